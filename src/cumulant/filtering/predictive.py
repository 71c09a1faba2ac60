"""Forecast distributions of the observations: quantiles, and residuals that are normal.

With several modes an observation is predicted by a mixture of Gaussians, so y less its mean in
standard deviations is not normal even where the model is right. Its quantile in the mixture, read
as a standard normal, is: z_t = Phi^-1(P(y <= y_t | y_1, ..., y_{t-1})). With one mode that is the
usual standardized residual. (Rosenblatt 1952; for switching models, Smith 2008.)
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from cumulant.filtering.posterior import Posterior, gaussian_posterior
from cumulant.filtering.recursion import Belief

__all__ = ["quantiles", "residuals"]

BISECTIONS = 60


def residuals(post: Posterior) -> Tensor:
    """One-step residuals ``(*batch, T, p)``, standard normal if the model is right.

    z_t = Phi^-1(P(y_t' <= y_t | y_1, ..., y_{t-1})), element by element, under the mixture that
    predicts the observation; (y_t - mean) / deviation where there is one mode. NaN where missing.

    Args:
        post: from `filter` or `update`.

    >>> import torch, cumulant as cm
    >>> model = cm.filtering.autoregression(1).replace(
    ...     emission_bias=torch.zeros(1), dynamics_noise=torch.full((1, 1), 4.0),
    ...     dynamics=torch.full((1, 1), 0.5), initial_covariance=torch.zeros(1, 1))
    >>> post = cm.filtering.filter(model, torch.tensor([[2.0], [3.0]]))
    >>> cm.filtering.residuals(post).flatten()
    tensor([1., 1.], dtype=torch.float64)
    """
    gaussian_posterior("residuals", post)
    y = torch.cat(post.observations, -2).detach().double().cpu()
    found: list[Tensor] = []
    begin = 0
    for belief in post.predicted_observations:
        log_weights, mean, deviation = _components(belief)
        here = y[..., begin : begin + mean.shape[-3], None, :]
        begin += mean.shape[-3]
        score = (here - mean) / deviation
        below, above = (
            (log_weights + _normal("log_ndtr", s * score)).logsumexp(-2) for s in (1, -1)
        )
        # From the nearer tail, where a probability has all its digits.
        left, right = _normal("ndtri_exp", below), -_normal("ndtri_exp", above)
        found.append(torch.where(below < above, left, right))
    return torch.cat(found, -2).to(post.observations[0].dtype)


def quantiles(post: Posterior, levels: list[float]) -> Tensor:
    """Quantiles of what is predicted at each step, ``(levels, T, p)``, of one series."""
    probabilities = torch.tensor(levels, dtype=torch.float64)[:, None, None]
    found: list[Tensor] = []
    for belief in post.predicted_observations:
        log_weights, mean, deviation = _components(belief)
        low = (mean - 40 * deviation).amin(-2).expand(len(levels), -1, -1)
        high = (mean + 40 * deviation).amax(-2).expand(len(levels), -1, -1)
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            score = (middle[..., None, :] - mean) / deviation
            under = (log_weights.exp() * _normal("ndtr", score)).sum(-2) < probabilities
            low, high = torch.where(under, middle, low), torch.where(under, high, middle)
        found.append((low + high) / 2)
    return torch.cat(found, -2)


def _normal(name: str, x: Tensor) -> Tensor:
    """A function of the standard normal: log_ndtr, ndtr, or ndtri_exp, the inverse of the first."""
    special: Any = import_module("scipy.special")
    return torch.as_tensor(getattr(special, name)(x.numpy()))


def _components(belief: Belief) -> tuple[Tensor, Tensor, Tensor]:
    """Log-weights ``(..., T, K, 1)``, means and deviations ``(..., T, K, p)`` of the mixtures."""
    joint = belief.log_weights.detach().double().cpu()
    lead, pair = joint.shape[:-2], joint.shape[-2:]
    mean, covariance = (x.detach().double().cpu() for x in belief.message[:2])
    spread = covariance.diagonal(dim1=-2, dim2=-1)
    p, at = mean.shape[-1], len(lead)
    flat = [x.expand(*lead, *pair, p).flatten(at, at + 1) for x in (mean, spread)]
    weights = joint.flatten(-2).log_softmax(-1)[..., None]
    return weights, flat[0], flat[1].clamp_min(1e-300).sqrt()
