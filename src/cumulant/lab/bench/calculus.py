"""What the derivatives of attention cost, as multiples of torch's own attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from cumulant.attention import attend, scaled_dot_product_attention
from cumulant.core.progress import ProgressCallback, counted
from cumulant.core.typed import take_step
from cumulant.derivatives import differentiable
from cumulant.kernels.attention import Options
from cumulant.kernels.rows import summarize
from cumulant.lab.bench import engines
from cumulant.lab.bench.peak import growth
from cumulant.lab.bench.timing import Row, clock, interleave, row

__all__ = ["SHAPES", "double_backward", "run", "tangents"]

Shape = tuple[int, int, int, int]
SHAPES: tuple[Shape, ...] = (
    (1, 8, 1024, 64),
    (1, 8, 4096, 64),
    (8, 12, 512, 64),
    (1, 1, 16384, 64),
)
_AGAINST_MATH: Shape = (1, 8, 4096, 64)

_FORWARD = "SDPA forward"
_BOTH = "SDPA forward+backward"
_CAUSAL = "SDPA causal forward"
_SUMS = "attention + G + entropy + score mean, variance and maximum, forward"
_TANGENTS = "JVP, all tangents"
_ALL_TANGENTS = "JVP, all tangents, with G and entropy"


def _ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v)


def _three(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    a = attend(q, k, v)
    return a.entropy, a.mean, a.log_normalizer


def _math(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v)


def _aims(n: int) -> list[tuple[str, str, float]]:
    """(quantity, baseline, ratio hoped for) at length n."""
    return [
        ("attention forward", _FORWARD, 0.88),
        ("attention forward+backward", _BOTH, 0.78),
        (_SUMS, _FORWARD, 0.95 if n >= 16384 else 0.88),
        ("causal attention + G + entropy, forward", _CAUSAL, 0.65),
        ("G with gradient in q, k", _BOTH, 0.78),
        ("JVP, query tangent", _FORWARD, 2.0),
        (_TANGENTS, _FORWARD, 2.6),
        (_ALL_TANGENTS, _FORWARD, 2.6),
        ("double backward alone", _FORWARD, 5.2),
        ("row statistics: G, entropy, k90, top key", _FORWARD, 1.7),
    ]


def attention_cases(shape: Shape) -> dict[str, Callable[[], object]]:
    q, k, v, dq, dk, dv, g = (torch.randn(shape) for _ in range(7))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    seed = g.clone().requires_grad_()
    ones = torch.ones(shape[:-1])

    def both(function: Callable[..., Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(function(*leaves), leaves, g)

    def sums() -> object:
        a = attend(q, k, v)
        return a.entropy, a.mean, a.log_normalizer, a.score_mean, a.score_variance, a.score_max

    def causal() -> object:
        a = attend(q, k, v, is_causal=True)
        return a.entropy, a.mean, a.log_normalizer

    def statistics() -> object:
        scale = Options(shape[-1] ** -0.5)
        return summarize({"query": q, "key": k}, scale, spectrum=False)

    def normalizer() -> object:
        return torch.autograd.grad(attend(*leaves[:2]).log_normalizer, leaves[:2], ones)

    first = torch.autograd.grad(_ours(*leaves), leaves, seed, create_graph=True)
    return {
        _FORWARD: lambda: F.scaled_dot_product_attention(q, k, v),
        "attention forward": lambda: _ours(q, k, v),
        _BOTH: both(F.scaled_dot_product_attention),
        "attention forward+backward": both(_ours),
        _SUMS: sums,
        _CAUSAL: lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        "causal attention + G + entropy, forward": causal,
        "G with gradient in q, k": normalizer,
        "JVP, query tangent": lambda: torch.func.jvp(partial(_ours, k=k, v=v), (q,), (dq,)),
        _TANGENTS: lambda: torch.func.jvp(_ours, (q, k, v), (dq, dk, dv)),
        _ALL_TANGENTS: lambda: torch.func.jvp(_three, (q, k, v), (dq, dk, dv)),
        "double backward alone": lambda: torch.autograd.grad(
            first, [*leaves, seed], (dq, dk, dv), retain_graph=True
        ),
        "row statistics: G, entropy, k90, top key": statistics,
    }


def math_cases(shape: Shape) -> dict[str, Callable[[], object]]:
    q, k, v, dq, dk, dv, g = (torch.randn(shape) for _ in range(7))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]

    def jvp(function: Callable[..., Tensor]) -> Callable[[], object]:
        return lambda: torch.func.jvp(function, (q, k, v), (dq, dk, dv))

    def twice(function: Callable[..., Tensor]) -> Callable[[], object]:
        def run() -> object:
            first = torch.autograd.grad(function(*leaves), leaves, g, create_graph=True)
            return torch.autograd.grad(first, leaves, (dq, dk, dv))

        return run

    return {
        "math backend, all tangents": jvp(_math),
        _TANGENTS: jvp(_ours),
        "math backend, forward+backward+double backward": twice(_math),
        "forward+backward+double backward": twice(_ours),
    }


_STEP = "torch, training step"
_STEP_OURS = "training step in differentiable()"
_MODEL = "2 layers, width 128, (8, 128) tokens"


def _training_cases() -> dict[str, Callable[[], object]]:
    """A training step of a small transformer: values and first gradients only."""
    layer = torch.nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(8, 128, 128)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        take_step(optimizer)

    def ours() -> None:
        with differentiable():
            step()

    return {_STEP: step, _STEP_OURS: ours}


# For children that measure peak memory: functions without arguments, by name.
_LONG: Shape = (1, 1, 16384, 64)


def tangents() -> Callable[[], object]:
    """The value and all tangents at N = 16384."""
    given, along = (tuple(torch.randn(_LONG) for _ in range(3)) for _ in range(2))
    torch.func.jvp(_ours, *(tuple(x[..., :64, :] for x in y) for y in (given, along)))
    return lambda: torch.func.jvp(_ours, given, along)


def double_backward() -> Callable[[], object]:
    """The gradient of a gradient at N = 16384; the first one is made before."""
    leaves = [torch.randn(_LONG, requires_grad=True) for _ in range(3)]
    first = torch.autograd.grad(_ours(*leaves).sum(), leaves, create_graph=True)
    along = [torch.randn(_LONG) for _ in leaves]
    return lambda: torch.autograd.grad(first, leaves, along)


def _memory() -> list[Row]:
    """Peak memory against one matrix of scores."""
    scores = _LONG[2] ** 2 * 4 / 2**20
    rows: list[Row] = []
    for name, quantity, most in (
        ("tangents", _TANGENTS, 20.0),
        ("double_backward", "double backward alone", 30.0),
    ):
        if (grown := growth(__name__, name)) is not None:
            told = (str(_LONG), quantity, "the scores alone")
            rows.append(Row(*told, grown, scores, grown / scores, most / scores, unit="MB"))
    return rows


def run(
    *, rounds: int = 7, quick: bool = False, progress: ProgressCallback | None = None
) -> list[Row]:
    """Measure all shapes; `progress` is called before every single run."""
    shapes = SHAPES[:1] if quick else SHAPES
    plan: list[tuple[Shape, dict[str, Callable[[], object]], int]] = []
    plan.extend(
        (s, attention_cases(s), max(3, rounds // 2) if s[2] >= 4096 else rounds) for s in shapes
    )
    against_math = SHAPES[0] if quick else _AGAINST_MATH
    plan.append((against_math, math_cases(against_math), 3))
    training = _training_cases()
    small, products = engines.small_cases(), engines.cases(quick=quick)
    few = max(3, rounds // 2)
    tick = counted(
        progress,
        sum(len(cases) * (r + 1) for _, cases, r in plan)
        + (len(training) + len(small)) * (rounds + 1)
        + 2 * len(products) * (few + 1)
        + 1,
    )
    rows: list[Row] = []
    for shape, cases, repeats in plan:
        label = str(shape)
        seconds = interleave(
            cases,
            rounds=repeats,
            tick=lambda name, label=label: tick(f"{label} {name}"),
            clock=clock(),
        )
        if _FORWARD in cases:
            rows.extend(row(seconds, label, *aim) for aim in _aims(shape[2]))
        else:
            names = list(cases)
            rows.append(row(seconds, label, names[1], names[0], 1 / 4))
            rows.append(row(seconds, label, names[3], names[2], 1 / 3))
    seconds = interleave(training, rounds=rounds, tick=tick, clock=clock())
    rows.append(row(seconds, _MODEL, _STEP_OURS, _STEP, 1.3))
    seconds = interleave(small, rounds=rounds, tick=tick, clock=clock())
    rows.append(row(seconds, engines.SMALL_SHAPE, engines.SMALL, engines.EXPRESSION, 1.5))
    for (label, quantity), pair in products.items():
        seconds = interleave(pair, rounds=few, tick=tick, clock=clock())
        rows.append(row(seconds, label, quantity, engines.TILES, 1.0))
    tick("peak memory")
    return rows if quick else rows + _memory()
