"""The self-test of the Triton kernels on the GPU at hand, against dense attention in float64.

Every question of the engine is asked directly, so no other engine can answer in its place, and
compared with attention written out and differentiated by torch in float64 on the CPU, on the same
inputs. The tolerances are rounding errors of the inputs' type, fixed here: a product in plain TF32
(ten bits) would fail the float32 checks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, cast

import torch
from torch import Tensor

from cumulant.core.progress import ProgressCallback, counted
from cumulant.kernels.dropout import kept
from cumulant.kernels.tiles import Band, Named, Program, Result
from cumulant.kernels.triton import answers
from cumulant.kernels.triton.blocks import target_of
from cumulant.kernels.triton.recording import Check, Record, identity

__all__ = ["CASES", "Case", "check", "example", "self_test"]

_TOLERANCES = {torch.float32: 5e-5, torch.float16: 8e-3, torch.bfloat16: 6e-2}
_PRIMAL = ("query", "key", "value", "bias")


@dataclass(frozen=True)
class Case:
    """One call: sizes, and what shapes its scores."""

    name: str
    widths: tuple[int, int] = (64, 64)
    band: Band = Band()
    batch: tuple[int, ...] = (1, 2)
    keys: tuple[int, ...] = (1, 2)  # the batch of the keys
    bias: bool = False
    mask: bool = False
    cap: float | None = None
    rate: float = 0.0
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float16, torch.bfloat16)


CASES = (
    Case("plain"),
    Case("causal, grouped heads", band=Band(None, 0), keys=(1, 1)),
    Case("window, widths 40 and 24", (40, 24), band=Band(-30, 5)),
    Case("width 128", (128, 128), band=Band(None, 0)),
    Case("width 256", (256, 256)),
    Case("bias, mask, dropout", bias=True, mask=True, rate=0.3, band=Band(None, 20)),
    Case("softcap", cap=1.5, dtypes=(torch.float32,)),
)

_INTERPRETED = (
    Case("causal, grouped heads", (16, 24), Band(None, 0), keys=(1, 1)),
    Case("bias, mask, dropout", (16, 16), bias=True, mask=True, rate=0.3, dtypes=(torch.float32,)),
)


def _inputs(case: Case, m: int, n: int) -> dict[str, Tensor]:
    """The arguments of a call in float64, rounded to halves so that every type holds them."""
    generator = torch.Generator().manual_seed(len(case.name))

    def normal(*shape: int) -> Tensor:
        x = torch.randn(shape, generator=generator, dtype=torch.float32)
        return x.bfloat16().double()

    d, e = case.widths
    out = {
        "query": normal(*case.batch, m, d),
        "key": normal(*case.keys, n, d),
        "value": normal(*case.keys, n, e),
    }
    if case.bias:
        out["bias"] = normal(1, case.batch[-1], m, n)
    out |= {f"along {name}": normal(*x.shape) for name, x in list(out.items())}
    out["cotangent mean"] = normal(*case.batch, m, e)
    out["cotangent log_normalizer"] = normal(*case.batch, m, 1)
    if case.mask:
        out["mask"] = torch.rand(case.batch[0], 1, 1, n, generator=generator) < 0.8
    if case.cap is not None:
        out["cap"] = torch.full((1,) * out["query"].ndim, case.cap, dtype=torch.float64)
    if case.rate:
        shape = (*case.batch, 1, 1)
        out["seed"] = torch.randint(-99, 99, shape, generator=generator, dtype=torch.int32)
    return out


def _dense(case: Case, a: Named, primal: Named) -> tuple[Tensor, Tensor, Tensor]:
    """(mean, G, entropy) written out; rows without keys do not occur in the cases."""
    q, k, v = (primal[n] for n in ("query", "key", "value"))
    m, n = q.shape[-2], k.shape[-2]
    s = q @ k.mT / math.sqrt(q.shape[-1])
    if case.cap is not None:
        s = case.cap * torch.tanh(s / case.cap)
    s = s + primal["bias"] if case.bias else s
    hidden = case.band.hidden(range(m), range(n), s.device)
    s = s if hidden is None else s.masked_fill(hidden, -math.inf)
    s = s.masked_fill(~a["mask"], -math.inf) if case.mask else s
    level = s.logsumexp(-1, keepdim=True)
    p = (s - level).exp()
    entropy = -(p * (s - level).masked_fill(p == 0, 0.0)).sum(-1, keepdim=True)
    if case.rate:
        p = p * kept(a["seed"], range(m), range(n), case.rate) / (1 - case.rate)
    return p @ v, level, entropy


def _expected(case: Case, a: Named) -> dict[str, Tensor]:
    """Value, tangent, gradient and curvature of (mean, G) by torch in float64."""
    names = [n for n in _PRIMAL if n in a]
    leaves = [a[n].clone().requires_grad_() for n in names]
    along = tuple(a[f"along {n}"] for n in names)

    def function(*xs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return _dense(case, a, dict(zip(names, xs, strict=True)))

    found = function(*leaves)
    _, moved = cast(Any, torch.func).jvp(function, tuple(leaves), along)
    seeds = (a["cotangent mean"], a["cotangent log_normalizer"])
    value = sum((x * g).sum() for x, g in zip(found, seeds, strict=False))
    first = torch.autograd.grad(cast(Tensor, value), leaves, create_graph=True)
    inner = sum((x * y).sum() for x, y in zip(first, along, strict=True))
    second = torch.autograd.grad(cast(Tensor, inner), leaves)
    rows = ("mean", "log_normalizer", "entropy")
    out = {f"forward {n}": x for n, x in zip(rows, found, strict=True)}
    out |= {f"tangent {n}": x for n, x in zip(rows, cast(tuple[Tensor, ...], moved), strict=True)}
    out |= {f"gradient {n}": x for n, x in zip(names, first, strict=True)}
    if case.cap is None:
        out |= {f"curvature {n}": x for n, x in zip(names, second, strict=True)}
    return {n: x.detach() for n, x in out.items()}


Question = Callable[[], Mapping[str, Tensor] | None]


def _questions(case: Case, a: Named, level: Tensor) -> dict[str, Question]:
    """The questions of the engine for these arguments; `level` is G."""
    scale, rate = 1 / math.sqrt(a["query"].shape[-1]), case.rate
    rows = (*case.batch, a["query"].shape[-2])
    index = {"query": "i", "key": "j", "value": "j", "bias": "ij"}
    primal = {n: tuple(a[n].shape) for n in _PRIMAL if n in a}
    measure = {n: a[n] for n in (*_PRIMAL, "mask", "seed", "cap") if n in a}
    known = {**measure, "log_normalizer": level}
    seeds = {n: x for n, x in a.items() if n.startswith("cotangent ")}

    def program(shapes: Mapping[str, tuple[int, ...]]) -> Program:
        results = tuple(Result(n, index.get(n, "i"), shape) for n, shape in shapes.items())
        grid = (rows[-1], a["key"].shape[-2])
        return Program(_no_tile, {}, results, grid, case.band, whole_rows=True)

    def along(prefix: str) -> dict[str, Tensor]:
        return {f"{prefix} {n}": a[f"along {n}"] for n in primal}

    pushed = {"mean": (*rows, a["value"].shape[-1]), "log_normalizer": (*rows, 1)}
    pushed["entropy"] = (*rows, 1)
    named = {"scale": scale, "rate": rate}
    out: dict[str, Question] = {
        "forward": lambda: answers.forward(measure, band=case.band, fields=("entropy",), **named),
        "tangent": lambda: answers.tangent(program(pushed), {**known, **along("tangent")}, **named),
        "gradient": lambda: answers.gradient(program(primal), {**known, **seeds}, **named),
        "curvature": lambda: answers.curvature(
            program(primal), {**known, **seeds, **along("second")}, **named
        ),
    }
    if case.cap is not None:  # the engine leaves second derivatives with a softcap to the tiles
        del out["curvature"]
    return out


def _no_tile(*_: object) -> dict[str, Tensor]:
    raise LookupError("the self-test asks the engine alone")


def _on(device: torch.device, dtype: torch.dtype, inputs: Named) -> dict[str, Tensor]:
    """The inputs as calls give them: bias, cap and columns in float32, the vectors in `dtype`."""
    wide = ("cotangent log_normalizer", "bias", "along bias", "cap")
    return {
        n: x.to(device, torch.float32 if n in wide else dtype)
        if x.is_floating_point()
        else x.to(device)
        for n, x in inputs.items()
    }


def example(
    case: Case, device: torch.device, dtype: torch.dtype, sizes: tuple[int, int]
) -> dict[str, Question]:
    """The questions of a case on random inputs, to be timed."""
    a = _on(device, dtype, _inputs(case, *sizes))
    level = torch.zeros(*case.batch, sizes[0], 1, device=device)
    return _questions(case, a, level)


def check(case: Case, device: torch.device, sizes: tuple[int, int]) -> Iterator[Check]:
    """Every answer for one case in each of its types; an answer not given has an infinite error."""
    inputs = _inputs(case, *sizes)
    expected = _expected(case, inputs)
    for dtype in case.dtypes:
        if dtype == torch.bfloat16 and target_of(device) == "interpreter":
            continue  # its products are wrong there (triton #11584)
        level = expected["forward log_normalizer"].to(device, torch.float32)
        questions = _questions(case, _on(device, dtype, inputs), level)
        answered = {question: ask() or {} for question, ask in questions.items()}
        for name, true in expected.items():
            question, result = name.split(" ", 1)
            found, error = answered[question].get(result), math.inf
            if found is not None:
                gap = (found.double().cpu() - true).abs().amax()
                error = float(gap / true.abs().amax().clamp_min(1e-3))
            kind = str(dtype).removeprefix("torch.")
            yield Check(f"{case.name}, {kind}: {name}", error, _TOLERANCES[dtype])


def self_test(
    device: torch.device,
    *,
    cases: tuple[Case, ...] | None = None,
    sizes: tuple[int, int] | None = None,
    progress: ProgressCallback | None = None,
) -> Record:
    """Ask everything of the kernels on `device` and compare; `keep` the result to be believed.

    The default cases launch 192 kernels, each compiled on a first run (0.6 s of CPU time for one on
    average) and then kept by Triton; the interpreter gets two small cases.
    """
    interpreted = target_of(device) == "interpreter"
    cases = cases or (_INTERPRETED if interpreted else CASES)
    sizes = sizes or ((20, 36) if interpreted else (300, 500))
    tick = counted(progress, len(cases))
    checks: list[Check] = []
    for case in cases:
        tick(case.name)
        try:
            checks.extend(check(case, device, sizes))
        except Exception as error:  # whatever Triton or the driver raises is a failure, not a crash
            checks.append(Check(f"{case.name}: {type(error).__name__}: {error}", math.inf, 0.0))
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return Record(identity(device), now, tuple(checks))
