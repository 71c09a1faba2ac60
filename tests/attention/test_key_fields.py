"""Largest scores, received mass, top keys, Renyi entropies: against attention written out."""

from __future__ import annotations

import copy
import itertools
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import hessian, jacfwd, jacrev, vmap

import cumulant as cm
from oracle import assert_close, band_mask, cotangent, dense, differentiate, directions

DOUBLE = torch.float64
B, H, M, N, D, E = 2, 4, 5, 6, 3, 2
ORDERS = (0.5, 2.0, math.inf)


def normal(*shape, seed=0, dtype=DOUBLE):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def qkv(groups=1, dtype=DOUBLE):
    return [
        normal(B, h, rows, width, seed=s, dtype=dtype)
        for s, (h, rows, width) in enumerate([(H, M, D), (H // groups, N, D), (H // groups, N, E)])
    ]


def boolean():
    mask = torch.rand(B, H, M, N, generator=torch.Generator().manual_seed(3)) > 0.4
    mask[0, 0, 1] = False  # a query that sees no key
    mask[1, 1, :, 2] = False  # a key that no query sees
    return mask


def padding():
    bias = torch.zeros(B, 1, 1, N, dtype=DOUBLE)
    bias[0, ..., 4:] = -math.inf
    return bias


# name: (arguments of `attend`, of the oracle)
MASKS = {
    "none": ({}, {}),
    "causal": ({"is_causal": True}, {"mask": band_mask(M, N, upper=0)}),
    "window": ({"window": (1, 0)}, {"mask": band_mask(M, N, lower=-1, upper=0)}),
    "boolean": ({"attn_mask": boolean()}, {"mask": boolean()}),
    "additive": ({"attn_mask": normal(H, M, N)}, {"bias": normal(H, M, N)}),
    "padding": ({"attn_mask": padding()}, {"bias": padding()}),
}


def entropy_of(p, alpha):
    """log(sum p^alpha) / (1 - alpha), over what has weight; 0 for rows without any."""
    alive = (p > 0).any(-1)
    if alpha == math.inf:
        top = p.gather(-1, p.argmax(-1, keepdim=True))[..., 0]
        return -torch.where(alive, top, 1.0).log()
    powers = torch.where(p > 0, torch.where(p > 0, p, 1.0) ** alpha, 0.0).sum(-1)
    return torch.where(alive, powers, 1.0).log() / (1 - alpha)


def written_out(q, k, v, sink, softcap, options):
    """All fields of this page from the matrix of weights."""
    k, v = (x.repeat_interleave(H // x.shape[1], 1) for x in (k, v))
    p = dense(q, k, v, sink=sink, softcap=softcap, **options).weights
    keys = p if sink is None else p[..., :-1]
    order = keys.detach().sort(dim=-1, descending=True, stable=True).indices[..., :3]
    return (
        keys.sum(-2),
        keys[..., 1:4, :].sum(-2),
        keys.gather(-1, order),
        *(entropy_of(p, alpha) for alpha in ORDERS),
    )


def ours(q, k, v, sink, softcap, options):
    gqa = q.shape[1] != k.shape[1]
    a = cm.attend(q, k, v, sink=sink, softcap=softcap, enable_gqa=gqa, **options)
    return (
        a.received(),
        a.received(slice(1, 4)),
        a.top_keys(3).weights,
        *(a.renyi(alpha) for alpha in ORDERS),
    )


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("softcap", [None, 0.8])
@pytest.mark.parametrize("sunk", [False, True])
@pytest.mark.parametrize("mask", MASKS)
def test_fields_are_those_of_dense_attention(mask, sunk, softcap, groups):
    mine, theirs = MASKS[mask]
    sink = normal(H, seed=9) if sunk else None
    found = ours(*qkv(groups), sink, softcap, mine)
    expected = written_out(*qkv(groups), sink[:, None] if sunk else None, softcap, theirs)
    assert_close(found, expected, 1e-12)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("mask", MASKS)
def test_every_seam_between_tiles(mask):
    mine, theirs = MASKS[mask]
    assert_close(ours(*qkv(), None, None, mine), written_out(*qkv(), None, None, theirs), 1e-12)


@pytest.mark.parametrize("mask", MASKS)
def test_which_keys(mask):
    """Indices, the largest score's key and the counts, among them rows and columns of nothing."""
    mine, theirs = MASKS[mask]
    q, k, v = qkv()
    a, b = cm.attend(q, k, v, **mine), dense(q, k, v, **theirs)
    order = b.weights.sort(dim=-1, descending=True, stable=True)
    expected = order.indices.masked_fill(order.values == 0, -1)
    assert torch.equal(a.top_keys(N).indices, expected)
    assert torch.equal(a.top_keys(2).indices, expected[..., :2])
    assert torch.equal(a.score_max_key, expected[..., 0])
    seen = b.weights > 0
    assert torch.equal(a.seen_by(), seen.sum(-2).to(DOUBLE))
    assert torch.equal(a.seen_by(slice(2, None)), seen[..., 2:, :].sum(-2).to(DOUBLE))
    torch.testing.assert_close(a.renyi(0), seen.sum(-1).clamp_min(1).to(DOUBLE).log())
    alive = seen.any(-1)
    torch.testing.assert_close(a.effective_keys, b.entropy.exp() * alive)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_precision(dtype):
    """Half precision in, float32 out: weights and entropies are scalars of a query or a key."""
    given = qkv(dtype=dtype)
    found = ours(*given, None, 2.0, {"is_causal": True})
    wide = [x.double() for x in given]
    expected = written_out(*wide, None, 2.0, {"mask": band_mask(M, N, upper=0)})
    assert all(x.dtype == torch.float32 for x in found)
    assert_close([x.double() for x in found], expected, 1e-6)


@settings(deadline=None, max_examples=60)
@given(
    batch=st.lists(st.integers(1, 3), max_size=2).map(tuple),
    m=st.integers(1, 6),
    n=st.integers(1, 7),
    k=st.integers(1, 8),
    magnitude=st.sampled_from([1e-6, 1.0, 30.0]),
    mask=st.sampled_from(["none", "boolean", "additive", "causal", "window"]),
    window=st.tuples(*(st.one_of(st.none(), st.integers(0, 7)) for _ in "lr")),
    seed=st.integers(0, 2**31),
)
def test_agrees_with_the_matrix_of_weights(batch, m, n, k, magnitude, mask, window, seed):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=DOUBLE) * magnitude

    q, key = draw(*batch, m, D), draw(*batch, n, D)
    seen = torch.rand(m, n, generator=generator) > 0.5
    bias = draw(m, n).masked_fill(~seen, -math.inf)
    left, right = window
    banded = band_mask(m, n, lower=None if left is None else -left, upper=right)
    options, oracle = {
        "none": ({}, {}),
        "boolean": ({"attn_mask": seen}, {"mask": seen}),
        "additive": ({"attn_mask": bias}, {"bias": bias}),
        "causal": ({"is_causal": True}, {"mask": band_mask(m, n, upper=0)}),
        "window": ({"window": window}, {"mask": banded}),
    }[mask]
    a, b = cm.attend(q, key, **options), dense(q, key, key, **oracle)
    visible = torch.ones(m, n, dtype=torch.bool)
    visible = oracle.get("mask", seen if mask == "additive" else visible).expand_as(b.weights)
    order = torch.where(
        visible, q @ key.mT / D**0.5 + (bias if mask == "additive" else 0), -math.inf
    )
    order = order.sort(dim=-1, descending=True, stable=True)
    shown = min(k, n)
    top = a.top_keys(k)
    gone = order.values[..., :shown] == -math.inf
    weights = b.weights.gather(-1, order.indices[..., :shown])
    assert_close([top.weights[..., :shown]], [weights.masked_fill(gone, 0.0)], 1e-10)
    if magnitude >= 1.0:  # smaller scores differ by rounding alone
        assert torch.equal(
            top.indices[..., :shown], order.indices[..., :shown].masked_fill(gone, -1)
        )
    assert (top.indices[..., shown:] == -1).all()
    assert_close(
        [a.received(), a.seen_by()], [b.weights.sum(-2), visible.sum(-2).to(DOUBLE)], 1e-10
    )
    which = torch.rand(m, generator=generator) > 0.5
    assert torch.equal(a.seen_by(which), visible[..., which, :].sum(-2).to(DOUBLE))
    for alpha in (0.5, 3.0, math.inf):
        assert_close([a.renyi(alpha)], [entropy_of(b.weights, alpha)], 1e-8)


# ---------------------------------------------------------------------------------- derivatives

CALLS = {
    "plain": ("none", None, False),
    "softcap": ("causal", 0.8, False),
    "sink": ("boolean", None, True),
    "bias": ("additive", None, True),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("word", [word for order in (1, 2, 3) for word in directions(order)])
def test_derivatives_through_third_order(word, call):
    """Of all fields at once, in query, key and sink."""
    mask, softcap, sunk = CALLS[call]
    mine, theirs = MASKS[mask]
    q, k, v = (x[:, :2] for x in qkv())
    mine, theirs = (
        {n: x[..., :2, :, :] if torch.is_tensor(x) and x.ndim > 2 else x for n, x in o.items()}
        for o in (mine, theirs)
    )
    given = (q, k, normal(2, seed=9))
    tangents = tuple(normal(*x.shape, seed=20 + i) for i, x in enumerate(given))
    f = lambda q, k, s: ours(q, k, v, s if sunk else None, softcap, mine)

    def oracle(q, k, s):
        p = dense(q, k, v, sink=s[:, None] if sunk else None, softcap=softcap, **theirs).weights
        keys = p[..., :-1] if sunk else p
        order = keys.detach().sort(dim=-1, descending=True, stable=True).indices[..., :3]
        entropies = (entropy_of(p, alpha) for alpha in ORDERS)
        return keys.sum(-2), keys[..., 1:4, :].sum(-2), keys.gather(-1, order), *entropies

    found, expected = (differentiate(g, word, tangents, cotangent)(*given) for g in (f, oracle))
    assert_close(found, expected, 1e-8)


@pytest.mark.parametrize("transform", [jacrev, jacfwd, hessian])
def test_under_vmap(transform):
    queries, k = normal(3, M, D), normal(N, D, seed=1)

    def mine(q):
        a = cm.attend(q, k, is_causal=True)
        return a.received().sin().sum() + a.top_keys(2).weights.cos().sum() + a.score_max.sum()

    def theirs(q):
        b = dense(q, k, k, mask=band_mask(M, N, upper=0))
        top = b.weights.topk(2).values
        return b.weights.sum(-2).sin().sum() + top.cos().sum() + b.score_max.sum()

    found, expected = vmap(transform(mine))(queries), vmap(transform(theirs))(queries)
    assert_close([found], [expected], 1e-10)


def test_received_is_linear_in_the_weights_of_queries():
    q, k, v = qkv()
    p = dense(q, k, v).weights
    weights = normal(B, H, M, seed=5).requires_grad_()
    found = cm.attend(q, k, v).received(weights)
    torch.testing.assert_close(found, (weights[..., None] * p).sum(-2))
    (gradient,) = torch.autograd.grad(found.sum(), weights)
    torch.testing.assert_close(gradient, torch.ones_like(gradient))  # weights of a row sum to one
    chosen = torch.tensor([True, False, True, False, False])
    torch.testing.assert_close(cm.attend(q, k, v).received(chosen), p[..., [0, 2], :].sum(-2))


def test_the_first_of_equal_scores_has_the_derivative():
    """At a tie any mixture of the keys' gradients is a subgradient; ours is the first key's."""
    q = torch.tensor([[1.0, 2.0]], dtype=DOUBLE, requires_grad=True)
    k = torch.tensor([[0.0, 1.0], [2.0, 0.0], [0.0, 0.5]], dtype=DOUBLE)  # scores 2, 2, 1
    a = cm.attend(q, k, scale=1.0)
    assert a.score_max.item() == 2.0
    assert a.score_max_key.item() == 0
    assert a.top_keys(2).indices.tolist() == [[0, 1]]
    (gradient,) = torch.autograd.grad(a.score_max, q)
    torch.testing.assert_close(gradient, k[:1])


@pytest.mark.parametrize("n", [5, 3000])
def test_ties_go_to_the_smaller_index(n):
    """All scores equal: over all seams the first keys are the top ones."""
    a = cm.attend(torch.zeros(2, 4), torch.randn(n, 4), is_causal=False)
    assert a.top_keys(4).indices.tolist() == [[0, 1, 2, 3]] * 2
    torch.testing.assert_close(a.top_keys(4).weights, torch.full((2, 4), 1 / n))
    assert a.score_max_key.tolist() == [0, 0]


# ------------------------------------------------------------------- merges, packing, long streams


@pytest.mark.parametrize("sunk", [False, True])
@pytest.mark.parametrize("low", [0.0, -1e9, torch.finfo(torch.float32).min])
def test_merged_parts_agree_with_the_whole(sunk, low):
    """Also where a row's keys all carry a huge bias, in one part or in all."""
    q, k, v = (x.float() for x in qkv())
    bias = torch.zeros(M, N)
    bias[0, :2], bias[1] = low, low
    sink = normal(H, seed=9).float() if sunk else None
    whole = cm.attend(q, k, v, attn_mask=bias, sink=sink)
    parts = [
        cm.attend(
            q, k[..., s, :], v[..., s, :], attn_mask=bias[:, s], sink=sink if s.start == 0 else None
        )
        for s in (slice(0, 2), slice(2, 2), slice(2, 5), slice(5, 6))
    ]
    joined = cm.merge(cm.merge(parts[0], parts[1]), parts[2], parts[3])
    for a in (joined, whole):
        assert a.received().shape == (B, H, N)
    # A sink takes all of row 1: its weights are 0, and which of them are largest is rounding.
    rows = slice(2, None) if sunk else slice(None)
    pairs = [
        (
            *(a.received(), a.seen_by(), a.score_max, a.top_keys(4).weights),
            *(x[..., rows, :3] for x in (a.top_keys(3).indices, a.score_max_key[..., None])),
            *(a.renyi(x) for x in (0, *ORDERS)),
        )
        for a in (joined, whole)
    ]
    assert_close(*pairs, 1e-5)
    bias = bias.clone()
    if not sunk:
        bias[1] = 0.0  # one number added to a whole row changes no weight
    scores = q.double() @ k.double().mT / D**0.5 + bias
    if sunk:
        scores = torch.cat([scores, sink[:, None, None].expand(B, H, M, 1)], -1)
    expected = scores.softmax(-1)[..., :N].sum(-2)
    torch.testing.assert_close(joined.received().double(), expected, rtol=1e-5, atol=1e-6)


def test_packed_sequences_count_their_keys_through():
    q, k, v = normal(H, 7, D), normal(H, 9, D, seed=1), normal(H, 9, E, seed=2)
    a = cm.attend_packed(q, k, v, query_offsets=[0, 3, 3, 7], key_offsets=[0, 4, 5, 9])
    mask = torch.block_diag(torch.ones(3, 4), torch.ones(0, 1), torch.ones(4, 4)) > 0
    b = cm.attend(q, k, v, attn_mask=mask)
    pairs = [
        (x.received(), x.seen_by(slice(2, 5)), *x.top_keys(5), x.score_max_key, x.renyi(2.0))
        for x in (a, b)
    ]
    assert_close(*pairs, 1e-12)


def test_decoding_steps_add_up():
    """Token by token with a cache that grows, and with one that forgets its first key."""
    x = normal(B, 6, D)
    so_far = cm.Received.of(cm.attend(x[:, :2], x[:, :2], is_causal=True))
    for t in range(2, 6):
        so_far += cm.Received.of(cm.attend(x[:, t : t + 1], x[:, : t + 1]))
    whole = cm.attend(x, x, is_causal=True)
    torch.testing.assert_close(so_far.total, whole.received())
    torch.testing.assert_close(so_far.count, torch.tensor([6.0, 5, 4, 3, 2, 1]).to(x).expand(B, 6))
    torch.testing.assert_close(so_far.mean, whole.received() / so_far.count)
    kept = so_far.keep(torch.tensor([[1, 2, 3, 4, 5]]))
    torch.testing.assert_close(kept.total, so_far.total[:, 1:])
    later = kept + cm.Received.of(cm.attend(x[:, :1], normal(B, 6, D, seed=4)))
    assert later.count.tolist() == [[6, 5, 4, 3, 2, 1]] * B


def test_sums_of_other_batches_are_refused():
    one = cm.Received(torch.ones(2, 3), torch.ones(2, 3))
    with pytest.raises(cm.InputError, match=r"\(2, 3\) and \(4, 3\)"):
        _ = one + cm.Received(torch.ones(4, 3), torch.ones(4, 3))
    with pytest.raises(cm.InputError, match="count must broadcast"):
        cm.Received(torch.ones(2, 3), torch.ones(5))


@pytest.mark.parametrize("how", [copy.deepcopy, lambda a: pickle.loads(pickle.dumps(a))])
def test_copies_keep_numbers_and_say_what_is_gone(how):
    q, k, v = qkv()
    a = cm.attend(q, k, v, sink=0.5)
    b = how(a)
    assert_close([b.score_max, b.effective_keys], [a.score_max, a.effective_keys], 1e-15)
    assert torch.equal(b.score_max_key, a.score_max_key)
    for ask in (b.received, lambda: b.top_keys(2), lambda: b.renyi(2.0), b.seen_by):
        with pytest.raises(cm.UnknownFieldError, match=r"without their keys.*cumulant\.Received"):
            ask()
    assert b.renyi(1) is b.entropy


def test_long_streams_still_know_their_largest_score():
    q, k = normal(3, D), normal(80, D, seed=1)
    total = cm.attend(q, k[:1])
    with torch.no_grad():
        for t in range(1, 80):
            total = cm.merge(total, cm.attend(q, k[t : t + 1]))
            _ = total.mean, total.score_max
    scores = q @ k.mT / D**0.5
    torch.testing.assert_close(total.score_max, scores.amax(-1))
    assert torch.equal(total.score_max_key, scores.argmax(-1))


# ------------------------------------------------------------------------------------------ edges


def test_a_query_without_keys_gives_nothing():
    q, k = normal(3, D).requires_grad_(), normal(N, D)
    mask = torch.ones(3, N, dtype=torch.bool)
    mask[1] = False
    a = cm.attend(q, k, attn_mask=mask)
    assert a.score_max[1] == -math.inf
    assert a.score_max_key[1] == -1
    assert a.effective_keys[1] == a.renyi(0)[1] == a.renyi(2)[1] == a.renyi(math.inf)[1] == 0
    assert (a.top_keys(2).weights[1] == 0).all()
    assert (a.top_keys(2).indices[1] == -1).all()
    assert a.received().sum().item() == pytest.approx(2.0)
    total = a.received().square().sum() + a.renyi(2).sum() + a.top_keys(2).weights.square().sum()
    (first,) = torch.autograd.grad(total + a.renyi(math.inf).sum(), q, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), q)
    assert (first[1] == 0).all()
    assert first.isfinite().all()
    assert second.isfinite().all()


def test_without_any_keys():
    a = cm.attend(normal(2, 3, D), normal(2, 0, D))
    assert a.received().shape == a.seen_by().shape == (2, 0)
    assert (a.score_max == -math.inf).all()
    assert (a.top_keys(2).indices == -1).all()
    assert (a.renyi(2.0) == 0).all()


def test_zero_size_batches():
    a = cm.attend(normal(0, 3, D), normal(0, N, D))
    assert a.received().shape == (0, N)
    assert a.top_keys(2).weights.shape == (0, 3, 2)
    assert a.score_max.shape == a.score_max_key.shape == a.renyi(2.0).shape == (0, 3)


@pytest.mark.parametrize("kind", ["boolean", "additive", "causal"])
@pytest.mark.parametrize("garbage", [math.nan, math.inf])
def test_a_hidden_key_may_hold_anything(kind, garbage):
    q, k = normal(4, D), normal(5, D)
    k[4] = garbage
    seen = torch.ones(4, 5, dtype=torch.bool)
    seen[:, 4] = False
    bias = torch.zeros(4, 5, dtype=DOUBLE).masked_fill(~seen, -math.inf)
    options, others = {
        "boolean": ({"attn_mask": seen}, {}),
        "additive": ({"attn_mask": bias}, {}),
        "causal": ({"is_causal": True}, {"is_causal": True}),
    }[kind]
    leaves = [x.clone().requires_grad_() for x in (q, k)], [q.requires_grad_(), k[:4].clone()]
    leaves[1][1].requires_grad_()
    results = []
    for (query, key), o in zip(leaves, (options, others), strict=True):
        a = cm.attend(query, key, **o)
        fields = (a.score_max, a.top_keys(2).weights, a.renyi(2.0), a.received()[:4])
        total = sum(x.sin().sum() for x in fields)
        grads = torch.autograd.grad(total, (query, key))
        results.append((*fields, a.top_keys(2).indices, grads[0], grads[1][:4]))
    assert_close(*results, 1e-12)


def test_a_visible_nan_shows():
    q, k = normal(3, D), normal(4, D)
    k[2, 0] = math.nan
    a = cm.attend(q.requires_grad_(), k, is_causal=True)
    assert a.score_max[:2].isfinite().all()
    assert a.score_max[2].isnan()
    assert a.top_keys(1).weights[2].isnan().all()
    assert a.renyi(2.0)[2].isnan()


def test_every_field_has_the_full_batch():
    a = cm.attend(normal(4, D), normal(5, D), normal(3, 5, E))
    assert a.received().shape == a.seen_by().shape == (3, 5)
    assert a.score_max.shape == a.score_max_key.shape == a.renyi(2.0).shape == (3, 4)
    assert a.top_keys(2).weights.shape == a.top_keys(2).indices.shape == (3, 4, 2)


def test_dropout_leaves_these_fields_alone():
    q, k, v = qkv()
    a, b = cm.attend(q, k, v, dropout_p=0.5), cm.attend(q, k, v)
    assert_close(
        [a.received(), a.top_keys(2).weights], [b.received(), b.top_keys(2).weights], 1e-14
    )


BAD = {
    "k zero": (lambda a: a.top_keys(0), "k must be an integer >= 1, not 0"),
    "k kind": (lambda a: a.top_keys(2.5), r"not 2\.5"),
    "alpha negative": (lambda a: a.renyi(-1), "alpha must be a number >= 0"),
    "alpha nan": (lambda a: a.renyi(math.nan), "not nan"),
    "alpha kind": (lambda a: a.tsallis("2"), "tsallis: alpha must be"),
    "queries shape": (lambda a: a.received(torch.ones(7)), r"\(2, 4, 5\).*shape \(7,\)"),
    "queries kind": (lambda a: a.received([1, 2]), "not list"),
    "queries integers": (lambda a: a.seen_by(torch.tensor([1, 2])), r"not torch\.int64"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(case):
    ask, message = BAD[case]
    with pytest.raises(cm.InputError, match=message):
        ask(cm.attend(*qkv()))


def test_inputs_changed_in_place_are_noticed():
    q, k = normal(3, D), normal(5, D)
    a = cm.attend(q, k)
    _ = a.mean
    k.zero_()
    for ask in (a.received, lambda: a.top_keys(2), lambda: a.renyi(2.0), lambda: a.score_max):
        with pytest.raises(cm.InputError, match="changed in place"):
            ask()


# ---------------------------------------------------------------------------------- Renyi, Tsallis


def test_orders_join_up_at_one():
    """Around 1 the formula is 0/0; the derivative there is -Var[log p] / 2."""
    q, k = torch.randn(3, 8) * 3, torch.randn(50, 8)
    a = cm.attend(q, k)
    p = dense(q.double(), k.double(), k.double()).weights
    variance = (p * p.log() ** 2).sum(-1) - (p * p.log()).sum(-1) ** 2
    for step in (1e-3, 1e-5, 1e-7, 0.0):
        expected = -(p * p.log()).sum(-1) - step * variance / 2
        found = a.renyi(1 + step)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_entropies_do_not_cancel_in_single_precision():
    """Scores near 1e4, all equal: every entropy is log N although G is 1e4."""
    a = cm.attend(torch.full((1, 1), 100.0), torch.full((64, 1), 100.0), scale=1.0)
    for alpha in (0, 0.3, 0.999, 1.001, 5.0, math.inf):
        assert a.renyi(alpha).item() == pytest.approx(math.log(64), abs=1e-5)


@settings(deadline=None, max_examples=40)
@given(
    alphas=st.tuples(st.floats(0, 30), st.floats(0, 30)).map(sorted),
    seed=st.integers(0, 2**31),
    size=st.sampled_from([0.1, 1.0, 10.0]),
)
def test_renyi_falls_with_its_order(alphas, seed, size):
    """R_0 = log N >= R_alpha >= R_beta >= R_inf >= 0, and alpha R_alpha / (alpha - 1) bounds it."""
    a = cm.attend(normal(2, D, seed=seed) * size, normal(N, D, seed=seed + 1))
    found = [a.renyi(x) for x in (0, *alphas, math.inf)]
    assert torch.allclose(found[0], torch.full_like(found[0], math.log(N)))
    for higher, lower in itertools.pairwise(found):
        assert (higher >= lower - 1e-6).all()
    for alpha in alphas:
        if alpha > 1.01:  # sum p^alpha >= max p^alpha
            assert (a.renyi(alpha) <= alpha / (alpha - 1) * found[-1] + 1e-9).all()


def test_tsallis():
    q, k, v = qkv()
    a, p = cm.attend(q, k, v), dense(q, k, v).weights
    for alpha in (0.5, 2.0, 3.0):
        expected = (1 - (p**alpha).sum(-1)) / (alpha - 1)
        torch.testing.assert_close(a.tsallis(alpha), expected)
    assert a.tsallis(1.0) is a.entropy
    torch.testing.assert_close(a.tsallis(0), torch.full((B, H, M), N - 1.0, dtype=DOUBLE))
    assert (a.tsallis(math.inf) == 0).all()
