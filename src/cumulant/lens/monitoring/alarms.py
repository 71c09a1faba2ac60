"""When figures of a training step mean trouble: entropy collapse, growing logits, NaN."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from cumulant.core.checks import real
from cumulant.core.errors import InputError

if TYPE_CHECKING:
    from cumulant.lens.monitoring.log import Watched

__all__ = ["DEFAULTS", "Alarm", "AttentionAlarm", "Bell", "Thresholds"]

Kind = Literal["entropy", "logits", "finite"]


class AttentionAlarm(UserWarning):
    """The warning of a `Monitor`."""


class Alarm(NamedTuple):
    """What rang: `value` of a layer (or of one head) crossed `threshold` at a step.

    `kind` is "entropy" (collapse), "logits" (growth) or "finite" (NaN or infinity).
    """

    kind: Kind
    step: int
    layer: int
    module: str
    head: int | None
    value: float
    threshold: float
    message: str


@dataclass(frozen=True)
class Thresholds:
    """When a `Monitor` rings.

    Attributes:
        entropy: a layer has collapsed if its mean entropy, as a share of log(visible keys), is
            below this. At 0.05, a query of 64 keys looks at 1.2 of them. One such head is common in
            healthy models; a whole layer is not (Zhai et al., 2023).
        sink: but not if the layer's mean weight on the first token is above this: heads that rest
            on a sink have low entropy and do no harm.
        logits: largest score. 100 is where Kimi K2's QK-clip begins (2025): softmax is then one-hot
            unless several keys tie.
        growth: but only if the score has grown by this factor since the layer was first watched, so
            that models trained elsewhere may start above `logits`.
    """

    entropy: float = 0.05
    sink: float = 0.5
    logits: float = 100.0
    growth: float = 2.0

    def __post_init__(self) -> None:
        for name in ("entropy", "sink"):
            real("Thresholds", name, getattr(self, name), least=0.0, most=1.0)
        for name in ("logits", "growth"):
            real("Thresholds", name, getattr(self, name), least=0.0)


DEFAULTS = Thresholds()


class Bell:
    """Compares each watched step with the thresholds; rings once until a layer has recovered.

    Args:
        thresholds: when to ring.
    """

    def __init__(self, thresholds: Thresholds) -> None:
        if not isinstance(thresholds, Thresholds):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InputError(
                f"Monitor: thresholds must be Thresholds, not {type(thresholds).__name__}."
            )
        self._thresholds = thresholds
        self._first: dict[int, float] = {}
        self._ringing: set[tuple[Kind, int]] = set()

    def check(self, watched: Watched) -> list[Alarm]:
        """Alarms that were not ringing before."""
        found = list(self._found(watched))
        new = [alarm for alarm in found if (alarm.kind, alarm.layer) not in self._ringing]
        self._ringing = {(alarm.kind, alarm.layer) for alarm in found}
        return new

    def _found(self, watched: Watched) -> Iterator[Alarm]:
        limits, step = self._thresholds, watched.step
        for layer, name in watched.modules.items():
            of = watched.layer(layer)
            where = f"layer {layer} ({name}) at step {step}"
            if not all(bool(x.isfinite().all()) for x in of.values()):
                message = f"queries or keys of {where} hold NaN or infinity."
                nan = float("nan")
                yield Alarm("finite", step, layer, name, None, nan, nan, message)
                continue
            share, sink = float(of["entropy_share"].mean()), float(of["sink_mass"].mean())
            if share < limits.entropy and sink <= limits.sink:
                message = (
                    f"attention entropy has collapsed in {where}: {share:.3f} of that of uniform "
                    f"weights on average over its heads, below {limits.entropy:g}. Lower the "
                    "learning rate, warm up longer, or normalize queries and keys (QK-norm)."
                )
                yield Alarm("entropy", step, layer, name, None, share, limits.entropy, message)
            head = int(of["score_max"].argmax())
            score = float(of["score_max"][head])
            first = self._first.setdefault(layer, score)
            if score > limits.logits and score > limits.growth * abs(first):
                message = (
                    f"attention logits grow in {where}: head {head} has a score of {score:.0f}, "
                    f"above {limits.logits:g} (it was {first:.3g} when first watched). Lower the "
                    "learning rate, or bound the scores (QK-norm, QK-clip, softcap)."
                )
                yield Alarm("logits", step, layer, name, head, score, limits.logits, message)
