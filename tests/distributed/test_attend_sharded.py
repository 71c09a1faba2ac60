"""Sharded attention gives the single-process answer: value, gradient, JVP, second derivative."""

from __future__ import annotations

import pytest
import torch

import cumulant as cm
from cumulant.distributed import ShardedKeys, total
from oracle import FIELDS

# How many keys, and how many queries, each rank has: uneven, and some have none.
KEYS = {1: [11], 2: [4, 7], 3: [4, 0, 7], 4: [5, 1, 0, 5]}
QUERIES = {1: [6], 2: [2, 4], 3: [3, 3, 0], 4: [1, 2, 0, 3]}
WAYS = ("replicated", "gather", "ring")


def part(counts, rank):
    start = sum(counts[:rank])
    return slice(start, start + counts[rank])


def inputs(seed=0, dtype=torch.float64):
    random = torch.Generator().manual_seed(seed)
    shapes = ((2, 6, 4), (2, 11, 4), (2, 11, 3))
    return [torch.randn(s, generator=random, dtype=dtype) for s in shapes]


def shard_of(way, keys, values, group):
    if way == "replicated":
        return ShardedKeys(keys, values, group=group)
    return ShardedKeys(keys, values, group=group, queries="sharded", route=way)


def close(a, b, what):
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10, msg=lambda m: f"{what}: {m}")


def scalar(attended, signs):
    """A function of all fields."""
    return sum(
        (getattr(attended, n).masked_fill(getattr(attended, n).isinf(), 0.0) * s).sin().sum()
        for n, s in zip(FIELDS, signs, strict=True)
    )


SIGNS = [1.0, -0.5, 0.7, 1.3, -1.1, 0.9, 0.4, -0.8]


def all_orders(group, rank, size, way, options):
    q, k, v = inputs()
    mask = options.pop("mask", None)
    mine = part(KEYS[size], rank)
    asked = slice(None) if way == "replicated" else part(QUERIES[size], rank)
    whole_options, own_options = dict(options), dict(options)
    if mask is not None:
        whole_options["attn_mask"] = mask
        own_options["attn_mask"] = mask[..., mine]

    def alone(q, k, v):
        return cm.attend(q, k, v, **whole_options)

    def together(q, k, v):
        return cm.attend(q, shard_of(way, k, v, group), **own_options)

    def replicated(parts):
        """Of scalars that queries and keys have, one on every rank."""
        ours, keyed = parts
        if way == "replicated":
            return ours + total(keyed, group)
        return total(ours + keyed, group)

    full = [x.clone().requires_grad_() for x in (q, k, v)]
    own = [
        x[:, s].clone().requires_grad_()
        for x, s in zip((q, k, v), (asked, mine, mine), strict=True)
    ]
    a, b = alone(*full), together(*own)
    for name in FIELDS:
        close(getattr(b, name), getattr(a, name)[:, asked], name)
    loss = scalar(a, SIGNS)
    mine_loss = scalar(b, SIGNS)
    mine_loss = mine_loss if way == "replicated" else total(mine_loss, group)
    close(mine_loss, loss, "loss")
    first = torch.autograd.grad(loss, full, create_graph=True)
    ours = torch.autograd.grad(mine_loss, own, create_graph=True)
    cut = (asked, mine, mine)
    for name, x, y, s in zip(("query", "key", "value"), ours, first, cut, strict=True):
        close(x, y[:, s], f"gradient in {name}")
    square = sum((x**2).sum() for x in first)
    own_square = replicated(((ours[0] ** 2).sum(), (ours[1] ** 2).sum() + (ours[2] ** 2).sum()))
    second = torch.autograd.grad(square, full)
    ours = torch.autograd.grad(own_square, own)
    for x, y, s in zip(ours, second, cut, strict=True):
        torch.testing.assert_close(x, y[:, s], rtol=1e-10, atol=1e-10 * float(y.abs().max()))

    def value(f):
        def call(*x):
            a = f(*x)
            G = a.log_normalizer
            return torch.cat(
                [a.mean, a.entropy[..., None], G.masked_fill(G.isinf(), 0.0)[..., None]], -1
            )

        return call

    tangents = inputs(seed=1)
    _, expected = torch.func.jvp(value(alone), (q, k, v), tuple(tangents))
    _, found = torch.func.jvp(
        value(together),
        tuple(x[:, s] for x, s in zip((q, k, v), cut, strict=True)),
        tuple(x[:, s] for x, s in zip(tangents, cut, strict=True)),
    )
    close(found, expected[:, asked], "tangent")

    # forward over reverse: a Hessian-vector product
    def gradient(f, reduce):
        def call(*x):
            return torch.func.grad(lambda *y: reduce(value(f)(*y).sin().sum()), (0, 1, 2))(*x)

        return call

    _, expected = torch.func.jvp(gradient(alone, lambda x: x), (q, k, v), tuple(tangents))
    reduce = (lambda x: x) if way == "replicated" else (lambda x: total(x, group))
    _, found = torch.func.jvp(
        gradient(together, reduce),
        tuple(x[:, s] for x, s in zip((q, k, v), cut, strict=True)),
        tuple(x[:, s] for x, s in zip(tangents, cut, strict=True)),
    )
    for x, y, s in zip(found, expected, cut, strict=True):
        close(x, y[:, s], "Hessian-vector product")


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("way", WAYS)
def test_every_derivative(crew, way, size):
    crew.run(all_orders, size, way, {})


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "options", [{"is_causal": True}, {"window": (2, 1), "scale": 0.7}], ids=["causal", "window"]
)
def test_bands_count_keys_and_queries_over_all_ranks(crew, way, options):
    crew.run(all_orders, 3, way, options)


def holes(size):
    """One query sees nothing, and the last rank's keys are hidden from all."""
    mask = torch.rand(2, 6, 11, generator=torch.Generator().manual_seed(3)) < 0.7
    mask[:, 2] = False
    mask[..., part(KEYS[size], size - 1)] = False
    return mask


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("way", ["replicated", "gather"])
def test_a_fully_masked_shard_and_a_query_without_keys(crew, way, size):
    crew.run(all_orders, size, way, {"mask": holes(size)})


@pytest.mark.parametrize("way", ["replicated", "gather"])
def test_an_additive_mask(crew, way):
    bias = torch.randn(1, 6, 11, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    crew.run(all_orders, 3, way, {"mask": bias})


@pytest.mark.parametrize("way", WAYS)
def test_a_softcap_and_the_sink_of_each_head(crew, way):
    """The sink is counted once, not once on every rank."""
    sink = torch.tensor([0.5, -1.0], dtype=torch.float64)
    crew.run(all_orders, 3, way, {"softcap": 1.5, "sink": sink, "is_causal": True})


def sink_of_each_query(group, rank, size, way):
    q, k, v = inputs()
    mine = part(KEYS[size], rank)
    asked = slice(None) if way == "replicated" else part(QUERIES[size], rank)
    sink = torch.randn(2, 6, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    full, own = sink.clone().requires_grad_(), sink[:, asked].clone().requires_grad_()
    a = cm.attend(q, k, v, sink=full)
    b = cm.attend(q[:, asked], shard_of(way, k[:, mine], v[:, mine], group), sink=own)
    for name in FIELDS:
        close(getattr(b, name), getattr(a, name)[:, asked], name)
    (expected,) = torch.autograd.grad(scalar(a, SIGNS), full)
    loss = scalar(b, SIGNS)
    loss = loss if way == "replicated" else total(loss, group)
    close(torch.autograd.grad(loss, own)[0], expected[:, asked], "gradient in the sink")


@pytest.mark.parametrize("way", WAYS)
def test_the_sink_of_each_query_and_its_gradient(crew, way):
    crew.run(sink_of_each_query, 3, way)


def heads(group, rank, size, way):
    random = torch.Generator().manual_seed(5)
    q = torch.randn(2, 4, 6, 8, generator=random, dtype=torch.float64)
    k, v = (torch.randn(2, 2, 11, 8, generator=random, dtype=torch.float64) for _ in range(2))
    mine = part(KEYS[size], rank)
    asked = slice(None) if way == "replicated" else part(QUERIES[size], rank)
    scale = torch.rand(4, 1, 1, generator=random, dtype=torch.float64)
    whole = cm.attend(q, k, v, enable_gqa=True, scale=scale)
    ours = cm.attend(
        q[:, :, asked],
        shard_of(way, k[:, :, mine], v[:, :, mine], group),
        enable_gqa=True,
        scale=scale,
    )
    for name in FIELDS:
        close(getattr(ours, name), getattr(whole, name)[:, :, asked], name)
    half = [x.bfloat16() for x in (q, k, v)]
    scale = scale.float()
    whole = cm.attend(*half, enable_gqa=True, scale=scale)
    ours = cm.attend(
        half[0][:, :, asked],
        shard_of(way, half[1][:, :, mine], half[2][:, :, mine], group),
        enable_gqa=True,
        scale=scale,
    )
    assert ours.mean.dtype == torch.bfloat16
    torch.testing.assert_close(ours.mean, whole.mean[:, :, asked], rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(
        ours.log_normalizer, whole.log_normalizer[:, :, asked], rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("way", WAYS)
def test_grouped_heads_tensor_scale_and_half_precision(crew, way):
    crew.run(heads, 3, way)


def learned_scale(group, rank, size, way, rows):
    """A scale of all queries, or one for each: whole if replicated, otherwise a rank's part."""
    q, k, v = inputs()
    keys = part(KEYS[size], rank)
    asked = slice(None) if way == "replicated" else part(QUERIES[size], rank)
    random = torch.Generator().manual_seed(6)
    scale = torch.rand(rows, generator=random, dtype=torch.float64).requires_grad_()
    whole = cm.attend(q, k, v, scale=scale)
    (expected,) = torch.autograd.grad(whole.mean.sin().sum(), scale)
    own = scale[asked] if rows else scale
    ours = cm.attend(q[:, asked], shard_of(way, k[:, keys], v[:, keys], group), scale=own)
    close(ours.mean, whole.mean[:, asked], "mean")
    loss = ours.mean.sin().sum()
    (found,) = torch.autograd.grad(loss if way == "replicated" else total(loss, group), scale)
    close(found if way == "replicated" else total(found, group), expected, "gradient")


@pytest.mark.parametrize("rows", [(), (6, 1)], ids=["one", "each"])
@pytest.mark.parametrize("way", WAYS)
def test_a_learned_scale(crew, way, rows):
    crew.run(learned_scale, 3, way, rows)


def far_apart(group, rank, size, way):
    """Scores of thousands: the shares of most shards underflow, and nothing becomes NaN."""
    q, k, v = inputs()
    mine = part(KEYS[size], rank)
    asked = slice(None) if way == "replicated" else part(QUERIES[size], rank)
    q = (2000 * q).requires_grad_()
    whole = cm.attend(q, k, v)
    own = q.detach()[:, asked].requires_grad_()
    ours = cm.attend(own, shard_of(way, k[:, mine], v[:, mine], group))
    close(ours.mean, whole.mean[:, asked], "mean")
    close(ours.log_normalizer, whole.log_normalizer[:, asked], "G")
    close(ours.entropy, whole.entropy[:, asked], "entropy")
    (expected,) = torch.autograd.grad(whole.log_normalizer.sum(), q)
    loss = ours.log_normalizer.sum()
    (found,) = torch.autograd.grad(loss if way == "replicated" else total(loss, group), own)
    close(found, expected[:, asked], "gradient")


@pytest.mark.parametrize("way", WAYS)
def test_scores_of_thousands(crew, way):
    crew.run(far_apart, 3, way)


def vectorized(group, rank, size):
    """jacrev and jacfwd batch the collectives by vmap."""
    q, k, v = inputs()
    mine = part(KEYS[size], rank)

    def f(q):
        return cm.attend(q, ShardedKeys(k[0, mine], v[0, mine], group=group)).mean

    def g(q):
        return cm.attend(q, k[0], v[0]).mean

    for jacobian in (torch.func.jacrev, torch.func.jacfwd):
        close(jacobian(f)(q[0]), jacobian(g)(q[0]), jacobian.__name__)
    close(
        torch.func.hessian(lambda x: f(x).sum())(q[0]),
        torch.func.hessian(lambda x: g(x).sum())(q[0]),
        "hessian",
    )


@pytest.mark.parametrize("size", [2, 3])
def test_jacobians_by_vmap(crew, size):
    crew.run(vectorized, size)
