"""Callback for Lightning's Trainer: ``Trainer(..., callbacks=[MemledgerCallback()])``."""

from typing import Any, Dict, Optional

try:
    from lightning.pytorch import Callback
except ImportError:  # the older name of the same package
    from pytorch_lightning import Callback

import memledger_client
from memledger_client._guard import never_raises, warn_once
from memledger_client._report import StepReport


class MemledgerCallback(Callback):  # type: ignore[misc]
    """Reports optimizer steps and settings of a training, and the memory of this process.

    ``batch_size`` is the number of samples in a batch of one rank, if samples are to be counted. With ``report=True`` it prints what the
    training takes, and which batch sizes fit, after its second batch, or the first whose optimizer has its state.
    """

    def __init__(self, batch_size: Optional[int] = None, report: bool = False) -> None:
        super().__init__()
        self._report = StepReport() if report else None
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
        memledger_client.start(self._settings(trainer))

    @never_raises()
    def on_train_batch_start(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        """Begins to measure for the report."""
        if self._report is None or not trainer.is_global_zero:
            return
        if self._settings(trainer).get("batch_size"):
            self._report.begin(trainer.lightning_module, trainer.optimizers[0])
        else:
            warn_once("report", "no report: give MemledgerCallback the batch_size, which the DataLoader does not say")

    @never_raises()
    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        """Counts the samples of a batch, and its optimizer step if one was made: gradients may be accumulated over several."""
        steps, self._step = trainer.global_step - self._step, trainer.global_step
        memledger_client.step(steps, samples=self.batch_size)
        batch_size = self._settings(trainer).get("batch_size")
        if self._report is not None and trainer.is_global_zero and batch_size:
            precision = str(trainer.precision)
            self._report.end(trainer.lightning_module, trainer.optimizers[0], batch_size, precision if "mixed" in precision else "")

    @never_raises()
    def on_train_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        """Ends a batch that was interrupted."""
        if self._report is not None:
            self._report.cancel()

    @never_raises()
    def on_exception(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        """Ends a batch that failed."""
        if self._report is not None:
            self._report.cancel()
