"""Attention as alternation between natural parameters and means, approximate and exact
(docs/theory.md, T18, T33)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from cumulant.core.chains import stationary_law
from cumulant.core.checks import finite, numbers, real, whole
from cumulant.core.describing import described_fields
from cumulant.core.errors import InputError
from cumulant.core.typed import linalg
from cumulant.dynamics.cloud_checks import cloud
from cumulant.measures.gaussian import inverse
from cumulant.measures.measure import Measure

__all__ = [
    "Alternation",
    "BlockGibbs",
    "alternate",
    "alternation_matrix",
    "block_gibbs",
    "stationary",
]

LINKS = ("exact", "linear", "linear+skip")


@dataclass(frozen=True)
class Alternation:
    """A run of `alternate`.

    Attributes:
        means: ``(steps + 1, N, d)``.
        log_normalizer: G at the natural parameters that were used, ``(steps, N)``.
        index: index of the natural parameter each mean drew, ``(steps, N)``.
        blow_up_step: the step at which a mean overflowed, before which the run ends; None if none
            did.
    """

    means: Tensor
    log_normalizer: Tensor
    index: Tensor
    blow_up_step: int | None

    __repr__ = described_fields


def _linear(measure: Measure) -> tuple[Tensor, Tensor]:
    """The link of the Gaussian with the measure's own moments: eta = S^(-1) (mu - m) (T29)."""
    mean, covariance = measure.moments()
    if int(linalg.inv_ex(covariance.detach()).info.max()) != 0:
        raise InputError(
            "alternate: the linear link needs a measure that fills its space, but its covariance "
            "is singular."
        )
    return mean, inverse(covariance)


def natural(measure: Measure, means: Tensor, link: str) -> Tensor:
    """The natural parameters that a link makes of means."""
    if link == "exact":
        return measure.link(means)
    center, precision = _linear(measure)
    return (means - center) @ precision


def _logits(
    measure: Measure, means: Tensor, eta: Tensor, log_prior: Tensor | None, drop: bool
) -> Tensor:
    """log P(j | mu_i) up to a constant of each row: log rho_j + <eta_j, mu_i> - G(eta_j)."""
    scores = means @ eta.mT
    if not drop:
        scores = scores - measure.log_normalizer(eta)
    return scores if log_prior is None else scores + log_prior


def _check(
    call: str, measure: Measure, means: Tensor, log_prior: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    means = cloud(call, means, "means")
    if len(measure.batch_shape) or means.ndim != 2 or means.shape[-1] != measure.dimension:
        raise InputError(
            f"{call}: means must have shape (N, {measure.dimension}) and the measure no batch, but "
            f"they are {tuple(means.shape)} and {tuple(measure.batch_shape)}."
        )
    if log_prior is not None:
        log_prior = finite(call, "log_prior", numbers(call, log_prior=log_prior)[0]["log_prior"])
        if log_prior.shape != means.shape[:1]:
            raise InputError(
                f"{call}: log_prior must have one entry for each of the {len(means)} means, but "
                f"has shape {tuple(log_prior.shape)}."
            )
    return means, log_prior


def alternation_matrix(
    measure: Measure,
    means: Tensor,
    *,
    log_prior: Tensor | None = None,
    drop_normalizer: bool = False,
) -> Tensor:
    """P(j | mu_i) ∝ rho_j exp(<eta_j, mu_i> - G(eta_j)), ``(N, N)``, eta_j the link of mu_j (T18).

    By duality the exponent is -B(mu_i, mu_j) up to a constant of i, B the Bregman divergence of the
    dual: a random walk that prefers means nearby. The draft drops -G, which `drop_normalizer` does
    too.

    Raises:
        InputError: a mean that has no natural parameter, see `Measure.link`.
    """
    means, log_prior = _check("alternation_matrix", measure, means, log_prior)
    eta = natural(measure, means, "exact")
    return _logits(measure, means, eta, log_prior, drop_normalizer).softmax(-1)


def stationary(transition: Tensor) -> Tensor:
    """The law pi with pi T = pi of a Markov chain with transition matrix T ``(N, N)``.

    Differentiable, and accurate in small entries too; see `cumulant.core.chains`.

    Raises:
        InputError: rows that are not probabilities, or a chain with several stationary laws.

    >>> import torch, cumulant as cm
    >>> cm.dynamics.stationary(torch.tensor([[0.9, 0.1], [0.3, 0.7]]))
    tensor([0.7500, 0.2500])
    """
    got = numbers("stationary", transition=transition)[0]["transition"]
    T = finite("stationary", "transition", got)
    square = T.ndim == 2 and T.shape[0] == T.shape[1] and len(T) > 0
    if not square or bool((T < 0).any()) or bool(((T.sum(-1) - 1).abs() > 1e-4).any()):
        raise InputError("stationary: transition must be square, not negative, its rows sum to 1.")
    law, unique = stationary_law(T.double() / T.double().sum(-1, keepdim=True))
    if not bool(unique):
        raise InputError(
            "stationary: the chain has several stationary laws: it falls into classes of states "
            "that never meet. Take one class alone."
        )
    return law.to(got.dtype)


def alternate(
    measure: Measure,
    means: Tensor,
    steps: int,
    *,
    link: str = "exact",
    log_prior: Tensor | None = None,
    drop_normalizer: bool = False,
    generator: torch.Generator | None = None,
) -> Alternation:
    """Approximate Gibbs alternation between natural parameters and means (T18).

    The means make natural parameters eta_j = f(mu_j). Each mean mu_i draws one of them,
    j ~ P(j | mu_i) ∝ rho_j exp(<eta_j, mu_i> - G(eta_j)), and becomes E[x | eta_j].

    With the exact link E[x | eta_j] = mu_j: a Markov chain on the N given means, with
    `alternation_matrix` as its transition. With a linear link (that of the Gaussian with the
    measure's moments) the natural parameters follow the means, and stay in the hull. With the skip
    connection the result is added to mu_i, as a transformer does: nothing holds the means in the
    hull, and they and G blow up.

    Args:
        measure: h, without batch.
        means: ``(N, d)``; for the exact link inside the hull of the support.
        steps: number of steps.
        link: "exact", "linear" or "linear+skip".
        log_prior: log rho ``(N,)``.
        drop_normalizer: omit -G, as the draft does.
        generator: of the draws; torch's own by default.

    >>> import torch, cumulant as cm
    >>> h = cm.Gaussian(torch.zeros(2), torch.eye(2))
    >>> run = cm.dynamics.alternate(h, torch.randn(5, 2), 100, link="linear+skip")
    >>> bool(run.log_normalizer[-1].max() > 1e10)
    True
    """
    means, log_prior = _check("alternate", measure, means, log_prior)
    if link not in LINKS:
        raise InputError(f"alternate: link must be one of {', '.join(LINKS)}, not {link!r}.")
    whole("alternate", "steps", steps, 0)
    fixed = natural(measure, means, "exact") if link == "exact" else None
    pool = means
    path, heights, drawn = [means], list[Tensor](), list[Tensor]()
    for k in range(1, steps + 1):
        mu = path[-1]
        eta = natural(measure, mu, "linear") if fixed is None else fixed
        logits = _logits(measure, mu, eta, log_prior, drop_normalizer)
        if not bool(logits.isfinite().all()):
            return _gather(path, heights, drawn, k)
        j = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
        new = pool[j] if fixed is not None else measure.mean(eta[j])
        new = mu + new if link == "linear+skip" else new
        if not bool(new.isfinite().all()):
            return _gather(path, heights, drawn, k)
        path.append(new)
        heights.append(measure.log_normalizer(eta[j]))
        drawn.append(j)
    return _gather(path, heights, drawn, None)


def _gather(
    path: list[Tensor], heights: list[Tensor], drawn: list[Tensor], end: int | None
) -> Alternation:
    empty = path[0].new_zeros(0, len(path[0]))
    return Alternation(
        torch.stack(path),
        torch.stack(heights) if heights else empty,
        torch.stack(drawn) if drawn else empty.long(),
        end,
    )


@dataclass(frozen=True)
class BlockGibbs:
    """States ``(steps + 1, chains, d)`` and the patterns they were drawn around, ``(steps,
    chains)``."""

    states: Tensor
    index: Tensor

    __repr__ = described_fields


def block_gibbs(
    patterns: Tensor,
    steps: int,
    *,
    beta: float = 1.0,
    start: Tensor | None = None,
    chains: int = 1,
    generator: torch.Generator | None = None,
) -> BlockGibbs:
    """The exact sampler behind the alternation: i ~ softmax(beta <x_i, s>), s ~ N(x_i, I / beta) in
    turn (T33).

    Its stationary law is exp(-beta E) of the Hopfield energy
    ``E(s) = -G(beta s) / beta + |s|^2 / 2``: a restricted Boltzmann machine with a categorical
    hidden unit, or equivalently the mixture
    ``GaussianMixture(patterns, 1 / beta, log_weights)`` with weights ∝ ``exp(beta |x_i|^2 / 2)``.
    The mean of the second draw is attention: the network's own update is this with the noise left
    out.

    Args:
        patterns: ``(N, d)``.
        steps: number of steps, each drawing both.
        beta: inverse temperature, positive.
        start: ``(chains, d)``; `chains` standard normal points by default.
        generator: of the draws; torch's own by default.

    >>> import torch, cumulant as cm
    >>> run = cm.dynamics.block_gibbs(torch.eye(3), 100, chains=7)
    >>> run.states.shape, run.index.shape
    (torch.Size([101, 7, 3]), torch.Size([100, 7]))
    """
    x = cloud("block_gibbs", patterns, "patterns")
    if x.ndim != 2:
        raise InputError(f"block_gibbs: patterns must have shape (N, d), not {tuple(x.shape)}.")
    beta = real("block_gibbs", "beta", beta, least=0.0, open_at_least=True)
    whole("block_gibbs", "steps", steps, 0)
    whole("block_gibbs", "chains", chains, 1)
    if start is None:
        s = torch.randn(chains, x.shape[-1], dtype=x.dtype, device=x.device, generator=generator)
    else:
        s = cloud("block_gibbs", start, "start").to(x)
        if s.ndim != 2 or s.shape[-1] != x.shape[-1]:
            raise InputError(
                f"block_gibbs: start must have shape (chains, {x.shape[-1]}), not {tuple(s.shape)}."
            )
    path, drawn = [s], list[Tensor]()
    for _ in range(steps):
        weights = (beta * path[-1] @ x.mT).softmax(-1)
        if not bool(weights.isfinite().all()):
            raise InputError("block_gibbs: scores overflowed; scale down patterns, start or beta.")
        i = torch.multinomial(weights, 1, generator=generator)[:, 0]
        noise = torch.randn(s.shape, dtype=s.dtype, device=s.device, generator=generator)
        path.append(x[i] + noise / math.sqrt(beta))
        drawn.append(i)
    index = torch.stack(drawn) if drawn else torch.zeros(0, len(s), dtype=torch.long)
    return BlockGibbs(torch.stack(path), index)
