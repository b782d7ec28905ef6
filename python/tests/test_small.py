"""Pure parts of the client."""

import ast
import contextlib
import json
import os
import pathlib
import socket
import subprocess
import sys
import types

import pytest

import memledger_client
from memledger_client import _connection, _cuda_oom, _host, _model_memory, _records, _reporter, _startup, _torch, analyze


def test_version_is_that_of_memledger():
    manifest = (pathlib.Path(__file__).resolve().parents[2] / "Cargo.toml").read_text()
    assert f'version = "{memledger_client.__version__}"' in manifest


def test_syntax_is_that_of_the_oldest_python():
    root = pathlib.Path(memledger_client.__file__).resolve().parents[1]
    sources = [*root.glob("memledger_client/*.py"), root / "sitecustomize.py"]
    assert len(sources) > 10
    for source in sources:
        ast.parse(source.read_text(), str(source), feature_version=(3, 8))


def test_facts_of_gpus_never_raise(monkeypatch, capsys):
    def fails(*_args, **_kwargs):
        raise OSError("libcudart.so: cannot open shared object file")

    broken = types.SimpleNamespace(cuda=types.SimpleNamespace(is_available=fails))
    monkeypatch.setitem(sys.modules, "torch", broken)
    assert analyze.get_gpu_info() == []
    forked = types.SimpleNamespace(is_available=lambda: True, device_count=lambda: 1, get_device_properties=fails)
    monkeypatch.setattr(analyze, "_cuda", lambda: types.SimpleNamespace(cuda=forked))
    monkeypatch.setattr(_torch, "initialized", lambda: types.SimpleNamespace(cuda=forked))
    with pytest.warns(RuntimeWarning, match="cannot open shared object file"):
        assert analyze.get_gpu_info() == []
    with pytest.warns(RuntimeWarning, match="monitor_gpu_memory ignored"):
        assert analyze.monitor_gpu_memory(0, reset=True) == {}
    analyze.print_gpu_info()
    assert "GPUs: 0" in capsys.readouterr().out
    with pytest.warns(RuntimeWarning, match="print_memory_analysis ignored"):
        assert analyze.print_memory_analysis(None, 8) is None


@pytest.mark.parametrize("names", [2, 3, 1 << 30])
def test_records_keep_start_and_end_of_each_operation_and_all_peaks(tmp_path, names):
    records = _records.Records()
    count = 5 * _records.MAX_RECORDS
    for number in range(count):
        rss = (1 << 30) if number == 777 else (1 << 20)
        records.add(_records.Record("a", str(number % names), float(number), rss, None, None, None))
    path = tmp_path / "below" / "memory_usage.json"
    records.save(str(path))
    report = json.loads(path.read_text())
    log = report["detailed_log"]
    assert _records.MAX_RECORDS / 4 < len(log) <= _records.MAX_RECORDS + 1
    assert log[0]["timestamp"] == 0.0
    assert log[-1]["operation"] == str((count - 1) % names)
    numbers = [entry["operation"] for entry in log]
    if names < count:  # as often as they ran
        assert all(abs(numbers.count(str(name)) - len(log) / names) <= 2 for name in range(names))
    assert report["peak_usage"] == dict(cpu_ram_used_mb=1024, gpu_ram_used_mb=None, gpu_ram_peak_mb=None, reserved_gpu_ram_mb=None)  # fmt: skip
    assert [entry.name for entry in path.parent.iterdir()] == ["memory_usage.json"]


def test_sum_over_devices_is_absent_if_a_part_is():
    assert _torch.total(None, "alloc") is None
    assert _torch.total([], "alloc") == 0  # CUDA is initialised and holds nothing
    assert _torch.total([{"i": 0, "alloc": 1}, {"i": 1, "alloc": 2}], "alloc") == 3
    assert _torch.total([{"i": 0, "alloc": 1}, {"i": 1}], "alloc") is None


def test_only_a_whole_positive_number_changes_the_interval():
    reporter = _reporter.Reporter()
    for text in ("NaN", "true", "-5", "0", "1e999", "0.001", '"1"', "null", "[]", "{}"):
        reporter._handle(json.loads('{"t":"welcome","interval_ms":%s}' % text))
        assert reporter._interval == 1.0, text
    for number, seconds in ((500, 0.5), (1, 0.1), (10**400, 60)):
        reporter._handle({"t": "welcome", "interval_ms": number})
        assert reporter._interval == seconds


def test_hello_that_was_dropped_is_sent_again_before_anything_else(monkeypatch):
    class Full:
        lost, sent, is_full = 0, [], True

        def connect(self):
            return False

        def is_open(self):
            return True

        def receive(self):
            return []

        def send(self, message):
            self.sent.append(message["t"])
            return not self.is_full

    monkeypatch.setattr(_torch, "devices", lambda: [])
    reporter = _reporter.Reporter()
    reporter._connection = Full()
    reporter._report(1)
    Full.is_full = False
    reporter._report(1)
    reporter._report(1)
    assert Full.sent == ["hello", "hello", "sample", "sample"]


def test_connection_that_is_closed_without_an_answer_is_retried_ever_later(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMLEDGER_REPORTER_DIRECTORY", str(tmp_path))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / "reporter.sock"))
        listener.listen()
        connection = _connection.Connection()
        waits = []
        for _ in range(8):
            connection._next_attempt = 0
            assert connection.connect()
            listener.accept()[0].close()
            assert connection.receive() == [] and not connection.is_open()
            waits.append(connection._retry_seconds)
        assert waits == [1, 2, 4, 8, 16, 30, 30, 30]
        connection.mark_accepted()
        connection._next_attempt = 0
        assert connection.connect() and connection._retry_seconds == 1
        connection.close()


def test_settings_are_bounded_and_json():
    reporter = _reporter.Reporter()
    with pytest.warns(RuntimeWarning, match="only the first 16"):
        reporter.add_settings({f"key{number}": number for number in range(20)})
    assert len(reporter._settings) == 16
    reporter.add_settings({"key0": float("nan"), "key1": 10**30, "key2": "x" * 99, "key3": True, "key4": [1], "key5": 3e-4})
    values = [reporter._settings[f"key{number}"] for number in range(6)]
    assert values == ["nan", str(10**30), "x" * 64, True, "[1]", 3e-4]


def test_peak_of_host_memory_is_at_least_what_is_resident():
    assert _host.peak_rss_bytes() >= _host.rss_bytes() > 1 << 20


class FakeTensor:
    requires_grad = True

    def numel(self):
        return 10

    def element_size(self):
        return 4


def test_optimizer_state_is_counted_in_nested_values():
    class Model:
        def parameters(self):
            return [FakeTensor()]

        def buffers(self):
            return []

    class Optimizer:
        state = {1: {"step": 3, "exp_avg": FakeTensor(), "more": [FakeTensor(), FakeTensor()]}}

    memory = _model_memory.of_model(Model(), Optimizer())
    assert (memory.parameters, memory.gradients, memory.optimizer, memory.optimizer_estimate) == (40, 40, 120, 80)
    assert memory.fixed == 200
    assert _model_memory.of_model(Model()).fixed == 160


def test_module_of_the_program_with_the_same_name_breaks_nothing(monkeypatch):
    class Torch:
        class cuda:
            @staticmethod
            def _lazy_call(function):
                function()  # CUDA is initialised: what this raises would end the training

    monkeypatch.setitem(sys.modules, "memledger_client", types.ModuleType("memledger_client"))
    for name in [name for name in sys.modules if name.startswith("memledger_client.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError):
        from memledger_client import _api  # noqa: F401
    _startup.start_with_cuda(Torch)


def test_torchs_own_class_is_an_out_of_memory_error_whatever_it_says():
    kind = type("OutOfMemoryError", (RuntimeError,), {})
    error = kind("Allocation on device 0 would exceed allowed memory. (out of memory)\nCurrently allocated : 9.43 GiB")  # cudaMallocAsync
    assert _cuda_oom.is_cuda_oom(error) and not _cuda_oom.is_cuda_oom(RuntimeError("out of range"))


def test_older_python_gets_one_sentence(tmp_path):
    source = (pathlib.Path(_host.__file__).parent / "__init__.py").read_text()
    ast.parse(source, feature_version=(3, 4))  # it is read before that sentence
    program = "import sys; sys.version_info = (3, 6, 9, 'final', 0)\ntry:\n    import memledger_client\nexcept ImportError as error:\n    print(error)"
    found = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env={"PYTHONPATH": os.pathsep.join(sys.path)}, capture_output=True, text=True)
    assert (found.stdout, found.stderr) == ("memledger_client needs Python 3.8 or later, and this is Python 3.6\n", "")


def test_setting_of_the_allocator_is_what_torch_parsed(monkeypatch):
    class Parsed:
        _accelerator_getAllocatorSettings = staticmethod(lambda: parsed[0])

    parsed = [""]
    torch = types.SimpleNamespace(_C=Parsed, cuda=types.SimpleNamespace(is_initialized=lambda: is_initialized[0]), __version__="2.15.0")
    is_initialized = [True]
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # after torch had read it
    assert _reporter._allocator_settings() == {"pytorch_cuda_alloc_conf": ""}
    parsed[0] = "max_split_size_mb:64"
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # ignored beside the other
    assert _reporter._allocator_settings() == {"pytorch_cuda_alloc_conf": "max_split_size_mb:64"}
    is_initialized[0] = False  # the call would parse, and the program may set it yet
    both = {"pytorch_alloc_conf": "expandable_segments:True", "pytorch_cuda_alloc_conf": "expandable_segments:True"}
    assert _reporter._allocator_settings() == both
    del Parsed._accelerator_getAllocatorSettings  # before torch 2.9
    is_initialized[0] = True
    assert _reporter._allocator_settings() == both
