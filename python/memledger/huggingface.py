"""Callback for Hugging Face's Trainer: ``Trainer(..., callbacks=[MemledgerCallback()])``."""

from typing import Any

from transformers import TrainerCallback

import memledger
from memledger._guard import never_raises


class MemledgerCallback(TrainerCallback):  # type: ignore[misc]
    """Reports steps and samples of a training, and the memory of this process."""

    _step = 0

    @never_raises()
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Starts to report; a training that is resumed does not count its earlier steps."""
        self._step = state.global_step
        memledger.start()

    @never_raises()
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Counts the optimizer steps since the last call, with the samples of this rank in them."""
        steps, self._step = state.global_step - self._step, state.global_step
        # that of the state is what the Trainer uses, after it searched for one that fits
        batch_size = getattr(state, "train_batch_size", None) or args.train_batch_size
        memledger.step(steps, batch_size=batch_size * args.gradient_accumulation_steps)
