"""Callback for Hugging Face's Trainer: ``Trainer(..., callbacks=[MemledgerCallback()])``."""

from typing import Any, Dict

from transformers import TrainerCallback

import memledger
from memledger._guard import never_raises


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
    """Reports steps, samples and settings of a training, and the memory of this process."""

    _step = 0

    @never_raises()
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Starts to report; a training that is resumed does not count its earlier steps."""
        self._step = state.global_step
        memledger.start(_settings(args))

    @never_raises()
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Counts the optimizer steps since the last call, with the samples of this rank in them."""
        steps, self._step = state.global_step - self._step, state.global_step
        # that of the state is what the Trainer uses, after it searched for one that fits
        batch_size = getattr(state, "train_batch_size", None) or args.train_batch_size
        memledger.step(steps, batch_size=batch_size * args.gradient_accumulation_steps)
