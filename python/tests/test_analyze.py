"""What a batch size needs: the arithmetic, without torch. Real modules are in torch/test_real.py, the measurement of steps in the dry run
of tests/gpu/check.sh, and real GPUs in docs/gpu-verification.md.
"""

import pytest
from memledger_client import _training_memory, analyze
from memledger_client._report import GpuBudget
from memledger_client._training_memory import TrainingMemory, EstimateError, fit

MIB = 1 << 20


def memory(optimizer_step, fixed, per_sample):
    return TrainingMemory(optimizer_step, fixed, per_sample, "made up")


def test_sizes_are_powers_of_two_for_shares_of_the_memory():
    assert memory(0, 0, 1000).sizes(600 * 1000) == {"maximum": 512, "recommended": 256, "safe": 128}
    assert memory(0, 0, 1).sizes(1 << 60)["maximum"] == _training_memory.MAX_BATCH_SIZE
    # 60 and 40 % of the memory, as in `memledger advise`, and not of the batch
    assert memory(390_000, 390_000, 1000).sizes(1_000_000) == {"maximum": 512, "recommended": 128, "safe": 8}
    # the optimizer's step takes more than any small batch
    assert memory(500_000, 390_000, 1000).sizes(1_000_000) == {"maximum": 512, "recommended": 128, "safe": 0}


def test_size_is_zero_where_nothing_fits_and_an_error_where_nothing_is_known():
    for available in (-5, 0, 999):
        assert memory(0, 0, 1000).sizes(available) == {"maximum": 0, "recommended": 0, "safe": 0}
        with pytest.raises(EstimateError, match="does not grow with the batch"):
            memory(0, 0, 0).sizes(available)


class Steps:
    """Steps of a training whose parameters, gradients and optimizer take 100 MiB each."""

    limit = float("inf")

    def __init__(self, each=10 * MIB, fails_from=1 << 30, error=""):
        self.each, self.fails_from, self.error = each, fails_from, error
        self.sizes = []

    def peak(self, size):
        # as the backward pass makes gradients, the activations go: small batches have their peak at its end
        return 300 * MIB + max(size * self.each, 100 * MIB)

    def measure(self, size):
        self.sizes.append(size)
        if size >= self.fails_from:
            raise RuntimeError(self.error)
        return self.peak(size), 450 * MIB


DOUBLED = [2 << number for number in range(10)]


@pytest.mark.parametrize("each, sizes", [(60 * MIB, [2, 4]), (10 * MIB, [2, 4, 8, 16, 32]), (2 * MIB, DOUBLED[:7]), (1 << 16, DOUBLED), (0, DOUBLED)])
def test_activations_that_gradients_hide_are_found_by_larger_batches(each, sizes):
    steps = Steps(each)
    found = fit(steps, 100 * MIB, available=1 << 30)
    assert steps.sizes == sizes
    if each >= 2 * MIB:
        for size in (128, 512):
            assert 1 <= found.at(size) / steps.peak(size) <= 1.02
    else:  # it is hidden still, and at most so much
        assert found.per_sample == 0 or found.at(4096) >= steps.peak(4096)
    assert found.optimizer_step >= 450 * MIB and f"with batch sizes {sizes[-2]} and {sizes[-1]}" in found.source


def test_larger_batches_are_measured_up_to_a_quarter_of_the_memory():
    steps = Steps(60 * MIB)
    fit(steps, 100 * MIB, available=8 << 30)
    assert steps.sizes == [2, 4, 8, 16]
    fit(steps, 100 * MIB, available=1 << 50)
    assert steps.sizes[-1] == _training_memory.MAX_MEASURED


def test_size_that_takes_more_than_was_expected_ends_the_measurement():
    steps = Steps(60 * MIB, fails_from=8, error="CUDA out of memory.")
    found = fit(steps, 100 * MIB, available=1 << 50)
    assert steps.sizes == [2, 4, 8] and "with batch sizes 2 and 4" in found.source
    steps = Steps(60 * MIB)
    steps.limit = 600 * MIB  # what is free now
    fit(steps, 100 * MIB, available=1 << 50)
    assert steps.sizes == [2, 4]


@pytest.mark.parametrize("error", ["CUDA out of memory.", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling", "CUDA error: out of memory"])
def test_search_ends_before_memory_runs_out_and_where_it_does_nevertheless(error):
    steps = Steps(100 * MIB)
    assert analyze._double(steps, 1, 2000 * MIB) == 16 and steps.sizes == [1, 2, 4, 8, 16]  # 32 would take 3500 MiB
    assert analyze._double(Steps(100 * MIB), 1, 440 * MIB) == 0  # the optimizer's step takes more
    steps = Steps(100 * MIB)
    assert analyze._double(steps, 64, 2000 * MIB) == 16 and steps.sizes == [64, 32, 16]  # the first is halved until one fits
    assert analyze._double(Steps(100 * MIB), 128, 440 * MIB) == 0
    assert analyze._double(Steps(100 * MIB, fails_from=64, error=error), 128, 1 << 50) == 32
    steps = Steps(100 * MIB, fails_from=8, error=error)
    assert analyze._double(steps, 1, 1 << 50) == 4 and steps.sizes[-1] == 8
    with pytest.raises(RuntimeError, match="illegal memory access"):
        analyze._double(Steps(fails_from=8, error="CUDA error: an illegal memory access was encountered"), 1, 1 << 50)


def test_what_may_be_used_is_a_share_of_what_others_leave():
    assert GpuBudget(total=1000, others=0).available == 700
    assert GpuBudget(total=1000, others=400).available == 420


def test_search_for_a_batch_size_begins_at_one_or_more():
    with pytest.raises(ValueError, match="start_batch is 0"):
        analyze.auto_select_batch_size(None, "cpu", 0, sample=lambda size: None)


@pytest.mark.parametrize("target, says", [("nothing", "expected MODULE:FUNCTION"), ("no_such_module:make", "No module named")])
def test_wrong_target_of_analyze_is_an_error_that_says_why(capsys, target, says):
    assert analyze.main([target]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("arguments, says", [(["--auto-batch-size"], "needs MODULE:FUNCTION"), (["--batch-size", "0"], "at least 1"), (["--batch-size", "256"], "needs MODULE:FUNCTION")])
def test_wrong_options_of_analyze_are_errors(capsys, arguments, says):
    with pytest.raises(SystemExit):
        analyze.main(arguments)
    assert says in capsys.readouterr().err


def test_gpus_that_the_program_does_not_use_have_the_drivers_figures_and_no_context(receiver, run, driver):
    program = run(
        """
import torch
from memledger_client.compat import get_gpu_info, print_gpu_info, monitor_gpu
monitor_gpu()
print([(gpu["total_memory_gb"], gpu["used_memory_gb"], gpu["free_memory_gb"]) for gpu in get_gpu_info()])
print_gpu_info()
print(torch.cuda.standin_contexts)
""",
        environment={**driver(), "STANDIN_GPUS": "a,b", "CUDA_VISIBLE_DEVICES": "1,0"},
    )
    code, out, err = program.end()
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "GPU memory: 6.00 of 12.00 GB used (50.0 %), 6.00 GB free; this process: 0.00 GB in tensors, 0.00 GB in torch's cache"
    assert lines[1] == "[(12.0, 3.0, 9.0), (12.0, 6.0, 6.0)]"
    assert "    memory: 12.00 GB total, 3.00 GB used (25%), 9.00 GB free" in lines
    assert lines[-1] == "set()"


@pytest.mark.parametrize(
    "kinds, environment, used",
    [
        (1, {}, 3),
        (1, {"CUDA_VISIBLE_DEVICES": "GPU-b,GPU-a"}, 6),
        (2, {"CUDA_VISIBLE_DEVICES": "GPU-b"}, 6),
        (2, {}, None),  # CUDA would put the faster one first
        (2, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, 3),
        (1, {"CUDA_VISIBLE_DEVICES": ""}, None),
        (1, {"CUDA_VISIBLE_DEVICES": "5"}, None),
        (1, {"CUDA_VISIBLE_DEVICES": "MIG-1"}, None),
    ],
)
def test_manager_reads_the_gpu_that_will_be_used_before_cuda_is_initialised(receiver, run, driver, kinds, environment, used):
    program = run(
        """
import torch
from memledger_client.compat import gpu_manager
print(gpu_manager.get_gpu_memory_info().get("used_memory_gb"), gpu_manager.check_memory_threshold(50), torch.cuda.is_initialized())
""",
        environment={**driver(kinds), **environment},
    )
    assert program.end() == (0, f"{None if used is None else float(used)} {used == 6} False\n", "")
