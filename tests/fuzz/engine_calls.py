"""Random kernel calls on one engine against dense attention in the same precision.

The compiled engine, or, with ``TRITON_INTERPRET=1``, Triton's kernels in its interpreter (smaller
calls, wider heads, float32).

Batches that broadcast in any way, strides, sizes on both sides of a tile, masks and biases shared
along any dimension, bands, caps, tags, dropout; values, tangents, gradients, the gradient of a
gradient, and the statistics of rows. A call follows from its seed and the engine:

    python tests/fuzz/engine_calls.py --seed 17 --rounds 1
"""

from __future__ import annotations

import math
import os
import random
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cumulant as cm
from cumulant.kernels.attention import Options, attention
from cumulant.kernels.dropout import kept
from cumulant.kernels.rows import LANCZOS_STEPS, summarize
from cumulant.kernels.tiles import Band
from fuzz import driver
from oracle import band_mask, differentiate, finite

SLACK = {torch.float64: 1e-10, torch.float32: 3e-5}
MOVING = ("query", "key", "value", "bias")
ENGINE = "triton" if os.environ.get("TRITON_INTERPRET") == "1" else "native"


@dataclass(frozen=True)
class Call:
    """Named arguments, options, and the word of derivatives that is asked for."""

    arguments: dict[str, Tensor]
    options: Options
    word: str
    told: str

    def names(self) -> list[str]:
        return [n for n in MOVING if n in self.arguments]

    def ours(self, *xs: Tensor) -> tuple[Tensor, ...]:
        out = attention(self._with(xs), self.options)
        fields = (out.mean, out.log_normalizer, out.entropy)
        return tuple(finite(x) for x in fields[: 3 if self.options.entropy else 2])

    def scores(self, a: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Scores without and with the bias, and which pairs may meet."""
        plain = self.options.scale * (a["query"] @ a["key"].mT)
        if "cap" in a:
            plain = a["cap"] * torch.tanh(plain / a["cap"])
        s = plain
        seen = band_mask(*s.shape[-2:], self.options.band.lower, self.options.band.upper)
        if "bias" in a:
            s, seen = s + a["bias"], seen & (a["bias"] > -math.inf)
        if "mask" in a:
            seen = seen & a["mask"]
        if "query_tag" in a:
            same = a["query_tag"][..., :, None, :] == a["key_tag"][..., None, :, :]
            seen = seen & ~same.any(-1)
        batch = torch.broadcast_shapes(*(x.shape[:-2] for x in a.values()))
        return tuple(x.expand(*batch, *s.shape[-2:]) for x in (plain, s, seen))

    def dense(self, *xs: Tensor) -> tuple[Tensor, ...]:
        a = self._with(xs)
        _, s, seen = self.scores(a)
        alive = seen.any(-1, keepdim=True)
        s = torch.where(seen, s, -math.inf).masked_fill(~alive, 0.0)
        p = torch.softmax(s, -1) * alive
        log_p = torch.log_softmax(s, -1).masked_fill(~seen, 0.0)
        w = p
        if "seed" in a:
            rate = self.options.dropout
            keep = kept(a["seed"], range(s.shape[-2]), range(s.shape[-1]), rate)
            w = p * keep / (1 - rate)
        out = (w @ a["value"], torch.logsumexp(s, -1, keepdim=True).masked_fill(~alive, 0.0))
        return (*out, -(p * log_p).sum(-1, keepdim=True))[: 3 if self.options.entropy else 2]

    def _with(self, xs: tuple[Tensor, ...]) -> dict[str, Tensor]:
        return {**self.arguments, **dict(zip(self.names(), xs, strict=True))}


def _strided(x: Tensor, rng: random.Random) -> Tensor:
    """The same numbers in another layout."""
    kind = rng.choice(["plain", "plain", "transposed", "sliced"])
    if kind == "transposed":
        return x.mT.contiguous().mT
    if kind == "sliced":
        wide = torch.full((*x.shape[:-1], x.shape[-1] * 2 + 1), math.nan, dtype=x.dtype)
        wide[..., 1::2] = x
        return wide[..., 1::2]
    return x


def draw(seed: int) -> Call:
    """The call of a seed."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    compiled = ENGINE == "native"
    dtype = rng.choice(list(SLACK)) if compiled else torch.float32
    sizes = [1, 2, 5, 16, 17, 63, 64, 65, 100, 130] if compiled else [1, 2, 17, 31, 32, 33, 40]
    m, n = rng.choice(sizes), rng.choice(sizes)
    widths = ([1, 3, 8, 16, 20, 64], [1, 2, 8, 16, 33])
    d, e = map(rng.choice, widths if compiled else ([1, 3, 16, 20, 72, 130], [1, 2, 16, 33, 100]))
    batch = tuple(rng.choice([1, 2, 3]) for _ in range(rng.choice([0, 1, 2, 3])))

    def shape(*last: int) -> tuple[int, ...]:
        return (*(rng.choice([1, x]) for x in batch), *last)

    def normal(*last: int) -> Tensor:
        return _strided(torch.randn(shape(*last), generator=generator, dtype=dtype), rng)

    a = {"query": normal(m, d), "key": normal(n, d), "value": normal(n, e)}
    if rng.random() < 0.3:
        a["bias"] = normal(rng.choice([1, m]), rng.choice([1, n]))
        if rng.random() < 0.5:
            a["bias"] = a["bias"].masked_fill(a["bias"] > 1.0, -math.inf)
    if rng.random() < 0.3:
        mask = torch.rand(shape(rng.choice([1, m]), rng.choice([1, n])), generator=generator) > 0.3
        a["mask"] = mask.mT.contiguous().mT if rng.random() < 0.5 else mask
    if rng.random() < 0.2:
        a["cap"] = torch.full((1,) * (len(batch) + 2), rng.choice([0.5, 3.0]), dtype=dtype)
    if compiled and rng.random() < 0.2:
        c = rng.choice([1, 2])
        a["query_tag"] = torch.randint(3, shape(m, c), generator=generator)
        a["key_tag"] = torch.randint(3, shape(n, c), generator=generator)
    rate = 0.0
    if rng.random() < 0.2:
        rate = rng.choice([0.1, 0.5])
        full = torch.broadcast_shapes(*(x.shape[:-2] for x in a.values()))
        a["seed"] = torch.randint(-(2**31), 2**31, (*full, 1, 1), generator=generator).int()
    side = (None, None, 0, 1, 40)
    lower, upper = (rng.choice(side), rng.choice(side)) if rng.random() < 0.4 else (None, None)
    band = Band(None if lower is None else -lower, upper)
    options = Options(rng.choice([1.0, 0.3]), band, rate, entropy=rng.random() < 0.5)
    words = (
        ["", "F", "R", "rows"]
        if options.entropy or m * n > 5000
        else ["", "F", "R", "RR", "RF", "FR", "rows"]
    )
    word = rng.choice(words if compiled else words[:-1])
    shapes = {name: tuple(x.shape) for name, x in a.items()}
    return Call(a, options, word, f"seed {seed}: {word!r} {dtype} {shapes} {options}")


def _constant(x: Tensor) -> Tensor:
    wave = torch.arange(x.numel(), dtype=torch.float64).sin()
    return wave.to(x.dtype).view(x.shape)


def check_rows(call: Call) -> str | None:
    """The same for the statistics of rows, against a covariance matrix for every query."""
    given = {
        n: x for n, x in call.arguments.items() if n in ("query", "key", "bias", "mask", "cap")
    }
    with cm.engine(ENGINE):
        found = {n: x.double() for n, x in summarize(given, call.options).items()}
    a = {n: x.double() if x.is_floating_point() else x for n, x in given.items()}
    plain, s, seen = call.scores(a)
    p = torch.softmax(torch.where(seen, s, -math.inf), -1).nan_to_num(0.0)
    apart = a["key"].unsqueeze(-3) - (p @ a["key"]).unsqueeze(-2)
    covariance = torch.einsum("...mn,...mni,...mnj->...mij", p, apart, apart)
    spectrum = torch.linalg.eigvalsh(covariance)
    falling = p.sort(-1, descending=True).values.cumsum(-1)
    slack = SLACK[given["query"].dtype]
    least, most = (((falling < 0.9 + x).sum(-1) + 1) * seen.any(-1) for x in (-slack, slack))
    alive = seen.any(-1)
    truth = {
        "log_normalizer": torch.where(seen, s, -math.inf).logsumexp(-1).masked_fill(~alive, 0.0),
        "entropy": torch.special.entr(p).sum(-1),
        "score_variance": (p * (plain - (p * plain).sum(-1, keepdim=True)) ** 2).sum(-1),
        "visible": seen.sum(-1).double(),
        "top_weight": p.amax(-1),
        "fisher_trace": spectrum.sum(-1),
        "coverage": found["coverage"][..., 0].clamp(least, most),
    }
    if a["key"].shape[-1] <= LANCZOS_STEPS:
        truth["leading"] = spectrum[..., -1].clamp_min(0.0)
    for name, wanted in truth.items():
        got = finite(found[name][..., 0])
        gone = (got - wanted).abs().nan_to_num(math.inf).max() / wanted.abs().max().clamp_min(1.0)
        if got.shape != wanted.shape or gone > slack:
            return f"{call.told}: {name} is off by {gone:.1e}"
    return None


def check(call: Call) -> str | None:
    """What is wrong with our answer, if anything."""
    if call.word == "rows":
        return check_rows(call)
    point = tuple(call.arguments[n] for n in call.names())
    point = tuple(x.masked_fill(x == -math.inf, -math.inf) for x in point)
    generator = torch.Generator().manual_seed(1)
    tangents = tuple(torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in point)
    with cm.engine(ENGINE):
        found = differentiate(call.ours, call.word, tangents, _constant)(*point)
    truth = differentiate(call.dense, call.word, tangents, _constant)(*point)
    for number, (a, b) in enumerate(zip(found, truth, strict=True)):
        gone = (b - a).abs().nan_to_num(math.inf).max() / b.abs().max().clamp_min(1.0)
        if a.shape != b.shape or gone > SLACK[b.dtype]:
            return f"{call.told}: result {number} is off by {gone:.1e}"
    return None


def run(rounds: int, seed: int) -> list[str]:
    """The failures of so many cases from this seed on."""
    return driver.run(lambda seed: check(draw(seed)), "engine_calls", rounds, seed)


if __name__ == "__main__":
    sys.exit(driver.main(lambda seed: check(draw(seed)), "engine_calls", __doc__, rounds=500))
