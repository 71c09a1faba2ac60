"""Lightning: a callback that drives a monitor and sends its figures to the trainer's loggers."""

from __future__ import annotations

from typing import Any, cast

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from cumulant.integrations.monitored import Watcher

__all__ = ["MonitorCallback"]


class MonitorCallback(Callback):
    """Drives a `cumulant.lens.Monitor` from a Lightning `Trainer`.

    Figures of each layer go to all loggers of the trainer. A step is one of the optimizer: of
    accumulated batches, the first is watched.

    Args:
        monitor: a `cumulant.lens.Monitor` of the `LightningModule`, or of a module inside it.
    """

    def __init__(self, monitor: Watcher) -> None:
        self.monitor = monitor

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin at the step of the checkpoint that training resumes from."""
        self.monitor.start(trainer.global_step)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Log the figures of a watched step."""
        if trainer.global_step == self.monitor.steps:  # the optimizer waits for further batches
            return
        loss = cast(dict[str, Any], outputs).get("loss") if isinstance(outputs, dict) else outputs
        watched = self.monitor.step(loss if isinstance(loss, Tensor) else None)
        if watched is not None:
            for logger in trainer.loggers:
                logger.log_metrics(watched.scalars(), step=trainer.global_step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take everything off the model."""
        self.monitor.close()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """The same when training fails."""
        self.monitor.close()
