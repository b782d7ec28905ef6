"""Callback for Lightning's Trainer: ``Trainer(..., callbacks=[MemledgerCallback()])``."""

from typing import Any, Optional

try:
    from lightning.pytorch import Callback
except ImportError:  # the older name of the same package
    from pytorch_lightning import Callback

import memledger


class MemledgerCallback(Callback):  # type: ignore[misc]
    """Reports steps of a training, and the memory of this process.

    ``batch_size`` is the number of samples in a batch of one rank, if samples are to be counted.
    """

    def __init__(self, batch_size: Optional[int] = None) -> None:
        super().__init__()
        self.batch_size = batch_size

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Starts to report."""
        memledger.start()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Counts a batch."""
        memledger.step(batch_size=self.batch_size)
