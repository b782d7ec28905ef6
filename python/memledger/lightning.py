"""Callback for Lightning's Trainer: ``Trainer(..., callbacks=[MemledgerCallback()])``."""

from typing import Any, Dict, Optional

try:
    from lightning.pytorch import Callback
except ImportError:  # the older name of the same package
    from pytorch_lightning import Callback

import memledger
from memledger._guard import never_raises


class MemledgerCallback(Callback):  # type: ignore[misc]
    """Reports optimizer steps and settings of a training, and the memory of this process.

    ``batch_size`` is the number of samples in a batch of one rank, if samples are to be counted.
    """

    def __init__(self, batch_size: Optional[int] = None) -> None:
        super().__init__()
        self.batch_size = batch_size
        self._step = 0

    def _settings(self, trainer: Any) -> Dict[str, Any]:
        loader = getattr(trainer, "train_dataloader", None)
        found = {
            "batch_size": self.batch_size or getattr(loader, "batch_size", None),
            "num_workers": getattr(loader, "num_workers", None),
            "accumulate_grad_batches": getattr(trainer, "accumulate_grad_batches", None),
            "precision": getattr(trainer, "precision", None),
        }
        return {name: value for name, value in found.items() if isinstance(value, (int, str))}

    @never_raises()
    def on_train_start(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        """Starts to report; a training that is resumed does not count its earlier steps."""
        self._step = trainer.global_step
        memledger.start(self._settings(trainer))

    @never_raises()
    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        """Counts the samples of a batch, and its optimizer step if one was made: gradients may be accumulated over several."""
        steps, self._step = trainer.global_step - self._step, trainer.global_step
        memledger.step(steps, samples=self.batch_size)
