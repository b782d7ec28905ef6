"""The report of a training: GPU, model, batch, and the batch sizes that fit."""

from typing import Any, NamedTuple, Optional

from memledger_client import _model_memory, _torch
from memledger_client._peaks import Interval, peaks
from memledger_client._records import MIB
from memledger_client._training_memory import TrainingMemory, EstimateError

GIB = 1 << 30
#: Share of the GPU's memory that a training should use at most; the rest is for the CUDA context, fragmentation and peaks.
SAFETY_MARGIN = 0.7


class GpuBudget(NamedTuple):
    """Bytes of the GPU that a training gets."""

    total: int
    #: Of other processes, and of this one beside the training.
    others: int

    @property
    def available(self) -> float:
        """What may be used: a share of the whole, and of what the others leave."""
        return SAFETY_MARGIN * (self.total - self.others)


def gpu_budget(gpu: Any, model: Any, optimizer: Any = None) -> GpuBudget:
    """Returns what a training of a model gets of a GPU now. Torch's cache is free for it."""
    import torch

    free, total = torch.cuda.mem_get_info(gpu)
    own = _model_memory.bytes_on(gpu, model, optimizer)
    beside = max(0, torch.cuda.memory_allocated(gpu) - own)
    return GpuBudget(total, max(0, total - free - torch.cuda.memory_reserved(gpu)) + beside)


class Report(NamedTuple):
    """What the report of a model says."""

    model: Any
    batch_size: int
    #: None: not known.
    memory: Optional[TrainingMemory]
    #: Of the batch size itself, in bytes, where it was measured.
    measured: Optional[int] = None
    #: Device of torch; None without a GPU.
    gpu: Any = None
    optimizer: Any = None
    #: Such as "bf16"; empty: as the program computes.
    precision: str = ""
    #: Bytes of the inputs of one sample, where they are known.
    input_bytes: Optional[int] = None
    #: What the batch takes without mixed precision, where that was measured too.
    without_precision: Optional[int] = None


def print_report(report: Report, unknown: str = "") -> None:
    """Prints GPU, model, batch and batch sizes; ``unknown`` says why there is no more than the model."""
    budget = _print_gpu(report)
    memory = _model_memory.of_model(report.model, report.optimizer)

    def line(name: str, amount: Optional[int], words: str = "") -> None:
        print(f"  {name:<12}" + (f"{amount / MIB:12.2f} MB" if amount is not None else f"{'unknown':>12}   ") + (f"  {words}" if words else ""))

    print("Model:")
    line("parameters", memory.parameters, "counted")
    line("buffers", memory.buffers, "counted")
    line("gradients", memory.gradients, "computed: one value per trained parameter, whether it exists yet or not")
    if memory.optimizer is None:
        line("optimizer", memory.optimizer_estimate, "estimated: two values per trained parameter, as in Adam")
    else:
        line("optimizer", memory.optimizer, "counted")
    line("together", memory.fixed)
    print(f"Batch of {report.batch_size}, " + (f"in mixed precision ({report.precision}):" if report.precision else "in the precision of the program:"))
    if report.input_bytes is not None:
        line("input", report.batch_size * report.input_bytes)
    if report.memory is None:
        line("activations", None, unknown)
        return
    highest = report.memory.at(report.batch_size) if report.measured is None else report.measured
    line("activations", max(0, highest - memory.fixed), "and all else that a step takes")
    words = "measured with this batch size" if report.measured is not None else report.memory.source
    line("highest", highest, words)
    if report.without_precision is not None:
        saved = report.without_precision - report.memory.at(report.batch_size)
        without = f"{report.without_precision / MIB:.2f} MB without it"
        line("saved", saved, f"by mixed precision: {without}" + ("; it keeps a second copy of the weights" if saved < 0 else ""))
    if budget is None:
        print("No GPU: batch sizes need its memory; see recommend_batch_size(gpu_memory_gb=...).")
        return
    print(f"  {highest / budget.total:.0%} of the GPU; {max(0, budget.total - budget.others - highest) / GIB:.2f} GB of it remain")
    _print_sizes(report.memory, budget, report.batch_size)


def _print_gpu(report: Report) -> Optional[GpuBudget]:
    if report.gpu is None:
        return None
    import torch

    budget = gpu_budget(report.gpu, report.model, report.optimizer)
    name = torch.cuda.get_device_properties(report.gpu).name
    print(f"GPU {report.gpu.index}: {name}")
    print(f"  {budget.total / GIB:.2f} GB, of which {budget.others / GIB:.2f} GB ({budget.others / budget.total:.0%}) are used by others and by CUDA")
    return budget


def _print_sizes(memory: TrainingMemory, budget: GpuBudget, current: int) -> None:
    print(f"Batch sizes within {SAFETY_MARGIN:.0%} of what is free for it, {budget.available / GIB:.2f} GB ({memory.source}):")
    try:
        sizes = memory.sizes(budget.available)
    except EstimateError as error:
        print(f"  unknown: {error}.")
        return
    shown = {**sizes, "current": current} if current not in sizes.values() else sizes
    for name, size in shown.items():
        takes = f"  {memory.at(size) / GIB:8.2f} GB" if size else "  none fits"
        mark = ""
        if size == current:
            mark = "  over the maximum" if current > sizes["maximum"] else "  <- current" if name != "current" else "  fits"
        print(f"  {name:<12}{size:>8}{takes}{mark}")


class StepReport:
    """Prints the report of a training once, from its first step with an optimizer that has its state: what that took."""

    def __init__(self) -> None:
        self._is_done = False
        self._steps = 0
        self._interval: Optional[Interval] = None
        self._others = 0  # bytes on the GPU beside the training

    def begin(self, model: Any, optimizer: Any) -> None:
        """A step begins. ``end`` or ``cancel`` must follow."""
        self.cancel()
        self._steps += 1
        torch = _torch.initialized()
        if not self._is_done and torch is not None and getattr(optimizer, "state", None):
            gpu = torch.device("cuda", torch.cuda.current_device())
            self._others = torch.cuda.memory_allocated(gpu) - _model_memory.bytes_on(gpu, model, optimizer)
            self._interval = peaks.enter()

    def cancel(self) -> None:
        """Ends what ``begin`` began, without a report."""
        if self._interval is not None:
            peaks.leave(self._interval)
            self._interval = None

    def end(self, model: Any, optimizer: Any, batch_size: int, precision: str) -> None:
        """A step has ended; ``batch_size`` is the number of samples in one forward pass."""
        interval, self._interval = self._interval, None
        usage = peaks.leave(interval) if interval is not None else None
        if self._is_done or (usage is None and self._steps < 2):
            return
        if usage is None:
            self._is_done = _torch.initialized() is None
            if self._is_done:
                print_report(Report(model, batch_size, None, optimizer=optimizer, precision=precision), "the training uses no GPU")
            return
        import torch

        self._is_done = True
        gpu = torch.device("cuda", torch.cuda.current_device())
        report = Report(model, batch_size, None, None, gpu, optimizer, precision)
        found = [device["alloc_peak"] for device in usage.devices or [] if device["i"] == gpu.index and "alloc_peak" in device]
        if not found:
            print_report(report, "torch has no exact peak of this step")
            return
        memory = _model_memory.of_model(model, optimizer)
        fixed, highest = memory.fixed - memory.gradients, found[0] - self._others
        # what gradients take is in it, as if it grew with the batch: too much for larger ones, never too little
        per_sample = -((fixed - highest) // batch_size)
        source = "from a step of this training"
        print_report(report._replace(memory=TrainingMemory(memory.fixed, fixed, per_sample, source), measured=highest))
