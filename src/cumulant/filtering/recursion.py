"""The one recursion behind GPB1, GPB2, GPB(k), IMM and exact enumeration (docs/theory.md, T25).

A belief is a mixture: log-weights ``(*batch, G, M)`` of G histories of modes and M current modes,
and a message (a tuple of tensors with the same leading dimensions) about the state given both. A
step branches every history into every next mode, moves each message by its new mode, conditions it
on the observation and collapses what the scheme does not keep. The schemes differ in where they
collapse: IMM before the move, GPB after the observation, exact enumeration nowhere.

What a message is, only the `Bank` knows: Gaussian moments, or natural parameters of another family.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol, overload

import torch
from torch import Tensor

from cumulant.core.checks import holds
from cumulant.core.errors import InputError
from cumulant.core.progress import Progress, ProgressCallback

__all__ = [
    "Bank",
    "Belief",
    "Beliefs",
    "Message",
    "Run",
    "Scheme",
    "Step",
    "advance",
    "bounded",
    "fits",
    "scheme_of",
    "steps",
]

Message = tuple[Tensor, ...]

# log 0. A finite number, so that every derivative is one too; its exponential is zero.
LOG_ZERO = -1e30

# Messages with more numbers than this are refused: 2 GB in double precision.
MOST_NUMBERS = 1 << 28


class Bank(Protocol):
    """The filters of all modes over one family of messages."""

    def log_transition(self, t: int | None) -> Tensor:
        """log P(j | i) into step t, ``(..., 1, M, M)`` or ``(M, M)``."""
        ...

    def predict(self, message: Message, t: int | None) -> Message:
        """Each message moved by each mode: ``(*batch, G, M, ...)`` from 1 or M of them."""
        ...

    def observe(self, message: Message, t: int | None) -> tuple[Message, Tensor]:
        """Conditioned on the observation of step t, and its log-likelihood ``(*batch, G, M)``."""
        ...

    def collapse(self, log_weights: Tensor, message: Message) -> Message:
        """The M-projection of the mixtures over histories, ``(*batch, 1, M, ...)``."""
        ...


class Belief(NamedTuple):
    """A mixture over histories and modes; weights sum to one over both."""

    log_weights: Tensor
    message: Message


class Beliefs(Sequence[Belief]):
    """Beliefs one after another, kept with time as the last batch dimension.

    Args:
        pieces: log-weights ``(*batch, steps, G, M)`` and messages alike; beliefs of one piece have
            as many histories. Or a function that returns them, called when they are needed.
        moments: where the compiled recursion made them, computes moments over all histories.
        smoothed: likewise, beliefs given all observations, and log-weights of pairs of modes.
    """

    def __init__(
        self,
        pieces: Sequence[Belief] | Callable[[], Sequence[Belief]],
        moments: Callable[[], dict[str, Tensor]] | None = None,
        smoothed: Callable[[], tuple[Beliefs, tuple[Tensor, ...]] | None] | None = None,
    ) -> None:
        self._given = pieces
        self.moments, self.smoothed = moments, smoothed

    @cached_property
    def pieces(self) -> tuple[Belief, ...]:
        given = self._given() if callable(self._given) else self._given
        return tuple(p for p in given if p.log_weights.shape[-3])

    def __len__(self) -> int:
        return sum(p.log_weights.shape[-3] for p in self.pieces)

    @overload
    def __getitem__(self, index: int) -> Belief: ...
    @overload
    def __getitem__(self, index: slice) -> Beliefs: ...
    def __getitem__(self, index: int | slice) -> Belief | Beliefs:
        if isinstance(index, slice):
            begin, end, _ = index.indices(len(self))
            return Beliefs(self._between(begin, end))
        at = range(len(self))[index]
        return _steps(self._between(at, at + 1)[0], 0, None)

    def _between(self, begin: int, end: int) -> list[Belief]:
        out: list[Belief] = []
        for piece in self.pieces:
            count = piece.log_weights.shape[-3]
            first, last = max(begin, 0), min(end, count)
            if first < last:
                whole = (first, last) == (0, count)
                out.append(piece if whole else _steps(piece, first, last - first))
            begin, end = begin - count, end - count
        return out

    def __add__(self, other: Sequence[Belief]) -> Sequence[Belief]:
        if isinstance(other, Beliefs):
            return Beliefs((*self.pieces, *other.pieces))
        return (*self, *other)


def _steps(piece: Belief, first: int, count: int | None) -> Belief:
    """Some steps of a piece, or one without its time dimension."""
    time = piece.log_weights.ndim - 3

    def part(x: Tensor) -> Tensor:
        return x.select(time, first) if count is None else x.narrow(time, first, count)

    return Belief(part(piece.log_weights), tuple(part(x) for x in piece.message))


class Step(NamedTuple):
    """The belief after an observation, the log-likelihood of it, and the modes before it."""

    belief: Belief
    log_likelihood: Tensor
    log_predicted: Tensor


@dataclass(frozen=True)
class Scheme:
    """Where to collapse.

    Attributes:
        memory: GPB(k): k - 1 modes are remembered; None remembers all.
        mixes: collapse for each next mode before the move (IMM).
        name: as the user gave it.
    """

    memory: int | None
    mixes: bool
    name: Any

    def histories(self, modes: int) -> int | None:
        """How many histories are kept beside the current mode."""
        return None if self.memory is None else modes ** min(max(self.memory - 2, 0), 64)


def scheme_of(owner: str, collapse: Any) -> Scheme:
    """The scheme that a name or a number k stands for."""
    if hasattr(collapse, "__index__") and not isinstance(collapse, bool) and int(collapse) >= 1:
        return Scheme(int(collapse), False, int(collapse))
    match collapse:
        case "gpb1":
            return Scheme(1, False, collapse)
        case "gpb2":
            return Scheme(2, False, collapse)
        case "imm":
            return Scheme(2, True, collapse)
        case "exact":
            return Scheme(None, False, collapse)
        case _:
            raise InputError(
                f"{owner}: collapse must be 'gpb1', 'gpb2', 'imm', 'exact' or an integer "
                f"k >= 1 for GPB(k), not {collapse!r}."
            )


def branch(bank: Bank, belief: Belief, t: int | None) -> Belief:
    """Every history continued by every next mode j: ``(*batch, G M, M)``; messages wait at 1."""
    weights, message = belief
    at = weights.ndim - 2
    joint = weights[..., None] + bank.log_transition(t)
    waiting = tuple(x.flatten(at, at + 1).unsqueeze(at + 1) for x in message)
    return Belief(joint.flatten(-3, -2), waiting)


def advance(
    bank: Bank, scheme: Scheme, belief: Belief, t: int | None, *, alike: bool = False
) -> Step:
    """One step of the filter.

    Args:
        bank: the filters of the modes.
        scheme: where to collapse.
        belief: after step t - 1.
        t: which step; None in a bank takes all steps, with time as the last batch dimension.
        alike: the messages of all modes are the same now, as at the start or in GPB1, so that
            mixing them before the move is exact.
    """
    joint, message = branch(bank, belief, t)
    log_predicted = joint.logsumexp(-2)
    if scheme.mixes or alike:
        at = joint.ndim - 2
        message = (
            tuple(x.narrow(at, 0, 1) for x in message) if alike else bank.collapse(joint, message)
        )
        joint = log_predicted[..., None, :]
    message, log_likelihood = bank.observe(bank.predict(message, t), t)
    # A common part is taken off first, so that an outlier does not swamp the weights.
    size = log_likelihood.detach().amax((-2, -1), keepdim=True)
    weights = joint + (log_likelihood - size)
    rest = weights.logsumexp((-2, -1), keepdim=True)
    belief = Belief(weights - rest, message)
    return Step(remember(bank, scheme, belief), (rest + size)[..., 0, 0], log_predicted)


def remember(bank: Bank, scheme: Scheme, belief: Belief) -> Belief:
    """Collapse the oldest mode of each history that the scheme has no room for."""
    weights, message = belief
    lead, M = weights.ndim - 2, weights.shape[-1]
    keep = scheme.histories(M)
    if keep is not None and weights.shape[-2] > keep:
        old = weights.shape[-2] // keep
        # (old, keep, M) becomes old histories of keep * M modes.
        shape = (old, keep * M)
        weights = torch.unflatten(weights, -2, (old, keep)).flatten(-2)
        message = tuple(torch.unflatten(x.flatten(lead, lead + 1), lead, shape) for x in message)
        message = bank.collapse(weights, message)
        weights = torch.unflatten(weights.logsumexp(-2), -1, (keep, M))
        message = tuple(
            torch.unflatten(x.flatten(lead, lead + 1), lead, (keep, M)) for x in message
        )
    if scheme.memory == 1 and M > 1:
        across = tuple(x.transpose(lead, lead + 1) for x in message)
        one = bank.collapse(weights.mT, across)
        message = tuple(x.expand(*x.shape[: lead + 1], M, *x.shape[lead + 2 :]) for x in one)
    return Belief(weights, message)


class Run(NamedTuple):
    """Beliefs around the steps, their log-likelihoods, and the modes before each observation.

    The last two are pieces of time: ``(*batch, steps)`` and ``(*batch, steps, M)``.
    """

    beliefs: Sequence[Belief]
    step_totals: tuple[Tensor, ...]
    log_predicted: tuple[Tensor, ...]


def steps(
    bank: Bank,
    scheme: Scheme,
    belief: Belief,
    count: int,
    *,
    alike: bool = False,
    first: int = 0,
    progress: ProgressCallback | None = None,
) -> Run:
    """Step after step of the bank's observations, from a belief on.

    Args:
        bank: the filters of the modes.
        scheme: where to collapse.
        belief: before the first step.
        count: how many steps.
        alike: all modes begin with the same message.
        first: how many steps went before, for what errors say.
        progress: called after each step.
    """
    fits(scheme, belief, count)
    beliefs, totals, predicted = [belief], list[Tensor](), list[Tensor]()
    for t in range(count):
        same = alike if t == 0 else scheme.memory == 1
        step = advance(bank, scheme, beliefs[-1], t, alike=same)
        beliefs.append(step.belief)
        totals.append(step.log_likelihood)
        predicted.append(step.log_predicted)
        if progress is not None:
            progress(Progress(t + 1, count))
    all_totals = torch.stack(totals, -1)
    whole_numbers(all_totals, first)
    return Run(tuple(beliefs), (all_totals,), (torch.stack(predicted, -2),))


def fits(scheme: Scheme, belief: Belief, count: int) -> None:
    """Refuse so many steps from a belief on if they would not fit in memory."""
    kept, modes = belief.log_weights.shape[-2:]
    numbers = sum(x.numel() for x in belief.message) / max(kept, 1)
    bounded(scheme, modes, numbers, count, kept)


def bounded(scheme: Scheme, modes: int, numbers: float, count: int, kept: int = 1) -> None:
    """Refuse what would not fit in memory, before it is tried.

    Args:
        scheme: where to collapse.
        modes: M.
        numbers: in the messages about one history.
        count: of the steps to go.
        kept: histories at the beginning.
    """
    most = kept * modes ** min(count, 64)
    room = scheme.histories(modes)
    histories = most if room is None else min(most, max(room, kept) * modes)
    if numbers * histories > MOST_NUMBERS:
        raise InputError(
            f"filter: collapse={scheme.name!r} would keep {histories:.3g} histories of {modes} "
            f"modes in {count} steps, more than fit in memory. Take a smaller k, 'gpb2' or 'imm', "
            "or fewer or shorter series."
        )


def whole_numbers(totals: Tensor, first: int) -> None:
    """Raise where a log-likelihood ``(*batch, T)`` is not a number."""
    bad = ~totals.detach().isfinite()
    if holds(~bad) is not False:
        return
    at = bad.flatten(0, -2).any(0) if bad.ndim > 1 else bad
    raise InputError(
        f"filter: the observation of step {first + int(at.nonzero()[0])} (counted from 0) has no "
        "density: the predicted covariance of the observations is singular, or numbers overflow. "
        "With emission_noise R singular, the state must be uncertain where R is zero."
    )
