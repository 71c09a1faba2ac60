"""Models as vectors: coordinates without constraints, and the way back.

Rows of probabilities are softmax of logits, one of them fixed at zero; covariances are L L' with
the logarithms of L's diagonal; everything else is itself.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cumulant.core.errors import InputError
from cumulant.core.typed import linalg
from cumulant.filtering.model import COVARIANCES, SHAPES, TIMELESS, SwitchingLinearGaussian
from cumulant.filtering.scales import ScaleBlock, scale_block

__all__ = ["Block", "Coordinates", "Free", "coordinates"]

Free = str | Sequence[str] | set[str] | Mapping[str, bool | str | Tensor] | None

PROBABILITIES = ("transition", "initial")
USUAL = (
    *("transition", "dynamics_bias", "dynamics_input", "dynamics_noise"),
    *("emission_bias", "emission_input", "emission_noise"),
)


@dataclass(frozen=True)
class Block:
    """One parameter: where it starts, and which entries (or logits, or entries of L) move."""

    name: str
    start: Tensor
    mask: Tensor

    @property
    def size(self) -> int:
        return int(self.mask.sum())

    @property
    def moving(self) -> Tensor:
        """The entries of the parameter that change."""
        if self.name in PROBABILITIES:
            return (self.start > 0) & (self.mask.any(-1, keepdim=True))
        return self.mask | self.mask.mT if self.name in COVARIANCES else self.mask

    def moved(self, parameter: Tensor, order: Tensor) -> Block | ScaleBlock:
        """The block around another value, whose modes are in another order."""
        if self.name in PROBABILITIES:  # the likeliest entries may be others now
            return _block(self.name, parameter, True)
        tail, mask = len(SHAPES[self.name]), self.mask
        if mask.ndim > tail:
            mask = mask.index_select(-tail - 1, order)
        return Block(self.name, parameter, mask)

    def vector(self, value: Tensor) -> Tensor:
        """The free coordinates of a value."""
        if self.name in PROBABILITIES:
            reference = _reference(self.start)
            logs = torch.where(value > 0, value, 1.0).log()
            return (logs - logs.gather(-1, reference))[self.mask]
        if self.name in COVARIANCES:
            root = linalg.cholesky(value)
            logs = torch.diag_embed(root.diagonal(dim1=-2, dim2=-1).log())
            return (root.tril(-1) + logs)[self.mask]
        return value[self.mask]

    @property
    def constant(self) -> bool:
        """Whether the parameter is the same at all steps and for all series."""
        most = {"transition": 2, "initial": 1}.get(self.name, len(SHAPES.get(self.name, "")) + 1)
        return self.start.ndim <= most

    def value(self, vector: Tensor) -> Tensor:
        """The parameter at coordinates ``(*points, size)``; what does not move stays as it was."""

        def scattered(base: Tensor) -> Tensor:
            shape = (*vector.shape[:-1], *base.shape)
            return base.expand(shape).masked_scatter(self.mask.expand(shape), vector)

        if self.name in PROBABILITIES:
            logits = scattered(torch.zeros_like(self.start))
            return logits.masked_fill(self.start <= 0, -torch.inf).softmax(-1)
        if self.name in COVARIANCES:
            entries = scattered(torch.zeros_like(self.start))
            diagonal = entries.diagonal(dim1=-2, dim2=-1).exp()
            root = entries.tril(-1) + torch.diag_embed(diagonal)
            return root @ root.mT
        return scattered(self.start)


def _reference(p: Tensor) -> Tensor:
    """The likeliest entry of each row, whose logit is zero."""
    return p.detach().argmax(-1, keepdim=True)


@dataclass(frozen=True)
class Coordinates:
    """A model's free parameters as one vector."""

    model: SwitchingLinearGaussian
    blocks: tuple[Block | ScaleBlock, ...]

    def vector(self, model: SwitchingLinearGaussian) -> Tensor:
        """Where a model lies."""
        parts = [b.vector(model.parameters[b.name].detach()) for b in self.blocks]
        return torch.cat([p.reshape(-1) for p in parts])

    def values(self, vector: Tensor) -> dict[str, Tensor]:
        """The free parameters at coordinates ``(*points, P)``."""
        parts = torch.split(vector, [b.size for b in self.blocks], -1)
        return {b.name: b.value(p) for b, p in zip(self.blocks, parts, strict=True)}

    def at(self, vector: Tensor, batch: int = 0) -> SwitchingLinearGaussian:
        """The model there, valid by construction.

        Args:
            vector: coordinates ``(P,)``, or ``(S, P)`` for a batch of models before those of the
                series; parameters are constant then.
            batch: the number of batch dimensions of the series.
        """
        values = self.values(vector)
        if vector.ndim > 1:
            values = {name: self._by_point(name, x, batch) for name, x in values.items()}
        return self.model.unchecked(values)

    def _by_point(self, name: str, x: Tensor, batch: int) -> Tensor:
        """``(S, ...)`` as ``(S, *ones, M, ...)``, with one step where there are steps."""
        tail = 1 if name in PROBABILITIES else len(SHAPES[name])
        if name not in PROBABILITIES and x.ndim == tail + 1:
            x = x.unsqueeze(1).expand(len(x), self.model.modes, *x.shape[1:])
        return x.reshape(len(x), *[1] * (batch + (name not in TIMELESS)), *x.shape[1:])

    @property
    def constant(self) -> bool:
        """Whether no free parameter changes with time or from series to series."""
        return all(block.constant for block in self.blocks)

    @property
    def alike(self) -> bool:
        """Whether all modes begin with the same message."""
        given = self.model.parameters
        return given["initial_mean"].ndim == 1 and given["initial_covariance"].ndim == 2

    def moved(self, model: SwitchingLinearGaussian, order: list[int]) -> Coordinates:
        """The same coordinates around another model, whose modes are in another order."""
        at = torch.as_tensor(order, device=model.device)
        moved = (b.moved(model.parameters[b.name].detach(), at) for b in self.blocks)
        return Coordinates(model, tuple(moved))


def coordinates(model: SwitchingLinearGaussian, free: Free = None) -> Coordinates:
    """The coordinates that `fit` moves; see there for `free`."""
    free = getattr(model, "free", None) if free is None else free
    if free is None:
        chosen: dict[str, Any] = {
            name: True
            for name in USUAL
            if name in model.parameters
            and model.parameters[name].numel()
            and not (name in COVARIANCES and _singular(model.parameters[name]))
        }
    elif isinstance(free, Mapping):
        chosen = dict(free)
    else:
        given: Any = [free] if isinstance(free, str) else free
        names: Collection[Any] = given
        if not isinstance(given, list | tuple | set) or not all(isinstance(n, str) for n in names):
            raise InputError(f"fit: free must be names or a dict of names, not {free!r}.")
        chosen = dict.fromkeys(names, True)
    functions = getattr(model, "functions", {})
    known = {"transition", "initial", *SHAPES} - set(functions)
    blocks: list[Block | ScaleBlock] = []
    for name, how in chosen.items():
        if name not in known or name not in model.parameters:
            have = ", ".join(n for n in model.parameters if n in known)
            raise InputError(f"fit: the model has no parameter {name!r} to free; it has {have}.")
        blocks.append(_block(name, model.parameters[name].detach(), how))
    found = Coordinates(model, tuple(b for b in blocks if b.size))
    if not found.blocks:
        raise InputError("fit: nothing is free: name parameters in free=.")
    return found


def _singular(covariance: Tensor) -> bool:
    return bool((linalg.cholesky_ex(covariance).info != 0).any())


def _block(name: str, start: Tensor, how: Any) -> Block | ScaleBlock:
    if name in COVARIANCES and isinstance(how, Tensor) and how.dtype == torch.long:
        return scale_block(name, start, how.to(start.device))
    every = torch.ones_like(start, dtype=torch.bool)
    if name in PROBABILITIES:
        if how is not True:
            raise InputError(f"fit: {name} is free as a whole; entries that are zero stay zero.")
        mask = (start > 0).scatter(-1, _reference(start), False)
        return Block(name, start, mask)
    if name in COVARIANCES:
        if _singular(start):
            raise InputError(
                f"fit: {name} can only be learned from a positive definite start; leave it out of "
                "free, or start with a little noise in every direction."
            )
        lower = every.tril()
        diagonal = torch.diag_embed(every.diagonal(dim1=-2, dim2=-1))
        shared = bool((start == torch.diag_embed(start.diagonal(dim1=-2, dim2=-1))).all())
        if how is True:
            how = "diagonal" if shared else "dense"
        if not isinstance(how, str) or how not in ("diagonal", "dense"):
            raise InputError(
                f"fit: {name} may be free as 'diagonal' or 'dense', or True for either by its "
                f"start, not {how!r}."
            )
        if how == "diagonal" and not shared:
            raise InputError(f"fit: {name} is to stay diagonal, but does not start so.")
        return Block(name, start, diagonal if how == "diagonal" else lower)
    if how is True:
        return Block(name, start, every)
    try:
        mask = torch.as_tensor(how, device=start.device).expand(start.shape)
    except (RuntimeError, TypeError, ValueError):
        mask = start.new_zeros(())
    if mask.dtype != torch.bool or mask.shape != start.shape:
        raise InputError(
            f"fit: free[{name!r}] must be True or a boolean mask of shape {tuple(start.shape)}."
        )
    return Block(name, start, mask)
