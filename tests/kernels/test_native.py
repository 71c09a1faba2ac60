"""The compiled engine: when it runs, odd memory, and any number of threads."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import cumulant as cm
from cumulant.cli.main import app
from cumulant.kernels import streaming
from cumulant.kernels.engines import Status, compiled, engines
from cumulant.kernels.native import answers
from oracle import assert_close, dense


def test_the_engine_is_there_where_it_must_be():
    """In CI a compiler is promised: a build that failed must not hide behind skipped tests."""
    if os.environ.get("CI"):
        assert engines()["native"].available, engines()["native"].why


needs_native = pytest.mark.skipif(
    not engines()["native"].available, reason="no compiled engine here"
)


def qkv(m=70, n=130, d=20, e=12, batch=(2, 3), dtype=torch.float32):
    return [torch.randn(*batch, *x, dtype=dtype) for x in ((m, d), (n, d), (n, e))]


def test_doctor_lists_engines():
    told = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)["engines"]
    assert told["torch"]["available"]
    assert set(told["native"]) == {"available", "why", "instruction_set"}


def test_an_engine_that_is_not_there_is_refused(monkeypatch):
    missing = {"torch": Status(True, "", None), "native": Status(False, "was not built", None)}
    monkeypatch.setattr("cumulant.kernels.engines.engines", lambda: missing)
    with pytest.raises(cm.InputError, match="was not built"), cm.engine("native"):
        pass
    with pytest.raises(cm.InputError, match="one of torch, native"), cm.engine("numpy"):
        pass


def test_the_choice_ends_with_the_context(engine):
    with cm.engine("torch"):
        assert compiled() is None
    assert (compiled() is None) == (engine == "torch")


@needs_native
def test_the_package_works_without_the_library():
    """As installed where there was no compiler."""
    code = (
        "import torch, cumulant as cm; from cumulant.kernels.engines import engines;"
        "x = torch.randn(5, 4, requires_grad=True); cm.attend(x, x).entropy.sum().backward();"
        "assert x.grad.isfinite().all(); print(engines()['native'].why)"
    )
    told = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "CUMULANT_NATIVE": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "CUMULANT_NATIVE=0" in told.stdout


def derivatives(xs, **options):
    """Value, first gradient and the gradient of a gradient, all that C++ makes."""
    leaves = [x.detach().clone().requires_grad_() for x in xs]
    a = cm.attend(*leaves, **options)
    out = [a.mean, a.log_normalizer, a.entropy, a.score_variance]
    first = torch.autograd.grad(
        a.mean.sin().sum() + a.log_normalizer.cos().sum(), leaves, create_graph=True
    )
    second = torch.autograd.grad(sum(g.sin().sum() for g in first), leaves)
    pushed = torch.func.jvp(
        lambda *ys: cm.attend(*ys, **options).mean, tuple(xs), tuple(x.cos() for x in xs)
    )
    return [x.detach() for x in (*out, *first, *second, *pushed)]


@needs_native
@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True}, {"attn_mask": torch.arange(70 * 130.0).sin().view(70, 130)}],
    ids=["plain", "causal", "mask"],
)
def test_any_number_of_threads_gives_the_same_bits(options, engine):
    if engine != "native":
        pytest.skip("torch's own products depend on the number of threads")
    query, key, value = qkv(batch=(4,))
    key, value = key[:1], value[:1]  # shared: sums for keys come from every member
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(derivatives((query, key, value), **options))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@needs_native
def test_layouts_are_read_where_they_lie(engine):
    """Transposed, strided and expanded tensors; addresses that are no multiple of a vector."""
    generator = torch.Generator().manual_seed(0)
    packed = torch.randn(2, 70, 3, 4, 9, generator=generator, dtype=torch.float64)
    query, key, value = packed[..., 1:].permute(2, 0, 3, 1, 4)
    mask = torch.rand(70, 1, generator=generator).expand(70, 70) > 0.5
    found = cm.attend(query, key, value, attn_mask=mask)
    expected = dense(query, key, value, mask=mask)
    assert_close((found.mean, found.entropy), (expected.mean, expected.entropy), 1e-12)
    turned = (x.mT.contiguous().mT for x in (query, key, value))
    assert_close((cm.attend(*turned).mean,), (dense(query, key, value).mean,), 1e-12)


@needs_native
def test_zeros_without_storage_and_lazy_signs(engine):
    q, k, v = qkv(5, 6, 4, 4, batch=(), dtype=torch.float64)
    zero = torch._efficientzerotensor(q.shape, dtype=q.dtype)
    found = torch.func.jvp(lambda x, y: cm.attend(x, y, v).mean, (q, k), (zero, k))[1]
    expected = torch.func.jvp(lambda x, y: dense(x, y, v).mean, (q, k), (torch.zeros_like(q), k))[1]
    assert_close((found,), (expected,), 1e-12)
    negative = torch._neg_view(q)
    assert_close((cm.attend(negative, k, v).mean,), (dense(-q, k, v).mean,), 1e-12)


@needs_native
@pytest.mark.parametrize("upper", [-40, -100, 0, 200])
def test_bands_that_leave_rows_or_tiles_out(upper, engine):
    """Blocks of queries without keys pass their turn on."""
    q, k, v = qkv(150, 100, 8, 8, batch=(2,), dtype=torch.float64)
    options = streaming.Options(band=cm.kernels.tiles.Band(upper=upper))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = cm.kernels.attention.attention(
        dict(zip(("query", "key", "value"), leaves, strict=True)), options
    )
    gradients = torch.autograd.grad(out.mean.sin().sum(), leaves)
    seen = torch.arange(100)[None] - torch.arange(150)[:, None] <= upper
    expected = dense(*leaves, scale=1.0, mask=seen)
    wanted = torch.autograd.grad(expected.mean.sin().sum(), leaves)
    assert_close(gradients, wanted, 1e-11)
    assert bool((out.log_normalizer[~seen.any(-1).expand(2, 150)] == -math.inf).all())


@needs_native
def test_the_extras_are_those_of_the_tiles(engine):
    q, k, v = qkv(70, 130, dtype=torch.float64)
    bias = torch.randn(70, 130, dtype=torch.float64).masked_fill_(
        torch.rand(70, 130) > 0.8, -math.inf
    )
    arguments = {"query": q, "key": k, "value": v, "bias": bias[None, None]}
    out = answers.forward(
        arguments,
        scale=0.4,
        band=streaming.Band(),
        rate=0.0,
        fields=("score_mean", "score_variance", "score_max", "top"),
    )
    plain = 0.4 * q @ k.mT
    p = torch.softmax(plain + bias, -1)
    mean = (p * plain).sum(-1, keepdim=True)
    variance = (p * (plain - mean) ** 2).sum(-1, keepdim=True)
    top = (plain + bias).max(-1, keepdim=True)
    assert_close(
        (out["score_mean"], out["score_variance"], out["score_max"]),
        (mean, variance, top.values),
        1e-12,
    )
    assert torch.equal(out["top"].long(), top.indices)


@needs_native
def test_a_library_of_other_sources_is_refused(tmp_path, monkeypatch):
    from cumulant.kernels.native import library as module

    loaded = module.library()
    assert not module._is_stale(loaded._handle)
    here = tmp_path / "kernels" / "native"
    shutil.copytree(Path(module.__file__).parent, here)
    (tmp_path / "filtering").mkdir()
    original = Path(module.__file__).parents[2] / "filtering" / "native"
    shutil.copytree(original, tmp_path / "filtering" / "native")
    monkeypatch.setattr(module, "__file__", str(here / "library.py"))
    assert not module._is_stale(loaded._handle)
    with (here / "problem.hpp").open("a") as file:
        file.write("// one word more in a structure\n")
    assert module._is_stale(loaded._handle)
    assert "of older sources: run python hatch_build.py" in module._found.__wrapped__()
    monkeypatch.setattr(module, "_found", module._found.__wrapped__)
    with pytest.raises(module.Missing, match=r"of older sources: run python hatch_build\.py"):
        module.library()
