"""Statistics of rows of weights against dense algebra in float64; soft-capping with derivatives."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from cumulant.kernels.attention import Options, attention
from cumulant.kernels.rows import dropped, largest_root, root_without_asking, sort_rows, summarize
from cumulant.kernels.tiles import Band
from oracle import assert_close, band_mask, cotangent, differentiate, directions, finite

DOUBLE = torch.float64
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5}


def problem(m, n, d=6, *, dtype=DOUBLE, batch=(2, 3), spread=1.0):
    generator = torch.Generator().manual_seed(m * 1000 + n)

    def normal(*shape):
        return (spread * torch.randn(*shape, generator=generator, dtype=DOUBLE)).to(dtype)

    return {"query": normal(*batch, m, d), "key": normal(*batch, n, d)}


def some_mask(m, n):
    """Two thirds of the pairs; one query sees nothing, one a single key."""
    mask = torch.rand(2, 1, m, n, generator=torch.Generator().manual_seed(n)) < 0.66
    mask[0, 0, m // 2] = False
    mask[1, 0, 0] = False
    mask[1, 0, 0, n // 2] = True
    return mask


def dense_rows(arguments, options, mass=0.9):
    """Everything `summarize` knows, with M x N arrays and a covariance matrix per query."""
    query, key = arguments["query"].double(), arguments["key"].double()
    m, n = query.shape[-2], key.shape[-2]
    scores = options.scale * query @ key.mT
    if "cap" in arguments:
        cap = arguments["cap"].double()
        scores = cap * torch.tanh(scores / cap)
    seen = band_mask(m, n, options.band.lower, options.band.upper).expand(scores.shape).clone()
    total = scores
    if "bias" in arguments:
        total = total + arguments["bias"].double()
        seen &= arguments["bias"] > -math.inf
    if "mask" in arguments:
        seen &= arguments["mask"]
    total = total.masked_fill(~seen, -math.inf)
    normalizer = total.logsumexp(-1)
    p = torch.where(seen, (total - normalizer[..., None]).exp(), 0.0)
    mean = (p * scores).sum(-1, keepdim=True)
    key_mean = p @ key
    apart = key[..., None, :, :] - key_mean[..., None, :]
    covariance = torch.einsum("...mn,...mni,...mnj->...mij", p, apart, apart)
    falling = p.sort(-1, descending=True).values.cumsum(-1)
    slack = 100 * torch.finfo(arguments["query"].dtype).eps
    return {
        "log_normalizer": normalizer,
        "entropy": torch.special.entr(p).sum(-1),
        "score_variance": (p * (scores - mean) ** 2).sum(-1),
        "visible": seen.sum(-1),
        "fisher_trace": covariance.diagonal(dim1=-2, dim2=-1).sum(-1),
        # Sums closer to the mass than the slack of the dtype may count either way.
        "coverage": ((falling < mass - slack).sum(-1) + 1) * seen.any(-1),
        "coverage at most": ((falling < mass + slack).sum(-1) + 1) * seen.any(-1),
        "top_weight": p.amax(-1),
        "leading": torch.linalg.eigvalsh(covariance)[..., -1],
    }, p


def assert_rows(arguments, options, *, tolerance=None, **given):
    tolerance = tolerance or TOLERANCE[arguments["query"].dtype]
    found = summarize(arguments, options, **given)
    wanted, p = dense_rows(arguments, options, given.get("mass", 0.9))
    assert all(x.shape == (*p.shape[:-1], x.shape[-1]) for x in found.values())
    assert all(x.dtype == arguments["query"].dtype for x in found.values())
    empty = wanted["visible"] == 0
    got = {name: x[..., 0].double() for name, x in found.items() if name != "marked"}
    assert (got["log_normalizer"][empty] == -math.inf).all()
    top = got.pop("top", None)
    for name, x in got.items():
        assert not x.isnan().any(), name
        if name == "coverage":
            wanted[name] = x.clamp(wanted[name], wanted["coverage at most"])
        error = (x - wanted[name])[~empty].abs()
        size = 1 + wanted[name][~empty].abs().max() if error.numel() else 1.0
        assert (error <= tolerance * size).all(), f"{name} off by {error.max():.1e} of {size:.1e}"
        if name != "log_normalizer":
            assert (x[empty].abs() < 1e-300).all(), name
    if top is not None:  # which of two equal keys comes first is nobody's business
        chosen = p.gather(-1, top.long()[..., None])[..., 0]
        assert ((chosen - wanted["top_weight"])[~empty].abs() <= tolerance).all()
    return found, p


def variants(m, n):
    """name: (further arguments, band)."""
    bias = torch.randn(1, 3, m, n, generator=torch.Generator().manual_seed(5), dtype=DOUBLE)
    removed = bias.masked_fill(torch.rand(bias.shape, generator=torch.Generator()) < 0.3, -math.inf)
    cap = torch.full((1, 1, 1, 1), 1.5, dtype=DOUBLE)
    return {
        "plain": ({}, Band()),
        "mask": ({"mask": some_mask(m, n)}, Band()),
        "causal": ({}, Band(upper=0)),
        "window": ({}, Band(lower=-2, upper=1)),
        "behind": ({}, Band(upper=-2)),
        "bias": ({"bias": bias}, Band()),
        "row bias": ({"bias": 3 * bias[..., :1, :]}, Band()),
        "infinite bias": ({"bias": removed}, Band()),
        "cap": ({"cap": cap}, Band()),
        "cap, bias, mask, band": (
            {"cap": cap, "bias": bias, "mask": some_mask(m, n)},
            Band(lower=-9, upper=3),
        ),
    }


NAMES = list(variants(4, 4))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("m", "n"), [(7, 7), (5, 70), (40, 33), (3, 64), (9, 4)])
@pytest.mark.parametrize("name", NAMES)
def test_against_dense_algebra(name, m, n, dtype):
    extra, band = variants(m, n)[name]
    extra = {k: x if x.dtype == torch.bool else x.to(dtype) for k, x in extra.items()}
    assert_rows({**problem(m, n, dtype=dtype), **extra}, Options(scale=0.6, band=band))


@pytest.mark.parametrize(("m", "n"), [(11, 10), (13, 5), (4, 37)])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("small_tiles")
def test_many_tiles(name, m, n):
    extra, band = variants(m, n)[name]
    assert_rows({**problem(m, n), **extra}, Options(scale=0.6, band=band))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", ["plain", "causal", "bias", "cap"])
def test_one_key(name, dtype):
    """All the mass on it: no entropy, no variance, and G is its score."""
    extra, band = variants(1, 1)[name]
    extra = {k: x.to(dtype) for k, x in extra.items()}
    arguments = {**problem(1, 1, dtype=dtype), **extra}
    found, _ = assert_rows(arguments, Options(band=band))
    for exact in ("entropy", "score_variance"):
        assert (found[exact] == 0).all()
    assert (found["top_weight"] == 1).all()
    assert (found["coverage"] == 1).all()


def test_one_feature():
    found, _ = assert_rows(problem(6, 9, 1), Options())
    torch.testing.assert_close(found["leading"], found["fisher_trace"], rtol=1e-12, atol=1e-12)


def test_no_keys_and_no_queries():
    found = summarize(problem(3, 0), Options())
    assert (found["log_normalizer"] == -math.inf).all()
    assert all((x.abs() < 1e-300).all() for n, x in found.items() if n != "log_normalizer")
    assert all(x.shape == (2, 3, 0, 1) for x in summarize(problem(0, 3), Options()).values())


def test_a_strip_of_queries_outside_the_band():
    """Queries whose tiles are skipped altogether see nothing, like those on a tile that is not."""
    arguments = problem(3000, 400, 2, batch=(1, 1))
    found = summarize(arguments, Options(band=Band(lower=-5, upper=0)))
    assert (found["visible"][0, 0, 410:] == 0).all()
    assert (found["log_normalizer"][0, 0, 410:] == -math.inf).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_marks(dtype):
    arguments = problem(8, 35, dtype=dtype)
    arguments["mask"] = some_mask(8, 35)
    marks = torch.randint(-1, 35, (2, 3, 8, 4), generator=torch.Generator().manual_seed(2))
    arguments["marks"] = marks.to(dtype)
    found, p = assert_rows(arguments, Options(scale=0.5))
    wanted = p.gather(-1, marks.clamp_min(0)).masked_fill(marks < 0, 0.0)
    torch.testing.assert_close(found["marked"].double(), wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.usefixtures("small_tiles")
def test_marks_shared_by_heads_and_many_tiles():
    arguments = problem(8, 12)
    marks = torch.arange(8)[:, None].expand(2, 1, 8, 1)
    found, p = assert_rows({**arguments, "marks": marks.double()}, Options(band=Band(upper=0)))
    torch.testing.assert_close(found["marked"][..., 0], p.diagonal(dim1=-2, dim2=-1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("n", [3, 35, 200])
def test_largest_weights(n, dtype):
    """In descending order; 0 and key -1 where fewer than five are above 0."""
    arguments = problem(8, n, dtype=dtype)
    arguments["mask"] = some_mask(8, n)
    options = Options(scale=0.5, band=Band(upper=n - 6))
    found = summarize(arguments, options, largest=5)
    _, p = dense_rows(arguments, options)
    wanted = p.sort(-1, descending=True).values[..., :5]
    wanted = torch.nn.functional.pad(wanted, (0, 5 - wanted.shape[-1]))
    weight, key = found["largest"].double(), found["largest_key"].long()
    torch.testing.assert_close(weight, wanted, rtol=TOLERANCE[dtype], atol=1e-12)
    assert torch.equal(key < 0, wanted == 0)
    at_key = p.gather(-1, key.clamp_min(0)).masked_fill(key < 0, 0.0)
    torch.testing.assert_close(at_key, weight, rtol=TOLERANCE[dtype], atol=1e-12)


def test_of_equal_weights_the_first_keys_are_the_largest():
    arguments = {"query": torch.zeros(1, 2, 3), "key": torch.randn(1, 90, 3)}
    arguments["mask"] = torch.arange(90).expand(1, 2, 90) % 2 == 1
    found = summarize(arguments, Options(), largest=5)
    assert found["largest_key"].tolist() == [[[1, 3, 5, 7, 9]] * 2]


@pytest.mark.parametrize("mass", [0.5, 0.9, 0.99])
def test_other_masses(mass):
    assert_rows(problem(9, 50), Options(), mass=mass)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_equal_weights(dtype):
    """Nine of ten equal weights hold nine tenths: rounding must not ask for a tenth."""
    for n in (1, 2, 10, 20, 30, 100, 1000):
        arguments = {
            "query": torch.zeros(1, 2, 3, dtype=dtype),
            "key": torch.zeros(1, n, 3).to(dtype),
        }
        found = summarize(arguments, Options())
        assert (found["coverage"] == math.ceil(0.9 * n - 1e-9)).all()
        torch.testing.assert_close(
            found["entropy"], torch.full((1, 2, 1), math.log(n), dtype=dtype), rtol=1e-6, atol=1e-6
        )
        assert (found["fisher_trace"] == 0).all()
        assert (found["leading"] < 1e-30).all()


def test_only_what_is_asked_for():
    always = {"log_normalizer", "entropy", "score_variance", "visible", "fisher_trace"}
    arguments = problem(3, 4)
    assert summarize(arguments, Options(), order=False, spectrum=False).keys() == always
    ordered = {"coverage", "top", "top_weight"}
    assert summarize(arguments, Options(), spectrum=False).keys() == always | ordered
    assert summarize(arguments, Options(), order=False).keys() == always | {"leading"}


def test_large_scores():
    """Scores of thousands: weights are almost one-hot, and nothing overflows."""
    assert_rows(problem(6, 40, spread=30.0), Options())
    arguments = problem(6, 40, dtype=torch.float32, spread=30.0)
    found = summarize(arguments, Options())
    assert all(x.isfinite().all() for x in found.values())


def test_a_common_part_of_the_keys_does_not_cancel():
    """Cov[k] does not see where the keys are."""
    arguments = problem(6, 40, dtype=torch.float32)
    arguments["key"] = arguments["key"] + 100.0
    wanted, _ = dense_rows(arguments, Options(scale=0.01))
    found = summarize(arguments, Options(scale=0.01))
    for name in ("fisher_trace", "leading"):
        torch.testing.assert_close(found[name][..., 0].double(), wanted[name], rtol=1e-3, atol=0.0)


@pytest.mark.parametrize("d", [13, 24, 64])
def test_leading_eigenvalue_with_more_features_than_steps(d):
    """Lanczos' value is a Rayleigh quotient: never above, and close where the spectrum decays."""
    arguments = problem(9, 200, d)
    arguments["key"] = arguments["key"] * torch.linspace(1, 0.1, d, dtype=DOUBLE) ** 2
    wanted, _ = dense_rows(arguments, Options(scale=0.2))
    found = summarize(arguments, Options(scale=0.2))["leading"][..., 0]
    assert (found <= wanted["leading"] * (1 + 1e-12)).all()
    torch.testing.assert_close(found, wanted["leading"], rtol=1e-3, atol=0.0)


def test_covariances_of_low_rank():
    """Keys on a line, in a plane, and few visible keys in many dimensions."""
    base = problem(7, 30, 16)
    for rank in (1, 2, 3):
        key = base["key"][..., :rank] @ torch.randn(rank, 16, dtype=DOUBLE)
        assert_rows({**base, "key": key}, Options(scale=0.1), tolerance=1e-9)
    assert_rows(base, Options(scale=0.1, band=Band(lower=-2, upper=0)), tolerance=1e-9)


# ----------------------------------------------------------------- roots of tridiagonal matrices


def eigvalsh(diagonal, off):
    beside = np.apply_along_axis(lambda x: np.diag(x, 1) + np.diag(x, -1), -1, off[..., :-1])
    matrix = np.apply_along_axis(np.diag, -1, diagonal) + (beside if off.shape[-1] > 1 else 0)
    return np.linalg.eigvalsh(matrix)[..., -1:]


def assert_root(diagonal, off, tolerance=1e-11):
    wanted = eigvalsh(np.asarray(diagonal), np.asarray(off))
    for root_of in (largest_root, root_without_asking):
        found = root_of(torch.as_tensor(diagonal), torch.as_tensor(off)).numpy()
        assert found.shape == wanted.shape
        assert (np.abs(found - wanted) <= tolerance * np.abs(wanted) + 1e-300).all()


@pytest.mark.parametrize("s", [1, 2, 3, 5, 12])
@pytest.mark.parametrize("size", [1e-12, 1.0, 1e9])
def test_largest_root_of_covariances(s, size):
    """Tridiagonal L L' with L bidiagonal: positive semidefinite by construction."""
    rng = np.random.default_rng(s)
    a, b = size**0.5 * rng.normal(size=(2, 50, s))
    diagonal, off = a**2, a * b
    diagonal[:, 1:] += b[:, :-1] ** 2
    assert_root(diagonal, off)


def test_largest_root_where_the_rank_is_deficient():
    """Lanczos stops early: zeros from there on."""
    rng = np.random.default_rng(1)
    for rank in range(1, 12):
        a, b = rng.normal(size=(2, 20, 12))
        b[:, rank - 1 :] = 0
        a[:, rank:] = 0
        diagonal, off = a**2, a * b
        diagonal[:, 1:] += b[:, :-1] ** 2
        assert_root(diagonal, off)
    assert_root(np.zeros((3, 12)), np.zeros((3, 12)))


@pytest.mark.parametrize("times", [2, 3, 12])
def test_multiple_roots(times):
    """An identity beside something smaller; close pairs too."""
    diagonal = np.full((1, 12), 0.25)
    diagonal[:, :times] = 2.0
    assert_root(diagonal, np.zeros((1, 12)), tolerance=1e-7)
    off = np.zeros((1, 12))
    off[:, ::2] = 1e-6
    assert_root(diagonal, off, tolerance=1e-7)


def test_single_precision_comes_back_in_single_precision():
    diagonal, off = torch.tensor([[1.0, 3.0]]), torch.tensor([[1.0, 0.0]])
    root = largest_root(diagonal, off)
    assert root.dtype == torch.float32
    torch.testing.assert_close(root, torch.tensor([[2 + 2**0.5]]))


# ------------------------------------------------------------------------ order of the weights


def counted(row, limit):
    """The definition, one entry after another."""
    total, count = 0, 0
    for x in row:
        total += x
        if total > limit:
            break
        count += 1
    return min(count, len(row) - 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("n", [1, 2, 9, 31, 32, 33, 63, 64, 65, 96, 100])
def test_dropped_by_the_definition(n, dtype):
    """Whole numbers, so that sums are exact and equality with the limit happens."""
    generator = torch.Generator().manual_seed(n)
    rows = torch.randint(0, 6, (40, n), generator=generator).sort(-1).values
    limits = torch.randint(0, 3 * n, (40, 1), generator=generator)
    limits[:3] = 0
    limits[3:6] = rows.sum(-1, keepdim=True)[3:6]
    found = dropped(rows.to(dtype), limits.to(dtype))
    pairs = zip(rows.tolist(), limits[:, 0].tolist(), strict=True)
    assert found[:, 0].tolist() == [counted(row, limit) for row, limit in pairs]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", [(3, 5, 7), (1, 300, 400), (2, 1, 70000), (257, 300)])
def test_sort_rows(shape, threads):
    x = torch.randn(shape)
    wanted = x.sort(-1).values
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert torch.equal(sort_rows(x), wanted)
    finally:
        torch.set_num_threads(before)


def test_sort_rows_of_a_view():
    """Buffers of the workspace have padded rows; the padding stays as it is."""
    buffer = torch.randn(4, 20)
    view, padding = buffer[:, :16], buffer[:, 16:].clone()
    wanted = view.sort(-1).values
    assert torch.equal(sort_rows(view), wanted)
    assert torch.equal(buffer[:, 16:], padding)


# --------------------------------------------------------------------------------- soft-capping

M, N = 3, 5


def capped_arguments():
    generator = torch.Generator().manual_seed(7)
    shapes = {"query": (2, M, 2), "key": (1, N, 2), "value": (2, N, 3), "bias": (1, M, N)}
    return {n: torch.randn(s, generator=generator, dtype=DOUBLE) for n, s in shapes.items()}


def boolean():
    mask = torch.rand(2, M, N, generator=torch.Generator().manual_seed(3)) > 0.4
    mask[0, 1] = False  # a query that sees nothing
    return mask


# name: (a mask among the arguments, band, is the bias among them?)
CAPPED = {
    "none": (None, Band(), False),
    "boolean": (boolean(), Band(), False),
    "causal": (None, Band(upper=0), False),
    "bias": (None, Band(), True),
    "bias, boolean, window": (boolean(), Band(lower=-1, upper=2), True),
}


def capped_functions(kind, names, *, entropy, cap=0.8, scale=1.7):
    """(ours, oracle): maps from the named arguments to mean, G and, where asked for, entropy."""
    mask, band, biased = CAPPED[kind]
    base = capped_arguments()
    if not biased:
        del base["bias"]

    def ours(*values):
        given = {**base, **dict(zip(names, values, strict=True))}
        given["cap"] = torch.full((1, 1, 1), cap, dtype=DOUBLE)
        if mask is not None:
            given["mask"] = mask
        out = attention(given, Options(scale, band, entropy=entropy))
        return tuple(finite(x) for x in out[:3] if x is not None)

    def oracle(*values):
        given = {**base, **dict(zip(names, values, strict=True))}
        seen = band_mask(M, N, band.lower, band.upper)
        seen = (seen if mask is None else seen & mask).expand(2, M, N)
        total = cap * torch.tanh(scale * given["query"] @ given["key"].mT / cap)
        total = total + given.get("bias", 0.0)
        # Scores are below 1 + |bias|, so no maximum need be subtracted.
        raw = torch.where(seen, total.exp(), 0.0)
        alive = seen.any(-1, keepdim=True)
        mass = torch.where(alive, raw.sum(-1, keepdim=True), 1.0)
        p = raw / mass
        normalizer = torch.where(alive, mass.log(), 0.0)
        out = (p @ given["value"], normalizer)
        heat = (p * (total - normalizer)).sum(-1, keepdim=True)
        return (*out, -heat) if entropy else out

    return ours, oracle


def assert_capped(word, kind, names, *, entropy):
    ours, oracle = capped_functions(kind, names, entropy=entropy)
    point = tuple(capped_arguments()[n] for n in names)
    generator = torch.Generator().manual_seed(11)
    tangents = tuple(torch.randn(x.shape, generator=generator, dtype=DOUBLE) for x in point)
    results = [differentiate(f, word, tangents, cotangent)(*point) for f in (ours, oracle)]
    assert_close(*results, 1e-10)


@pytest.mark.parametrize("word", [w for order in range(3) for w in directions(order)])
@pytest.mark.parametrize("kind", list(CAPPED))
@pytest.mark.parametrize("entropy", [False, True])
def test_capped_derivatives(word, kind, entropy):
    names = ("query", "key", "value", "bias") if CAPPED[kind][2] else ("query", "key", "value")
    assert_capped(word, kind, names, entropy=entropy)


@pytest.mark.parametrize("word", ["", "F", "R", "FR", "RF", "RR", "FF", "RRR", "FRF"])
@pytest.mark.parametrize("kind", ["none", "bias, boolean, window"])
@pytest.mark.usefixtures("small_tiles")
def test_capped_derivatives_on_many_tiles(word, kind):
    names = ("query", "key", "value", "bias") if CAPPED[kind][2] else ("query", "key", "value")
    assert_capped(word, kind, names, entropy=True)


@pytest.mark.parametrize("word", ["F", "R", "FR", "RF", "RR"])
@pytest.mark.parametrize("name", ["query", "key", "value", "bias"])
def test_capped_each_argument_alone(word, name):
    assert_capped(word, "bias", (name,), entropy=False)


def test_capped_gradcheck():
    base = capped_arguments()
    point = tuple(base[n].requires_grad_() for n in ("query", "key", "value", "bias"))

    def f(query, key, value, bias):
        cap = torch.full((1, 1, 1), 0.8, dtype=DOUBLE)
        named = {"query": query, "key": key, "value": value, "bias": bias, "cap": cap}
        return attention(named, Options(1.7)).mean

    assert torch.autograd.gradcheck(f, point, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(f, point, check_fwd_over_rev=True, fast_mode=True)


def test_a_high_cap_is_no_cap():
    """cap tanh(s / cap) = s - s^3 / (3 cap^2) + ...: equal to rounding at 1e8."""
    base = {n: x for n, x in capped_arguments().items() if n != "bias"}
    high = {**base, "cap": torch.full((1, 1, 1), 1e8, dtype=DOUBLE)}
    plain, capped = attention(base, Options()), attention(high, Options())
    torch.testing.assert_close(capped.mean, plain.mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(capped.log_normalizer, plain.log_normalizer)


def test_a_cap_bounds_the_weights():
    """Scores in [-cap, cap]: no two weights differ by more than exp(2 cap)."""
    arguments = problem(5, 40, spread=20.0)
    cap = torch.full((1, 1, 1, 1), 1.5, dtype=DOUBLE)
    found = summarize({**arguments, "cap": cap}, Options())
    assert (found["top_weight"] <= math.exp(3.0) / 40).all()
    assert (found["score_variance"] <= 1.5**2).all()


def test_peaked_rows_keep_their_digits():
    """Where one key holds all but 1e-12 of the mass, its covariance is still right in float32."""
    generator = torch.Generator().manual_seed(0)
    key = torch.randn(1, 200, 16, generator=generator) + 3
    query = key[:, torch.randperm(200, generator=generator)]
    query = query * torch.logspace(-1, 1, 200)[None, :, None]
    found = summarize({"query": query, "key": key}, Options(scale=0.5))
    k = key[0].double()
    weights = (query[0].double() @ k.mT * 0.5).softmax(-1)
    from_mean = k - (weights @ k)[:, None]  # (queries, keys, features)
    covariance = torch.einsum("mn,mni,mnj->mij", weights, from_mean, from_mean)
    leading = torch.linalg.eigvalsh(covariance)[:, -1]
    trace = covariance.diagonal(dim1=-2, dim2=-1).sum(-1)
    assert trace.min() < 1e-10
    for name, expected in (("leading", leading), ("fisher_trace", trace)):
        torch.testing.assert_close(found[name][0, :, 0].double(), expected, rtol=1e-3, atol=0.0)
