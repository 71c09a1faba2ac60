"""Random calls of `attend` against dense attention in float64.

Shapes, strides, masks, biases, windows, grouped heads, dtypes, offsets of the keys, every field,
and derivatives to second order. A call follows from its seed alone, so a failure names the command
that repeats it:

    python tests/fuzz/attention_calls.py --seed 17 --rounds 1
"""

from __future__ import annotations

import math
import random
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cumulant as cm
from fuzz import driver
from oracle import FIELDS, band_mask, differentiate, finite

DOUBLE = torch.float64
WORDS = ["", "F", "R", "FF", "FR", "RF", "RR"]
# How far from float64 a call may be, beside ten times what dense attention in its precision is.
SLACK = {
    DOUBLE: 1e-9,
    torch.float32: 2e-5,
    torch.bfloat16: 8e-2,
    torch.float16: 2e-2,
}


@dataclass(frozen=True)
class Call:
    """One call and what is asked of it."""

    field: str
    word: str
    tensors: tuple[Tensor, Tensor, Tensor]
    options: dict
    seen: Tensor | None
    bias: Tensor | None
    groups: int
    scale: float
    softcap: float | None
    sink: Tensor | None  # broadcasts to (*batch, M)
    told: str

    def ours(self, *xs: Tensor) -> tuple[Tensor, ...]:
        return (finite(getattr(cm.attend(*xs, **self.options), self.field)),)

    def dense(self, *xs: Tensor) -> tuple[Tensor, ...]:
        return (_dense(self, *xs),)


def _dense(call: Call, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The field written out; a query that sees no key has zeros."""
    if call.groups:
        key, value = (x.repeat_interleave(call.groups, -3) for x in (key, value))
    plain = (query * call.scale) @ key.mT
    if call.softcap is not None:
        plain = call.softcap * (plain / call.softcap).tanh()
    scores = plain if call.bias is None else plain + call.bias.to(plain.dtype)
    seen = torch.ones_like(scores, dtype=torch.bool) if call.seen is None else call.seen
    seen = (seen & (scores > -math.inf)).expand(scores.shape)
    if call.field == "score_max":  # of keys: the sink is none
        among = torch.where(seen, scores, -math.inf)
        return finite(among.gather(-1, among.argmax(-1, keepdim=True))[..., 0])
    if call.sink is not None:  # one more column: no key, no value, no score, only a logit
        logits = call.sink.to(plain.dtype)[..., None].expand(*plain.shape[:-1], 1)
        scores, plain = torch.cat([scores, logits], -1), torch.cat([plain, 0 * logits], -1)
        seen = torch.cat([seen, torch.ones_like(logits, dtype=torch.bool)], -1)
        key, value = (torch.nn.functional.pad(x, (0, 0, 0, 1)) for x in (key, value))
    alive = seen.any(-1, keepdim=True)
    scores = torch.where(seen, scores, -math.inf).masked_fill(~alive, 0.0)
    peak = scores.detach().amax(-1, keepdim=True)
    log_mass = (scores - peak).exp().sum(-1, keepdim=True).log()
    p = torch.softmax(scores, -1) * alive
    log_p = (scores - peak - log_mass).masked_fill(~seen, 0.0)
    mean, score_mean = p @ value, (p * plain).sum(-1, keepdim=True)
    if call.field == "value_variance":
        return (p[..., None] * (value[..., None, :, :] - mean[..., None, :]) ** 2).sum(-2)
    return {
        "mean": mean,
        "log_normalizer": (peak + log_mass).masked_fill(~alive, 0.0)[..., 0],
        "key_mean": p @ key,
        "entropy": -(p * log_p).sum(-1),
        "score_mean": score_mean[..., 0],
        "score_variance": (p * (plain - score_mean) ** 2).sum(-1),
    }[call.field]


def draw(seed: int) -> Call:
    """The call of this seed."""
    choose = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    kinds = [torch.float32] * 4 + [DOUBLE] * 4 + [torch.bfloat16, torch.float16]
    dtype = choose.choice(kinds)
    half = dtype in (torch.bfloat16, torch.float16)
    word = choose.choice(WORDS[:3] if half else WORDS)
    # In float64 the oracle has no more digits than we have, and loses more of them at 1000.
    offset = 0.0 if half else choose.choice([0.0, 0.0, 30.0, 30.0 if dtype == DOUBLE else 1000.0])
    m, n = choose.randint(1, 30), choose.randint(1, 40)
    d = choose.randint(1, 12)
    e = d if choose.random() < 0.5 else choose.randint(1, 6)
    groups = choose.choice([0, 0, 0, 1, 2, 3])
    batch = [choose.randint(1, 2) for _ in range(choose.randint(0, 2))] + ([2] if groups else [])
    shared = choose.random() < 0.2 and len(batch) > 1 and not groups

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=DOUBLE)

    def laid_out(x: Tensor) -> Tensor:
        """The same numbers with other strides."""
        how = choose.randint(0, 3)
        if how == 1:
            return x.mT.contiguous().mT
        if how == 2:
            return torch.cat([x, x], -1)[..., : x.shape[-1]]
        return torch.stack([x, x], -2).flatten(-3, -2)[..., ::2, :] if how == 3 else x

    heads = [*batch[:-1], batch[-1] * groups] if groups else batch
    keys = [1, *batch[1:]] if shared else batch
    query, key, value = normal(*heads, m, d), normal(*keys, n, d), normal(*keys, n, e)
    along = torch.nn.functional.normalize(normal(d), dim=0)
    query, key = query + along, key + offset * along
    scale = choose.choice([1 / math.sqrt(d), 1 / math.sqrt(d), 0.3, -0.5])
    options: dict = {"scale": None if scale == 1 / math.sqrt(d) else scale}
    options |= {"enable_gqa": True} if groups else {}
    mask, seen, bias = choose.choice(["none", "none", "causal", "boolean", "additive"]), None, None
    if mask == "causal":
        options["is_causal"], seen = True, band_mask(m, n, upper=0)
    elif choose.random() < 0.3:
        left, right = choose.randint(0, n), choose.randint(0, n)
        options["window"], seen = (left, right), band_mask(m, n, -left, right)
    some = torch.rand(*choose.choice([[m, n], [1, n], [*heads, m, n]]), generator=generator) > 0.4
    if mask == "boolean":
        options["attn_mask"] = some
        seen = some if seen is None else seen & some
    elif mask == "additive":
        bias = normal(*some.shape).to(dtype)
        bias = bias.masked_fill(~some, -math.inf) if choose.random() < 0.5 else bias
        options["attn_mask"] = bias
    softcap = choose.choice([None, None, None, 1.5])
    options |= {} if softcap is None else {"softcap": softcap}
    sink = None
    if choose.random() < 0.3:
        full = (*heads, m)
        per_query = choose.random() < 0.5 or len(full) < 2
        sink = normal(*full) if per_query else normal(full[-2], 1)
        if softcap is None:  # near the normalizer, wherever the keys are
            shared_key = key.repeat_interleave(groups, -3) if groups else key
            sink = sink + torch.logsumexp((query * scale) @ shared_key.mT, -1).mean()
        sink = sink.to(dtype)
        options["sink"] = sink if per_query else sink[:, 0]
    tensors = tuple(laid_out(x.to(dtype)) for x in (query, key, value))
    # In less than double precision rounding decides which score is largest: derivatives jump.
    jumps = bool(word) and dtype != DOUBLE
    field = choose.choice([n for n in FIELDS if not (jumps and n == "score_max")])
    told = (
        f"{field} {word or 'value'} {str(dtype)[6:]} query={tuple(query.shape)} "
        f"key={tuple(key.shape)} value={tuple(value.shape)} mask={mask} offset={offset:g} "
        f"scale={scale:.3g} groups={groups} window={options.get('window')} "
        f"softcap={softcap} sink={None if sink is None else tuple(sink.shape)}"
    )
    return Call(field, word, tensors, options, seen, bias, groups, scale, softcap, sink, told)


def _cotangent(x: Tensor) -> Tensor:
    return torch.arange(x.numel(), dtype=DOUBLE).sin().to(torch.bfloat16).to(x.dtype).view(x.shape)


def _error(found: tuple[Tensor, ...], truth: tuple[Tensor, ...]) -> list[float]:
    errors = []
    for a, b in zip(found, truth, strict=True):
        if a.shape != b.shape:
            return [math.inf] * len(truth)
        gap = (a.double() - b).abs().max().item()
        errors.append(math.inf if math.isnan(gap) else gap)
    return errors


def check(seed: int) -> str | None:
    """What is wrong with the call of this seed, if anything."""
    call = draw(seed)
    generator = torch.Generator().manual_seed(seed + 1)
    dtype = call.tensors[0].dtype
    directions = tuple(torch.randn(x.shape, generator=generator).to(dtype) for x in call.tensors)

    def derived(function, kind: torch.dtype) -> tuple[Tensor, ...]:
        ts = tuple(t.to(kind) for t in directions)
        xs = (x.to(kind) if kind != dtype else x for x in call.tensors)
        return differentiate(function, call.word, ts, _cotangent)(*xs)

    truth = derived(call.dense, DOUBLE)
    found = _error(derived(call.ours, dtype), truth)
    wide = torch.float32 if dtype != DOUBLE else dtype
    dense = _error(derived(call.dense, wide), truth)
    for ours, theirs, exact in zip(found, dense, truth, strict=True):
        limit = 10 * theirs + SLACK[dtype] * (1 + exact.abs().max().item())
        if not ours <= limit:
            return f"{call.told}: off by {ours:.2e}, allowed {limit:.2e}"
    return None


def run(rounds: int, seed: int) -> list[str]:
    """The failures of so many cases from this seed on."""
    return driver.run(check, "attention_calls", rounds, seed)


if __name__ == "__main__":
    sys.exit(driver.main(check, "attention_calls", __doc__, rounds=1000))
