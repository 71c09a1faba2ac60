"""Every derivative of every field against the dense oracle: order x direction x argument x mask."""

from __future__ import annotations

import math

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import hessian, jacfwd, jacrev, vmap

import cumulant as cm
from oracle import (
    FIELDS,
    assert_close,
    band_mask,
    cotangent,
    dense,
    differentiate,
    directions,
    finite,
)

M, N, D, E = 3, 5, 2, 2
DOUBLE = torch.float64


def tensors(dtype=DOUBLE, batch=(2,)):
    generator = torch.Generator().manual_seed(7)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=DOUBLE).to(dtype)

    return {
        "query": normal(*batch, M, D),
        "key": normal(*batch, N, D),
        "value": normal(*batch, N, E),
        "bias": normal(1, M, N),
        "scale": torch.tensor(0.7, dtype=dtype),
    }


def _bool_mask():
    mask = torch.rand(2, M, N, generator=torch.Generator().manual_seed(3)) > 0.4
    mask[0, 1] = False  # a query that sees nothing
    mask[1, 0] = False
    mask[1, 0, 2] = True  # a query that sees one key
    return mask


MASKS = ("none", "causal", "window", "boolean", "shared", "additive")


def masked(kind):
    """(arguments of `attend`, mask for the oracle, does it take a bias?)."""
    return {
        "none": ({}, None, False),
        "causal": ({"is_causal": True}, band_mask(M, N, upper=0), False),
        "window": ({"window": (1, 1)}, band_mask(M, N, lower=-1, upper=1), False),
        "boolean": ({"attn_mask": _bool_mask()}, _bool_mask(), False),
        "shared": ({"attn_mask": _bool_mask()[1:, 2:]}, _bool_mask()[1:, 2:], False),
        "additive": ({}, None, True),
    }[kind]


def functions(kind, names, fields, dtype=DOUBLE, fixed=None):
    """(ours, oracle): maps from the named arguments to the named fields."""
    options, mask, biased = masked(kind)
    base = fixed or tensors(dtype)

    def split(values):
        given = {**base, **dict(zip(names, values, strict=True))}
        bias = given.pop("bias")
        return given, (bias if biased else None)

    def ours(*values):
        given, bias = split(values)
        scale = given.pop("scale")
        extra = options if bias is None else {**options, "attn_mask": bias}
        a = cm.attend(given["query"], given["key"], given["value"], scale=scale, **extra)
        return tuple(finite(getattr(a, f)) for f in fields)

    def oracle(*values):
        given, bias = split(values)
        a = dense(**given, bias=bias, mask=mask)
        return tuple(finite(getattr(a, f)) for f in fields)

    return ours, oracle


def assert_agrees(word, kind, names, fields, tolerance=1e-10):
    ours, oracle = functions(kind, names, fields)
    point = tuple(tensors()[n] for n in names)
    generator = torch.Generator().manual_seed(11)
    tangents = tuple(torch.randn(x.shape, generator=generator, dtype=DOUBLE) for x in point)
    results = [differentiate(f, word, tangents, cotangent)(*point) for f in (ours, oracle)]
    assert_close(*results, tolerance)


ALL = ("query", "key", "value", "scale")
MAIN = ("mean", "log_normalizer", "entropy")


@pytest.mark.parametrize("word", [w for order in range(4) for w in directions(order)])
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.usefixtures("small_tiles")
def test_all_arguments_at_once(word, kind):
    names = (*ALL, "bias") if masked(kind)[2] else ALL
    assert_agrees(word, kind, names, MAIN)


@pytest.mark.parametrize("word", ["", "F", "R", "FF", "FR", "RF", "RR", "RRR", "FFR"])
@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("kind", ["none", "boolean"])
def test_every_field(word, field, kind):
    assert_agrees(word, kind, ("query", "key", "value"), (field,), tolerance=1e-9)


@pytest.mark.parametrize("word", ["F", "R", "FR", "RF", "RR", "FF"])
@pytest.mark.parametrize("name", ["query", "key", "value", "bias", "scale"])
@pytest.mark.parametrize("field", MAIN)
@pytest.mark.usefixtures("small_tiles")
def test_each_argument_alone(word, name, field):
    assert_agrees(word, "additive", (name,), (field,))


@pytest.mark.parametrize("word", ["", "F", "R", "RR", "FR"])
def test_large_enough_for_real_tiles(word):
    """Several tiles of the real size, in batch, query and key direction."""
    generator = torch.Generator().manual_seed(1)
    shape = {"query": (2, 1, 1300, 3), "key": (1, 2, 1100, 3), "value": (2, 2, 1100, 2)}
    point = tuple(torch.randn(s, generator=generator, dtype=DOUBLE) for s in shape.values())
    tangents = tuple(torch.randn(x.shape, generator=generator, dtype=DOUBLE) for x in point)

    def ours(q, k, v):
        a = cm.attend(q, k, v, is_causal=True)
        return a.mean, a.log_normalizer

    def oracle(q, k, v):
        s = (q @ k.mT / math.sqrt(3)).masked_fill(~band_mask(1300, 1100, upper=0), -math.inf)
        g = (s.exp().sum(-1)).log()
        return (s - g[..., None]).exp() @ v, g

    results = [
        differentiate(f, word, tangents, lambda x: x / x.numel())(*point) for f in (ours, oracle)
    ]
    assert_close(*results, 1e-10)


@pytest.mark.parametrize("kind", ["none", "boolean", "additive"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("word", ["", "F", "R", "RR", "FR"])
def test_lower_precision(kind, dtype, word):
    """Against the oracle in float64 on the same rounded numbers."""
    names, fields = ("query", "key", "value"), ("mean", "log_normalizer", "entropy")
    base = tensors(dtype)
    point = tuple(base[n] for n in names)
    tangents = tuple(torch.randn_like(x) for x in point)
    ours, _ = functions(kind, names, fields, fixed=base)
    wide = {n: x.to(DOUBLE) for n, x in base.items()}
    _, oracle = functions(kind, names, fields, fixed=wide)
    got = differentiate(ours, word, tangents, cotangent)(*point)
    want = differentiate(oracle, word, tuple(t.to(DOUBLE) for t in tangents), cotangent)(
        *(x.to(DOUBLE) for x in point)
    )
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 8e-2}[dtype]
    assert_close([x.to(DOUBLE) for x in got], want, tolerance)
    if word == "":
        assert got[0].dtype == dtype
        assert got[1].dtype == torch.float32


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize(
    "transform",
    [jacfwd, jacrev, hessian, lambda f: jacfwd(jacfwd(f)), lambda f: jacrev(jacrev(f))],
    ids=["jacfwd", "jacrev", "hessian", "jacfwd jacfwd", "jacrev jacrev"],
)
def test_jacobians(kind, transform):
    def scalar(f):
        return lambda q: sum(x.sin().sum() for x in f(q))

    query = tensors()["query"]
    results = [transform(scalar(f))(query) for f in functions(kind, ("query",), MAIN)]
    assert_close([results[0]], [results[1]], 1e-10)


@pytest.mark.parametrize("name", ["query", "key", "value"])
@pytest.mark.parametrize("word", ["", "F", "R", "RR", "FR", "RF"])
@pytest.mark.parametrize("dim", [0, 1])
def test_vmap(name, word, dim):
    """vmap over one argument, the others shared, around and inside derivatives."""
    point = tensors()[name]
    stack = torch.stack([point, 2 * point, -point], dim)
    tangent = (torch.ones_like(point),)
    results = [
        vmap(differentiate(f, word, tangent, cotangent), in_dims=dim)(stack)
        for f in functions("boolean", (name,), MAIN)
    ]
    assert_close(*results, 1e-10)


@pytest.mark.parametrize("kind", MASKS)
def test_plain_dual_numbers_then_backward_twice(kind):
    """torch.autograd.forward_ad without torch.func, differentiated in reverse afterwards."""
    names = ("query", "key", "value")
    results = []
    for f in functions(kind, names, MAIN):
        leaves = [tensors()[n].requires_grad_() for n in names]
        with forward_ad.dual_level():
            out = f(*(forward_ad.make_dual(x, torch.ones_like(x)) for x in leaves))
            moved = [forward_ad.unpack_dual(x).tangent for x in out]
        first = torch.autograd.grad(sum(x.sin().sum() for x in moved), leaves, create_graph=True)
        second = torch.autograd.grad(sum(x.sin().sum() for x in first), leaves)
        results.append([*moved, *first, *second])
    assert_close(*results, 1e-10)


@pytest.mark.parametrize("field", ["mean", "log_normalizer", "entropy", "score_variance"])
def test_torch_gradcheck(field):
    base = tensors(batch=())
    point = tuple(base[n].requires_grad_() for n in ("query", "key", "value", "scale"))

    def f(q, k, v, s):
        return getattr(cm.attend(q, k, v, scale=s), field)

    assert torch.autograd.gradcheck(f, point, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(f, point, check_fwd_over_rev=True)


def test_gradients_only_where_asked():
    base = tensors()
    query = base["query"].requires_grad_()
    out = cm.attend(query, base["key"], base["value"]).mean
    (grad,) = torch.autograd.grad(out.sum(), query, create_graph=True)
    assert grad.requires_grad
    (second,) = torch.autograd.grad(grad.sin().sum(), query)
    assert second.isfinite().all()


def test_the_older_vmap_is_refused_with_what_to_use():
    x = torch.randn(1, 4, 3, requires_grad=True)
    y = cm.scaled_dot_product_attention(x, x, x)
    with pytest.raises(cm.InputError, match=r"torch\.func\.vmap, jacrev or jacfwd"):
        torch.autograd.grad(y, x, torch.eye(12).reshape(12, 1, 4, 3), is_grads_batched=True)
    entropy = cm.attend(x, x, x).entropy
    with pytest.raises(cm.InputError, match=r"torch\.func\.vmap"):
        torch.autograd.grad(entropy, x, torch.eye(4)[:, None], is_grads_batched=True)
