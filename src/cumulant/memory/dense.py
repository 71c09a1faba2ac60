"""`Memory`: the modern Hopfield network, with its energy (THEORY T19, T21, T33)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from cumulant.errors import InputError
from cumulant.kernels.attention import Moments, Options, attention
from cumulant.kernels.search import largest
from cumulant.measures.checks import finite, numbers, real, require
from cumulant.measures.mixture import GaussianMixture
from cumulant.memory import files
from cumulant.memory.inputs import checked, given_kind, inverse_temperature, out_of_range
from cumulant.memory.retrieval import Retrieval, Rows, Settled, energy, plan, settle

__all__ = ["Memory", "Retrieval"]


class Memory:
    """Stored patterns, found again from a part of them: the modern Hopfield network (T19).

    With G(eta) = log sum_i exp<x_i, eta> over the patterns x_i, the energy ::

        E(xi) = -G(beta xi) / beta + |xi|^2 / 2 + log(N) / beta + M^2 / 2,   M = max |x_i|,

    is never negative, and the update xi <- softmax(beta X xi)' X, attention without skip
    connection, never raises it. All of it streams over the patterns: memory is linear in Q + N.

    Args:
        patterns: ``(*sets, N, d)``, not copied; there is no 1/sqrt(d). Images go in flat:
            ``x.flatten(1)``. States are converted to their dtype.
        beta: inverse temperature, a positive number, or a tensor that broadcasts to ``sets`` (one
            for each head or set of patterns). Large is precise, small blends patterns.
        values: ``(*sets, N, e)``, stored with the patterns and read by ``retrieve(...).value``.

    Raises:
        InputError: no patterns, numbers that are not finite, beta <= 0, shapes that do not fit.

    >>> import torch, cumulant as cm
    >>> patterns = torch.tensor([[1.0, 1.0, -1.0, -1.0], [1.0, -1.0, 1.0, -1.0]])
    >>> memory = cm.Memory(patterns, beta=4.0)
    >>> found = memory.retrieve(torch.tensor([[1.0, 1.0, 0.0, 0.0]]))
    >>> found.state.round(decimals=2), found.index
    (tensor([[ 1.,  1., -1., -1.]]), tensor([0]))
    """

    def __init__(
        self, patterns: Tensor, beta: float | Tensor = 1.0, *, values: Tensor | None = None
    ) -> None:
        got = checked("Memory", patterns=patterns, values=values)
        self.patterns, self.values = got["patterns"], got.get("values")
        self._kind = given_kind(patterns, self.patterns)
        self._value_kind = given_kind(patterns if values is None else values, self.patterns)
        self.beta = inverse_temperature("Memory", beta, self.patterns)

    def __len__(self) -> int:
        """How many patterns each set holds."""
        return self.patterns.shape[-2]

    def __repr__(self) -> str:
        beta = self.beta
        told = tuple(beta.shape) if isinstance(beta, Tensor) else f"{beta:g}"
        extra = "" if self.values is None else f", values={tuple(self.values.shape)}"
        return f"Memory(patterns={tuple(self.patterns.shape)}, beta={told}{extra})"

    # Queries

    def energy(self, state: Tensor) -> Tensor:
        """E(state) >= 0, ``(*batch, Q)``, differentiable to any order (T19)."""
        xi, restore = self._states("energy", state)
        return restore(self._energy(xi))

    def retrieve(
        self,
        state: Tensor,
        steps: int | None = None,
        tol: float | None = None,
        *,
        step_size: float = 1.0,
    ) -> Retrieval:
        """Update the states: exactly `steps` times, or each until it moves by at most `tol`.

        Args:
            state: ``(*batch, Q, d)``.
            steps: how many updates, 1 if left out; with `tol` the most there may be (1000).
            tol: a query is at rest once an update moves it by at most this, in Euclidean norm. It
                then stays as it is, whatever the others do.
            step_size: in (0, 1]; t moves to (1 - t) xi + t softmax(beta X xi)' X.

        Returns:
            Retrieval: differentiable in states, patterns, values and beta. Without `tol`,
            ``converged`` asks for a change of at most sqrt(eps) M in the last update, which one
            update from afar hardly ever meets.

        >>> import torch, cumulant as cm
        >>> memory = cm.Memory(torch.randn(100, 32), beta=1.0)
        >>> found = memory.retrieve(memory.patterns + 0.1 * torch.randn(100, 32), tol=1e-4)
        >>> bool(found.converged.all()), bool((found.energy >= 0).all())
        (True, True)
        """
        most, tol = plan("retrieve", steps, tol)
        size = real("retrieve", "step_size", step_size, least=0.0, most=1.0, open_at_least=True)
        xi, restore = self._states("retrieve", state)

        def update(x: Tensor) -> Tensor:
            to = self._attend(x, self.patterns).mean
            return to if size == 1.0 else x + size * (to - x)

        if most == 0:
            xi = xi.clone()  # the result is not the caller's tensor
        found = settle(update, xi, most, tol, separate=self.patterns.ndim == 2)
        require(found.state.isfinite(), lambda: self._overflow("retrieve"))
        if tol is None:
            tol = math.sqrt(torch.finfo(xi.dtype).eps)
            rest = found.change <= tol * self._largest_norm()
        else:
            rest = found.change <= tol
        return Retrieval(
            restore(found.state).to(self._kind),
            restore(found.steps),
            restore(rest),
            _Answers(self._snapshot(), found, restore),
        )

    def separation(self) -> Tensor:
        """How far each pattern stands out: min over j != i of <x_i, x_i - x_j>, ``(*sets, N)``.

        Infinite for a pattern that is alone. Differentiable almost everywhere.
        """
        x = self.patterns
        if len(self) == 1:
            return x.new_full(x.shape[:-1], math.inf)
        own = torch.arange(len(self), device=x.device)[:, None]
        tags = {n: own.expand(*x.shape[:-1], 1) for n in ("query_tag", "key_tag")}
        nearest = largest({"query": x.detach(), "key": x.detach(), **tags}).index
        other = x.gather(-2, nearest.clamp_min(0).expand_as(x))
        gaps = (x * (x - other)).sum(-1)
        require(gaps.isfinite(), lambda: self._overflow("separation"))
        return gaps

    def error_bound(
        self, state: Tensor, index: Tensor | None = None, *, fixed_point: Tensor | None = None
    ) -> Tensor:
        """How far one update of `state` can end from a stored pattern x_i at most, ``(*batch, Q)``.

        ``|f(xi) - x_i| <= 2 (N - 1) M exp(-beta (D_i - 2 M r))``, ``r = |xi - x_i|``, D_i the
        separation (T21, after Theorem 5 of Ramsauer et al., 2021). It always holds; where patterns
        crowd, it says little.

        Args:
            state: ``(*batch, Q, d)``.
            index: ``(*batch, Q)``, which pattern; the one of the largest weight if left out.
            fixed_point: ``(*batch, Q, d)``; r becomes ``max(r, |fixed_point - x_i|)``, as in the
                paper, whose bound is for the distance to a fixed point too.
        """
        xi, restore = self._states("error_bound", state)
        at = self._index(xi)
        if index is not None:
            at = self._rows_of("error_bound", index, state, xi)
        expanded = self.patterns.expand(*xi.shape[:-2], *self.patterns.shape[-2:])
        x = expanded.gather(-2, at[..., None].expand(*at.shape, xi.shape[-1]))
        gap = self.separation().expand(*xi.shape[:-2], len(self)).gather(-1, at)
        radius = torch.linalg.vector_norm(xi - x, dim=-1)
        if fixed_point is not None:
            rest, _ = self._states("error_bound", fixed_point)
            if rest.shape != xi.shape:
                raise InputError(
                    f"error_bound: fixed_point must have the shape of state, {tuple(state.shape)}, "
                    f"but has {tuple(fixed_point.shape)}."
                )
            radius = torch.maximum(radius, torch.linalg.vector_norm(rest - x, dim=-1))
        M = self._largest_norm()
        exponent = self._beta_rows() * (gap - 2 * M * radius)
        if len(self) == 1:
            return restore(torch.zeros_like(exponent))
        return restore(2 * (len(self) - 1) * M * (-exponent).exp())

    def mixture(self) -> GaussianMixture:
        """exp(-beta E) as a density: Gaussians of variance 1/beta around the patterns (T33).

        Its weights are proportional to ``exp(beta |x_i|^2 / 2)``. The update is its EM
        (mean-shift) step, and `cumulant.dynamics.block_gibbs` draws from it.
        """
        x = self.patterns
        beta = self._beta_rows()
        weights = torch.log_softmax(beta * (x * x).sum(-1) / 2, -1)
        spread = (1 / beta[..., None]) if isinstance(beta, Tensor) else 1 / beta
        return GaussianMixture(x, torch.ones_like(x) * spread, weights)

    # Changes

    def add(self, patterns: Tensor, values: Tensor | None = None) -> None:
        """Store more patterns, ``(*sets, n, d)``, after those that are there.

        The whole store is copied once a call: add many at a time.
        """
        new = self._like_stored("add", patterns, values)
        self.patterns = torch.cat([self.patterns, new[0]], -2)
        if self.values is not None:
            self.values = torch.cat([self.values, new[1]], -2)

    def replace(
        self, index: Tensor | Sequence[int], patterns: Tensor, values: Tensor | None = None
    ) -> None:
        """Store ``patterns[..., n, :]`` in place of number ``index[n]``."""
        at = self._numbers("replace", index)
        new = self._like_stored("replace", patterns, values)
        if new[0].shape[-2] != len(at):
            raise InputError(
                f"replace: index names {len(at)} patterns, but {new[0].shape[-2]} came."
            )
        self.patterns = self.patterns.index_copy(-2, at, new[0])
        if self.values is not None:
            self.values = self.values.index_copy(-2, at, new[1])

    def remove(self, index: Tensor | Sequence[int]) -> None:
        """Forget the patterns with these numbers; those behind them move up."""
        at = self._numbers("remove", index)
        keep = torch.ones(len(self), dtype=torch.bool, device=self.patterns.device)
        keep[at] = False
        if not bool(keep.any()):
            raise InputError("remove: a memory must keep at least one pattern.")
        self.patterns = self.patterns[..., keep, :]
        if self.values is not None:
            self.values = self.values[..., keep, :]

    def save(self, path: str | PathLike[str]) -> None:
        """Write patterns, values and beta as one safetensors file."""
        exact = None if isinstance(self.beta, Tensor) else torch.float64
        beta = torch.as_tensor(self.beta, dtype=exact)
        tensors = {"patterns": self.patterns.to(self._kind), "beta": beta}
        if self.values is not None:
            tensors["values"] = self.values.to(self._value_kind, copy=True)
        files.write(path, {n: x.detach() for n, x in tensors.items()})

    @classmethod
    def load(cls, path: str | PathLike[str], device: str | torch.device = "cpu") -> Memory:
        """Read what `save` wrote."""
        got = files.read(path, device)
        beta = got["beta"]
        return cls(
            got["patterns"],
            float(beta) if beta.ndim == 0 else beta,
            values=got.get("values"),
        )

    # Inside

    def _snapshot(self) -> Memory:
        """This memory as it is now, whatever is added to it later."""
        copy = Memory.__new__(Memory)
        copy.__dict__.update(self.__dict__)
        return copy

    def _beta_rows(self) -> Tensor | float:
        """beta against rows ``(*sets, Q)``."""
        return self.beta[..., None] if isinstance(self.beta, Tensor) else self.beta

    def _largest_norm(self) -> Tensor:
        """M, ``(*sets, 1)``."""
        return torch.linalg.vector_norm(self.patterns, dim=-1).amax(-1, keepdim=True)

    def _attend(self, xi: Tensor, value: Tensor) -> Moments:
        """E[value] and G at beta xi."""
        named = {"query": xi, "key": self.patterns, "value": value}
        scale = 1.0
        if isinstance(self.beta, Tensor):
            named["query"] = xi * self.beta[..., None, None]
        else:
            scale = self.beta
        rank = xi.ndim
        named = {n: x[(None,) * (rank - x.ndim)] for n, x in named.items()}
        return attention(named, Options(scale=scale))

    def _energy(self, xi: Tensor) -> Tensor:
        G = self._attend(xi, self.patterns[..., :0]).log_normalizer[..., 0]
        count = torch.full_like(G[..., :1], math.log(len(self)))
        beta = torch.as_tensor(self._beta_rows(), dtype=xi.dtype, device=xi.device)
        value = energy(xi, G, count, beta, self._largest_norm())
        require(value.isfinite(), lambda: self._overflow("energy"))
        return value

    def _index(self, xi: Tensor) -> Tensor:
        x = self.patterns.detach()
        top = largest({"query": xi.detach(), "key": x[(None,) * (xi.ndim - x.ndim)]})
        require(top.score.isfinite(), lambda: self._overflow("index"))
        return top.index[..., 0]

    def _overflow(self, what: str) -> str:
        return (
            f"{what}: beta <state, pattern> leaves the range of {self.patterns.dtype}; scale "
            "states and patterns down, or use a wider dtype."
        )

    def _states(self, owner: str, state: Tensor) -> tuple[Tensor, Rows]:
        """States as the kernels take them, and the way back for a row quantity."""
        xi = finite(owner, "state", numbers(owner, state=state)[0]["state"])
        d, sets = self.patterns.shape[-1], self.patterns.shape[:-2]
        if xi.ndim < 2 or xi.shape[-1] != d:
            raise InputError(
                f"{owner}: state must have shape (*batch, Q, {d}) to meet patterns "
                f"{tuple(self.patterns.shape)}, but has {tuple(xi.shape)}. A single state goes in "
                "as x[None]."
            )
        if xi.device != self.patterns.device:
            raise InputError(
                f"{owner}: state is on {xi.device}, the patterns are on {self.patterns.device}."
            )
        xi = finite(owner, f"state as {self.patterns.dtype}", xi.to(self.patterns.dtype))
        shape = xi.shape
        if not sets:  # one set of patterns: all states are queries of it
            return xi.reshape(-1, d), Rows(shape[:-1])
        try:
            batch = torch.broadcast_shapes(shape[:-2], sets)
        except RuntimeError:
            raise InputError(
                f"{owner}: the batch of state, {tuple(shape[:-2])}, must broadcast against the "
                f"sets of patterns, {tuple(sets)}."
            ) from None
        return xi.expand(*batch, *shape[-2:]), Rows(None)

    def _rows_of(self, owner: str, index: Any, state: Tensor, xi: Tensor) -> Tensor:
        try:
            at = torch.as_tensor(index, device=xi.device)
        except (TypeError, ValueError, RuntimeError):
            raise InputError(f"{owner}: index must be whole numbers, not {index!r:.40}.") from None
        try:
            if at.is_floating_point() or at.is_complex() or at.dtype == torch.bool:
                raise RuntimeError
            at = at.expand(state.shape[:-1]) if self.patterns.ndim == 2 else at
            at = at.reshape(xi.shape[:-1]) if self.patterns.ndim == 2 else at.expand(xi.shape[:-1])
        except RuntimeError:
            raise InputError(
                f"{owner}: index must be whole numbers of shape {tuple(state.shape[:-1])}, one for "
                f"each state, but is {at.dtype} of shape {tuple(at.shape)}."
            ) from None
        require((at >= 0) & (at < len(self)), lambda: out_of_range(owner, len(self)))
        return at.long()

    def _numbers(self, owner: str, index: Any) -> Tensor:
        try:
            at = torch.as_tensor(index, device=self.patterns.device)
        except (TypeError, ValueError, RuntimeError):
            raise InputError(f"{owner}: index must be whole numbers, not {index!r}.") from None
        at = at.reshape(-1) if at.numel() else at.reshape(-1).long()
        if at.is_floating_point() or at.is_complex() or at.dtype == torch.bool:
            raise InputError(f"{owner}: index must be whole numbers, not {at.dtype}.")
        at = at.long()
        require((at >= 0) & (at < len(self)), lambda: out_of_range(owner, len(self)))
        if len(at.unique()) != len(at):
            raise InputError(f"{owner}: index names a pattern twice.")
        return at

    def _like_stored(
        self, owner: str, patterns: Tensor, values: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        got = checked(owner, patterns=patterns, values=values)
        if (values is None) != (self.values is None):
            need = "has no values" if self.values is None else "needs values for new patterns"
            raise InputError(f"{owner}: this memory {need}.")
        out: list[Tensor] = []
        for name, stored, kind in (
            ("patterns", self.patterns, self._kind),
            ("values", self.values, self._value_kind),
        ):
            if stored is None:
                out.append(self.patterns)
                continue
            # Held as they would be saved, in the precision the memory was made with.
            new = finite(owner, f"{name} as {kind}", got[name].to(stored.device, kind))
            new = new.to(stored.dtype)
            fits = new.shape[-1] == stored.shape[-1] and new.ndim <= stored.ndim
            try:
                new = new.expand(*stored.shape[:-2], *new.shape[-2:])
            except RuntimeError:
                fits = False
            if not fits:
                raise InputError(
                    f"{owner}: {name} must have shape (*sets, n, {stored.shape[-1]}) like the "
                    f"stored {tuple(stored.shape)}, but have {tuple(got[name].shape)}."
                )
            out.append(new)
        return out[0], out[1]


class _Answers:
    """Fields of a `Retrieval` that cost another pass."""

    def __init__(self, memory: Memory, found: Settled, restore: Rows) -> None:
        self._memory, self._found, self._restore = memory, found, restore
        self._versions = self._seen()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._versions = self._seen()

    def _seen(self) -> dict[str, list[int]]:
        """How often the tensors behind each field have been changed in place."""
        memory, found = self._memory, self._found
        beta = memory.beta if isinstance(memory.beta, Tensor) else None
        behind = {
            "energy": (memory.patterns, beta, found.state),
            "index": (memory.patterns, found.state),
            "value": (memory.patterns, beta, memory.values, found.before),
        }
        return {
            name: [x._version for x in tensors if x is not None and not x.is_inference()]
            for name, tensors in behind.items()
        }

    def __call__(self, name: str) -> Tensor:
        memory, found = self._memory, self._found
        if self._seen()[name] != self._versions[name]:
            raise InputError(
                f"{name} is computed when it is asked for, but states, patterns, values or beta "
                "were changed in place since: ask for it first, or clone them."
            )
        if name == "energy":
            return self._restore(memory._energy(found.state))
        if name == "index":
            return self._restore(memory._index(found.state))
        values = memory.patterns if memory.values is None else memory.values
        return self._restore(memory._attend(found.before, values).mean).to(memory._value_kind)
