"""Single precision is worth as much here as in attention written out, at every order.

Truth is dense attention in float64 on the same numbers. The yardstick is dense attention in
float32, with torch's softmax and torch's derivatives: no error may be more than three times its
error, however large the scores are and whatever they have in common.
"""

from __future__ import annotations

import math
import statistics
from functools import partial

import pytest
import torch

import cumulant as cm
from cumulant.kernels import calculus as kernel
from oracle import FIELDS, assert_close, band_mask, differentiate

M, N, D = 24, 32, 16
SECOND = ["FF", "FR", "RF", "RR"]
OFFSETS = [0.0, 30.0, 300.0, 1000.0, 1e4]
SEEDS = 3

MASK = torch.rand(M, N, generator=torch.Generator().manual_seed(1)) > 0.4
MASK[:, 3] = True
BIAS = 5 * torch.randn(M, N, generator=torch.Generator().manual_seed(2))

# What `attend` is told, and the yardstick.
CALLS = {
    "plain": ({}, {}),
    "causal": ({"is_causal": True}, {"causal": True}),
    "mask": ({"attn_mask": MASK}, {"mask": MASK}),
    "bias": ({"attn_mask": BIAS}, {"bias": BIAS}),
    "grouped": ({"enable_gqa": True}, {"groups": 2}),
}


def dense(query, key, value, *, mask=None, bias=None, groups=1, causal=False):
    """Every field by torch's softmax of all scores."""
    key, value = (x.repeat_interleave(groups, -3) if groups > 1 else x for x in (key, value))
    plain = (query / math.sqrt(query.shape[-1])) @ key.mT
    scores = plain if bias is None else plain + bias.to(plain.dtype)
    if causal:
        mask = band_mask(query.shape[-2], key.shape[-2], upper=0)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    peak = scores.detach().amax(-1, keepdim=True)
    log_mass = (scores - peak).exp().sum(-1, keepdim=True).log()
    p = torch.softmax(scores, -1)
    log_p = (scores - peak - log_mass).masked_fill(scores == -math.inf, 0.0)
    mean, score_mean = p @ value, (p * plain).sum(-1, keepdim=True)
    return {
        "mean": mean,
        "log_normalizer": (peak + log_mass)[..., 0],
        "key_mean": p @ key,
        "entropy": -(p * log_p).sum(-1),
        "score_mean": score_mean[..., 0],
        "score_variance": (p * (plain - score_mean) ** 2).sum(-1),
        "value_variance": (p[..., None] * (value[..., None, :, :] - mean[..., None, :]) ** 2).sum(
            -2
        ),
    }


def point(seed, offset, scores="common", groups=1, sizes=(M, N, D)):
    """Queries, keys, values and directions; the scores are about `offset` in size.

    common: the same for all keys of a query. clusters: half of the keys on the other side of the
    origin. spread: different for every key.
    """
    generator = torch.Generator().manual_seed(seed)
    m, n, d = sizes

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    query, key, value = normal(2 * groups, m, d), normal(2, n, d), normal(2, n, d)
    along = torch.nn.functional.normalize(normal(d), dim=0)
    far = offset * math.sqrt(d) / 3 * along
    if scores == "spread":
        query, key = (x * math.sqrt(1 + offset / 4) for x in (query, key))
    elif scores == "clusters":
        side = (-1.0) ** torch.arange(n)[:, None]
        query = query + 3 * along * (-1.0) ** (torch.arange(m) // 3)[:, None]
        key = key + side * far
    else:
        query, key = query + 3 * along, key + far
    directions = tuple(normal(*x.shape) for x in (query, key, value))
    return (query, key, value), directions


def cotangent(x):
    """Constant, and the same number in every precision."""
    return torch.arange(x.numel(), dtype=torch.float64).sin().float().to(x.dtype).view(x.shape)


def error(found, truth):
    """The largest over the results, relative to the largest entry of each."""
    pairs = [(a.double(), b) for a, b in zip(found, truth, strict=True) if b.abs().max() > 0]
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


def compare(field, word, offset, call="plain", scores="common", sizes=(M, N, D)):
    """Medians over seeds of (our error, the yardstick's error)."""
    ours_options, dense_options = CALLS[call]
    groups = dense_options.get("groups", 1)

    def ours(*xs):
        return (getattr(cm.attend(*xs, **ours_options), field),)

    def yardstick(*xs):
        return (dense(*xs, **dense_options)[field],)

    errors = []
    for seed in range(SEEDS):
        xs, ts = point(seed, offset, scores, groups, sizes)
        wide = tuple(x.double() for x in xs), tuple(t.double() for t in ts)
        truth = differentiate(yardstick, word, wide[1], cotangent)(*wide[0])
        errors.append(
            [error(differentiate(f, word, ts, cotangent)(*xs), truth) for f in (ours, yardstick)]
        )
    return [statistics.median(column) for column in zip(*errors, strict=True)]


# Rounding decides which of two scores is the largest, so its derivatives jump.
SMOOTH = tuple(name for name in FIELDS if name != "score_max")


def assert_as_precise(word, offset, call="plain", scores="common", sizes=(M, N, D), fields=SMOOTH):
    worse = []
    for field in fields:
        ours, yardstick = compare(field, word, offset, call, scores, sizes)
        if ours > 3 * yardstick + 1e-6:
            worse.append(f"{field}: {ours:.1e}, dense {yardstick:.1e}")
    assert not worse, "; ".join(worse)


@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("word", ["", "F", "R", *SECOND, "FRR"])
def test_scores_with_a_common_part(word, offset):
    assert_as_precise(word, offset)


@pytest.mark.parametrize("offset", [5.0, 20.0, 60.0])
@pytest.mark.parametrize("call", ["plain", "causal", "grouped"])
def test_torchs_fused_gradient(call, offset):
    """Its backward pass cuts rows elsewhere than its forward pass if there are enough keys."""
    sizes = (64, 300, 32)
    assert_as_precise("R", offset, call, sizes=sizes, fields=("mean", "key_mean"))


@pytest.mark.parametrize("word", ["", "F", "R", "FF", "RR"])
@pytest.mark.parametrize("call", [c for c in CALLS if c != "plain"])
def test_masks_biases_and_grouped_heads(word, call):
    assert_as_precise(word, 1000.0, call)


@pytest.mark.parametrize("word", ["", "F", "R", *SECOND])
@pytest.mark.parametrize("offset", [300.0, 1e4])
@pytest.mark.parametrize("scores", ["clusters", "spread"])
def test_large_scores_that_no_shift_makes_small(word, offset, scores):
    assert_as_precise(word, offset, scores=scores)


def test_score_mean_keeps_its_digits():
    """At scores of 1000 that spread by 2, the mean is off by their rounding, not by tenths."""
    (query, key, value), _ = point(0, 1000.0)
    found = cm.attend(query, key, value).score_mean
    wide = [x.double() for x in (query, key, value)]
    assert (found - dense(*wide)["score_mean"]).abs().max() < 2e-3


@pytest.mark.parametrize("scores", ["common", "clusters", "spread"])
@pytest.mark.parametrize("word", ["F", "R", "FF", "RR"])
def test_rows_too_long_for_one_tile_are_whole_where_that_shows(word, scores, monkeypatch):
    monkeypatch.setattr(kernel, "_LARGEST_STRIP", 0)
    assert_as_precise(word, 300.0, scores=scores, fields=("mean", "entropy", "score_variance"))


def test_rows_too_long_for_one_tile_under_vmap(monkeypatch):
    """Where nobody can ask how large G is, rows are whole."""
    monkeypatch.setattr(kernel, "_LARGEST_STRIP", 0)
    (query, key, value), (tangent, *_) = point(0, 300.0)

    def one(f, query, key, value, tangent):
        return torch.func.jvp(lambda q: f(q, key, value), (query,), (tangent,))[1]

    given = (query, key, value, tangent)
    found = torch.vmap(partial(one, lambda *xs: cm.attend(*xs).mean))(*given)
    plain, truth = (
        torch.vmap(partial(one, lambda *xs: dense(*xs)["mean"]))(*(x.to(d) for x in given))
        for d in (torch.float32, torch.float64)
    )
    assert error([found], [truth]) <= 3 * error([plain], [truth]) + 1e-6


def test_hidden_keys_are_no_part_of_what_keys_have_in_common():
    """Most keys are hidden and far away: the first gradient is as precise as without them."""
    (query, key, value), _ = point(0, 0.0, sizes=(40, 300, 32))
    seen = torch.zeros(40, 300, dtype=torch.bool)
    seen[:, :50] = True
    for far in (100.0, 1e30, math.inf, math.nan):
        spoiled = torch.where(seen[0, :, None], key, far)
        q = query.clone().requires_grad_()
        out = cm.scaled_dot_product_attention(q, spoiled, value, attn_mask=seen)
        wide = query.double().requires_grad_()
        exact = dense(wide, key[:, :50].double(), value[:, :50].double())["mean"]
        found, truth = (
            torch.autograd.grad(y, x, cotangent(y))[0] for x, y in ((q, out), (wide, exact))
        )
        assert error([found], [truth]) < 3e-6


@pytest.mark.parametrize("word", ["", "F", "R", "FF", "RR", "FR", "RF", "FFR"])
@pytest.mark.usefixtures("small_tiles")
def test_rows_too_long_for_one_tile(word, monkeypatch):
    """Parts of rows are told G and the means; the derivatives are the same."""
    monkeypatch.setattr(kernel, "_LARGEST_STRIP", 0)
    xs, ts = point(0, 0.0)
    xs, ts = (tuple(x.double()[:1, :5] for x in group) for group in (xs, ts))
    fields = ("mean", "log_normalizer", "entropy", "score_variance")

    def ours(*xs):
        a = cm.attend(*xs, window=(1, 2))
        return tuple(getattr(a, f) for f in fields)

    def oracle(*xs):
        a = dense(*xs, mask=band_mask(5, 5, -1, 2))
        return tuple(a[f] for f in fields)

    assert_close(*(differentiate(f, word, ts, cotangent)(*xs) for f in (ours, oracle)), 1e-10)


@pytest.mark.parametrize("name", ["native", "torch"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_on_the_cpu_is_float32_rounded_once(dtype, name):
    """Bit by bit, with the gradient: only engines that compute in half precision are given it."""
    generator = torch.Generator().manual_seed(0)
    halves = [torch.randn(n, D, generator=generator).to(dtype) for n in (M, N, N)]
    bias = BIAS.to(dtype)

    def fields(xs, given):
        xs = [x.clone().requires_grad_() for x in xs]
        a = cm.attend(*xs, attn_mask=given)
        seeds = torch.ones_like(a.mean), torch.ones_like(a.log_normalizer)
        first = torch.autograd.grad((a.mean, a.log_normalizer), xs, seeds, create_graph=True)
        second = torch.autograd.grad(first, xs, [torch.ones_like(x) for x in first])
        return [a.mean, *first, *second], [a.log_normalizer, a.entropy]

    for given in (None, bias):
        with cm.engine(name):
            narrow, columns = fields(halves, given)
            wider = None if given is None else bias.float()
            wide, levels = fields([x.float() for x in halves], wider)
        assert all(torch.equal(x, y.to(dtype)) for x, y in zip(narrow, wide, strict=True))
        assert all(torch.equal(x, y) for x, y in zip(columns, levels, strict=True))
