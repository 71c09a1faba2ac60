"""Filters against filterpy's IMM, fits against statsmodels' Markov autoregression, all on one
thread, and the log-likelihood and its gradient against the torch recursion."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from cumulant.core.errors import InputError
from cumulant.core.progress import ProgressCallback, counted
from cumulant.filtering import SwitchingLinearGaussian, filter, fit, sample
from cumulant.filtering.parameters import coordinates
from cumulant.kernels.engines import engine
from cumulant.lab.bench.timing import Row, interleave, row

__all__ = ["run"]

THREADS = 1
D = torch.float64
_STATSMODELS = "statsmodels MarkovAutoregression"
_REPEATS = 20  # of calls of about a millisecond, which a fit makes one after another
FIELDS = (
    *("log_likelihood", "step_log_likelihood", "mode_probabilities"),
    *("predicted_mode_probabilities", "mean", "covariance", "mode_means", "mode_covariances"),
    *("predicted_mean", "predicted_covariance", "observation_mean", "observation_covariance"),
)


def _other(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        package = name.split(".")[0]
        raise InputError(f"this comparison needs {package}: pip install {package}.") from None


def target() -> SwitchingLinearGaussian:
    """A point in the plane, position and velocity, with three levels of agility."""
    W = torch.tensor([[1.0, 1, 0, 0], [0, 1, 0, 0], [0, 0, 1, 1], [0, 0, 0, 1]], dtype=D)
    eye = torch.eye(4, dtype=D)
    return SwitchingLinearGaussian(
        transition=0.05 + 0.85 * torch.eye(3, dtype=D),
        initial=torch.full((3,), 1 / 3, dtype=D),
        dynamics=W.expand(3, 4, 4),
        dynamics_noise=torch.stack([0.01 * eye, 0.1 * eye, eye]),
        emission=torch.tensor([[1.0, 0, 0, 0], [0, 0, 1, 0]], dtype=D).expand(3, 2, 4),
        emission_noise=torch.eye(2, dtype=D).expand(3, 2, 2),
        initial_mean=torch.zeros(4, dtype=D),
        initial_covariance=eye,
    )


def filterpy_imm(model: SwitchingLinearGaussian, series: Any) -> Any:
    """filterpy's loop over one series."""
    kalman = _other("filterpy.kalman")
    given = {name: x.numpy() for name, x in model.parameters.items()}
    filters: list[Any] = []
    for j in range(model.modes):
        f = kalman.KalmanFilter(dim_x=4, dim_z=2)
        f.F, f.Q = given["dynamics"][j], given["dynamics_noise"][j]
        f.H, f.R = given["emission"][j], given["emission_noise"][j]
        f.x, f.P = given["initial_mean"][:, None].copy(), given["initial_covariance"].copy()
        filters.append(f)
    imm = kalman.IMMEstimator(filters, given["initial"], given["transition"])
    for y in series:
        imm.predict()
        imm.update(y[:, None])
    return imm


def filters(count: int, steps: int) -> tuple[Tensor, dict[str, Callable[[], object]]]:
    model = target()
    y = sample(model, steps, (count,), generator=torch.Generator().manual_seed(0)).observations
    one = y[0].numpy()
    post, imm = filter(model, y[0], collapse="imm"), filterpy_imm(model, one)
    if abs(post.mode_probabilities[-1].numpy() - imm.mu).max() > 1e-6:
        raise RuntimeError("filterpy's IMM and ours do not agree")
    return y, {
        "filterpy IMM, one series": lambda: filterpy_imm(model, one),
        "IMM, one series, all fields": lambda: _all_fields(model, y[0]),
        "GPB2, one series": lambda: filter(model, y[0]),
    }


def one_series(steps: int) -> dict[str, Callable[[], object]]:
    """One series by filterpy and by ours, after a check that they agree."""
    return filters(1, steps)[1]


def _all_fields(model: SwitchingLinearGaussian, y: Tensor) -> list[Tensor]:
    post = filter(model, y, collapse="imm")
    return [getattr(post, name) for name in FIELDS]


def _likelihoods(
    model: SwitchingLinearGaussian, steps: int, free: tuple[str, ...]
) -> dict[str, Callable[[], object]]:
    """Value, and value with gradient in the free coordinates, by each recursion."""
    y = sample(model, steps, generator=torch.Generator().manual_seed(0)).observations
    found = coordinates(model, free)
    start = found.vector(model)

    def value() -> Tensor:
        with torch.no_grad():
            return filter(model, y).log_likelihood

    def gradient() -> Tensor:
        at = start.clone().requires_grad_()
        return torch.autograd.grad(filter(found.at(at), y).log_likelihood, at)[0]

    def by_torch(run: Callable[[], Tensor]) -> Callable[[], object]:
        def case() -> Tensor:
            with engine("torch"):
                return run()

        return case

    count = f"gradient in {len(start)} parameters"
    return {
        "log-likelihood": value,
        "log-likelihood, torch recursion": by_torch(value),
        count: gradient,
        f"{count}, torch recursion": by_torch(gradient),
    }


def two_states() -> SwitchingLinearGaussian:
    """A level with a trend that moves little or much: 7 numbers to learn."""
    eye = torch.eye(2, dtype=D)
    return SwitchingLinearGaussian(
        transition=torch.tensor([[0.95, 0.05], [0.1, 0.9]], dtype=D),
        initial=torch.full((2,), 0.5, dtype=D),
        dynamics=torch.tensor([[1.0, 1.0], [0.0, 0.9]], dtype=D),
        dynamics_noise=torch.stack([0.05 * eye, 0.5 * eye]),
        emission=torch.tensor([[1.0, 0.0]], dtype=D),
        emission_noise=torch.ones(1, 1, dtype=D),
        initial_mean=torch.zeros(2, dtype=D),
        initial_covariance=eye,
    )


def growth(count: int) -> Tensor:
    """A first-order autoregression around a mean that switches."""
    g = torch.Generator().manual_seed(0)
    mode, y = 0, torch.zeros(count + 1, dtype=D)
    noise = torch.randn(count, generator=g, dtype=D)
    flips = torch.rand(count, generator=g, dtype=D)
    for t in range(count):
        mode = 1 - mode if flips[t] < 0.08 else mode
        y[t + 1] = (1.0, -0.8)[mode] + 0.3 * y[t] + 0.7 * noise[t]
    return y


def autoregression() -> SwitchingLinearGaussian:
    """y_t = c + phi y_{t-1} + noise with a switching c: 6 numbers to learn."""
    nothing = torch.zeros(2, 0, 0, dtype=D)
    return SwitchingLinearGaussian(
        transition=torch.tensor([[0.8, 0.2], [0.2, 0.8]], dtype=D),
        dynamics=nothing,
        dynamics_noise=nothing,
        emission=torch.zeros(2, 1, 0, dtype=D),
        emission_noise=torch.eye(1, dtype=D),
        emission_bias=torch.tensor([[-0.5], [0.5]], dtype=D),
        emission_input=torch.zeros(1, 1, dtype=D),
        initial_mean=torch.zeros(0, dtype=D),
        initial_covariance=torch.zeros(0, 0, dtype=D),
    )


def local_level() -> SwitchingLinearGaussian:
    """A level that moves little or much, under noise: 5 numbers to learn."""
    one = torch.ones(1, 1, dtype=D)
    return SwitchingLinearGaussian(
        transition=torch.tensor([[0.9, 0.1], [0.1, 0.9]], dtype=D),
        dynamics=one,
        dynamics_noise=torch.tensor([0.1, 1.0], dtype=D)[:, None, None],
        emission=one,
        emission_noise=one,
        initial_mean=torch.zeros(1, dtype=D),
        initial_covariance=one,
    )


def fits(count: int) -> dict[str, Callable[[], object]]:
    y = growth(count)
    rows, lags = y[1:, None], y[:-1, None]
    theirs = _other("statsmodels.tsa.api").MarkovAutoregression

    def statsmodels() -> object:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return theirs(y.numpy(), k_regimes=2, order=1, switching_ar=False).fit()

    return {
        _STATSMODELS: statsmodels,
        "fit, autoregression": lambda: fit(
            autoregression(), rows, inputs=lags, standard_errors=False
        ),
        "fit, local level, standard errors": lambda: fit(local_level(), rows),
    }


def run(
    *, rounds: int = 7, quick: bool = False, progress: ProgressCallback | None = None
) -> list[Row]:
    """Measure everything on one thread; `progress` is called before every single run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    try:
        return _run(rounds, quick, progress)
    finally:
        torch.set_num_threads(threads)


def _run(rounds: int, quick: bool, progress: ProgressCallback | None) -> list[Row]:
    count, steps = (200, 100) if quick else (1000, 500)
    few = max(2, rounds // 3)
    tick = counted(progress, 3 * (rounds + 1) + few + (3 + 8) * (few + 1))

    def told(what: str) -> None:
        tick(what)

    with torch.no_grad():
        y, cases = filters(count, steps)
        short = {"IMM, one series, all fields": _REPEATS, "GPB2, one series": _REPEATS}
        seconds = interleave(cases, rounds=rounds, tick=told, repeats=short)
        base, label = "filterpy IMM, one series", f"{steps} steps, 3 modes, 4 states"
        rows = [
            row(seconds, label, "IMM, one series, all fields", base, 0.01),
            row(seconds, label, "GPB2, one series", base, float("inf")),
        ]
        model, taken = target(), list[float]()
        for _ in range(few):
            told("GPB2, all series")
            start = time.perf_counter()
            filter(model, y)
            taken.append(time.perf_counter() - start)
    theirs = statistics.median(seconds[base])
    ours = statistics.median(taken) / count
    what = f"GPB2, {count} series at once, each"
    rows.append(Row(label, what, base, 1e3 * ours, 1e3 * theirs, ours / theirs, 0.004))
    seconds = interleave(fits(40 if quick else 150), rounds=few, tick=told)
    label = f"{40 if quick else 150} observations, 2 regimes"
    rows.append(row(seconds, label, "fit, autoregression", _STATSMODELS, 0.1))
    rows.append(row(seconds, label, "fit, local level, standard errors", _STATSMODELS, 0.5))
    free = ("transition", "dynamics_noise", "emission_noise")
    problems = (("2 modes, 2 states", two_states(), 0.005), ("3 modes, 4 states", target(), 0.03))
    for sizes, model, most in problems:
        cases = _likelihoods(model, steps, free)
        value, _, slope, _ = cases
        short = {value: _REPEATS, slope: _REPEATS}
        seconds = interleave(cases, rounds=few, tick=told, repeats=short)
        label = f"{steps} steps, {sizes}"
        rows.append(row(seconds, label, value, f"{value}, torch recursion", most))
        rows.append(row(seconds, label, slope, f"{slope}, torch recursion", most))
    return rows
