"""Callback for Hugging Face's Trainer: ``Trainer(..., callbacks=[MemledgerCallback()])``."""

from typing import Any, Dict

from transformers import TrainerCallback

import memledger_client
from memledger_client._guard import never_raises
from memledger_client._report import StepReport


#: Arguments of a training on which its memory depends.
ARGUMENTS = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "dataloader_num_workers",
    "bf16",
    "fp16",
    "gradient_checkpointing",
    "optim",
    "max_length",
    "group_by_length",
)


def _settings(args: Any) -> Dict[str, Any]:
    """Returns the settings of a ``TrainingArguments`` that are reported."""
    found = {name: getattr(args, name, None) for name in ARGUMENTS}
    return {name: str(getattr(value, "value", value)) for name, value in found.items() if value is not None}


class MemledgerCallback(TrainerCallback):  # type: ignore[misc]
    """Reports steps, samples and settings of a training, and the memory of this process.

    With ``report=True`` it prints what the training takes, and which batch sizes fit, after its second step, or the first whose optimizer
    has its state.
    """

    _step = 0

    def __init__(self, report: bool = False) -> None:
        super().__init__()
        self._report = StepReport() if report else None

    @never_raises()
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Starts to report; a training that is resumed does not count its earlier steps."""
        self._step = state.global_step
        memledger_client.start(_settings(args))

    @never_raises()
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begins to measure for the report."""
        if self._report is not None and state.is_world_process_zero:
            self._report.begin(kwargs["model"], kwargs["optimizer"])

    @never_raises()
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Counts the optimizer steps since the last call, with the samples of this rank in them."""
        steps, self._step = state.global_step - self._step, state.global_step
        # that of the state is what the Trainer uses, after it searched for one that fits
        batch_size = getattr(state, "train_batch_size", None) or args.train_batch_size
        memledger_client.step(steps, batch_size=batch_size * args.gradient_accumulation_steps)
        if self._report is not None and state.is_world_process_zero:
            precision = "bf16" if args.bf16 else "fp16" if args.fp16 else ""
            self._report.end(kwargs["model"], kwargs["optimizer"], batch_size, precision)

    @never_raises()
    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ends a step that an error interrupted."""
        if self._report is not None:
            self._report.cancel()
