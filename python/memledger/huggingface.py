"""Callback for Hugging Face's Trainer: ``Trainer(..., callbacks=[MemledgerCallback()])``."""

from typing import Any

from transformers import TrainerCallback

import memledger


class MemledgerCallback(TrainerCallback):  # type: ignore[misc]
    """Reports steps and samples of a training, and the memory of this process."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Starts to report."""
        memledger.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Counts an optimizer step with the samples of this rank in it."""
        batch_size = args.per_device_train_batch_size * args.gradient_accumulation_steps
        memledger.step(batch_size=batch_size)
