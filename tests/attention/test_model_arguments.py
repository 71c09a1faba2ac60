"""softcap, sink and dropout_p of `attend`, as models use them, against attention written out."""

from __future__ import annotations

import importlib
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import grad, jacrev, vmap

import cumulant as cm
from cumulant.attention.inputs import prepare
from cumulant.kernels.attention import attention
from oracle import (
    FIELDS,
    LEVELS,
    assert_close,
    band_mask,
    cotangent,
    dense,
    differentiate,
    directions,
    finite,
)

DOUBLE = torch.float64
B, H, M, N, D, E = 2, 2, 3, 4, 2, 3


def normal(*shape, seed=0, dtype=DOUBLE):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def qkv(m=M, n=N, heads=H, dtype=DOUBLE):
    return [
        normal(B, h, rows, width, seed=s, dtype=dtype)
        for s, (h, rows, width) in enumerate([(heads, m, D), (H, n, D), (H, n, E)])
    ]


def boolean(m=M, n=N):
    mask = torch.rand(B, H, m, n, generator=torch.Generator().manual_seed(3)) > 0.4
    mask[0, 0, 1] = False  # a query that sees no key
    return mask


# name: (arguments of `attend`, of the oracle)
MASKS = {
    "none": ({}, {}),
    "causal": ({"is_causal": True}, {"mask": band_mask(M, N, upper=0)}),
    "window": ({"window": (1, 0)}, {"mask": band_mask(M, N, lower=-1, upper=0)}),
    "boolean": ({"attn_mask": boolean()}, {"mask": boolean()}),
    "additive": ({"attn_mask": normal(H, M, N)}, {"bias": normal(H, M, N)}),
}
# name: (what `attend` is given, what broadcasts to (*batch, M))
SINKS = {
    "number": (0.7, torch.full((), 0.7, dtype=DOUBLE)),
    "heads": (normal(H), normal(H)[:, None]),
    "queries": (normal(B, H, M), normal(B, H, M)),
    "rows": (normal(1, M), normal(1, M)),
    "none": (None, None),
}


@pytest.mark.parametrize("softcap", [None, 0.8])
@pytest.mark.parametrize("kind", SINKS)
@pytest.mark.parametrize("mask", MASKS)
def test_every_field_is_that_of_dense_attention(mask, kind, softcap):
    (ours, theirs), (sink, logits) = MASKS[mask], SINKS[kind]
    a = cm.attend(*qkv(), sink=sink, softcap=softcap, **ours)
    b = dense(*qkv(), sink=logits, softcap=softcap, **theirs)
    pairs = ([finite(getattr(x, n)) for n in FIELDS] for x in (a, b))
    assert_close(*pairs, 1e-12)


# ---------------------------------------------------------------------------------- derivatives

WORDS = [word for order in (1, 2, 3) for word in directions(order)]
CALLS = {
    "sink": ("none", None, True),
    "softcap": ("causal", 0.8, False),
    "both": ("boolean", 0.8, True),
    "bias": ("additive", None, True),
}


def pair(call, fields):
    """(ours, the oracle): maps of query, key, value and sink to some fields."""
    mask, softcap, sunk = CALLS[call]
    ours, theirs = MASKS[mask]

    def attended(q, k, v, s):
        a = cm.attend(q, k, v, sink=s if sunk else None, softcap=softcap, **ours)
        return tuple(finite(getattr(a, n)) for n in fields)

    def written_out(q, k, v, s):
        sink = s[:, None] if sunk else None
        b = dense(q, k, v, sink=sink, softcap=softcap, **theirs)
        return tuple(finite(getattr(b, n)) for n in fields)

    return attended, written_out


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("word", WORDS)
def test_derivatives_through_third_order(word, call):
    """Of all fields at once, in all of query, key, value and sink."""
    given = (*qkv(), normal(H, seed=9))
    tangents = tuple(normal(*x.shape, seed=20 + i) for i, x in enumerate(given))
    ours, theirs = (differentiate(f, word, tangents, cotangent) for f in pair(call, FIELDS))
    assert_close(ours(*given), theirs(*given), 1e-9)


def test_the_sink_under_vmap_and_jacrev():
    q, k, v = (x[0, 0] for x in qkv())
    sinks = normal(5)
    f = lambda s: cm.attend(q, k, v, sink=s).log_normalizer
    expected = [(s - dense(q, k, v, sink=s).log_normalizer).exp() for s in sinks]
    torch.testing.assert_close(vmap(jacrev(f))(sinks), torch.stack(expected))


def test_backward_reaches_a_parameter():
    """dL/ds = sum of p_sink (0 - <g, mean>) for a cotangent g of the mean."""
    q, k, v = qkv()
    sink = normal(H).requires_grad_()
    a = cm.attend(q, k, v, sink=sink)
    (ours,) = torch.autograd.grad(a.mean.sum(), sink)
    weight = (sink[:, None] - a.log_normalizer).exp()
    expected = -(weight * a.mean.sum(-1)).sum((0, 2))
    torch.testing.assert_close(ours, expected.detach())


# ------------------------------------------------------------------------------------- meaning


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**31), st.floats(-30, 30), st.integers(1, 6))
def test_a_sink_is_one_more_set_of_keys(seed, logit, n):
    """With w = e^(s - G): G = log(e^G' + e^s), and the fields mix as those of disjoint sets do."""
    q, k, v = normal(3, D, seed=seed), normal(n, D, seed=seed + 1), normal(n, E, seed=seed + 2)
    a, b = cm.attend(q, k, v, sink=logit), cm.attend(q, k, v)
    G = torch.logaddexp(b.log_normalizer, torch.tensor(logit, dtype=DOUBLE))
    p, w = (b.log_normalizer - G).exp(), (logit - G).exp()
    expected = {
        "mean": p[:, None] * b.mean,
        "log_normalizer": G,
        "key_mean": p[:, None] * b.key_mean,
        "entropy": p * b.entropy - p * (b.log_normalizer - G) - w * (logit - G),
        "score_mean": p * b.score_mean,
        "score_variance": p * b.score_variance + p * w * b.score_mean**2,
        "value_variance": p[:, None] * b.value_variance + (p * w)[:, None] * b.mean**2,
        "score_max": b.score_max,
    }
    for name in FIELDS:
        torch.testing.assert_close(getattr(a, name), expected[name], rtol=1e-9, atol=1e-9)


def test_key_mean_and_score_variance_are_derivatives_of_the_normalizer():
    """E[k] is the gradient of G in scale q; Var[s] the second derivative in a factor of all
    scores, which leaves the sink's logit alone."""
    (q, k), sink, scale = (x[0, 0] for x in qkv()[:2]), torch.tensor(0.4, dtype=DOUBLE), 0.7

    def normalizer(q, factor):
        scores = factor * scale * (q @ k.mT)
        return torch.cat([scores, sink[None]]).logsumexp(0)

    a, one = cm.attend(q, k, sink=sink, scale=scale), torch.ones((), dtype=DOUBLE)
    for i in range(M):
        torch.testing.assert_close(a.key_mean[i], grad(normalizer)(q[i], one) / scale)
        twice = grad(grad(normalizer, 1), 1)(q[i], one)
        torch.testing.assert_close(a.score_variance[i], twice)
        torch.testing.assert_close(a.score_mean[i], grad(normalizer, 1)(q[i], one))


def test_a_softcap_bounds_the_scores_and_a_large_one_does_nothing():
    q, k, v = qkv()
    a = cm.attend(50 * q, 50 * k, v, softcap=0.5)
    assert (a.score_mean.abs() <= 0.5).all()
    assert (a.log_normalizer <= math.log(N) + 0.5).all()
    assert_close([cm.attend(q, k, v, softcap=1e7).mean], [cm.attend(q, k, v).mean], 1e-12)


class TestEdges:
    def test_a_sink_of_minus_infinity_is_none(self):
        a, b = cm.attend(*qkv(), sink=-math.inf), cm.attend(*qkv())
        assert_close([getattr(a, n) for n in FIELDS], [getattr(b, n) for n in FIELDS], 1e-13)

    def test_a_huge_sink_takes_all(self):
        a = cm.attend(*qkv(), sink=1e6)
        assert (a.log_normalizer == 1e6).all()
        for name in set(FIELDS) - {*LEVELS}:
            assert (getattr(a, name) == 0).all(), name

    @pytest.mark.parametrize("how", ["no keys", "masked"])
    def test_without_keys_the_sink_is_the_measure(self, how):
        q, k, v = (x.requires_grad_() for x in qkv(n=0 if how == "no keys" else N))
        sink = normal(H).requires_grad_()
        options = {} if how == "no keys" else {"attn_mask": torch.zeros(M, N, dtype=torch.bool)}
        a = cm.attend(q, k, v, sink=sink, **options)
        torch.testing.assert_close(a.log_normalizer, sink[:, None].expand(B, H, M))
        assert (a.score_max == -math.inf).all()
        for name in set(FIELDS) - {*LEVELS}:
            assert (getattr(a, name) == 0).all(), name
        total = sum(finite(getattr(a, name)).sum() for name in FIELDS)
        *others, own = torch.autograd.grad(total, (q, k, v, sink), materialize_grads=True)
        assert all((g == 0).all() for g in others)
        torch.testing.assert_close(own, torch.full((H,), float(B * M), dtype=DOUBLE))

    def test_a_bias_far_from_zero_meets_the_sink_exactly(self):
        """One number added to all scores and to the sink changes G alone."""
        bias = torch.full((M, N), -3e5, dtype=torch.float32)
        given = [x.float() for x in qkv()]
        a = cm.attend(*given, attn_mask=bias, sink=-3e5 + 0.5)
        b = cm.attend(*given, sink=0.5)
        for name in set(FIELDS) - {*LEVELS}:
            torch.testing.assert_close(getattr(a, name), getattr(b, name), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(a.score_max, b.score_max - 3e5)

    def test_values_are_the_keys_by_default(self):
        q, k, _ = qkv()
        a, b = cm.attend(q, k, sink=0.3), dense(q, k, k, sink=torch.tensor(0.3, dtype=DOUBLE))
        assert_close([a.mean, a.key_mean], [b.mean, b.key_mean], 1e-12)

    def test_one_dimension_is_one_of_heads_even_where_lengths_agree(self):
        q, k, v = qkv(m=H)
        sink = normal(H)
        a, b = cm.attend(q, k, v, sink=sink), cm.attend(q, k, v, sink=sink[:, None])
        torch.testing.assert_close(a.mean, b.mean)
        a = cm.attend(q[0, 0], k[0, 0], v[0, 0], sink=sink)  # no heads: one for each query
        b = dense(q[0, 0], k[0, 0], v[0, 0], sink=sink)
        torch.testing.assert_close(a.mean, b.mean)

    def test_a_changed_sink_is_noticed(self):
        sink = normal(H)
        a = cm.attend(*qkv(), sink=sink)
        sink += 1
        with pytest.raises(cm.InputError, match="the sink was changed in place"):
            _ = a.mean


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_precision(dtype):
    """Half precision in, the same out; the logits may be more precise than the queries."""
    given = [x.to(dtype) for x in qkv()]
    logits = normal(H, seed=9)
    a = cm.attend(*given, sink=logits.float(), softcap=2.0)
    b = dense(*(x.double() for x in given), sink=logits[:, None], softcap=2.0)
    assert a.mean.dtype == a.key_mean.dtype == a.value_variance.dtype == dtype
    assert a.log_normalizer.dtype == a.entropy.dtype == torch.float32
    tolerance = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    for name in FIELDS:
        found, expected = getattr(a, name).double(), getattr(b, name)
        tight = found.dim() == 3  # scalars are float32
        assert_close([found], [expected], 2e-6 if tight else tolerance)


# ---------------------------------------------------------------- grouped heads, merging, packing


@pytest.mark.parametrize("kind", ["heads", "queries"])
def test_grouped_heads(kind):
    q, k, v = qkv(heads=6)
    sink = normal(6) if kind == "heads" else normal(B, 6, M)
    a = cm.attend(q, k, v, enable_gqa=True, sink=sink, softcap=0.8, is_causal=True)
    k, v = (x.repeat_interleave(3, 1) for x in (k, v))
    logits = sink[:, None] if kind == "heads" else sink
    b = dense(q, k, v, sink=logits, softcap=0.8, mask=band_mask(M, N, upper=0))
    assert_close([getattr(a, n) for n in FIELDS], [getattr(b, n) for n in FIELDS], 1e-12)


def test_merge_counts_the_sink_of_one_part():
    q, k, v = qkv(n=9)
    sink = normal(H)
    whole = cm.attend(q, k, v, sink=sink, softcap=1.5)
    total = cm.attend(q, k[:, :, :3], v[:, :, :3], sink=sink, softcap=1.5)
    for i in (3, 6):
        part = slice(i, i + 3)
        total = cm.merge(total, cm.attend(q, k[:, :, part], v[:, :, part], softcap=1.5))
    assert_close([getattr(total, n) for n in FIELDS], [getattr(whole, n) for n in FIELDS], 1e-12)


@pytest.mark.parametrize("kind", ["number", "heads", "queries"])
def test_packed_sequences(kind):
    q, k, v = normal(H, 7, D), normal(H, 7, D, seed=1), normal(H, 7, E, seed=2)
    sink = {"number": 0.3, "heads": normal(H), "queries": normal(H, 7)}[kind]
    a = cm.attend_packed(q, k, v, query_offsets=[0, 3, 7], sink=sink, softcap=0.8, is_causal=True)
    for part in (slice(0, 3), slice(3, 7)):
        own = sink[:, part] if kind == "queries" else sink
        args = (x[:, part] for x in (q, k, v))
        b = cm.attend(*args, sink=own, softcap=0.8, is_causal=True)
        for name in FIELDS:
            torch.testing.assert_close(getattr(a, name)[:, part], getattr(b, name))


# --------------------------------------------------------------------------- models' own formulas


@pytest.mark.parametrize("sunk", [True, False])
def test_transformers_own_eager_attention(sunk):
    """gpt-oss (sinks) and Gemma 2 (softcap), as transformers writes them out."""
    q, k, v = (x.float() for x in qkv(heads=4))
    mask = torch.zeros(M, N).masked_fill(~band_mask(M, N, upper=0), torch.finfo(torch.float32).min)
    sinks = normal(4).float()
    module = SimpleNamespace(num_key_value_groups=2, sinks=sinks, training=False)
    name = "gpt_oss" if sunk else "gemma2"
    theirs = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    own = {} if sunk else {"softcap": 0.6}
    expected, _ = theirs.eager_attention_forward(module, q, k, v, mask, scaling=0.7, **own)
    ours = cm.attend(
        q, k, v, scale=0.7, enable_gqa=True, attn_mask=mask, sink=sinks if sunk else None, **own
    )
    torch.testing.assert_close(ours.mean.transpose(1, 2), expected)


# -------------------------------------------------------------------------------------- dropout


def weights_of(rate, seed, **options):
    q, k, _ = qkv(n=200)
    torch.manual_seed(seed)
    return cm.attend(q, k, torch.eye(200, dtype=DOUBLE), dropout_p=rate, **options)


class TestDropout:
    """With the identity as values, ``mean`` is the matrix of weights that was applied."""

    @pytest.mark.parametrize("options", [{}, {"sink": 1.0}, {"softcap": 0.5}])
    def test_weights_are_dropped_or_scaled_up(self, options):
        whole, some = weights_of(0.0, 0, **options), weights_of(0.25, 0, **options)
        kept = some.mean != 0
        torch.testing.assert_close(some.mean, torch.where(kept, whole.mean / 0.75, 0.0))
        share, pairs = kept.double().mean().item(), kept.numel()
        assert abs(share - 0.75) < 5 * math.sqrt(0.75 * 0.25 / pairs)

    def test_all_other_fields_know_no_dropout(self):
        whole, some = weights_of(0.0, 0, sink=0.5), weights_of(0.25, 0, sink=0.5)
        for name in set(FIELDS) - {"mean"}:
            torch.testing.assert_close(getattr(some, name), getattr(whole, name))

    def test_the_keys_mean_stays_the_gradient_where_values_are_the_keys(self):
        q, k, _ = qkv()
        a = cm.attend(q, k, dropout_p=0.5)
        torch.testing.assert_close(a.key_mean, dense(q, k, k).key_mean)

    def test_one_pattern_for_value_and_derivatives(self):
        q, k, _ = qkv(n=20)

        def applied(k):
            torch.manual_seed(5)
            return cm.attend(q, k, torch.eye(20, dtype=DOUBLE), dropout_p=0.5, sink=0.2).mean

        kept = (applied(k) != 0) * 2.0

        def written_out(k):
            return dense(q, k, torch.eye(20, dtype=DOUBLE), sink=torch.full((), 0.2)).mean * kept

        for word in ("F", "R", "RF", "RR"):
            tangent = (normal(*k.shape, seed=4),)
            pairs = [
                differentiate(lambda k, f=f: (f(k),), word, tangent, cotangent)(k)
                for f in (applied, written_out)
            ]
            assert_close(*pairs, 1e-9)

    def test_seeds_are_torchs(self):
        a, b, c = weights_of(0.5, 0), weights_of(0.5, 0), weights_of(0.5, 1)
        assert torch.equal(a.mean, b.mean)
        assert not torch.equal(a.mean, c.mean)

    def test_packed(self):
        x = normal(6, D)
        a = cm.attend_packed(x, x, query_offsets=[0, 3, 6], dropout_p=1.0)
        assert (a.mean == 0).all()


# ---------------------------------------------------------------------------------- the builder


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", ["heads", "queries"])
@pytest.mark.parametrize("groups", [1, 3])
def test_the_sink_as_a_key_is_the_same_measure(mask, kind, groups):
    """For readers of single weights the sink is key 0; windows and lifted biases included."""
    options, theirs = MASKS[mask]
    if mask == "additive":
        options = {"attn_mask": options["attn_mask"] - 1e3}
        theirs = {"bias": theirs["bias"] - 1e3}
    if groups == 3 and mask in ("additive", "boolean"):
        options, theirs = ({n: x[..., :1, :, :] for n, x in o.items()} for o in (options, theirs))
    q, k, v = qkv(heads=H * groups)
    sink = normal(H * groups) if kind == "heads" else normal(B, H * groups, M)
    call = prepare("attend", q, k, v, sink=sink, enable_gqa=groups > 1, **options).sink_as_key()
    done = attention(call.arguments, call.options)
    G = done.log_normalizer if call.lift is None else done.log_normalizer + call.lift
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    b = dense(q, k, v, sink=sink[:, None] if kind == "heads" else sink, **theirs)
    assert_close([call.finish(done.mean)], [b.mean], 1e-12)
    assert_close([call.finish(G)[..., 0]], [b.log_normalizer], 1e-12)


def test_a_mask_together_with_a_bias():
    q, k, v = qkv()
    bias, mask = normal(H, M, N), boolean()
    call = prepare("attend", q, k, v, attn_mask=mask, bias=bias)
    b = dense(q, k, v, mask=mask, bias=bias)
    assert_close([attention(call.arguments, call.options).mean], [b.mean], 1e-12)
    with pytest.raises(cm.InputError, match="attn_mask must be boolean"):
        prepare("attend", q, k, v, attn_mask=bias, bias=bias)


BAD = {
    "softcap zero": ({"softcap": 0.0}, r"softcap must be a finite number > 0.*softcap=0\.0"),
    "softcap infinite": ({"softcap": math.inf}, "softcap must be a finite number > 0"),
    "softcap kind": ({"softcap": "2"}, "softcap must be a finite number > 0"),
    "sink shape": ({"sink": torch.zeros(5)}, r"for each of 2 heads.*\(2, 2, 3\).*sink=\(5,\)"),
    "sink grows": ({"sink": torch.zeros(1, 2, 2, 3)}, "sink must be"),
    "sink kind": ({"sink": "heads"}, "sink must be a number or a real tensor, not 'heads'"),
    "sink integers": ({"sink": torch.zeros(2).long()}, "real tensor"),
    "sink device": ({"sink": torch.zeros(2, device="meta")}, "device"),
    "dropout": ({"dropout_p": 1.5}, r"dropout_p must lie in \[0, 1\]"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_restates_the_call(case):
    options, message = BAD[case]
    with pytest.raises(cm.InputError, match=message) as raised:
        cm.attend(*qkv(), **options)
    assert "Got attend(query=(2, 2, 3, 2) float64" in str(raised.value)
