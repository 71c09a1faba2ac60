"""A sink is one more set of keys: a single atom, joined to the keys as `merge` joins sets.

With logit s, the atom stands at key 0 with value 0, and s takes the place of its bias: its score is
<q, 0> = 0, its weight e^(s - G), and G = log(e^G_keys + e^s). All fields follow from the rule for
disjoint key sets (docs/theory.md, T1, T7), to any order and also in s, whatever computes the keys.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cumulant.attention.attended import Attended
from cumulant.attention.direct import Direct
from cumulant.attention.inputs import Call
from cumulant.attention.masks import lowered
from cumulant.attention.merging import Joined
from cumulant.attention.source import Source
from cumulant.core.lazy import Snapshot
from cumulant.core.precision import widest
from cumulant.kernels.search import Largest

__all__ = ["Sink", "attended", "with_sink"]


class Sink:
    """The source of the atom alone. It is no key: it has no number, and receives nothing.

    Args:
        logits: ``(*batch, M, 1)``, sizes 1 where they repeat.
        shape: of ``mean``, ``(*batch, M, e)``.
        features: of the keys.
    """

    def __init__(self, logits: Tensor, shape: torch.Size, features: int) -> None:
        self.shape = shape
        self._logits, self._lift = lowered(logits)
        self._features = features
        self._inputs = Snapshot([logits])

    @property
    def device(self) -> torch.device:
        return self._logits.device

    @property
    def requires_grad(self) -> bool:
        return self._logits.requires_grad

    keys = 0
    over_ranks: bool = False

    def ready(self, name: str) -> None:
        """Refuse a field if the logits have changed since."""
        self._inputs.check(name, "the sink was")

    def _zeros(self, width: int) -> Tensor:
        return self._logits.new_zeros(()).expand(*self.shape[:-1], width)

    @property
    def lift(self) -> Tensor | None:
        return None if self._lift is None else self._lift.expand(*self.shape[:-1], 1)

    @property
    def lowered(self) -> Tensor:
        return self._logits.expand(*self.shape[:-1], 1)

    @property
    def mean(self) -> Tensor:
        return self._zeros(self.shape[-1])

    @property
    def key_mean(self) -> Tensor:
        return self._zeros(self._features)

    @property
    def entropy(self) -> Tensor:
        return self._zeros(1)

    @property
    def score_mean(self) -> Tensor:
        return self._zeros(1)

    @property
    def score_variance(self) -> Tensor:
        return self._zeros(1)

    @property
    def value_moments(self) -> Tensor:
        moments = torch.cat([self._zeros(2 * self.shape[-1]), self.lowered], -1)
        return moments.to(widest(moments))

    @property
    def score_max(self) -> Tensor:
        return self._zeros(1).masked_fill(self._zeros(1) == 0, -math.inf)

    @property
    def score_max_key(self) -> Tensor:
        return torch.full((*self.shape[:-1], 1), -1, device=self._logits.device)

    def largest(self, k: int) -> Largest:
        return Largest(self.score_max, self.score_max_key)

    def received(self, share: Tensor) -> Tensor:
        return share[..., :0, :]

    def seen(self, share: Tensor) -> Tensor:
        return share[..., :0, :]

    def tempered(self, alpha: float) -> Tensor:
        logits = self.lowered.to(widest(self._logits))
        return logits if alpha == math.inf else alpha * logits


def with_sink(keys: Source, logits: Tensor, features: int) -> Joined:
    """The keys of a source, and the sink."""
    return Joined([keys, Sink(logits, keys.shape, features)])


def attended(call: Call, *, values_are_keys: bool = False) -> Attended:
    """The result of a checked call."""
    keys = Direct(call, values_are_keys=values_are_keys)
    if call.sink is None:
        return Attended(keys, call.dtype)
    features = call.arguments["key"].shape[-1]
    return Attended(with_sink(keys, call.sink, features), call.dtype)
