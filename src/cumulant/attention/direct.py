"""The columns of one attention call, straight from the kernels."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from cumulant.attention.inputs import Call
from cumulant.core.autodiff import on_tape
from cumulant.core.lazy import Lazy, Snapshot, kept, known
from cumulant.core.precision import widest
from cumulant.core.typed import functions
from cumulant.distributed.maps import total
from cumulant.kernels import formulas
from cumulant.kernels.attention import Moments, attention, expectation
from cumulant.kernels.received import received, visible
from cumulant.kernels.search import Largest, largest, scores_of

__all__ = ["Direct"]


class Direct(Lazy):
    """The source of a checked call, its sink aside; `Source` says what each column is.

    Dropout acts on the mean alone: the other columns belong to the measure with all its weights.
    """

    over_ranks: bool = False

    def __init__(self, call: Call, *, values_are_keys: bool = False) -> None:
        self._call = call
        self._measure = call.without_dropout() if "seed" in call.arguments else call
        self._values_are_keys = values_are_keys
        self._inputs = Snapshot(call.arguments.values())

    @property
    def _batch(self) -> torch.Size:
        return functions.broadcast_shapes(*(x.shape[:-2] for x in self._call.arguments.values()))

    @property
    def shape(self) -> torch.Size:
        arguments = self._call.arguments
        size = (*self._batch, arguments["query"].shape[-2], arguments["value"].shape[-1])
        return self._call.finish(torch.empty(size, device="meta")).shape

    @property
    def device(self) -> torch.device:
        return self._call.arguments["query"].device

    @property
    def requires_grad(self) -> bool:
        return any(x.requires_grad for x in self._call.arguments.values())

    @property
    def keys(self) -> int:
        ring = self._call.options.ring
        return self._call.arguments["key"].shape[-2] if ring is None else sum(ring.rows)

    def ready(self, name: str) -> None:
        """Refuse a field if an input has changed since."""
        self._inputs.check(name, "an input of attend was")

    @kept
    def _plain(self) -> Moments:
        return attention(self._call.arguments, self._call.options)

    @kept
    def _with_entropy(self) -> Moments:
        options = replace(self._call.options, entropy=True)
        return attention(self._call.arguments, options)

    def _moments(self) -> Moments:
        """Mean and G as the kernels have them, from the pass for the entropy if there was one."""
        found: Moments | None = known(self, "_with_entropy")
        return self._plain if found is None else found

    @kept
    def mean(self) -> Tensor:
        return self._call.finish(self._moments().mean)

    @kept
    def lowered(self) -> Tensor:
        return self._call.finish(self._moments().log_normalizer)

    @property
    def lift(self) -> Tensor | None:
        lift = self._call.lift
        if lift is None:
            return None
        rows = self._call.arguments["query"].shape[-2]
        return self._finish(lift.expand(*lift.shape[:-2], rows, 1))

    @kept
    def key_mean(self) -> Tensor:
        if self._values_are_keys and self._measure is self._call:
            return self.mean
        call = self._measure
        mean = attention({**call.arguments, "value": call.arguments["key"]}, call.options).mean
        return self._finish(mean)

    def _finish(self, x: Tensor) -> Tensor:
        """A row quantity that did not see the values, with their batch, in the caller's shape."""
        return self._call.finish(x.expand(*self._batch, *x.shape[-2:]))

    @kept
    def _scalars(self) -> Moments:
        """The entropy, without the mean that is there already."""
        arguments = self._call.arguments
        without = {**arguments, "value": arguments["value"][..., :0]}
        return attention(without, replace(self._call.options, entropy=True))

    def _entropic(self) -> Moments:
        """The pass for the entropy, and for what an engine makes beside it."""
        fresh = known(self, "_plain") is None or known(self, "_with_entropy") is not None
        return self._with_entropy if fresh else self._scalars

    @kept
    def entropy(self) -> Tensor:
        done = self._entropic().entropy
        if done is None:
            raise RuntimeError("the kernel did not return the entropy it was asked for")
        return self._call.finish(done)

    def _without_values(self) -> dict[str, Tensor]:
        return {n: x for n, x in self._measure.arguments.items() if n != "value"}

    def _with_normalizer(self) -> dict[str, Tensor]:
        return {**self._without_values(), "log_normalizer": self._moments().log_normalizer}

    @kept
    def _score_mean(self) -> Tensor:
        made = self._entropic().extras.get("score_mean")
        given, options = self._with_normalizer(), self._call.options
        return expectation(formulas.score_mean, "score_mean", given, options, value=made)

    @property
    def score_mean(self) -> Tensor:
        return self._call.finish(self._score_mean)

    @kept
    def score_variance(self) -> Tensor:
        options, made = self._call.options, self._entropic().extras.get("score_variance")
        given = {**self._with_normalizer(), "score_mean": self._score_mean}
        out = expectation(formulas.score_variance, "score_variance", given, options, value=made)
        return self._call.finish(out)

    @kept
    def value_moments(self) -> Tensor:
        # E[v^2] - E[v]^2 cancels where a row is peaked: double precision, and values relative to
        # a typical output. Values that are not finite count where they made the mean NaN.
        arguments, mean = self._measure.arguments, self._moments().mean
        wide = widest(mean)
        value = arguments["value"].to(wide)
        center = _typical(mean.to(wide), value)
        if (ring := self._call.options.ring) is not None:  # values meet queries of other ranks
            center = center + value.new_zeros(*value.shape[:-2], 1, value.shape[-1])
            center = total(center, ring.ranks) / ring.ranks.size
        value = torch.where(value.isfinite(), value, 0.0) - center
        features = value.shape[-1]
        given = {n: x.to(wide) if x.is_floating_point() else x for n, x in arguments.items()}
        given["value"] = torch.cat([value, value * value], -1)
        options = replace(self._measure.options, narrow=None)  # half precision would cancel
        both, normalizer, *_ = attention(given, options)
        variance = (both[..., features:] - both[..., :features] ** 2).clamp_min(0.0)
        return self._call.finish(
            torch.cat([both[..., :features] + center, variance, normalizer], -1)
        )

    @kept
    def _top(self) -> Largest:
        return largest(self._without_values(), self._measure.options)

    @kept
    def score_max(self) -> Tensor:
        given = self._without_values()
        if on_tape(*given.values()):
            return self._finish(scores_of(given, self._measure.options, self._top))
        for name in ("_with_entropy", "_scalars"):  # where it came with the entropy
            found: Moments | None = known(self, name)
            if found is not None and "score_max" in found.extras:
                return self._finish(found.extras["score_max"])
        return self._finish(self._top.score)

    @property
    def score_max_key(self) -> Tensor:
        return self._finish(self._top.index)

    def largest(self, k: int) -> Largest:
        given, options = self._without_values(), self._measure.options
        found = largest(given, options, k)
        score = scores_of(given, options, found) if on_tape(*given.values()) else found.score
        return Largest(self._finish(score), self._finish(found.index))

    def received(self, share: Tensor) -> Tensor:
        normalizer, options = self._moments().log_normalizer, self._measure.options
        share = self._split(share)
        return self._call.finish(received(self._without_values(), options, normalizer, share))

    def seen(self, share: Tensor) -> Tensor:
        _, queries = visible(self._without_values(), self._measure.options, self._split(share))
        return self._call.finish(queries)

    def _split(self, share: Tensor) -> Tensor:
        groups = self._call.groups
        return share if groups is None else groups.split("share", share)

    def tempered(self, alpha: float) -> Tensor:
        arguments, options = self._measure.arguments, self._measure.options
        wide = widest(arguments["query"])
        given = {n: x.to(wide) if x.is_floating_point() else x for n, x in arguments.items()}
        value = given.pop("value")[..., :0]
        if alpha == 0.0:
            one = value.new_ones(()).expand(*given["query"].shape[:-1], 1)
            return self._finish(visible(given, options, one)[0].log())
        if alpha == math.inf:
            return self._finish(scores_of(given, options, largest(given, options)))
        given |= {n: alpha * given[n] for n in ("bias", "cap") if n in given}
        hotter = replace(options, scale=alpha * options.scale, narrow=None)
        return self._call.finish(attention({**given, "value": value}, hotter).log_normalizer)


def _typical(mean: Tensor, value: Tensor) -> Tensor:
    """The median over queries of E[v], in the batch of the values; a constant."""
    center = mean.detach()
    for dim in range(center.ndim - 1):
        if center.shape[dim] and (value.shape[dim] == 1 or dim == center.ndim - 2):
            center = center.nanmedian(dim, keepdim=True).values
    return center.nan_to_num(0.0, 0.0, 0.0) if center.shape[-2] == 1 else center.new_zeros(1)
