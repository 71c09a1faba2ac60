"""transformers' `Trainer`: a callback that drives a monitor and sends its figures to the logs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from cumulant.integrations.monitored import Watcher

__all__ = ["MonitorCallback"]


class MonitorCallback(TrainerCallback):
    """Drives a `cumulant.lens.Monitor` from a `Trainer`, also with ``torch_compile=True``.

    Figures of each layer go where the trainer's logs go: TensorBoard, Weights & Biases and whatever
    else ``report_to`` names, and ``trainer.state.log_history``.

    Args:
        monitor: a `cumulant.lens.Monitor` of the model that the trainer trains.
        log: the trainer's ``log``.

    Use it as ``trainer.add_callback(MonitorCallback(monitor, trainer.log))``.
    """

    def __init__(self, monitor: Watcher, log: Callable[[dict[str, float]], object]) -> None:
        self.monitor = monitor
        self._log = log

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin at the step of the checkpoint that training resumes from."""
        self.monitor.start(state.global_step, compiled=True if args.torch_compile else None)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Log the figures of a watched step."""
        watched = self.monitor.step()
        if watched is not None:
            due = control.should_log
            self._log(watched.scalars())
            control.should_log = due  # the trainer's own log of this step is still to come

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take everything off the model."""
        self.monitor.close()
