"""How the client gets into a program: sitecustomize and the import hook, beside other hooks."""

import os
import shutil

from conftest import ROOT, STANDIN

USE_CUDA = """
import torch
torch.cuda.init()
torch.cuda.standin_allocate(1 << 20)
print("ready", flush=True)
input()
"""


def test_torch_of_another_finder_is_imported_and_reports(receiver, run):
    """As an editable installation has it: a finder at the end of sys.meta_path, and torch not in sys.path."""
    finder = f"""
import sys
from importlib.machinery import PathFinder
class Editable:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return PathFinder.find_spec(name, [{str(STANDIN)!r}]) if name == "torch" else None
sys.meta_path.append(Editable)
"""
    program = run(finder + USE_CUDA, path=(ROOT,))
    assert program.line() == "ready"
    receiver.wait("sample")


def test_search_for_torch_before_its_import_changes_nothing(receiver, run):
    search = "import importlib.util\nassert importlib.util.find_spec('torch') and importlib.util.find_spec('torch')\n"
    program = run(search + USE_CUDA)
    assert program.line() == "ready"
    receiver.wait("sample")


def test_torch_that_failed_to_import_reports_when_it_succeeds(tmp_path, receiver, run):
    broken = tmp_path / "broken" / "torch"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('no library')\n")
    retry = f"""
import sys
try:
    import torch
except ImportError:
    sys.path.remove({str(broken.parent)!r})
"""
    program = run(retry + USE_CUDA, path=(ROOT, broken.parent, STANDIN))
    assert program.line() == "ready"
    receiver.wait("sample")


def test_search_by_many_threads_raises_nothing(receiver, run):
    program = run(
        """
import importlib.util, sys, threading
sys.setswitchinterval(1e-6)
failed = []
def search():
    try:
        for _ in range(200):
            assert importlib.util.find_spec("torch") is not None
    except BaseException as error:
        failed.append(repr(error))
threads = [threading.Thread(target=search) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(failed[:1])
"""
    )
    assert program.end() == (0, "[]\n", "")


def test_finder_that_searches_itself_does_not_recurse(receiver, run):
    """As tracers do: they ask all finders for the spec and wrap its loader."""
    tracer = """
import importlib.util, sys
class Tracer:
    searching = False
    def find_spec(self, name, path=None, target=None):
        if name != "torch" or self.searching:
            return None
        self.searching = True
        try:
            return importlib.util.find_spec(name)
        finally:
            self.searching = False
"""
    for at in (0, 1):
        program = run(tracer + f"sys.meta_path.insert({at}, Tracer())\n" + USE_CUDA)
        assert program.line() == "ready"
        receiver.wait("sample", lambda message: (program.pid, message) in receiver.messages)


def test_two_copies_of_the_client_start_once_and_other_sitecustomizes_run(tmp_path, receiver, run):
    copy, linked, other = tmp_path / "copy", tmp_path / "linked", tmp_path / "other"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns("tests", "__pycache__"))
    os.symlink(ROOT, linked)
    other.mkdir()
    (other / "sitecustomize.py").write_text("import builtins; builtins.ran = getattr(builtins, 'ran', 0) + 1\n")
    text = "import sys; print(ran, sum(type(each).__name__ == '_TorchFinder' for each in sys.meta_path))"
    assert run(text, path=(ROOT, copy, linked, STANDIN, other)).end() == (0, "1 1\n", "")
    program = run(USE_CUDA, path=(linked, copy, ROOT, STANDIN))
    assert program.line() == "ready"
    receiver.wait("sample")


def test_other_sitecustomize_that_runs_the_next_one_ends(tmp_path, receiver, run):
    """As tracers do: they remove their own directory from the path and import sitecustomize again."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "sitecustomize.py").write_text(
        """
import os, sys
here = os.path.dirname(os.path.abspath(__file__))
before = sys.modules.pop("sitecustomize", None)
path, sys.path = sys.path, [each for each in sys.path if os.path.abspath(each or ".") != here]
import sitecustomize
sys.path = path
import builtins; builtins.ran = True
"""
    )
    for path in ((ROOT, STANDIN, other), (other, ROOT, STANDIN)):
        assert run("print(ran)", path=path).end() == (0, "True\n", "")


def test_package_memledger_of_the_program_is_neither_imported_nor_hidden(tmp_path, receiver, run):
    """As PyPI's project of that name, before and after the client in the path."""
    other = tmp_path / "other" / "memledger"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("name = 'of the program'\nprint('imported', flush=True)\n")
    text = f"""
import importlib, sys
theirs = importlib.import_module("memledger")
assert theirs.name == "of the program" and theirs.__file__.startswith({str(other)!r})
import memledger_client
assert memledger_client.step and sys.modules["memledger"] is theirs
print("both", flush=True)
input()
"""
    for path in ((ROOT, STANDIN, other.parent), (other.parent, ROOT, STANDIN)):
        program = run(USE_CUDA + text, path=path)
        assert program.line() == "ready"  # and it reports before the program imports either
        receiver.wait("sample", lambda message: (program.pid, message) in receiver.messages)
        program.go()
        assert [program.line(), program.line()] == ["imported", "both"]
        program.go()
        assert program.end() == (0, "", "")
    assert [each.name for each in other.iterdir()] == ["__init__.py"]
