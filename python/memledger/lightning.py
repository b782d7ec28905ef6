"""Callback for Lightning's Trainer: ``Trainer(..., callbacks=[MemledgerCallback()])``."""

from typing import Any, Optional

try:
    from lightning.pytorch import Callback
except ImportError:  # the older name of the same package
    from pytorch_lightning import Callback

import memledger
from memledger._guard import never_raises


class MemledgerCallback(Callback):  # type: ignore[misc]
    """Reports optimizer steps of a training, and the memory of this process.

    ``batch_size`` is the number of samples in a batch of one rank, if samples are to be counted.
    """

    def __init__(self, batch_size: Optional[int] = None) -> None:
        super().__init__()
        self.batch_size = batch_size
        self._step = 0

    @never_raises()
    def on_train_start(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        """Starts to report; a training that is resumed does not count its earlier steps."""
        self._step = trainer.global_step
        memledger.start()

    @never_raises()
    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        """Counts the samples of a batch, and its optimizer step if one was made: gradients may be accumulated over several."""
        steps, self._step = trainer.global_step - self._step, trainer.global_step
        memledger.step(steps, samples=self.batch_size)
