"""A search for a batch size in a real cgroup with a limit of 512 MiB: the real kernel kills what takes more. Cgroup v1, as root."""

import os
import pathlib
import threading
import uuid

import pytest
from conftest import ROOT, eventually

MIB = 1 << 20
MEMORY = pathlib.Path("/sys/fs/cgroup/memory")


class Limited:
    """A cgroup with a limit, and the most memory in it that the kernel could not reclaim."""

    def __init__(self, limit):
        self.limit, self.highest = limit, 0
        self.path = MEMORY / f"mlt-py-{uuid.uuid4().hex[:8]}"
        self.path.mkdir()
        (self.path / "memory.limit_in_bytes").write_text(str(limit))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self):
        while not self._stop.wait(0.002):
            stat = dict(line.split() for line in (self.path / "memory.stat").read_text().splitlines())
            kernel = int((self.path / "memory.kmem.usage_in_bytes").read_text())
            self.highest = max(self.highest, int(stat["total_rss"]) + int(stat["total_shmem"]) + kernel)

    def oom_kills(self):
        control = dict(line.split() for line in (self.path / "memory.oom_control").read_text().splitlines())
        return int(control["oom_kill"])

    def close(self):
        self._stop.set()
        self._thread.join()
        eventually("the end of the cgroup's processes", lambda: not (self.path / "cgroup.procs").read_text())
        self.path.rmdir()


@pytest.fixture
def limited():
    if not (MEMORY / "memory.limit_in_bytes").exists():
        pytest.skip("needs cgroup v1")
    if os.geteuid() != 0:
        pytest.skip("needs root")
    made = []

    def make(mib):
        made.append(Limited(mib * MIB))
        return made[-1]

    yield make
    for each in made:
        each.close()


#: Models: layers of 100 MB; few parameters and large activations, also larger than the limit for one sample; and a recurrent one.
MODELS = {
    "wide": "torch.nn.Sequential(torch.nn.Linear(5000, 5000), torch.nn.ReLU(), torch.nn.Linear(5000, 10)), lambda n: torch.zeros(n, 5000)",
    "images": "torch.nn.Sequential(torch.nn.Conv2d(3, 64, 3), torch.nn.ReLU(), torch.nn.Conv2d(64, 8, 3)), lambda n: torch.zeros(n, 3, 96, 96)",
    "large": "torch.nn.Sequential(torch.nn.Conv2d(3, 256, 3), torch.nn.ReLU(), torch.nn.Conv2d(256, 2, 3)), lambda n: torch.zeros(n, 3, 640, 640)",
    "series": "torch.nn.LSTM(64, 128, 2, batch_first=True), lambda n: torch.zeros(n, 100, 64)",
}
SEARCH = """
import os, warnings
open({procs!r}, "w").write(str(os.getpid()))
import torch
from memledger_client.compat import auto_select_batch_size
model, sample = {model}
with warnings.catch_warnings(record=True) as caught:
    size = auto_select_batch_size(model, "cpu", {start}, sample=sample)
print(caught[0].message, flush=True)
if size:
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):  # what the answer promises
        outputs = model(sample(size))
        (outputs if torch.is_tensor(outputs) else outputs[0]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
print(size)
"""


@pytest.mark.parametrize("start", [1, 128])
@pytest.mark.parametrize("name", MODELS)
def test_search_in_a_limit_of_512_mib_kills_nobody_and_neither_does_its_answer(run, limited, name, start):
    cgroup = limited(512)
    program = run(SEARCH.format(procs=str(cgroup.path / "cgroup.procs"), model=MODELS[name], start=start), path=(ROOT,))
    code, out, err = program.end()
    assert (code, cgroup.oom_kills()) == (0, 0), out + err
    assert cgroup.highest <= 0.95 * cgroup.limit, cgroup.highest / MIB
    words, size = out.splitlines()
    assert f"512.00 MB of the cgroup /{cgroup.path.name}" in words and "MB left of the" in words
    assert (int(size) == 0) == (name in ("wide", "large")), out  # with an optimizer like Adam that takes 400 MB, and with too much for one


def test_command_names_the_limit_of_a_search(run, limited, tmp_path):
    cgroup = limited(512)
    (tmp_path / "mine.py").write_text(
        f"import os\nopen({str(cgroup.path / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\nimport torch\n"
        "def make():\n    return torch.nn.LSTM(64, 128, 2, batch_first=True), lambda n: torch.zeros(n, 100, 64)\n"
    )
    program = run("--auto-batch-size", path=(ROOT,), arguments=("-m", "memledger_client.analyze", "mine:make"))
    code, out, err = program.end()
    assert (code, cgroup.oom_kills()) == (0, 0), err
    answer = out.splitlines()[-1]
    assert answer.startswith("Largest batch size on cpu (estimated): ") and f"512.00 MB of the cgroup /{cgroup.path.name}" in answer
