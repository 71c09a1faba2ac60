"""Gaussian messages through a model's modes: the bank of Kalman filters (docs/theory.md, T25)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from cumulant.core.chains import stationary_law
from cumulant.core.checks import broadcast, holds, require
from cumulant.core.errors import InputError
from cumulant.core.lazy import Mode
from cumulant.filtering import moments
from cumulant.filtering.model_checks import real_numbers
from cumulant.filtering.moments import Affine
from cumulant.filtering.recursion import Belief, Message
from cumulant.filtering.roots import collapsed, frame_of, regular, triangular, update, valued

__all__ = ["GaussianBank", "OverTime", "inputs_of"]


# Below this share of another variance, the digits of a double no longer suffice for smoothing.
LEAST_SHARE = 1e-7


class OverTime:
    """A parameter at one step or at all: ``(M, ...)``, or ``(*batch, 1, M, ...)`` with histories.

    All steps are ``(*batch, T, 1, M, ...)``: time is then one more batch dimension.
    """

    def __init__(self, x: Tensor, event: int) -> None:
        self.constant = x.ndim == event + 1
        self.whole = x if self.constant else x.unsqueeze(-event - 2)
        time = -event - 3

        self.batch = torch.Size() if self.constant else x.shape[: time + 1]
        self._event = event

    def map(self, function: Callable[[Tensor], Tensor]) -> OverTime:
        """The parameter through a function of its entries."""
        return OverTime(function(self.by_step), self._event)

    @property
    def by_step(self) -> Tensor:
        """``(M, ...)``, or ``(*batch, T, M, ...)``."""
        return self.whole if self.constant else self.whole.squeeze(-self._event - 2)

    @cached_property
    def _steps(self) -> Sequence[Tensor]:
        return (self.whole,) if self.constant else self.whole.unbind(-self._event - 3)

    def at(self, t: int | None) -> Tensor:
        if t is None:
            return self.whole
        return self._steps[t if len(self._steps) > 1 else 0]


def log_probability(p: Tensor) -> Tensor:
    """log p. An entry that is exactly zero stays impossible: it has no derivative."""
    least = -1e-8 * torch.finfo(p.dtype).max  # far below any likelihood, and finite
    return torch.where(p > 0, p, 1.0).log().masked_fill(p <= 0, least)


def stationary(transition: Tensor) -> Tensor:
    """The probabilities that a transition leaves as they are, ``(..., M)``."""
    found = stationary_law(transition)
    return torch.where(found.unique[..., None], found.law, torch.nan)


def inputs_of(owner: str, model: Any, inputs: Any, steps: int, like: Tensor) -> Tensor | None:
    """Inputs ``(*batch, steps, m)``, if the model takes them."""
    m = model.input_size
    if m == 0 and inputs is None:
        return None
    if m == 0:
        raise InputError(
            f"{owner}: inputs were given, but the model has no dynamics_input or emission_input."
        )
    if inputs is None:
        raise InputError(f"{owner}: the model takes {m} inputs at each step: give inputs=.")
    u = real_numbers(owner, "inputs", inputs, like.dtype, like.device)
    u = u.to(like.device, like.dtype)
    if u.ndim < 2 or u.shape[-1] != m or u.shape[-2] != steps:
        raise InputError(
            f"{owner}: inputs must have shape (*batch, {steps}, {m}), not {tuple(u.shape)}."
        )
    require(
        u.isfinite(), lambda: f"{owner}: inputs must be finite; only observations may be missing."
    )
    return u


_Affine = tuple[OverTime, OverTime, OverTime]


@dataclass
class Known:
    """What a model's constant parameters come to, for every filter of the same model.

    Only numbers are kept: parameters without gradient, outside of transforms. It serves as long as
    the tensors are the same ones, and nobody has written to them.
    """

    tensors: tuple[Tensor, ...]
    versions: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[OverTime, dict[str, _Affine]] | None = None
    starts: dict[torch.Size, tuple[Belief, bool]] = field(default_factory=lambda: {})
    arrays: dict[torch.Size, list[Tensor]] = field(default_factory=lambda: {})


_MODELS: WeakKeyDictionary[Any, Known] = WeakKeyDictionary()


def _known(model: Any, dtype: torch.dtype) -> Known | None:
    """What is known of the model, perhaps nothing yet; None where nothing may be kept."""
    tensors: tuple[Tensor, ...] = tuple(model.parameters.values())
    if any(type(x) is not Tensor or x.requires_grad or x.is_inference() for x in tensors):
        return None
    if not Mode.now().plain or torch.compiler.is_compiling():
        return None
    versions = tuple(x._version for x in tensors)
    found = _MODELS.get(model)
    if (
        found is None
        or found.dtype != dtype
        or found.versions != versions
        or len(found.tensors) != len(tensors)
        or any(a is not b for a, b in zip(found.tensors, tensors, strict=True))
    ):
        found = _MODELS[model] = Known(tensors, versions, dtype)
    return found


class GaussianBank:
    """One Kalman filter for each mode and history, on observations ``(*batch, T, p)``.

    States are computed in double precision: with a vague start, single precision has no digits left
    for what the observations pin down. Functions run in the precision that they were given.
    """

    def __init__(
        self, model: Any, observations: Tensor, inputs: Tensor | None = None, first: int = 0
    ) -> None:
        self.model, self.observations, self.inputs = model, observations, inputs
        wide = model.state_size > 0 and not getattr(model, "functions", None)
        self.dtype = torch.float64 if wide else observations.dtype
        self.first = first
        last = first + observations.shape[-2]
        if model.steps is not None and model.steps < last:
            raise InputError(
                f"the model's parameters cover {model.steps} steps, but step {last} is needed: "
                "give parameters for all steps."
            )

        known = None if inputs is not None or model.steps is not None else _known(model, self.dtype)
        self.known: Known | None = known
        if known is not None and known.parts is not None:
            self._log_transition, self._parts = known.parts
        else:
            self._log_transition = self._over_time("transition", 1).map(log_probability)
            self._parts = {which: self._affine(which) for which in ("dynamics", "emission")}
            if known is not None:
                known.parts = self._log_transition, self._parts
        self._noise_roots: dict[str, Tensor] = {}

    @cached_property
    def seen(self) -> Tensor | None:
        """Which elements were observed, ``(*batch, T, 1, 1, p)``; None if all were."""
        missing = self.observations[..., None, None, :].isnan()
        return None if holds(~missing) is True else ~missing

    @cached_property
    def value(self) -> Tensor:
        """The observations ``(*batch, T, 1, 1, p)``, zero where they are missing."""
        value = self.observations.to(self.dtype)[..., None, None, :]
        return value if self.seen is None else value.masked_fill(~self.seen, 0.0)

    @cached_property
    def exact(self) -> bool:
        """Whether some element of the observations has no noise of its own."""
        noise = self._parts["emission"][2].whole.detach().diagonal(dim1=-2, dim2=-1)
        return self.model.state_size > 0 and holds(noise != 0) is False

    def over_time(self) -> list[OverTime]:
        """log P(j | i), then matrix, offset and noise of the dynamics and of the emission."""
        return [part for _, part in self._varying()]

    def _steps(self, name: str, event: int) -> Tensor | None:
        """A parameter over the steps of this bank."""
        x = self.model.steps_of(name)
        if x is None:
            return None
        varies = x.ndim > event + 1 and x.shape[-event - 2] > 1
        count = self.observations.shape[-2]
        x = x.narrow(-event - 2, self.first, count) if varies else x
        return x.to(self.dtype)

    def _over_time(self, name: str, event: int) -> OverTime:
        x = self._steps(name, event)
        assert x is not None
        return OverTime(x, event)

    def _affine(self, which: str) -> tuple[OverTime, OverTime, OverTime]:
        model, kind = self.model, self.dtype
        matrix = self._over_time(which, 2)
        noise = self._over_time(f"{which}_noise", 2).map(moments.symmetric)
        bias = self._steps(f"{which}_bias", 1)
        size = model.state_size if which == "dynamics" else model.observation_size
        if bias is None:
            bias = torch.zeros(model.modes, size, dtype=kind, device=model.device)
        effect = self._steps(f"{which}_input", 2)
        if effect is not None and self.inputs is not None:
            lead = self.inputs.shape[:-2], effect.shape[: max(effect.ndim - 4, 0)]
            broadcast("filter", inputs=lead[0], **{f"{which}_input": lead[1]})
            bias = bias + (effect @ self.inputs.to(kind)[..., None, :, None])[..., 0]
        return matrix, OverTime(bias, 1), noise

    def affine(self, which: str, t: int | None) -> Affine:
        """The step of the dynamics or of the emission, at time t or at all times."""
        matrix, bias, noise = self._parts[which]
        return Affine(matrix.at(t), bias.at(t), noise.at(t))

    def linear(self, which: str, message: Message, t: int | None) -> Affine:
        """The same, linearized at the message where the model is not linear."""
        mean, covariance = message[:2]
        u = None
        if self.inputs is not None:
            u = self.inputs if t is None else self.inputs[..., t, :]
            u = u[..., None, None, :]
        return self.model.linearize(self.affine(which, t), mean, covariance, which, u)

    def start(self) -> tuple[Belief, bool]:
        """The belief at time 0, and whether all modes begin with the same message."""
        key = self.observations.shape[:-2]
        known = None if self.known is None else self.known.starts.get(key)
        if known is None:
            known = self._start()
            if self.known is not None and not key:  # one series: of batches there may be many
                self.known.starts[key] = known
        return known

    def _start(self) -> tuple[Belief, bool]:
        model, kind = self.model, self.dtype
        given = model.parameters
        initial = given.get("initial")
        if initial is None:
            first = given["transition"].to(kind)
            initial = stationary(first if first.ndim == 2 else first[..., 0, :, :])
        initial = initial.to(kind)
        mean, covariance = given["initial_mean"].to(kind), given["initial_covariance"].to(kind)
        alike = mean.ndim == 1 and covariance.ndim == 2
        M, n = model.modes, model.state_size
        batch = broadcast(
            "filter",
            observations=self.observations.shape[:-2],
            initial=initial.shape[:-1],
            initial_mean=mean.shape[:-2],
            initial_covariance=covariance.shape[:-3],
            **{name: x.batch for name, x in self._varying()},
        )
        logs = log_probability(initial)
        message = (
            (mean if mean.ndim > 1 else mean.expand(M, n)).unsqueeze(-3).expand(*batch, 1, M, n),
            (covariance if covariance.ndim > 2 else covariance.expand(M, n, n))
            .unsqueeze(-4)
            .expand(*batch, 1, M, n, n),
        )
        covariance = message[1] if model.diffuse else moments.symmetric(message[1])
        return Belief(logs.unsqueeze(-2).expand(*batch, 1, M), (message[0], covariance)), alike

    def _varying(self) -> list[tuple[str, OverTime]]:
        found = [("transition", self._log_transition)]
        for which, parts in self._parts.items():
            found += zip((which, f"{which}_bias", f"{which}_noise"), parts, strict=True)
        return found

    def log_transition(self, t: int | None) -> Tensor:
        return self._log_transition.at(t)

    def predict(self, message: Message, t: int | None) -> Message:
        # Here there are fewest of them, and once in a step is enough.
        mean, covariance = message[0], moments.symmetric(message[1])
        step = self.linear("dynamics", (mean, covariance), t)
        moved, spread = moments.predict(step, mean, covariance)
        if len(message) == 2:
            return moved, spread
        first = moments.times(step.matrix.detach(), message[2])
        noise = self._noise_root("dynamics", step).expand_as(first)
        root = triangular(torch.cat([first, noise], -1))
        return moved, valued(root @ root.mT, spread), root

    @cached_property
    def _rows(self) -> list[tuple[Tensor, Tensor | None]]:
        values = self.value.unbind(-4)
        seen = [None] * len(values) if self.seen is None else self.seen.unbind(-4)
        return list(zip(values, seen, strict=True))

    def observe(self, message: Message, t: int | None) -> tuple[Message, Tensor]:
        value, seen = (self.value, self.seen) if t is None else self._rows[t]
        emission = self.linear("emission", message, t)
        mean, covariance, *roots = message
        known = None
        if roots:
            noise = self._noise_root("emission", emission)
            known = update(emission.matrix, noise, roots[0], seen)
            roots = [known.root]
        exact = self.exact and known is None
        out = moments.observe(emission, mean, covariance, value, seen, known, exact=exact)
        found = out.mean
        if exact:
            found = moments.agreed(found, out.covariance, mean, covariance)
        return (found, out.covariance, *roots), out.log_likelihood

    def collapse(self, log_weights: Tensor, message: Message) -> Message:
        exact = self.exact and len(message) == 2
        mean, covariance = moments.collapse(log_weights, *message[:2], exact=exact)
        if len(message) == 2:
            return mean, covariance
        away, columns = (mean - message[0]).movedim(-3, -2), message[2].movedim(-4, -3)
        root = collapsed(log_weights.mT, away, columns)[..., None, :, :, :]
        return mean, valued(root @ root.mT, covariance), root

    def loses_digits(self, beliefs: Sequence[Belief]) -> bool:
        """Whether variances fall so far below those before that rounding shows in them.

        A variance is rounded to the digits of those that it was made from, step by step; one that
        is zero forgets them. At the end, a direction with far less variance than the coordinates
        counts as well: the next observation may pin them. Covariances that come with a root keep
        their digits.
        """
        if len(beliefs[0].message) > 2 or not self.model.state_size:
            return False
        last = moments.symmetric(beliefs[-1].message[1].detach())
        if not regular(last, LEAST_SHARE):
            return True
        each = [b.message[1].detach().diagonal(dim1=-2, dim2=-1) for b in beliefs]
        if len({x.shape for x in each}) == 1:  # mostly, all variances are of one size
            over_time = torch.stack(each)
            if holds(
                over_time >= LEAST_SHARE * over_time.amax((0, -3, -2, -1))[..., None, None, None]
            ):
                return False
        return self._falls(each)

    def _falls(self, variances: Sequence[Tensor]) -> bool:
        """Whether variances ``(*batch, G, M, n)`` fall too far below those they were made from."""
        n, device = self.model.state_size, self.observations.device
        moves = torch.ones(n, n, dtype=torch.bool, device=device)
        if not getattr(self.model, "functions", None):
            moves = (self._parts["dynamics"][0].whole.detach() != 0).flatten(0, -3).any(0)
        largest = torch.zeros(n, dtype=self.dtype, device=device)
        lost = torch.zeros((), dtype=torch.bool, device=device)
        for each in variances:
            own = each.amax((-3, -2))
            before = torch.where(moves, largest[..., None, :], 0.0).amax(-1)
            largest = torch.where(own > 0, torch.maximum(own, before), 0.0)
            least = torch.where(each == 0, torch.inf, each).amin((-3, -2))
            lost = lost | ~(least >= LEAST_SHARE * largest).all()
        return holds(~lost) is False

    def plain(self, belief: Belief) -> Belief:
        """The belief without roots, if its covariances have all their digits without them."""
        mean, covariance, *roots = belief.message
        if not roots or not regular(moments.symmetric(covariance.detach()), LEAST_SHARE):
            return belief
        return Belief(belief.log_weights, (mean, covariance))

    def rooted(self, belief: Belief) -> Belief:
        """The belief with a root of each covariance, which the filter then carries along."""
        mean, covariance, *roots = belief.message
        if roots:
            return belief
        return Belief(
            belief.log_weights, (mean, covariance, frame_of(moments.symmetric(covariance)).root)
        )

    def _noise_root(self, which: str, step: Affine) -> Tensor:
        """A root of the noise of a step, taken once where it is a constant."""
        if step.noise is not self._parts[which][2].whole:
            return frame_of(step.noise).root
        if which not in self._noise_roots:
            self._noise_roots[which] = frame_of(step.noise).root
        return self._noise_roots[which]
