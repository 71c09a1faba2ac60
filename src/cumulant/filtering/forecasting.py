"""`forecast` and `sample`: what a model expects, and what it might do (docs/theory.md, T25)."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.core.checks import whole
from cumulant.core.describing import described_fields
from cumulant.core.errors import InputError
from cumulant.core.randomness import generator_or
from cumulant.core.renamed import renamed
from cumulant.core.typed import linalg
from cumulant.filtering.filters import run
from cumulant.filtering.kalman import GaussianBank, inputs_of
from cumulant.filtering.model import SwitchingLinearGaussian, gaussian_model
from cumulant.filtering.model_checks import proper_start
from cumulant.filtering.posterior import Posterior, gaussian_posterior
from cumulant.filtering.recursion import Scheme

__all__ = ["Sample", "forecast", "sample"]


def forecast(post: Posterior, steps: int, *, inputs: Tensor | None = None) -> Posterior:
    """Forecasts of states, modes and observations after the last observation.

    A forecast is a filter without observations. Collapsing loses nothing here: means and
    covariances are those of the full mixture.

    Args:
        post: from `filter` or `update`. A model that changes with time must cover these steps.
        steps: how many steps ahead.
        inputs: u of these steps, ``(*batch, steps, m)``, if the model takes them.

    Returns:
        A `Posterior` over the steps to come: ``mean`` and ``covariance`` of the state,
        ``mode_probabilities``, ``observation_mean`` and ``observation_covariance``. Its
        ``to_pandas()`` continues the dates or periods of the observations.

    >>> import torch, cumulant as cm
    >>> one = torch.ones(1, 1, 1)
    >>> model = cm.filtering.SwitchingLinearGaussian(
    ...     transition=torch.ones(1, 1), initial=torch.ones(1), dynamics=one, dynamics_noise=one,
    ...     emission=one, emission_noise=one, initial_mean=torch.zeros(1),
    ...     initial_covariance=torch.zeros(1, 1))
    >>> post = cm.filtering.filter(model, torch.tensor([[2.0]]))
    >>> cm.filtering.forecast(post, 3).covariance.flatten()
    tensor([1.5000, 2.5000, 3.5000])
    """
    gaussian_posterior("forecast", post)
    steps = whole("forecast", "steps", steps, 1)
    seen = post.observations[-1]
    nothing = seen.new_full((*seen.shape[:-2], steps, seen.shape[-1]), torch.nan)
    u = inputs_of("forecast", post.model, inputs, steps, nothing)
    bank = GaussianBank(post.model, nothing, u, first=post.first + post.steps)
    # GPB1 would forget between steps which state belongs to which mode.
    scheme = post.scheme if post.scheme.memory != 1 else Scheme(2, False, post.scheme.name)
    found = run(bank, scheme, post.beliefs[-1], alike=False)
    labels = None if post.labels is None else post.labels.ahead(steps)
    return replace(found, labels=labels, past=post)


class Sample(NamedTuple):
    """Modes ``(*size, T)``, states ``(*size, T, n)`` and observations ``(*size, T, p)``."""

    modes: Tensor
    states: Tensor
    observations: Tensor

    __repr__ = described_fields


@renamed(seed="generator")
def sample(
    model: SwitchingLinearGaussian,
    steps: int,
    size: tuple[int, ...] | int = (),
    *,
    inputs: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Sample:
    """Draw series from the model.

    Args:
        model: a `SwitchingLinearGaussian` or `SwitchingNonlinear`.
        steps: T.
        size: how many series, ``()`` for one.
        inputs: u, ``(*size, T, m)``, if the model takes them.
        generator: source of the draws; the global one by default.

    >>> import torch, cumulant as cm
    >>> one = torch.ones(2, 1, 1)
    >>> model = cm.filtering.SwitchingLinearGaussian(
    ...     transition=torch.eye(2), initial=torch.tensor([0.0, 1.0]), dynamics=one,
    ...     dynamics_noise=one, emission=one, emission_noise=one,
    ...     initial_mean=torch.zeros(1), initial_covariance=torch.eye(1))
    >>> cm.filtering.sample(model, 4).modes
    tensor([1, 1, 1, 1])
    """
    gaussian_model("sample", model)
    proper_start("sample", model)
    steps = whole("sample", "steps", steps, 1)
    size = (size,) if isinstance(size, int) else size
    try:
        size = tuple(whole("sample", "size", s, 0) for s in size)
    except TypeError:
        raise InputError(f"sample: size must be a tuple of integers, not {size!r}.") from None
    device, kind = model.device, model.dtype
    blank = torch.full((*size, steps, model.observation_size), torch.nan).to(device, kind)
    bank = GaussianBank(model, blank, inputs_of("sample", model, inputs, steps, blank))
    # Drawn from the global generator by default, so that torch.manual_seed decides.
    generator = generator_or("sample", generator, None)

    def noise(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator).to(like)

    def pick(x: Tensor, mode: Tensor, event: int) -> Tensor:
        """What belongs to the mode, of ``(..., 1, M, ...)``."""
        x = x.expand(*size, 1, *x.shape[-event - 1 :]).squeeze(len(size))
        at = mode.reshape(*mode.shape, *(1,) * (event + 1))
        return x.take_along_dim(at, len(size)).squeeze(len(size))

    def draw(log_p: Tensor) -> Tensor:
        uniform = torch.rand(log_p.shape, generator=generator).to(log_p)
        return (log_p - (-uniform.log()).log()).argmax(-1)

    def move(which: str, x: Tensor, mode: Tensor, t: int) -> Tensor:
        step = bank.linear(which, (x[..., None, None, :], x.new_zeros(())), t)
        matrix, offset = pick(step.matrix, mode, 2), pick(step.offset, mode, 1)
        mean = (matrix @ x[..., None])[..., 0] + offset
        return mean + (_root(pick(step.noise, mode, 2)) @ noise(mean)[..., None])[..., 0]

    with torch.no_grad():
        belief, _ = bank.start()
        if belief.log_weights.shape[:-2] != size:
            raise InputError(
                f"sample: the model has batch shape {tuple(belief.log_weights.shape[:-2])}, so "
                f"size must end in it; it is {size}."
            )
        mode = draw(belief.log_weights.expand(*size, 1, -1)[..., 0, :])
        center = pick(belief.message[0], mode, 1)
        state = (
            center + (_root(pick(belief.message[1], mode, 2)) @ noise(center)[..., None])[..., 0]
        )
        modes, states, seen = list[Tensor](), list[Tensor](), list[Tensor]()
        for t in range(steps):
            mode = draw(pick(bank.log_transition(t), mode, 1))
            state = move("dynamics", state, mode, t)
            modes.append(mode)
            states.append(state)
            seen.append(move("emission", state, mode, t))
    found = torch.stack(states, -2).to(kind), torch.stack(seen, -2).to(kind)
    return Sample(torch.stack(modes, -1), *found)


def _root(covariance: Tensor) -> Tensor:
    """A root of a semi-definite matrix."""
    values, vectors = linalg.eigh(covariance)
    return vectors * values.clamp_min(0.0).sqrt()[..., None, :]
