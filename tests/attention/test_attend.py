"""`attend`, `merge` and packed sequences: defined answers, awkward input, agreement with dense."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cumulant as cm
from oracle import FIELDS, LEVELS, assert_close, band_mask, dense, finite

DOUBLE = torch.float64


def normal(*shape):
    return torch.randn(*shape, dtype=DOUBLE)


def all_fields(a):
    return {name: getattr(a, name) for name in FIELDS}


class TestWithoutKeys:
    """An empty key set or a fully masked row: G = -inf, zeros elsewhere, zero gradients."""

    @pytest.mark.parametrize("how", ["no keys", "boolean", "additive", "shared", "window"])
    def test_values_and_gradients(self, how):
        n = 0 if how == "no keys" else 4
        q, k, v = (x.requires_grad_() for x in (normal(2, 3, 2), normal(2, n, 2), normal(2, n, 5)))
        options = {
            "no keys": {},
            "boolean": {"attn_mask": torch.zeros(3, 4, dtype=torch.bool)},
            "additive": {"attn_mask": torch.full((3, 4), -math.inf, dtype=DOUBLE)},
            "shared": {"attn_mask": torch.zeros(1, 4, dtype=torch.bool)},
            "window": {"window": (0, 0), "attn_mask": ~torch.eye(3, 4, dtype=torch.bool)},
        }[how]
        a = cm.attend(q, k, v, **options)
        for name, x in all_fields(a).items():
            expected = -math.inf if name in LEVELS else 0.0
            assert (x == expected).all(), name
        total = sum(finite(x).sum() for x in all_fields(a).values())
        first = torch.autograd.grad(total, (q, k, v), create_graph=True, materialize_grads=True)
        for g in first:
            assert (g == 0).all()

    def test_one_dead_row_leaves_the_others_alone(self):
        q, k, v = normal(3, 2), normal(4, 2), normal(4, 5)
        mask = torch.ones(3, 4, dtype=torch.bool)
        mask[1] = False
        a, b = cm.attend(q, k, v, attn_mask=mask), cm.attend(q, k, v)
        for name in FIELDS:
            x, y = getattr(a, name), getattr(b, name)
            torch.testing.assert_close(x[[0, 2]], y[[0, 2]])

    def test_single_precision_takes_the_fused_operator_and_agrees(self):
        q, k, v = (torch.randn(1, 2, 3, 4, requires_grad=True) for _ in range(3))
        bias = torch.zeros(3, 3)
        bias[1] = -math.inf
        a = cm.attend(q, k, v, attn_mask=bias)
        assert (a.log_normalizer[..., 1] == -math.inf).all()
        assert (a.mean[..., 1, :] == 0).all()
        for g in torch.autograd.grad(a.mean.sum() + finite(a.log_normalizer).sum(), (q, k, v)):
            assert g.isfinite().all()

    def test_a_true_zero_is_not_mistaken_for_an_empty_row(self):
        """One visible key with score 0 has G = log 1 = 0, which torch's operator also reports
        for an empty row."""
        q, k = torch.zeros(1, 1, 2, 4), torch.randn(1, 1, 3, 4)
        mask = torch.tensor([[True, False, False], [False, False, False]])
        a = cm.attend(q, k, attn_mask=mask)
        assert a.log_normalizer.flatten().tolist() == [0.0, -math.inf]


class TestNotANumber:
    def test_a_nan_query_spoils_its_own_row_only(self):
        q, k, v = normal(4, 3), normal(5, 3), normal(5, 2)
        clean = cm.attend(q, k, v)
        spoiled = q.clone()
        spoiled[1, 0] = math.nan
        a = cm.attend(spoiled, k, v)
        for name in ("mean", "log_normalizer", "entropy"):
            x, y = getattr(a, name), getattr(clean, name)
            assert x[1].isnan().all()
            torch.testing.assert_close(x[[0, 2, 3]], y[[0, 2, 3]])

    @pytest.mark.parametrize("kind", ["boolean", "additive", "causal"])
    @pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
    def test_a_removed_key_may_hold_anything(self, kind, garbage, dtype):
        q, k, v = (torch.randn(1, 1, 4, 3, dtype=dtype) for _ in range(3))
        mask = band_mask(4, 4, upper=0) if kind == "causal" else torch.ones(4, 4) > 0
        mask[:3, 3] = False  # only the last query may see the last key
        bias = torch.zeros(4, 4, dtype=dtype).masked_fill(~mask, -math.inf)
        options = {
            "boolean": {"attn_mask": mask},
            "additive": {"attn_mask": bias},
            "causal": {"is_causal": True},
        }[kind]
        clean = cm.attend(q, k, v, **options)
        k2, v2 = k.clone(), v.clone()
        k2[..., 3, :] = garbage
        v2[..., 3, :] = garbage
        a = cm.attend(q, k2, v2, **options)
        torch.testing.assert_close(a.mean[..., :3, :], clean.mean[..., :3, :])
        torch.testing.assert_close(a.log_normalizer[..., :3], clean.log_normalizer[..., :3])
        assert not a.mean[..., 3, :].isfinite().all()

    @pytest.mark.parametrize("name", ["key", "value"])
    def test_a_nan_tangent_of_a_visible_key_is_not_hidden(self, name):
        """Garbage in hidden keys is left out; NaN that a query does see must show."""
        k, v = normal(4, 3), normal(4, 2)
        k[3], v[3] = math.nan, math.nan
        tangents = {"key": torch.ones_like(k), "value": torch.ones_like(v)}
        tangents["key"][3] = tangents["value"][3] = math.nan
        q = normal(2, 3)
        mask = torch.tensor([[True, True, True, False], [True, False, True, False]])
        f = lambda k, v: cm.attend(q, k, v, attn_mask=mask).mean
        given = (tangents["key"], tangents["value"])
        assert torch.func.jvp(f, (k, v), given)[1].isfinite().all()
        tangents[name][1] = math.nan  # the first query sees key 1, the second does not
        assert torch.func.jvp(f, (k, v), given)[1][0].isnan().all()

    @pytest.mark.parametrize("garbage", [math.nan, math.inf])
    @pytest.mark.parametrize("how", ["shared", "full", "additive", "causal", "window"])
    @pytest.mark.parametrize("names", [FIELDS, tuple(reversed(FIELDS))], ids=["there", "back"])
    def test_garbage_in_padding_reaches_no_field_and_no_gradient(self, garbage, how, names):
        """Keys hidden from all queries: everything equals the call without them."""
        q, k, v = normal(2, 4, 4), normal(2, 5, 4), normal(2, 5, 4)
        k[:, 4], v[:, 4] = garbage, garbage
        mask = torch.tensor([True, True, True, True, False])
        bias = torch.zeros(4, 5, dtype=DOUBLE).masked_fill(~mask, -math.inf)
        options, without = {
            "shared": ({"attn_mask": mask}, {}),
            "full": ({"attn_mask": mask.expand(2, 4, 5)}, {}),
            "additive": ({"attn_mask": bias}, {}),
            "causal": ({"is_causal": True}, {"is_causal": True}),
            "window": ({"window": (2, 0)}, {"window": (2, 0)}),
        }[how]
        leaves = [x.requires_grad_() for x in (q, k, v)]
        a = cm.attend(*leaves, **options)
        total = sum(getattr(a, n).sin().sum() for n in names)
        grads = torch.autograd.grad(total, leaves, create_graph=True)
        second = torch.autograd.grad(sum(g.sin().sum() for g in grads), leaves)
        short = [x.detach()[:, :4].requires_grad_() for x in leaves]
        b = cm.attend(*short, **without)
        for name in FIELDS:
            torch.testing.assert_close(getattr(a, name), getattr(b, name))
        total = sum(getattr(b, n).sin().sum() for n in names)
        expected = torch.autograd.grad(total, short, create_graph=True)
        expected2 = torch.autograd.grad(sum(g.sin().sum() for g in expected), short)
        for ours, theirs in zip((*grads, *second), (*expected, *expected2), strict=True):
            torch.testing.assert_close(ours[:, : theirs.shape[1]], theirs)
            assert (ours[:, theirs.shape[1] :] == 0).all()


def test_minus_infinity_removes_a_key_exactly():
    q, k, v = normal(3, 2), normal(5, 2), normal(5, 4)
    bias = torch.zeros(5, dtype=DOUBLE)
    bias[2] = -math.inf
    kept = [0, 1, 3, 4]
    a, b = cm.attend(q, k, v, attn_mask=bias), cm.attend(q, k[kept], v[kept])
    for name in FIELDS:
        torch.testing.assert_close(getattr(a, name), getattr(b, name), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [1e2, 1e4])
@pytest.mark.parametrize("sign", [1, -1])
def test_large_scores_do_not_overflow(size, sign):
    """float32 scores near +-1e4 against the oracle in float64 on the same numbers."""
    q = torch.full((1, 1), math.sqrt(size)) * sign
    k = torch.linspace(-1, 1, 9)[:, None] * math.sqrt(size)
    v = torch.randn(9, 3)
    a = cm.attend(q, k, v, scale=1.0)
    b = dense(q.double(), k.double(), v.double(), scale=1.0)
    for name in FIELDS:
        x, y = getattr(a, name), getattr(b, name)
        assert x.isfinite().all(), name
        torch.testing.assert_close(x.double(), y, rtol=1e-3, atol=1e-3)


def test_entropy_does_not_cancel_in_single_precision():
    """Scores near 1e4, all equal: the entropy is log N although G is 1e4."""
    q, k = torch.full((1, 1), 100.0), torch.full((64, 1), 100.0)
    a = cm.attend(q, k, scale=1.0)
    assert a.entropy.item() == pytest.approx(math.log(64), abs=1e-5)
    assert a.log_normalizer.item() == pytest.approx(1e4 + math.log(64), abs=2e-3)


def test_value_variance_of_a_peaked_row_in_single_precision():
    """Two keys with weights p and 1-p: Var = p (1-p) (v1-v2)^2, however small p."""
    for log_odds in (2.0, 8.0, 14.0):
        p = 1 / (1 + math.exp(log_odds))
        q, k = torch.ones(1, 1), torch.tensor([[log_odds], [0.0]])
        v = torch.tensor([[3.0], [5.0]])
        a = cm.attend(q, k, v, scale=1.0)
        assert a.value_variance.item() == pytest.approx(4 * p * (1 - p), rel=1e-4)


def test_fields_do_not_depend_on_the_order_of_asking():
    q, k, v = normal(2, 3, 4), normal(2, 5, 4), normal(2, 5, 2)
    forward, backward = cm.attend(q, k, v), cm.attend(q, k, v)
    first = {n: getattr(forward, n) for n in FIELDS}
    second = {n: getattr(backward, n) for n in reversed(FIELDS)}
    for name in FIELDS:
        torch.testing.assert_close(first[name], second[name])
        assert getattr(forward, name) is first[name]


def test_shapes():
    q, k, v = normal(2, 6, 3, 4), normal(2, 2, 5, 4), normal(2, 2, 5, 7)
    a = cm.attend(q, k, v, enable_gqa=True)
    assert a.mean.shape == a.value_variance.shape == (2, 6, 3, 7)
    assert a.key_mean.shape == (2, 6, 3, 4)
    for name in ("log_normalizer", "entropy", "score_mean", "score_variance"):
        assert getattr(a, name).shape == (2, 6, 3)


@pytest.mark.parametrize(
    "shapes",
    [
        ((0, 3, 4), (0, 5, 4)),
        ((2, 0, 4), (2, 5, 4)),
        ((2, 3, 0), (2, 5, 0)),
        ((1, 3, 4), (6, 5, 4)),
        ((2, 1, 3, 4), (3, 5, 4)),
    ],
    ids=str,
)
def test_empty_and_broadcast_batches(shapes):
    q, k = normal(*shapes[0]), normal(*shapes[1])
    v = normal(*shapes[1][:-1], 2)
    a, b = cm.attend(q, k, v), dense(q, k, v, scale=1.0 if q.shape[-1] == 0 else None)
    for name in FIELDS:
        torch.testing.assert_close(getattr(a, name), getattr(b, name))


@settings(deadline=None, max_examples=60)
@given(
    batch=st.lists(st.integers(1, 3), max_size=3).map(tuple),
    m=st.integers(1, 6),
    n=st.integers(1, 7),
    d=st.integers(1, 4),
    e=st.integers(1, 4),
    magnitude=st.sampled_from([1e-6, 1.0, 30.0]),
    mask=st.sampled_from(["none", "boolean", "additive", "causal", "window"]),
    seed=st.integers(0, 2**31),
)
def test_agrees_with_dense_attention(batch, m, n, d, e, magnitude, mask, seed):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=DOUBLE) * magnitude

    q, k, v = draw(*batch, m, d), draw(*batch, n, d), draw(*batch, n, e)
    seen = torch.rand(m, n, generator=generator) > 0.5
    bias = draw(m, n).masked_fill(~seen, -math.inf)
    options, oracle = {
        "none": ({}, {}),
        "boolean": ({"attn_mask": seen}, {"mask": seen}),
        "additive": ({"attn_mask": bias}, {"bias": bias}),
        "causal": ({"is_causal": True}, {"mask": band_mask(m, n, upper=0)}),
        "window": ({"window": (1, 2)}, {"mask": band_mask(m, n, lower=-1, upper=2)}),
    }[mask]
    a, b = cm.attend(q, k, v, **options), dense(q, k, v, **oracle)
    for name in FIELDS:
        assert_close([finite(getattr(a, name))], [finite(getattr(b, name))], 1e-10)


class TestMerge:
    @pytest.mark.parametrize("cut", [0, 1, 4, 7])
    def test_joins_disjoint_keys_exactly(self, cut):
        q, k, v = normal(2, 3, 4), normal(2, 7, 4), normal(2, 7, 5)
        parts = cm.merge(cm.attend(q, k[:, :cut], v[:, :cut]), cm.attend(q, k[:, cut:], v[:, cut:]))
        whole = cm.attend(q, k, v)
        for name in FIELDS:
            torch.testing.assert_close(getattr(parts, name), getattr(whole, name))

    def test_is_a_monoid(self):
        q = normal(3, 4)
        a, b, c = (cm.attend(q, normal(n, 4), normal(n, 2)) for n in (2, 5, 3))
        nothing = cm.attend(q, normal(0, 4), normal(0, 2))
        left, right = cm.merge(cm.merge(a, b), c), cm.merge(a, cm.merge(b, c))
        for name in FIELDS:
            torch.testing.assert_close(getattr(left, name), getattr(right, name))
            torch.testing.assert_close(getattr(cm.merge(a, nothing), name), getattr(a, name))
            x = getattr(cm.merge(nothing, nothing), name)
            assert not x.isnan().any()

    def test_derivatives_to_second_order(self):
        q, k, v = (x.requires_grad_() for x in (normal(3, 4), normal(7, 4), normal(7, 5)))
        hidden = torch.ones(3, 4, dtype=torch.bool)
        hidden[1] = False  # one query sees nothing of the first part
        mask = torch.cat([hidden, torch.ones(3, 3, dtype=torch.bool)], 1)

        def split():
            first = cm.attend(q, k[:4], v[:4], attn_mask=hidden)
            return cm.merge(first, cm.attend(q, k[4:], v[4:]))

        results = []
        for a in (split(), cm.attend(q, k, v, attn_mask=mask)):
            total = sum(getattr(a, n).sin().sum() for n in FIELDS)
            first = torch.autograd.grad(total, (q, k, v), create_graph=True)
            second = torch.autograd.grad(sum(g.sin().sum() for g in first), (q, k, v))
            results.append([*first, *second])
        assert_close(*results, 1e-10)

    def test_different_widths_are_refused(self):
        q = normal(3, 4)
        joined = cm.merge(cm.attend(q, q, normal(3, 2)), cm.attend(q, q, normal(3, 5)))
        with pytest.raises(cm.InputError, match="values of one width"):
            _ = joined.mean

    def test_different_precisions_are_refused(self):
        q = normal(3, 4)
        with pytest.raises(cm.InputError, match="one dtype"):
            cm.merge(cm.attend(q, q), cm.attend(q.float(), q.float()))

    def test_only_results_are_taken(self):
        q = normal(3, 4)
        with pytest.raises(cm.InputError, match="not a Tensor"):
            cm.merge(cm.attend(q, q), q)

    def test_different_queries_are_refused(self):
        a, b = cm.attend(normal(3, 4), normal(5, 4)), cm.attend(normal(2, 4), normal(5, 4))
        with pytest.raises(cm.InputError, match=r"\(3,\) and \(2,\)"):
            cm.merge(a, b)

    def test_decoding_with_a_cache(self):
        """One token at a time, past joined with the new key: the causal answer at each step."""
        x = normal(2, 6, 4)
        whole = cm.attend(x, x, is_causal=True)
        for t in range(1, 6):
            query = x[:, t : t + 1]
            past = cm.attend(query, x[:, :t])
            now = cm.merge(past, cm.attend(query, query))
            torch.testing.assert_close(now.mean[:, 0], whole.mean[:, t])
            torch.testing.assert_close(now.log_normalizer[:, 0], whole.log_normalizer[:, t])


class TestPacked:
    def test_equals_a_block_diagonal_mask(self):
        lengths, key_lengths = [3, 0, 4], [2, 3, 5]
        rows, columns = [0, 3, 3, 7], torch.tensor([0, 2, 5, 10])
        q, k, v = normal(2, 7, 4), normal(2, 10, 4), normal(2, 10, 3)
        blocks = [torch.ones(a, b) for a, b in zip(lengths, key_lengths, strict=True)]
        mask = torch.block_diag(*blocks) > 0
        a = cm.attend_packed(q, k, v, query_offsets=rows, key_offsets=columns)
        b = cm.attend(q, k, v, attn_mask=mask)
        for name in FIELDS:
            torch.testing.assert_close(getattr(a, name), getattr(b, name))

    @pytest.mark.parametrize(
        "offsets",
        [[0, 3], [1, 7], [0, 5, 4, 7], [0], [], [0, 2.5, 7], torch.zeros(2, 2), 7],
        ids=str,
    )
    def test_bad_offsets(self, offsets):
        with pytest.raises(cm.InputError, match="query_offsets must be integers that rise"):
            cm.attend_packed(normal(7, 4), normal(7, 4), query_offsets=offsets)

    def test_keys_and_values_must_agree(self):
        with pytest.raises(cm.InputError, match="same packed length"):
            cm.attend_packed(normal(7, 4), normal(7, 4), normal(8, 4), query_offsets=[0, 7])

    def test_counts_must_agree(self):
        with pytest.raises(cm.InputError, match="same number of sequences"):
            cm.attend_packed(
                normal(7, 4), normal(7, 4), query_offsets=[0, 7], key_offsets=[0, 3, 7]
            )


@pytest.mark.parametrize("window", [(-1, 0), 3, (3,), (1, 2, 3), (2.0, 0), "ab"])
def test_bad_window(window):
    with pytest.raises(cm.InputError, match=r"\(left, right\).*window="):
        cm.attend(normal(3, 4), normal(3, 4), window=window)


def test_causal_with_padding_through_the_window():
    q, mask = normal(2, 3, 4), torch.tensor([[True, False, True], [True, True, False]])[:, None]
    a = cm.attend(q, q, attn_mask=mask, window=(None, 0))
    b = dense(q, q, q, mask=mask & band_mask(3, 3, upper=0))
    torch.testing.assert_close(a.mean, b.mean)


def test_nested_tensors_are_pointed_elsewhere():
    x = torch.nested.nested_tensor([normal(2, 3, 4)] * 2, layout=torch.jagged)
    with pytest.raises(cm.InputError, match="attend_packed"):
        cm.attend(x, x, x)


def test_window_follows_the_alignment_of_a_causal_bias():
    from torch.nn.attention.bias import causal_lower_right

    q, k = normal(3, 4), normal(5, 4)
    a = cm.attend(q, k, attn_mask=causal_lower_right(3, 5), window=(1, None))
    b = dense(q, k, k, mask=band_mask(3, 5, lower=1, upper=2))
    torch.testing.assert_close(a.mean, b.mean)


def test_entropy_first_then_second_derivatives_of_the_others():
    """The entropy is computed in the same pass but has no part in these derivatives."""
    x = normal(3, 4).requires_grad_()
    results = []
    for first in ("entropy", "mean"):
        a = cm.attend(x, x)
        getattr(a, first)
        total = a.mean.square().sum() + a.log_normalizer.square().sum()
        (g,) = torch.autograd.grad(total, x, create_graph=True)
        (h,) = torch.autograd.grad(g.square().sum(), x, create_graph=True)
        results.append([g, h, *torch.autograd.grad(h.square().sum(), x)])
    assert_close(*results, 1e-10)


def test_inference_mode_leaves_nothing_behind():
    x = torch.randn(2, 5, 8, requires_grad=True)
    with torch.inference_mode():
        expected = cm.attend(x, x).entropy.clone()
    a = cm.attend(x, x)
    torch.testing.assert_close(a.entropy, expected)
    torch.autograd.grad(a.entropy.sum(), x)


def test_results_are_not_touched_by_later_calls():
    x = torch.randn(2, 300, 8)
    a = cm.attend(x, x)
    before = {n: getattr(a, n).clone() for n in FIELDS}
    b = cm.attend(x * 3, x * 2)
    _ = [getattr(b, n) for n in FIELDS]
    for name in FIELDS:
        assert torch.equal(getattr(a, name), before[name])


@pytest.mark.parametrize("low", [torch.finfo(torch.float32).min, -1e9, -1e5, 1e9])
@pytest.mark.parametrize("window", [None, (9, 9)])
def test_masks_made_of_huge_numbers(low, window):
    """A row whose keys all carry one huge bias is attention without it, in all derivatives."""
    q, k, v = (torch.randn(1, 2, 4, 8, requires_grad=True) for _ in range(3))
    bias = torch.zeros(1, 1, 4, 4)
    bias[..., 0, :] = low
    bias.requires_grad_()
    plain = torch.zeros_like(bias).requires_grad_()
    results = []
    for b in (bias, plain):
        a = cm.attend(q, k, v, attn_mask=b, window=window)
        total = a.mean.sin().sum() + a.entropy.sum() + a.score_mean.sum()
        first = torch.autograd.grad(total, (q, k, v, b), create_graph=True)
        second = torch.autograd.grad(sum(g.sin().sum() for g in first), (q, k, v, b))
        push = lambda q, b=b: cm.attend(q, k, v, attn_mask=b, window=window).mean
        tangent = torch.func.jvp(push, (q,), (torch.ones_like(q),))[1]
        results.append(
            [a.mean, a.entropy, a.score_mean, a.value_variance, tangent, *first, *second]
        )
    assert_close(*results, 1e-5)
    lifted, usual = (cm.attend(q, k, attn_mask=b).log_normalizer[0, 0, 0] for b in (bias, plain))
    assert lifted.item() == pytest.approx(low + usual.item(), rel=1e-6)


@pytest.mark.parametrize("hidden", [1e8, 1e30])
def test_value_variance_ignores_large_hidden_values(hidden):
    q, k, v = (torch.randn(6, 8) for _ in range(3))
    v[5] = hidden
    a = cm.attend(q, k, v, is_causal=True)
    b = cm.attend(q[:5], k[:5], v[:5], is_causal=True)
    torch.testing.assert_close(a.value_variance[:5], b.value_variance)


def test_a_nan_query_is_not_reported_as_an_empty_row():
    """torch's fused operator returns mean 0 and G = 0 for it at some lengths."""
    for n in (2, 5, 40):
        q, k = torch.randn(1, 2, 3, 8), torch.randn(1, 2, n, 8)
        q[0, 0, 1] = math.nan
        a = cm.attend(q, k)
        for name in ("mean", "log_normalizer", "entropy"):
            assert getattr(a, name)[0, 0, 1].isnan().all()
            assert getattr(a, name)[0, 0, 0].isfinite().all()


def test_inputs_changed_in_place_are_noticed():
    q, k = normal(3, 4), normal(5, 4)
    a = cm.attend(q, k)
    _ = a.mean
    k.zero_()
    with pytest.raises(cm.InputError, match="changed in place"):
        _ = a.entropy


def test_every_field_has_the_full_batch():
    a = cm.attend(normal(4, 8), normal(5, 8), normal(3, 5, 2))
    assert a.mean.shape == a.value_variance.shape == (3, 4, 2)
    assert a.key_mean.shape == (3, 4, 8)


def test_default_device_does_not_matter():
    q, mask = normal(3, 4), torch.ones(3, 3, dtype=torch.bool).tril()
    expected = cm.attend(q, q, attn_mask=mask).mean
    torch.set_default_device("meta")
    try:
        found = cm.attend(q, q, attn_mask=mask).mean
    finally:
        torch.set_default_device(None)
    torch.testing.assert_close(found, expected)
