"""Pure parts of the client."""

import json
import pathlib
import sys
import types

import pytest

import memledger
from memledger import _model_memory, _records, _startup, _torch, analyze


def test_version_is_that_of_memledger():
    manifest = (pathlib.Path(__file__).resolve().parents[2] / "Cargo.toml").read_text()
    assert f'version = "{memledger.__version__}"' in manifest


def test_records_keep_the_newest_and_all_peaks(tmp_path):
    records = _records.Records()
    for number in range(_records.MAX_RECORDS + 5):
        rss = (1 << 30) if number == 0 else (1 << 20)
        records.add(_records.Record("a", str(number), 0.0, rss, None, None, None))
    path = tmp_path / "below" / "memory_usage.json"
    records.save(str(path))
    report = json.loads(path.read_text())
    assert len(report["detailed_log"]) == _records.MAX_RECORDS
    assert report["detailed_log"][0]["timestamp"] == "1970-01-01T00:00:00+00:00"
    assert report["peak_usage"] == dict(cpu_ram_used_mb=1024, gpu_ram_used_mb=None, gpu_ram_peak_mb=None, reserved_gpu_ram_mb=None)  # fmt: skip
    assert [entry.name for entry in path.parent.iterdir()] == ["memory_usage.json"]


def test_sum_over_devices_is_absent_if_a_part_is():
    assert _torch.total([], "alloc") is None
    assert _torch.total([{"i": 0, "alloc": 1}, {"i": 1, "alloc": 2}], "alloc") == 3
    assert _torch.total([{"i": 0, "alloc": 1}, {"i": 1}], "alloc") is None


def test_recommendations_are_powers_of_two():
    found = analyze.recommendations(600 * 1000, 1000, mixed_precision=False)
    assert found == {"maximum": 512, "recommended": 256, "safe": 128}
    assert analyze.recommendations(600 * 1000, 1000, mixed_precision=True)["maximum"] == 1024
    assert analyze.recommendations(-5, 1000, mixed_precision=False) == {"maximum": 0, "recommended": 0, "safe": 0}
    assert analyze.recommendations(1000, 1000, mixed_precision=False) == {"maximum": 1, "recommended": 0, "safe": 0}


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
