"""Pure parts of the client."""

import ast
import contextlib
import json
import pathlib
import socket
import sys
import types

import pytest

import memledger
from memledger import _connection, _cuda_oom, _host, _model_memory, _records, _reporter, _startup, _torch, analyze


def test_version_is_that_of_memledger():
    manifest = (pathlib.Path(__file__).resolve().parents[2] / "Cargo.toml").read_text()
    assert f'version = "{memledger.__version__}"' in manifest


def test_syntax_is_that_of_the_oldest_python():
    root = pathlib.Path(memledger.__file__).resolve().parents[1]
    sources = [*root.glob("memledger/*.py"), root / "sitecustomize.py"]
    assert len(sources) > 10
    for source in sources:
        ast.parse(source.read_text(), str(source), feature_version=(3, 8))


def test_facts_of_gpus_never_raise(monkeypatch, capsys):
    def fails(*_args, **_kwargs):
        raise OSError("libcudart.so: cannot open shared object file")

    broken = types.SimpleNamespace(cuda=types.SimpleNamespace(is_available=fails))
    monkeypatch.setitem(sys.modules, "torch", broken)
    assert analyze.get_gpu_info() == {"gpu_count": 0, "gpus": []}
    forked = types.SimpleNamespace(is_available=lambda: True, device_count=lambda: 1, get_device_properties=fails)
    monkeypatch.setattr(analyze, "_cuda", lambda: types.SimpleNamespace(cuda=forked))
    monkeypatch.setattr(_torch, "initialized", lambda: types.SimpleNamespace(cuda=forked))
    with pytest.warns(RuntimeWarning, match="cannot open shared object file"):
        assert analyze.get_gpu_info() == {"gpu_count": 0, "gpus": []}
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
    assert log[0]["timestamp"] == "1970-01-01T00:00:00.000000+00:00"
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


def test_recommendations_are_powers_of_two():
    assert analyze.recommendations(600 * 1000, 0, 1000) == {"maximum": 512, "recommended": 256, "safe": 128}
    assert analyze.recommendations(1 << 60, 0, 1)["maximum"] == analyze.MAX_BATCH_SIZE
    # 60 and 40 % of the memory, as in `memledger advise`, and not of the batch
    assert analyze.recommendations(1_000_000, 390_000, 1000) == {"maximum": 512, "recommended": 128, "safe": 8}


def test_recommendation_is_zero_where_nothing_fits_and_an_error_where_nothing_is_known():
    for available in (-5, 0, 999):
        assert analyze.recommendations(available, 0, 1000) == {"maximum": 0, "recommended": 0, "safe": 0}
        with pytest.raises(ValueError, match="keeps no activations"):
            analyze.recommendations(available, 0, 0)


class FakeModel:
    def parameters(self):
        return [FakeTensor()]

    def buffers(self):
        return []


@pytest.mark.parametrize("sizes, mixed, activations", [((100, 180), False, "340"), ((100, 180), True, "170"), ((100, 100), False, "100")])
def test_analysis_and_recommendation_are_one_computation(monkeypatch, capsys, sizes, mixed, activations):
    """Only the measurement of the activations is replaced: it needs torch."""
    monkeypatch.setattr(_model_memory, "unchanged", lambda model: contextlib.nullcontext())
    monkeypatch.setattr(_model_memory, "activation_bytes", lambda model, inputs: {2: sizes[0], 4: sizes[1]}[inputs])
    properties = types.SimpleNamespace(total_memory=10_000)
    cuda = types.SimpleNamespace(get_device_properties=lambda device: properties)
    monkeypatch.setattr(analyze, "_cuda", lambda: types.SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(analyze, "MIB", 1)
    analyze.print_memory_analysis(FakeModel(), 8, mixed_precision=mixed, sample=lambda size: size)
    out = capsys.readouterr().out
    line = next(line for line in out.splitlines() if "activations" in line)
    assert line.split()[1] == f"{activations}.00" and ("half of" in line) == mixed
    assert "gradients" in out and "computed" in next(line for line in out.splitlines() if "gradients" in line)
    if sizes[0] == sizes[1]:
        assert "Batch sizes: unknown" in out and "maximum" not in out
        return
    found = analyze.recommend_batch_size(FakeModel(), 10_000 / 2**30, mixed_precision=mixed, sample=lambda size: size)
    printed = {line.split()[0]: int(line.split()[1]) for line in out.splitlines() if line.split()[0] in found}
    assert printed == found and found["maximum"] == (256 if mixed else 128)
    assert "current            8" in out
    analyze.print_memory_analysis(FakeModel(), found["safe"], mixed_precision=mixed, sample=lambda size: size)
    assert f"safe        {found['safe']:>8}  <- current" in capsys.readouterr().out


def test_batch_size_without_sample_names_it():
    for function in (analyze.recommend_batch_size, analyze.auto_select_batch_size):
        try:
            function(None, 12)
        except ValueError as error:
            assert "sample=" in str(error)
        else:
            raise AssertionError("no error")


def test_search_for_a_batch_size_begins_at_one_or_more():
    try:
        analyze.auto_select_batch_size(None, "cpu", 0, sample=lambda size: None)
    except ValueError as error:
        assert "start_batch is 0" in str(error)
    else:
        raise AssertionError("no error")


@pytest.mark.parametrize("text", ["CUDA out of memory.", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling", "CUDA error: out of memory"])
def test_search_ends_where_torch_or_a_library_has_no_memory_left(monkeypatch, text):
    """Torch and the model are replaced: the real ones need a GPU."""
    sizes, texts = [], [text]

    def step(_model, _device, _sample, size):
        sizes.append(size)
        if size > 8:
            raise RuntimeError(texts[-1])

    def search():
        return analyze.auto_select_batch_size(model, "cuda", 1, sample=lambda size: None)

    properties = types.SimpleNamespace(total_memory=1000)
    cuda = types.SimpleNamespace(
        reset_peak_memory_stats=lambda device: None, empty_cache=lambda: None, get_device_properties=lambda device: properties,
        max_memory_reserved=lambda device: 10 * sizes[-1],
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(analyze, "_run_step", step)
    monkeypatch.setattr(_model_memory, "unchanged", lambda model, device: contextlib.nullcontext())
    model = FakeModel()
    model.to = lambda device: model
    model.zero_grad = lambda set_to_none: None
    assert search() == 8 and sizes == [1, 2, 4, 8, 16]
    # 700 bytes may be used, and the optimizer of 40 bytes of parameters takes 80
    model.parameters = lambda: [FakeTensor() for _ in range(7)]
    assert search() == 8
    model.parameters = lambda: [FakeTensor() for _ in range(8)]
    assert search() == 4
    model.parameters = lambda: []
    texts.append("CUDA error: an illegal memory access was encountered")
    with pytest.raises(RuntimeError, match="illegal memory access"):
        search()


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

    monkeypatch.setitem(sys.modules, "memledger", types.ModuleType("memledger"))
    for name in [name for name in sys.modules if name.startswith("memledger.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError):
        from memledger import _api  # noqa: F401
    _startup.start_with_cuda(Torch)


def test_torchs_own_class_is_an_out_of_memory_error_whatever_it_says():
    kind = type("OutOfMemoryError", (RuntimeError,), {})
    error = kind("Allocation on device 0 would exceed allowed memory. (out of memory)\nCurrently allocated : 9.43 GiB")  # cudaMallocAsync
    assert _cuda_oom.is_cuda_oom(error) and not _cuda_oom.is_cuda_oom(RuntimeError("out of range"))


@pytest.mark.parametrize("target, says", [("nothing", "expected MODULE:FUNCTION"), ("no_such_module:make", "No module named")])
def test_wrong_target_of_analyze_is_an_error_that_says_why(capsys, target, says):
    assert analyze.main([target]) == 2
    assert says in capsys.readouterr().err


def test_search_without_a_model_is_an_error(capsys):
    with pytest.raises(SystemExit):
        analyze.main(["--auto-batch-size"])
    assert "needs MODULE:FUNCTION" in capsys.readouterr().err
