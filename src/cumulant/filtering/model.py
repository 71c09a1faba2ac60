"""`SwitchingLinearGaussian`: a linear state space whose matrices are chosen by a Markov chain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any, Self, cast

import torch
from torch import Tensor

from cumulant.core.checks import finite, holds, numbers, whole
from cumulant.core.errors import InputError
from cumulant.core.precision import HALF
from cumulant.core.renamed import moved
from cumulant.core.typed import linalg
from cumulant.filtering.model_checks import (
    bounded,
    initial_probabilities,
    one_class,
    semi_definite,
    sized,
    stochastic,
)
from cumulant.filtering.moments import Affine

__all__ = ["SwitchingLinearGaussian", "gaussian_model"]

# Names and the dimensions behind the mode: n state, p observation, m input.
SHAPES = {
    "dynamics": "nn",
    "dynamics_noise": "nn",
    "dynamics_bias": "n",
    "dynamics_input": "nm",
    "emission": "pn",
    "emission_noise": "pp",
    "emission_bias": "p",
    "emission_input": "pm",
    "initial_mean": "n",
    "initial_covariance": "nn",
}
COVARIANCES = ("dynamics_noise", "emission_noise", "initial_covariance")
REQUIRED = (
    *("transition", "dynamics", "dynamics_noise", "emission", "emission_noise"),
    *("initial_mean", "initial_covariance"),
)
RENAMED = {f"{what}_dimension": f"{what}_size" for what in ("state", "observation", "input")}
TIMELESS = ("initial", "initial_mean", "initial_covariance")


def gaussian_model(owner: str, model: Any) -> None:
    """Raise unless messages about the model's state are Gaussian."""
    if not isinstance(model, SwitchingLinearGaussian):
        hint = ""
        if type(model).__name__ == "SwitchingConjugate" and owner != "filter":
            hint = " Conjugate models are for filter and update."
        raise InputError(
            f"{owner}: model must be a SwitchingLinearGaussian or SwitchingNonlinear, not "
            f"{type(model).__name__}.{hint}"
        )


class SwitchingLinearGaussian:
    """Modes A_t, states x_t and observations y_t of a switching linear-Gaussian model (T25).

    P(A_t = j | A_{t-1} = i) = transition[i, j],
    x_t = W_j x_{t-1} + b_j + B_j u_t + N(0, Q_j) and y_t = C_j x_t + d_j + D_j u_t + N(0, R_j)
    in mode j. Time 0 is one transition before the first observation.

    Each parameter is constant, as below, or changes with time, ``(T, M, ...)``, or from series to
    series, ``(*batch, T, M, ...)`` with T = 1 for constants. Without the mode dimension, it is
    shared by all modes. Q and R may be singular.

    Args:
        transition: ``(M, M)``, rows sum to one.
        initial: probabilities of the modes at time 0, ``(M,)``; by default the stationary
            law of `transition`.
        dynamics: W, ``(M, n, n)``. n = 0 is allowed: a Markov-switching regression.
        dynamics_noise: Q, ``(M, n, n)``.
        emission: C, ``(M, p, n)``.
        emission_noise: R, ``(M, p, p)``.
        dynamics_bias: b, ``(M, n)``.
        emission_bias: d, ``(M, p)``.
        initial_mean, initial_covariance: of the state at time 0, ``(n,)`` and ``(n, n)``, or one
            for each mode. A variance of infinity, with covariances of zero, says that nothing is
            known of that state; the log-likelihood is then the exact limit (Koopman 1997).
        dynamics_input, emission_input: B ``(M, n, m)`` and D ``(M, p, m)``, for inputs u that are
            given with the observations.

    Raises:
        InputError: shapes that do not agree, rows of `transition` that do not sum to one, a
            covariance that is not symmetric positive semi-definite.

    >>> import torch, cumulant as cm
    >>> one = torch.ones(2, 1, 1)
    >>> model = cm.filtering.SwitchingLinearGaussian(
    ...     transition=torch.tensor([[0.9, 0.1], [0.2, 0.8]]), initial=torch.tensor([0.5, 0.5]),
    ...     dynamics=one, dynamics_noise=one * torch.tensor([0.1, 2.0])[:, None, None],
    ...     emission=one, emission_noise=one,
    ...     initial_mean=torch.zeros(1), initial_covariance=torch.eye(1))
    >>> model
    SwitchingLinearGaussian(modes=2, state_size=1, observation_size=1)
    """

    def __init__(
        self,
        *,
        transition: Tensor,
        initial: Tensor | None = None,
        dynamics: Tensor,
        dynamics_noise: Tensor,
        emission: Tensor,
        emission_noise: Tensor,
        dynamics_bias: Tensor | None = None,
        emission_bias: Tensor | None = None,
        initial_mean: Tensor,
        initial_covariance: Tensor,
        dynamics_input: Tensor | None = None,
        emission_input: Tensor | None = None,
    ) -> None:
        given: dict[str, Any] = {
            "transition": transition,
            "initial": initial,
            "dynamics": dynamics,
            "dynamics_noise": dynamics_noise,
            "dynamics_bias": dynamics_bias,
            "dynamics_input": dynamics_input,
            "emission": emission,
            "emission_noise": emission_noise,
            "emission_bias": emission_bias,
            "emission_input": emission_input,
            "initial_mean": initial_mean,
            "initial_covariance": initial_covariance,
        }
        owner = type(self).__name__
        for name in REQUIRED:
            if given[name] is None:
                raise InputError(f"{owner}: {name} is required.")
        half = [n for n in ("transition", "initial") if getattr(given[n], "dtype", None) in HALF]
        got, _ = numbers(owner, **{name: x for name, x in given.items() if x is not None})
        for name, x in got.items():
            finite(owner, name, bounded(owner, x) if name == "initial_covariance" else x)
        for name in half:  # probabilities of half precision do not sum to one
            got[name] = got[name] / got[name].sum(-1, keepdim=True)
        self.parameters: Mapping[str, Tensor] = got
        M = self.modes = stochastic(owner, got["transition"])
        if "initial" in got:
            initial_probabilities(owner, got["initial"], M)
        else:
            one_class(owner, got["transition"])
        sizes = {"p": sized(owner, "emission", got["emission"], 2)[-2]}
        sizes["n"] = sized(owner, "dynamics", got["dynamics"], 2)[-1]
        for name in ("dynamics_input", "emission_input"):
            if name in got:
                sizes.setdefault("m", sized(owner, name, got[name], 2)[-1])
        for name, letters in SHAPES.items():
            if name in got:
                self._check(owner, name, got[name], [sizes[c] for c in letters])
        if sizes["p"] < 1:
            raise InputError(f"{owner}: emission must have at least one row, (..., p, n).")
        self.state_size, self.observation_size = sizes["n"], sizes["p"]
        self.input_size = sizes.get("m", 0)
        self.steps = self._common_steps(owner)

    def _check(self, owner: str, name: str, x: Tensor, event: list[int]) -> None:
        tail, M = len(event), self.modes
        whole = list(x.shape[x.ndim - tail :]) if x.ndim >= tail else None
        if whole != event or (x.ndim > tail and x.shape[-tail - 1] != M):
            want = ", ".join(str(e) for e in event)
            raise InputError(
                f"{owner}: {name} must have shape ({M}, {want}) for {M} modes (transition), "
                f"({want}) if all modes share it, or "
                f"{'(*batch, ' if name in TIMELESS else '(*batch, T, '}{M}, {want}); "
                f"it has {tuple(x.shape)}."
            )
        if name in COVARIANCES:
            semi_definite(owner, name, bounded(owner, x) if name == "initial_covariance" else x)

    def _common_steps(self, owner: str) -> int | None:
        """The length T of what changes with time, None if nothing does."""
        found: dict[str, int] = {}
        for name, x in self.parameters.items():
            lead = 0 if name in TIMELESS else x.ndim - len(SHAPES.get(name, "MM")) - 1
            lead += name == "transition"
            if lead > 0 and x.shape[lead - 1] != 1:
                found[name] = x.shape[lead - 1]
        if len(set(found.values())) > 1:
            told = ", ".join(f"{name} {size}" for name, size in found.items())
            raise InputError(f"{owner}: parameters change over different numbers of steps: {told}.")
        return next(iter(found.values()), None)

    def __getattr__(self, name: str) -> Tensor | None:
        if name != "parameters" and name in {"transition", "initial", *SHAPES}:
            return self.parameters.get(name)
        moved(type(self).__name__, name, RENAMED)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(modes={self.modes}, state_size={self.state_size}, "
            f"observation_size={self.observation_size})"
        )

    @property
    def diffuse(self) -> bool:
        """Whether nothing is known of some state at the start: its variance is infinite."""
        return holds(~self.parameters["initial_covariance"].isinf()) is False

    @property
    def dtype(self) -> torch.dtype:
        """Of all parameters."""
        return self.parameters["transition"].dtype

    @property
    def device(self) -> torch.device:
        """Of all parameters."""
        return self.parameters["transition"].device

    def replace(self, **changes: Tensor | None) -> Self:
        """The model with some parameters changed."""
        unknown = changes.keys() - {"transition", "initial", *SHAPES}
        if unknown:
            raise InputError(
                f"replace: no parameter is called {', '.join(sorted(unknown))}; there are "
                f"transition, initial, {', '.join(SHAPES)}."
            )
        return self._again({**self.parameters, **changes})

    def _again(self, given: Mapping[str, Any]) -> Self:
        return type(self)(**given)

    def unchecked(self, changes: Mapping[str, Tensor]) -> Self:
        """The model with parameters changed that are known to be valid."""
        new = copy(self)
        new.parameters = {**self.parameters, **changes}
        return new

    def diffuse_start(self) -> Self:
        """The model with nothing known of its states at the start: infinite variances.

        For levels, trends and seasons. A state that returns to its mean has a stationary start.

        >>> import cumulant as cm
        >>> cm.filtering.local_level().diffuse_start().initial_covariance
        tensor([[inf]], dtype=torch.float64)
        """
        like = self.parameters["initial_covariance"]
        vague = torch.full((self.state_size,), torch.inf, dtype=like.dtype, device=like.device)
        return self.unchecked({"initial_covariance": vague.diag()})

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """The model with its parameters in another precision or place, as ``Tensor.to``."""
        moved = {n: x.to(*args, **kwargs) for n, x in self.parameters.items()}
        if not moved["transition"].is_floating_point():
            raise InputError(f"to: a model is not made of {moved['transition'].dtype}.")
        same = all(x is self.parameters[n] for n, x in moved.items())
        return self.unchecked(moved) if same else self._again(moved)

    def permute(self, order: Sequence[int]) -> Self:
        """The same model with its modes in another order."""
        try:
            order = [whole("permute", "order", k, 0) for k in order]
        except (TypeError, InputError):
            order = []
        if sorted(order) != list(range(self.modes)):
            raise InputError(f"permute: order must name each mode 0 to {self.modes - 1} once.")
        at = torch.as_tensor(list(order), device=self.device)
        out: dict[str, Tensor] = {}
        for name, x in self.parameters.items():
            if name == "transition":
                out[name] = x.index_select(-1, at).index_select(-2, at)
            elif name == "initial":
                out[name] = x.index_select(-1, at)
            else:
                tail = len(SHAPES[name])
                out[name] = x.index_select(-tail - 1, at) if x.ndim > tail else x
        return self.unchecked(out)

    def steps_of(self, name: str) -> Tensor | None:
        """A parameter as ``(M, ...)``, or ``(*batch, T, M, ...)`` if it has these dimensions."""
        x = self.parameters.get(name)
        if x is None:
            return None
        tail = 1 if name == "transition" else len(SHAPES[name])
        if x.ndim == tail:
            x = x.expand(self.modes, *x.shape)
        return x

    def linearize(
        self, step: Affine, mean: Tensor, covariance: Tensor, which: str, inputs: Tensor | None
    ) -> Affine:
        """The linear model is its own linearization, wherever the state may be."""
        return step

    @classmethod
    def embedded(
        cls,
        embeddings: Sequence[Tensor],
        *,
        dynamics: Sequence[Tensor],
        dynamics_noise: Sequence[Tensor],
        emission: Sequence[Tensor],
        dynamics_bias: Sequence[Tensor] | None = None,
        **rest: Any,
    ) -> Self:
        """Modes with states of different dimensions, in one common space.

        Mode j has n_j states z with x = E_j z in the common space; a state that comes from another
        mode is read as z = E_j^+ x, what lies outside the range of E_j being dropped.

        Args:
            embeddings: E_j, ``(n, n_j)``, each of full column rank.
            dynamics, dynamics_noise, emission, dynamics_bias: a list for the modes, in their own
                dimensions: ``(n_j, n_j)``, ``(n_j, n_j)``, ``(p, n_j)``, ``(n_j,)``.
            rest: all other parameters, in the common space.

        >>> import torch, cumulant as cm
        >>> level, trend = torch.eye(2)[:, :1], torch.eye(2)
        >>> cm.filtering.SwitchingLinearGaussian.embedded(
        ...     [level, trend], transition=torch.full((2, 2), 0.5), initial=torch.full((2,), 0.5),
        ...     dynamics=[torch.eye(1), torch.tensor([[1.0, 1.0], [0.0, 1.0]])],
        ...     dynamics_noise=[torch.eye(1), torch.eye(2)],
        ...     emission=[torch.ones(1, 1), torch.tensor([[1.0, 0.0]])],
        ...     emission_noise=torch.eye(1),
        ...     initial_mean=torch.zeros(2), initial_covariance=torch.eye(2))
        SwitchingLinearGaussian(modes=2, state_size=2, observation_size=1)
        """
        embeddings = _matrices("embeddings", embeddings)
        dynamics = _matrices("dynamics", dynamics)
        dynamics_noise = _matrices("dynamics_noise", dynamics_noise)
        emission = _matrices("emission", emission)
        if dynamics_bias is not None:
            dynamics_bias = _matrices("dynamics_bias", dynamics_bias, 1)
        maps: list[Tensor] = []
        for j, E in enumerate(embeddings):
            if E.ndim != 2 or E.shape[0] != embeddings[0].shape[0] or E.shape[1] > E.shape[0]:
                raise InputError(
                    "embedded: each embedding must be (n, n_j) with n_j <= n and one common n; "
                    f"number {j} is {tuple(E.shape)}."
                )
            if linalg.matrix_rank(E.detach()) < E.shape[1]:
                raise InputError(f"embedded: embedding {j} does not have full column rank.")
            maps.append(linalg.pinv(E))
        lists = {"dynamics": dynamics, "dynamics_noise": dynamics_noise, "emission": emission}
        if dynamics_bias is not None:
            lists["dynamics_bias"] = dynamics_bias
        for name, items in lists.items():
            if len(items) != len(embeddings):
                raise InputError(
                    f"embedded: {name} has {len(items)} entries for {len(embeddings)} embeddings."
                )
            for j, (x, into) in enumerate(zip(items, embeddings, strict=True)):
                own = [into.shape[1] if c == "n" else items[0].shape[-2] for c in SHAPES[name]]
                if list(x.shape) != own:
                    raise InputError(
                        f"embedded: {name} of mode {j} must be {tuple(own)} to fit its embedding "
                        f"{tuple(into.shape)}; it is {tuple(x.shape)}."
                    )
        whole: dict[str, Any] = {
            "dynamics": [
                E @ W @ back for E, W, back in zip(embeddings, dynamics, maps, strict=True)
            ],
            "dynamics_noise": [
                E @ Q @ E.mT for E, Q in zip(embeddings, dynamics_noise, strict=True)
            ],
            "emission": [C @ back for C, back in zip(emission, maps, strict=True)],
        }
        if dynamics_bias is not None:
            whole["dynamics_bias"] = [E @ b for E, b in zip(embeddings, dynamics_bias, strict=True)]
        return cls(**{name: torch.stack(list(x)) for name, x in whole.items()}, **rest)


def _matrices(name: str, given: Any, dimensions: int = 2) -> list[Tensor]:
    """A list of matrices (or vectors) of one dtype, one for each mode."""
    what = "matrices" if dimensions == 2 else "vectors"
    if not isinstance(given, list | tuple) or not given:
        raise InputError(f"embedded: {name} must be a list of {what}, one for each mode.")
    parts = enumerate(cast(Sequence[Any], given))
    got, _ = numbers("embedded", **{f"{name} of mode {j}": x for j, x in parts})
    for label, x in got.items():
        finite("embedded", label, x)
        if x.ndim != dimensions:
            raise InputError(
                f"embedded: {name} must be a list of {what}, but {label} has shape "
                f"{tuple(x.shape)}."
            )
    return list(got.values())
