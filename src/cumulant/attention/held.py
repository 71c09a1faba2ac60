"""`Held`: a source that holds columns as numbers, and nothing they were computed from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Never

import torch
from torch import Tensor

from cumulant.attention.source import COLUMNS, FIELDS, Source, column_of
from cumulant.core.errors import UnknownFieldError
from cumulant.kernels.search import Largest

__all__ = ["Held"]

_SETTLED = (
    "this result holds numbers without their keys (it is a copy, was pickled, or is a long stream "
    "of merges without gradients). Ask for it before; over a stream, add up cumulant.Received."
)


class Held:
    """Columns by name; those that are not there raise, and say why.

    Args:
        columns: what is known.
        lift: as in `Source`.
        keys: how many keys there were, if that is known.
        why: the reason why other columns are not known.
    """

    over_ranks: bool = False

    def __init__(
        self,
        columns: Mapping[str, Tensor],
        *,
        lift: Tensor | None = None,
        keys: int | None = None,
        why: str = _SETTLED,
    ) -> None:
        self._columns = dict(columns)
        self._keys = keys
        self._why = why
        self.lift = lift

    @classmethod
    def of(cls, source: Source) -> Held:
        """All that a source knows, computed now, without gradients."""
        columns: dict[str, Tensor] = {}
        keys, why = None, _SETTLED
        for name in FIELDS:
            source.ready(name)
        try:
            keys = source.keys
            for name in COLUMNS:
                columns[name] = getattr(source, name).detach()
        except UnknownFieldError as error:
            why = error.why
            columns |= {n: getattr(source, n).detach() for n in ("mean", "lowered")}
        lift = source.lift
        return cls(columns, lift=None if lift is None else lift.detach(), keys=keys, why=why)

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields that are known."""
        return tuple(name for name in FIELDS if column_of(name) in self._columns)

    @property
    def requires_grad(self) -> bool:
        return any(x.requires_grad for x in self._columns.values())

    @property
    def shape(self) -> torch.Size:
        return self.mean.shape

    @property
    def device(self) -> torch.device:
        return self.mean.device

    def _unknown(self, name: str) -> Never:
        raise UnknownFieldError(name, self._why)

    def _column(self, name: str) -> Tensor:
        return self._columns[name] if name in self._columns else self._unknown(name)

    def ready(self, name: str) -> None:
        """Always: nothing is left to compute."""

    @property
    def keys(self) -> int:
        return self._unknown("the number of keys") if self._keys is None else self._keys

    @property
    def mean(self) -> Tensor:
        return self._column("mean")

    @property
    def lowered(self) -> Tensor:
        return self._column("lowered")

    @property
    def key_mean(self) -> Tensor:
        return self._column("key_mean")

    @property
    def entropy(self) -> Tensor:
        return self._column("entropy")

    @property
    def score_mean(self) -> Tensor:
        return self._column("score_mean")

    @property
    def score_variance(self) -> Tensor:
        return self._column("score_variance")

    @property
    def value_moments(self) -> Tensor:
        if "value_moments" not in self._columns:
            self._unknown("value_variance")
        return self._column("value_moments")

    @property
    def score_max(self) -> Tensor:
        return self._column("score_max")

    @property
    def score_max_key(self) -> Tensor:
        return self._column("score_max_key")

    def largest(self, k: int) -> Largest:
        self._unknown("top_keys")

    def received(self, share: Tensor) -> Tensor:
        self._unknown("received")

    def seen(self, share: Tensor) -> Tensor:
        self._unknown("seen_by")

    def tempered(self, alpha: float) -> Tensor:
        self._unknown("renyi")
