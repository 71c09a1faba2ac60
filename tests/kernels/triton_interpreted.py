"""The Triton engine in Triton's interpreter, against attention written out in float64.

The interpreter has to be chosen before Triton is imported, so `test_triton.py` runs this file in a
process of its own. Its bfloat16 products are wrong (triton #11584), so half precision is float16.
"""

from __future__ import annotations

import math

import pytest
import torch

import cumulant as cm
from cumulant.attention import direct
from cumulant.kernels.attention import Options, attention
from cumulant.kernels.dropout import kept
from cumulant.kernels.tiles import Band, Program, Result
from cumulant.kernels.triton.blocks import read as read_tile
from oracle import assert_close, band_mask, finite

TOLERANCE = 5e-6


@pytest.fixture
def asked(engine, monkeypatch):
    """The questions that the engine answered, in order; other engines are not tested here.

    A NaN is no answer: on the CPU the tiles would then compute the call again, on a GPU nobody.
    """
    if engine != "triton":
        pytest.skip("a test of the Triton engine")
    from cumulant.kernels.triton import answers

    answered = []
    for name in ("forward", "tangent", "gradient", "curvature"):

        def counted(*args, _name=name, _ask=getattr(answers, name), **named):
            out = _ask(*args, **named)
            number = out is not None and not any(x.isnan().any() for x in out.values())
            answered.append(_name if number else f"no {_name}")
            return out

        monkeypatch.setattr(answers, name, counted)
    return answered


def dense(q, k, v, bias=None, mask=None, softcap=None):
    """(mean, G, entropy) of q, k, v that broadcast."""
    s = q @ k.mT / math.sqrt(q.shape[-1])
    s = s if softcap is None else softcap * torch.tanh(s / softcap)
    s = s if bias is None else s + bias
    s = s if mask is None else s.masked_fill(~mask, -math.inf)
    empty = (s == -math.inf).all(-1)
    level = s.masked_fill(empty[..., None], 0.0).logsumexp(-1)
    log = s - level[..., None]
    p = log.exp()
    entropy = -(p * log.masked_fill(p == 0, 0.0)).sum(-1)
    return p @ v, level.masked_fill(empty, -math.inf), entropy


def attended(q, k, v, bias=None, *, band=Band(), dropout=0.0, **more):
    """The same three by the engine."""
    given = {"query": q, "key": k, "value": v, **more}
    given |= {} if bias is None else {"bias": bias}
    scale = 1 / math.sqrt(q.shape[-1])
    got = attention(given, Options(scale=scale, band=band, dropout=dropout, entropy=True))
    return got.mean, got.log_normalizer[..., 0], got.entropy[..., 0]


def seeds(xs, number):
    generator = torch.Generator().manual_seed(number)
    return [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in xs]


def inner(xs, ys):
    return sum((finite(x) * y.to(x.dtype)).sum() for x, y in zip(xs, ys, strict=True))


def derivatives(function, xs, *, second=True):
    """Values, tangents, gradients, and the gradient of <gradient, direction>."""
    leaves = [x.clone().requires_grad_() for x in xs]
    values = function(*leaves)
    directions = seeds(xs, 1)
    moved = tuple(d.to(x.dtype) for d, x in zip(directions, xs, strict=True))
    _, tangents = torch.func.jvp(lambda *xs: tuple(map(finite, function(*xs))), tuple(xs), moved)
    weights = seeds(values, 2)
    cooled = torch.autograd.grad(inner(values, weights), leaves, retain_graph=True)
    first = torch.autograd.grad(inner(values[:2], weights[:2]), leaves, create_graph=second)
    out = [*(x.detach() for x in values), *tangents, *cooled, *(x.detach() for x in first)]
    return [*out, *torch.autograd.grad(inner(first, directions), leaves)] if second else out


def agree(found, expected, asked, *, tolerance=TOLERANCE):
    for x, y in zip(found, expected, strict=True):
        assert ((x == -math.inf) == (y == -math.inf)).all()
        assert_close([finite(x).double()], [finite(y).double()], tolerance)
    assert not [name for name in asked if name.startswith("no ")]


def compare(xs, asked, *, mask=None, cap=None, band=Band(), tolerance=TOLERANCE):
    """Every derivative of the engine in float32 against the dense one in float64."""
    more = {} if mask is None else {"mask": mask}
    if cap is not None:
        more["cap"] = torch.full((1,) * xs[0].ndim, cap)
    seen = band_mask(xs[0].shape[-2], xs[1].shape[-2], band.lower, band.upper)
    seen = seen if mask is None else seen & mask
    expected = derivatives(lambda *xs: dense(*xs, mask=seen, softcap=cap), xs)
    found = derivatives(lambda *xs: attended(*xs, band=band, **more), [x.float() for x in xs])
    names = {"forward", "tangent", "gradient", "curvature"}
    agree(found, expected, asked, tolerance=tolerance)
    assert names <= set(asked)


def qkv(m=20, n=50, d=16, e=24, batch=()):
    shapes = ((m, d), (n, d), (n, e))
    return [torch.randn(*batch, *x, dtype=torch.float64) for x in shapes]


def test_plain(asked):
    compare(qkv(35), asked)


@pytest.mark.parametrize("widths", [(20, 40), (16, 256), (256, 24)])
def test_widths(asked, widths):
    """Powers of two and others, d and e that differ; above 32 features go in chunks."""
    m, n = (17, 33) if max(widths) < 256 else (3, 5)
    compare(qkv(m, n, *widths), asked)


@pytest.mark.parametrize("tile", ["64x16/256/4/1i+", "16x64/16/8/2i+"])
def test_tiles(asked, monkeypatch, tile):
    """As the GPUs' table has them: more queries than keys, or fewer; whole rows, or chunks."""
    from cumulant.kernels.triton import answers

    monkeypatch.setattr(answers, "choose", lambda *_, **__: read_tile(tile))
    compare(qkv(20, 40, 24, 16), asked, mask=torch.rand(20, 1) < 0.8, band=Band(-30, 9))


@pytest.mark.parametrize("band", [Band(None, 0), Band(-5, 0), Band(-3, 4), Band(20, None)])
def test_bands(asked, band):
    """The last one leaves rows without keys."""
    compare(qkv(), asked, band=band)


@pytest.mark.parametrize("shape", [(2, 20, 50), (1, 20, 50), (2, 1, 50), (2, 20, 1)])
def test_boolean_masks(asked, shape):
    mask = torch.rand(shape) < 0.6
    compare(qkv(batch=(2,)), asked, mask=mask, band=Band(None, 10))


@pytest.mark.parametrize("shape", [(2, 20, 50), (1, 20, 50), (2, 1, 50), (1, 20, 1), (1, 1, 1)])
def test_bias_has_a_gradient(asked, shape):
    bias = torch.randn(shape, dtype=torch.float64)
    compare([*qkv(batch=(2,)), bias], asked, band=Band(None, 12))


def test_bias_hides(asked):
    xs = qkv()
    hidden = torch.rand(20, 50) < 0.4
    bias = torch.zeros(20, 50).masked_fill(hidden, -math.inf)
    expected = derivatives(lambda *xs: dense(*xs, mask=~hidden), xs)
    found = derivatives(lambda *xs: attended(*xs, bias), [x.float() for x in xs])
    agree(found, expected, asked)


@pytest.mark.parametrize("least", [torch.finfo(torch.float32).min, -1e30])
def test_padding_on_the_left(asked, least):
    """As models mask it: whole tiles of keys with the least number as bias, then visible ones."""
    bias = torch.randn(20, 50, dtype=torch.float64)
    bias[:, :40] = least
    compare([*qkv(), bias], asked)


def test_shared_keys(asked):
    """Grouped queries: (groups, heads of a group), keys of the group."""
    q = torch.randn(2, 3, 18, 16, dtype=torch.float64)
    k, v = (torch.randn(2, 1, 20, e, dtype=torch.float64) for e in (16, 8))
    compare([q, k, v], asked, band=Band(None, 2))


def test_batches_that_broadcast(asked):
    """Four dimensions, of which two are one; values that are shared where keys are not."""
    q = torch.randn(2, 1, 2, 2, 9, 16, dtype=torch.float64)
    k = torch.randn(1, 1, 2, 2, 11, 16, dtype=torch.float64)
    v = torch.randn(2, 1, 1, 1, 11, 8, dtype=torch.float64)
    compare([q, k, v], asked)


def test_odd_strides(asked):
    q, k, v = qkv()
    compare([q.mT.contiguous().mT, k.flip(-2)[::2], v[::2]], asked)


def test_softcap(asked):
    """Value and first derivatives; the tiles take the second."""
    xs, cap = qkv(), torch.full((1, 1), 1.5)
    expected = derivatives(lambda *xs: dense(*xs, softcap=1.5), xs, second=False)
    found = derivatives(lambda *xs: attended(*xs, cap=cap), [x.float() for x in xs], second=False)
    agree(found, expected, asked)


def test_dropout_drops_the_same_weights(asked):
    xs, seed = qkv(batch=(2,)), torch.tensor([7, -9], dtype=torch.int32)[:, None, None]
    keep = kept(seed, range(20), range(50), 0.3) / 0.7

    def function(q, k, v):
        _, level, entropy = dense(q, k, v)
        p = (q @ k.mT / 4 - level[..., None]).exp()
        return (p * keep) @ v, level, entropy

    expected = derivatives(function, xs)
    options = {"seed": seed, "dropout": 0.3}
    found = derivatives(lambda *xs: attended(*xs, **options), [x.float() for x in xs])
    agree(found, expected, asked)


def test_scores_far_from_zero(asked):
    """G is 300 and rounded to 1.5e-5; rows normalized by their own sum do not see it."""
    q, k, v = qkv(20, 30)
    k[..., 0], q[..., 0] = 40.0, 30.0
    xs = [x.float().double() for x in (q, k, v)]
    compare(xs, asked, tolerance=2e-4)


def test_the_fields_of_a_row(asked):
    from cumulant.kernels.triton import answers

    q, k, _ = qkv(35, 90)
    s = q @ k.mT / 4
    p = s.softmax(-1)
    fields = ("entropy", "score_mean", "score_variance", "score_max", "top")
    named = {"scale": 0.25, "band": Band(), "rate": 0.0, "fields": fields}
    got = answers.forward({"query": q.float(), "key": k.float()}, **named)
    mean = (p * s).sum(-1)
    variance = (p * (s - mean[..., None]) ** 2).sum(-1)
    expected = {"score_mean": mean, "score_variance": variance, "score_max": s.amax(-1)}
    for name, x in expected.items():
        assert_close([got[name][..., 0].double()], [x], TOLERANCE)
    assert (got["top"][..., 0] == s.argmax(-1)).all()


def test_value_variance_where_float64_is_slow(asked, monkeypatch):
    """The forward kernel with v and v^2 as values; elsewhere the tiles compute it in float64."""
    q, k, v = (x.float().double() for x in qkv())
    p = (q @ k.mT / 4).softmax(-1)
    expected = p @ v**2 - (p @ v) ** 2
    precise = cm.attend(q.float(), k.float(), v.float()).value_variance
    assert asked == ["forward", "no forward"]
    assert_close([precise.double()], [expected], 1e-6)
    asked.clear()
    monkeypatch.setattr(direct, "widest", lambda _: torch.float32)
    single = cm.attend(q.float(), k.float(), v.float()).value_variance
    assert asked == ["forward", "forward"]
    assert_close([single.double()], [expected], TOLERANCE)


def test_half_precision(asked):
    """Inputs in float16, sums in float32: errors are those of rounding the weights once."""
    from cumulant.kernels.triton import answers

    xs = [x.half() for x in qkv()]
    named = dict(zip(("query", "key", "value"), xs, strict=True))
    got = answers.forward(named, scale=0.25, band=Band(), rate=0.0, fields=("entropy",))
    mean, level, entropy = dense(*(x.double() for x in xs))
    assert got["mean"].dtype == torch.float32
    assert_close([got["mean"].double()], [mean], 5e-4)
    rows = [got[n][..., 0].double() for n in ("log_normalizer", "entropy")]
    assert_close(rows, [level, entropy], TOLERANCE)


def test_derivatives_in_half_precision(asked):
    """Tangent, gradient and curvature of float16 inputs, directions and cotangents."""
    from cumulant.kernels.triton import answers

    q, k, v = (x.half() for x in qkv())
    level, scale = dense(q.double(), k.double(), v.double())[1], 0.25
    measure = {"query": q, "key": k, "value": v, "log_normalizer": level[..., None].float()}
    along = {n: torch.randn_like(x) for n, x in (("query", q), ("key", k), ("value", v))}
    seed = torch.randn(20, 24).half()

    def program(named, index):
        results = tuple(Result(n, index[n], tuple(x.shape)) for n, x in named.items())
        return Program(lambda *_: {}, {}, results, (20, 50), whole_rows=True)

    keys = {"query": "i", "key": "j", "value": "j"}
    named = {"scale": scale, "rate": 0.0}
    pushed = {**measure, **{f"tangent {n}": x for n, x in along.items()}}
    moved = answers.tangent(program({"mean": seed}, {"mean": "i"}), pushed, **named)
    pulled = program({n: measure[n] for n in keys}, keys)
    first = answers.gradient(pulled, {**measure, "cotangent mean": seed}, **named)
    given = {**measure, "cotangent mean": seed, **{f"second {n}": x for n, x in along.items()}}
    second = answers.curvature(pulled, given, **named)

    leaves = tuple(x.double().requires_grad_() for x in (q, k, v))
    directions = tuple(x.double() for x in along.values())
    _, expected = torch.func.jvp(lambda *xs: dense(*xs)[0], leaves, directions)
    value = (dense(*leaves)[0] * seed.double()).sum()
    gradient = torch.autograd.grad(value, leaves, create_graph=True)
    curvature = torch.autograd.grad(inner(gradient, directions), leaves)
    found = [moved["mean"], *first.values(), *second.values()]
    theirs = [x.detach() for x in (expected, *gradient, *curvature)]
    assert_close([x.double() for x in found], theirs, 1e-3)


@pytest.fixture
def read(asked, monkeypatch):
    """The types of the vectors and of the bias that every launch read: (kernel, vectors, bias)."""
    from cumulant.kernels.triton import answers

    seen, launch = [], answers.launch
    vectors = ("value", "along_query", "along_key", "along_value", "seed_mean")

    def noted(kernel, grid, given, **named):
        z, change = given[:2]
        views = [z.query, z.key, *(getattr(change, n, None) for n in vectors)]
        views += [change] if kernel == "forward" else []
        kinds = {x.data.dtype for x in views if x is not None}
        seen.append((kernel, kinds, None if z.bias is None else z.bias.data.dtype))
        return launch(kernel, grid, given, **named)

    monkeypatch.setattr(answers, "launch", noted)
    return seen


def half_calls():
    """Calls of `attend` on (q, k, v, bias, sink), and the same written out."""
    seen = torch.ones(20, 20, dtype=torch.bool).tril()

    def plain(q, k, v):
        a = cm.attend(q, k, v)
        return a.mean, a.log_normalizer, a.entropy

    def everything(q, k, v, bias, sink):
        a = cm.attend(q, k, v, attn_mask=bias, window=(None, 0), enable_gqa=True, sink=sink)
        return a.mean, a.log_normalizer

    def written(q, k, v, bias, sink):
        k, v = (x.repeat_interleave(2, 0) for x in (k, v))
        s = (q @ k.mT / 4 + bias).masked_fill(~seen, -math.inf)
        s = torch.cat([sink[:, None, None].expand(4, 20, 1), s], -1)
        return s.softmax(-1)[..., 1:] @ v, s.logsumexp(-1)

    wide = ((4, 20, 16), (2, 20, 16), (2, 20, 8), (20, 20), (4,))
    return {
        "plain": (plain, dense, ((20, 16), (50, 16), (50, 24))),
        "everything": (everything, written, wide),
    }


def rounded(shapes, number):
    """Random numbers that float16 holds, in float64."""
    generator = torch.Generator().manual_seed(number)
    return [torch.randn(x, generator=generator).half().double() for x in shapes]


@pytest.mark.parametrize("word", ["plain", "everything"])
def test_half_precision_reaches_the_kernels(asked, read, word):
    """`attend` on float16: value, tangent, gradient and double backward by kernels in float16."""
    ours, theirs, shapes = half_calls()[word]
    points, along = rounded(shapes, 0), rounded(shapes, 1)

    def every(function, kind):
        xs, moved = ([x.to(kind) for x in named] for named in (points, along))
        leaves = [x.clone().requires_grad_() for x in xs]
        values = function(*leaves)
        weights = rounded([x.shape for x in values], 2)
        _, tangents = torch.func.jvp(lambda *xs: tuple(function(*xs)), tuple(xs), tuple(moved))
        first = torch.autograd.grad(
            values[:2],
            leaves,
            [w.to(x.dtype) for w, x in zip(weights, values[:2], strict=False)],
            create_graph=True,
        )
        second = torch.autograd.grad(first, leaves, moved)
        return [x.detach() for x in (*values, *tangents, *first, *second)]

    found, expected = every(ours, torch.float16), every(theirs, torch.float64)
    halves = [x.dtype for x in found]
    rows = 2 if word == "everything" else 3
    columns = [torch.float16, *[torch.float32] * (rows - 1)]
    assert halves == [*columns * 2, *[torch.float16] * (2 * len(shapes))]
    assert {"forward", "tangent", "gradient", "curvature"} == set(asked)  # no "no forward"
    bias = torch.float32 if word == "everything" else None
    assert {kernel for kernel, *_ in read} >= {"forward", "rows", "means", "to_queries", "to_keys"}
    assert all(kinds == {torch.float16} and kind == bias for _, kinds, kind in read)
    assert_close([x.double() for x in found], expected, 2e-3)
    exact = [(x, y) for x, y in zip(found, expected, strict=True) if x.dtype == torch.float32]
    assert_close(
        [x.double() for x, _ in exact[: rows - 1]], [y for _, y in exact[: rows - 1]], 1e-5
    )


def test_a_tensor_scale_is_computed_in_float32(asked, read):
    """The scaled queries are not the caller's: 2000 times them would overflow float16."""
    q, k, v = (x.half() for x in qkv(5, 6))
    a = cm.attend(q, k / 2000, v, scale=torch.full((), 2000.0))
    expected = (2000 * q.double() @ (k / 2000).double().mT).logsumexp(-1)
    assert_close([a.log_normalizer.double()], [expected], 1e-5)
    assert [kinds for _, kinds, _ in read] == [{torch.float32}]


def test_a_call_with_everything(asked):
    """Grouped heads, a sink, a mask and a causal band through `attend`, differentiated twice."""
    q = torch.randn(1, 4, 9, 16, dtype=torch.float64)
    k, v = (torch.randn(1, 2, 9, e, dtype=torch.float64) for e in (16, 8))
    sink = torch.randn(4, dtype=torch.float64)
    mask = torch.rand(1, 1, 9, 9) < 0.8

    def ours(q, k, v, sink):
        mine = mask | torch.eye(9, dtype=torch.bool)
        a = cm.attend(q, k, v, attn_mask=mine, enable_gqa=True, sink=sink)
        return a.mean, a.log_normalizer

    def theirs(q, k, v, sink):
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        seen = mask | torch.eye(9, dtype=torch.bool)
        s = (q @ k.mT / 4).masked_fill(~seen, -math.inf)
        s = torch.cat([sink[:, None, None].expand(1, 4, 9, 1), s], -1)
        return s.softmax(-1)[..., 1:] @ v, s.logsumexp(-1)

    xs = [q, k, v, sink]
    found = twice(ours, [x.float() for x in xs])
    agree(found, twice(theirs, xs), asked)
    assert {"forward", "gradient", "curvature"} <= set(asked)


def twice(function, xs):
    """Values, gradients and gradients of gradients."""
    leaves = [x.clone().requires_grad_() for x in xs]
    values = function(*leaves)
    first = torch.autograd.grad(inner(values, seeds(values, 2)), leaves, create_graph=True)
    second = torch.autograd.grad(inner(first, seeds(xs, 1)), leaves)
    return [x.detach() for x in (*values, *first, *second)]


def test_compiled_without_a_break(asked):
    """`torch.compile(fullgraph=True)`: value and first gradient by the kernels, as eagerly."""
    q, k, v = qkv(20, 20)

    def ours(q, k, v):
        a = cm.attend(q, k, v, is_causal=True)
        return a.entropy, a.mean.sin(), a.log_normalizer

    def theirs(q, k, v):
        mean, level, entropy = dense(q, k, v, mask=torch.ones(20, 20, dtype=torch.bool).tril())
        return entropy, mean.sin(), level

    def once(function, xs):
        leaves = [x.clone().requires_grad_() for x in xs]
        values = function(*leaves)
        first = torch.autograd.grad(inner(values, seeds(values, 2)), leaves)
        return [x.detach() for x in (*values, *first)]

    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    found = once(compiled, [x.float() for x in (q, k, v)])
    agree(found, once(theirs, [q, k, v]), asked)
    assert asked == ["forward", "gradient"]


def test_calls_beyond_the_counters_are_not_taken():
    """Offsets of more than 2^31 inside a tile, and more blocks of keys than a launch can have."""
    from cumulant.kernels.triton import answers

    near = {n: torch.empty(2**27, 16, device="meta") for n in ("query", "key", "value")}
    assert answers._taken(near) is not None
    for name in near:
        far = {**near, name: torch.empty(16, 2**28, device="meta").mT[: 2**27]}
        assert answers._taken(far) is None, name
    strided = torch.empty(2**27, 64, device="meta")[:, :1]
    assert answers._taken({**near, "log_normalizer": strided}) is None

    many, few = 2**21 + 33, torch.zeros(1, 1, 1)
    keys = torch.zeros(1, 1, 16).expand(1, many, 16)
    bias = torch.zeros(1, 1, many)
    given = {"query": few.expand(1, 1, 16), "key": keys, "value": keys, "bias": bias}
    given |= {"log_normalizer": few, "cotangent log_normalizer": few}
    wanted = (Result("bias", "ij", tuple(bias.shape)),)
    program = Program(lambda *_: {}, {}, wanted, (1, many), whole_rows=True)
    assert answers.gradient(program, given, scale=1.0, rate=0.0) is None


def test_what_is_not_taken_goes_to_the_tiles(asked):
    xs = qkv(5, 6, 300, 8)
    found = attended(*(x.float() for x in xs))
    assert asked == ["no forward"]
    assert_close([x.double() for x in found], list(dense(*xs)), TOLERANCE)


def test_random_calls(asked):
    """A few rounds of the fuzzer, whose sizes, broadcasts, masks and layouts nobody chose."""
    from fuzz import engine_calls

    failures = engine_calls.run(rounds=20, seed=0)
    assert not failures, "\n".join(failures)
    assert {"forward", "tangent", "gradient", "curvature"} <= set(asked)
