"""`Memory`: the modern Hopfield network, with its energy (docs/theory.md, T19, T21, T33)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from cumulant.core.checks import broadcasts_to, finite, real, require
from cumulant.core.errors import InputError
from cumulant.core.lazy import Snapshot
from cumulant.core.typed import linalg
from cumulant.distributed.ranks import Ranks
from cumulant.distributed.sharded import ShardedKeys
from cumulant.measures.mixture import GaussianMixture
from cumulant.memory import files
from cumulant.memory.inputs import (
    Asked,
    Bounded,
    beta_facts,
    checked,
    given_kind,
    inverse_temperature,
    one_each,
    same_numbers,
    several,
    states,
)
from cumulant.memory.retrieval import Retrieval, Rows, Settled, energy, plan, settle
from cumulant.memory.stores import Answer, Local, Sharded, Store

__all__ = ["Memory", "Retrieval"]


class Memory:
    """A modern Hopfield network: recovers stored patterns from noisy or partial copies (T19).

    With G(eta) = log sum_i exp<x_i, eta> over the patterns x_i, the energy ::

        E(xi) = -G(beta xi) / beta + |xi|^2 / 2 + log(N) / beta + M^2 / 2,   M = max |x_i|,

    is never negative, and the update xi <- softmax(beta X xi)' X, attention without a skip
    connection, never raises it. Everything streams over the patterns: memory is linear in Q + N.

    Args:
        patterns: ``(*sets, N, d)``, not copied. Flatten images first: ``x.flatten(1)``. States are
            converted to the patterns' dtype. Or `cumulant.distributed.ShardedKeys`, whose patterns
            and values are sharded over the ranks of a group: results cover all patterns, which are
            numbered across ranks, rank 0 first.
        beta: inverse temperature, a number >= 0, or a tensor that broadcasts to ``sets`` (one per
            head or set of patterns), without a factor 1/sqrt(d). Large values return single
            patterns, small ones blend them. At 0 all weights are equal: an update returns the mean
            pattern, and the energy is its limit
            ``|xi|^2 / 2 - <mean pattern, xi> + M^2 / 2``.
        values: ``(*sets, N, e)``, stored with the patterns and read by ``retrieve(...).value``.

    Raises:
        InputError: no patterns, non-finite numbers, beta < 0, or shapes that do not match.

    >>> import torch, cumulant as cm
    >>> patterns = torch.tensor([[1.0, 1.0, -1.0, -1.0], [1.0, -1.0, 1.0, -1.0]])
    >>> memory = cm.Memory(patterns, beta=4.0)
    >>> found = memory.retrieve(torch.tensor([[1.0, 1.0, 0.0, 0.0]]))
    >>> found.state.round(decimals=2), found.index
    (tensor([[ 1.,  1., -1., -1.]]), tensor([0]))
    """

    def __init__(
        self,
        patterns: Tensor | ShardedKeys,
        beta: float | Tensor = 1.0,
        *,
        values: Tensor | None = None,
    ) -> None:
        self._shard: ShardedKeys | None = None
        if isinstance(patterns, ShardedKeys):
            self._shard = patterns
            if len(patterns) == 0:
                raise InputError("Memory: at least one rank must have a pattern.")
            given = values
            patterns, values = patterns.keys, patterns.values
        else:
            given = None
        ranks = Ranks.solo() if self._shard is None else self._shard.ranks

        def check() -> tuple[dict[str, Tensor], float | Tensor]:
            if given is not None:
                raise InputError("Memory: pass values with sharded patterns: ShardedKeys(x, v).")
            got = checked("Memory", patterns=patterns, values=values, empty=not ranks.alone)
            return got, inverse_temperature("Memory", beta, got["patterns"])

        got, self.beta = ranks.checked("Memory", check, lambda made: beta_facts(made[1]))
        self.patterns, self.values = got["patterns"], got.get("values")
        self._kind = given_kind(patterns, self.patterns)
        self._value_kind = given_kind(patterns if values is None else values, self.patterns)

    def __len__(self) -> int:
        """Number of patterns in each set, over all ranks."""
        return self._store.count()

    @property
    def _store(self) -> Store:
        """Computes over all patterns, on this rank or all."""
        if self._shard is None or self._shard.ranks.alone:
            return Local(self.patterns)
        return Sharded(self._shard, self.patterns)

    def __repr__(self) -> str:
        beta = self.beta
        told = tuple(beta.shape) if isinstance(beta, Tensor) else f"{beta:g}"
        extra = "" if self.values is None else f", values={tuple(self.values.shape)}"
        return f"Memory(patterns={tuple(self.patterns.shape)}, beta={told}{extra})"

    # Queries

    def energy(self, state: Tensor) -> Tensor:
        """E(state) >= 0, ``(*batch, Q)``, differentiable to any order (T19)."""
        xi, restore = self._store.checked("Memory.energy", lambda: self._states("energy", state))
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
            steps: number of updates (default 1); with `tol`, the maximum (default 1000).
            tol: a query stops once an update moves it by at most this, in Euclidean norm,
                independently of the others.
            step_size: t in (0, 1]; an update moves to (1 - t) xi + t softmax(beta X xi)' X.

        Returns:
            Retrieval: differentiable in states, patterns, values and beta. Without `tol`,
            ``converged`` means that the last update changed the state by at most sqrt(eps) M, which
            is rare after a single update.

        >>> import torch, cumulant as cm
        >>> memory = cm.Memory(torch.randn(100, 32), beta=1.0)
        >>> found = memory.retrieve(memory.patterns + 0.1 * torch.randn(100, 32), tol=1e-4)
        >>> bool(found.converged.all()), bool((found.energy >= 0).all())
        (True, True)
        """
        store = self._store

        def check() -> Asked:
            most, least = plan("retrieve", steps, tol)
            size = real("retrieve", "step_size", step_size, least=0.0, most=1.0, open_at_least=True)
            return Asked(*self._states("retrieve", state), most, least, size)

        xi, restore, most, tol, size = store.checked("Memory.retrieve", check, Asked.facts)

        def update(x: Tensor) -> Tensor:
            to = self._update(x)
            return to if size == 1.0 else x + size * (to - x)

        if most == 0:
            xi = xi.clone()  # the result is not the caller's tensor
        separate = self.patterns.ndim == 2
        found = settle(update, xi, most, tol, separate=separate, still=store.still)
        self._within("retrieve", found.state)
        if tol is None:
            tol = math.sqrt(torch.finfo(xi.dtype).eps)
            rest = found.change <= tol * store.largest_norm()
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

        Infinite for a single pattern. Differentiable almost everywhere; over ranks, it covers this
        rank's patterns and has no derivative.
        """
        store = self._store
        store.checked("Memory.separation", lambda: None)
        gaps = store.gaps()
        if len(self) > 1:
            self._within("separation", gaps)
        return gaps

    def error_bound(
        self, state: Tensor, index: Tensor | None = None, *, fixed_point: Tensor | None = None
    ) -> Tensor:
        """Upper bound on the distance to pattern x_i after one update of `state`, ``(*batch, Q)``.

        ``|f(xi) - x_i| <= 2 (N - 1) M exp(-beta (D_i - 2 M r))``, ``r = |xi - x_i|``, D_i the
        separation (T21, after Theorem 5 of Ramsauer et al., 2021). It always holds, but is loose
        for crowded patterns.

        Args:
            state: ``(*batch, Q, d)``.
            index: ``(*batch, Q)``, the pattern; default: the one with the largest weight.
            fixed_point: ``(*batch, Q, d)``; r becomes ``max(r, |fixed_point - x_i|)``, as in the
                paper, whose bound also covers the distance to a fixed point.
        """
        store = self._store

        def check() -> Bounded:
            xi, restore = self._states("error_bound", state)
            at = None if index is None else self._named(index, state, xi)
            rest = None if fixed_point is None else self._fixed(fixed_point, state, xi)
            return Bounded(xi, restore, at, rest)

        xi, restore, at, rest = store.checked("Memory.error_bound", check, Bounded.facts)
        if at is None:
            at = self._index(xi)
        rows = torch.cat([self.patterns, self.separation()[..., None]], -1)
        found = store.take(rows.expand(*xi.shape[:-2], *rows.shape[-2:]), at)
        x, gap = found[..., :-1], found[..., -1]
        radius = linalg.vector_norm(xi - x, dim=-1)
        if rest is not None:
            radius = torch.maximum(radius, linalg.vector_norm(rest - x, dim=-1))
        M = store.largest_norm()
        exponent = self._beta_rows() * (gap - 2 * M * radius)
        if len(self) == 1:
            return restore(torch.zeros_like(exponent))
        return restore(2 * (len(self) - 1) * M * (-exponent).exp())

    def mixture(self) -> GaussianMixture:
        """exp(-beta E) as a density: Gaussians of variance 1/beta around the patterns (T33).

        Its weights are proportional to ``exp(beta |x_i|^2 / 2)``. The update is its EM
        (mean-shift) step, and `cumulant.dynamics.block_gibbs` draws from it.

        Raises:
            InputError: beta is 0 somewhere, where exp(-beta E) = 1 has no normalizer.
        """
        if isinstance(store := self._store, Sharded):
            raise store.refusal("mixture")
        x = self.patterns
        beta = self._beta_rows()
        require(
            torch.as_tensor(beta) > 0,
            lambda: "mixture: beta must be above 0: at 0 the Gaussians have infinite variance.",
        )
        weights = torch.log_softmax(beta * (x * x).sum(-1) / 2, -1)
        spread = (1 / beta[..., None]) if isinstance(beta, Tensor) else 1 / beta
        return GaussianMixture(x, torch.ones_like(x) * spread, weights)

    # Changes

    def add(self, patterns: Tensor, values: Tensor | None = None) -> None:
        """Store more patterns, ``(*sets, n, d)``, after those that are there.

        The whole store is copied once a call: add many at a time. Over ranks, each adds to its own
        (perhaps none), and the numbers of patterns behind them move up.
        """
        new = self._store.checked("Memory.add", lambda: self._like_stored("add", patterns, values))
        self._keep(
            torch.cat([self.patterns, new[0]], -2),
            None if self.values is None else torch.cat([self.values, new[1]], -2),
        )

    def replace(
        self, index: Tensor | Sequence[int], patterns: Tensor, values: Tensor | None = None
    ) -> None:
        """Store ``patterns[..., n, :]`` in place of number ``index[n]``.

        Over ranks, all are given the same, and each takes what is its own.
        """
        store = self._store

        def check() -> tuple[Tensor, tuple[Tensor, Tensor]]:
            at = several("replace", index, len(self), self.patterns.device)
            new = self._like_stored("replace", patterns, values)
            if new[0].shape[-2] != len(at):
                raise InputError(
                    f"replace: index names {len(at)} patterns, but {new[0].shape[-2]} came."
                )
            return at, new

        at, new = store.checked("Memory.replace", check, lambda made: same_numbers(made[0]))
        own = store.own(at)
        at = at[own] - store.before
        self.patterns = self.patterns.index_copy(-2, at, new[0][..., own, :])
        if self.values is not None:
            self.values = self.values.index_copy(-2, at, new[1][..., own, :])

    def remove(self, index: Tensor | Sequence[int]) -> None:
        """Forget the patterns with these numbers; those behind them move up.

        Over ranks, all are given the same numbers.
        """
        store = self._store

        def check() -> Tensor:
            at = several("remove", index, len(self), self.patterns.device)
            if len(at) == len(self):
                raise InputError("remove: a memory must keep at least one pattern.")
            return at

        at = store.checked("Memory.remove", check, same_numbers)
        keep = torch.ones(self.patterns.shape[-2], dtype=torch.bool, device=self.patterns.device)
        keep[at[store.own(at)] - store.before] = False
        values = None if self.values is None else self.values[..., keep, :]
        self._keep(self.patterns[..., keep, :], values)

    def _keep(self, patterns: Tensor, values: Tensor | None) -> None:
        """These instead of what was stored; the ranks learn how many each has now."""
        if isinstance(self._store, Sharded) and self._shard is not None:
            self._shard = self._shard.again(patterns, values)  # refuses before anything changes
        self.patterns, self.values = patterns, values

    def save(self, path: str | PathLike[str]) -> None:
        """Write patterns, values and beta as one safetensors file."""
        if isinstance(store := self._store, Sharded):
            raise store.refusal("save")
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

    def _attend(self, xi: Tensor, value: Tensor) -> Answer:
        """E[value] and G at beta xi."""
        if isinstance(self.beta, Tensor):
            return self._store.attend(xi * self.beta[..., None, None], value, 1.0)
        return self._store.attend(xi, value, self.beta)

    def _energy(self, xi: Tensor) -> Tensor:
        G = self._attend(xi, self.patterns[..., :0]).log_normalizer()
        count = torch.full_like(G[..., :1], math.log(len(self)))
        beta = torch.as_tensor(self._beta_rows(), dtype=xi.dtype, device=xi.device)
        largest = self._store.largest_norm()
        value = energy(xi, G, count, beta, largest, update=self._update)
        return self._within("energy", value)

    def _update(self, xi: Tensor) -> Tensor:
        return self._attend(xi, self.patterns).mean()

    def _index(self, xi: Tensor) -> Tensor:
        score, index = self._store.best(xi)
        self._within("index", score)
        return index

    def _within(self, what: str, x: Tensor) -> Tensor:
        """What was computed, if it is finite."""

        def check() -> None:
            require(
                x.isfinite(),
                lambda: (
                    f"{what}: beta <state, pattern> leaves the range of {self.patterns.dtype}; "
                    "scale states and patterns down, or use a wider dtype."
                ),
            )

        self._store.checked(f"Memory.{what}, computed", check)
        return x

    def _states(self, owner: str, state: Tensor) -> tuple[Tensor, Rows]:
        return states(owner, state, self.patterns)

    def _named(self, index: Any, state: Tensor, xi: Tensor) -> Tensor:
        """The number of a pattern for each state."""
        shape = state.shape[:-1] if self.patterns.ndim == 2 else xi.shape[:-1]
        return one_each("error_bound", index, len(self), shape, xi.device).reshape(xi.shape[:-1])

    def _fixed(self, fixed_point: Tensor, state: Tensor, xi: Tensor) -> Tensor:
        rest, _ = self._states("error_bound", fixed_point)
        if rest.shape != xi.shape:
            raise InputError(
                f"error_bound: fixed_point must have the shape of state, {tuple(state.shape)}, "
                f"but has {tuple(fixed_point.shape)}."
            )
        return rest

    def _like_stored(
        self, owner: str, patterns: Tensor, values: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        empty = owner == "add" and isinstance(self._store, Sharded)
        got = checked(owner, patterns=patterns, values=values, empty=empty)
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
            sets = stored.shape[:-2]
            if new.shape[-1] != stored.shape[-1] or not broadcasts_to(new.shape[:-2], sets):
                raise InputError(
                    f"{owner}: {name} must have shape (*sets, n, {stored.shape[-1]}) like the "
                    f"stored {tuple(stored.shape)}, but have {tuple(got[name].shape)}."
                )
            out.append(new.expand(*sets, *new.shape[-2:]))
        return out[0], out[1]


class _Answers:
    """Fields of a `Retrieval` that cost another pass."""

    def __init__(self, memory: Memory, found: Settled, restore: Rows) -> None:
        self._memory, self._found, self._restore = memory, found, restore
        beta = memory.beta if isinstance(memory.beta, Tensor) else None
        self._inputs = {
            "energy": Snapshot((memory.patterns, beta, found.state)),
            "index": Snapshot((memory.patterns, found.state)),
            "value": Snapshot((memory.patterns, beta, memory.values, found.before)),
        }

    def __call__(self, name: str) -> Tensor:
        memory, found, inputs = self._memory, self._found, self._inputs[name]

        def check() -> None:
            inputs.check(name, "states, patterns, values or beta were")

        memory._store.checked(f"retrieve(...).{name}", check)
        if name == "energy":
            return self._restore(memory._energy(found.state))
        if name == "index":
            return self._restore(memory._index(found.state))
        values = memory.patterns if memory.values is None else memory.values
        return self._restore(memory._attend(found.before, values).mean()).to(memory._value_kind)
