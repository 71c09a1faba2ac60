"""The GPU engine's self-test, tuning, cost model and benchmark, in Triton's interpreter.

`test_triton.py` runs this file in a process of its own.
"""

from __future__ import annotations

import json
import math
import sys

import pytest
import torch
import triton
import triton.language as tl
from typer.testing import CliRunner

import cumulant as cm
from cumulant.cli.main import app
from cumulant.kernels.tiles import Band
from cumulant.kernels.triton import answers, recording, sums, tuning, validating
from cumulant.kernels.triton.blocks import Blocks
from cumulant.kernels.triton.validating import Case, check, example
from cumulant.lab.bench import gpu
from cumulant.lab.bench.costs import WORK

HERE = torch.device("cpu")
SMALL = Case("small", (16, 16), Band(None, 0), (1, 1), (1, 1), dtypes=(torch.float32,))


@pytest.fixture(autouse=True)
def _one_engine(engine):
    if engine not in (None, "triton"):
        pytest.skip("asks the Triton engine itself")


def test_the_doctor_runs_and_keeps_the_self_test():
    runner = CliRunner()
    done = runner.invoke(app, ["doctor", "--self-test", "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["passed"]
    names = " ".join(c["name"] for c in told["checks"])
    for part in ("forward entropy", "tangent mean", "gradient bias", "curvature key", "float16"):
        assert part in names
    recording.forget()
    kept = recording.recorded(HERE)
    assert kept is not None
    assert kept.passed
    assert str(recording.folder()) in told["file"]


def test_the_doctor_names_the_engine():
    told = CliRunner().invoke(app, ["doctor"]).stdout.splitlines()
    assert "engine triton   runs: in Triton's interpreter, slow: for tests" in told


def test_the_doctor_says_how_many_kernels_it_compiles(monkeypatch):
    launched = []
    monkeypatch.setattr(answers, "launch", lambda kernel, *_, **__: launched.append(kernel))
    for case in validating.CASES:
        for dtype in case.dtypes:
            for ask in example(case, HERE, dtype, (4, 6)).values():
                ask()
    said = f"{len(launched)} kernels"
    assert said in validating.self_test.__doc__
    assert said in CliRunner().invoke(app, ["doctor", "--help"]).stdout


@triton.jit
def wrong_direction(z, b, a, i0, j0, slope):
    t = tl.zeros([z.tile.ROWS, z.tile.COLUMNS], tl.float32)
    return sums.product(z, b, a.along_query, i0, z.key, j0, t, z.tile.D, z.tile.WIDE) * z.scale


def test_a_wrong_kernel_fails(monkeypatch):
    """A term left out of the direction: tangents and curvatures, nothing else."""
    monkeypatch.setattr(sums, "direction", wrong_direction)
    failed = {c.name.split(": ")[1] for c in check(SMALL, HERE, (8, 12)) if not c.passed}
    assert {"tangent mean", "tangent log_normalizer", "curvature key"} <= failed
    assert not [name for name in failed if name.startswith(("forward", "gradient"))]


def test_a_question_not_answered_and_an_error_fail(monkeypatch):
    monkeypatch.setattr(answers, "tangent", lambda *_, **__: None)
    found = list(check(SMALL, HERE, (8, 12)))
    assert [c.error for c in found if "tangent mean" in c.name] == [math.inf]

    def crash(*_, **__):
        raise RuntimeError("out of resource: shared memory")

    monkeypatch.setattr(answers, "forward", crash)
    record = validating.self_test(HERE, cases=(SMALL,), sizes=(8, 12))
    assert not record.passed
    assert "shared memory" in record.checks[0].name


def test_the_cost_model_counts_the_products(monkeypatch):
    """FLOPs of `tl.dot` as the kernels run, against the table of the cost model."""
    builder = type(triton.runtime.interpreter.interpreter_builder)
    original, counted = builder.create_dot, []

    def count(self, a, b, *rest):
        counted.append(2 * a.data.shape[-2] * a.data.shape[-1] * b.data.shape[-1])
        return original(self, a, b, *rest)

    monkeypatch.setattr(builder, "create_dot", count)
    d, e, m, n = 64, 32, 32, 64
    case = Case("count", (d, e), batch=(1, 1), keys=(1, 1))
    for question, ask in example(case, HERE, torch.float32, (m, n)).items():
        counted.clear()
        assert ask() is not None
        expected = sum(2 * m * n * (w.d * d + w.e * e) for w in WORK[question].values())
        assert sum(counted) == expected, question


def test_tuning_keeps_the_fastest_tile(monkeypatch):
    """With a clock that says which tile ran: the smaller is faster, one does not run at all."""
    tiles = tuple(Blocks(n, n, 32, 4, 1, "ieee") for n in (64, 32, 16))
    seen = []

    def clock(run):
        (kernel, b), *others = recording.trial.get().items()
        assert not others
        seen.append((kernel, b.rows))
        if b.rows == 16:
            raise RuntimeError("does not fit here")
        return b.rows

    monkeypatch.setattr(tuning, "candidates", lambda *_, **__: tiles)
    chosen = tuning.tune(HERE, timer=clock, sizes=(4, 4), widths=(32,))
    assert set(chosen.values()) == {str(tiles[1])}
    assert recording.choice_of("to_bias", 32, torch.float16, True) in chosen
    assert {rows for _, rows in seen} == {64, 32, 16}
    assert recording.trial.get() == {}


def test_a_tile_on_trial_is_the_one_that_runs(monkeypatch):
    small = Blocks(16, 16, 32, 4, 1, "ieee")
    monkeypatch.setattr(recording, "candidates", lambda *_, **__: (recording.read(str(small)),))
    token = recording.trial.set({"forward": small})
    launched = []
    monkeypatch.setattr(answers, "launch", lambda kernel, grid, *_, **__: launched.append(grid))
    example(SMALL, HERE, torch.float32, (40, 16))["forward"]()
    recording.trial.reset(token)
    assert launched == [(3, 1)]


@pytest.fixture
def jvp_flash_attention(monkeypatch, tmp_path):
    """The names of that package (0.14) around dense attention: the package itself needs a GPU."""
    package = tmp_path / "jvp_flash_attention"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "jvp_attention.py").write_text(
        "class JVPAttn:\n"
        "    @staticmethod\n"
        "    def fwd_dual(q, k, v, attn_mask=None, dropout_p=0.0, causal=False, sm_scale=None):\n"
        "        return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in ("jvp_flash_attention.jvp_attention", "jvp_flash_attention"):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("jvp_flash_attention")
def test_alternatives_compute_the_same_tangent():
    q, k, v = torch.randn(3, 1, 2, 9, 16)
    torch.manual_seed(5)
    found = {name: run() for name, run in gpu._alternatives(q, k, v).items()}
    torch.manual_seed(5)
    along = tuple(torch.randn_like(x) for x in (q, k, v))
    with cm.engine("torch"):
        expected = torch.func.jvp(cm.scaled_dot_product_attention, (q, k, v), along)
    assert list(found) == ["JVP by the math backend", "JVP by jvp_flash_attention"]
    for pair in found.values():
        torch.testing.assert_close(pair, expected)


@pytest.mark.usefixtures("jvp_flash_attention")
def test_the_benchmark_prints_measured_beside_expected(monkeypatch):
    """A clock that counts calls in place of a GPU's; nothing here says how fast anything is."""
    ran = []

    def clock(run):
        ran.append(run)
        return 1.0 if len(ran) % 7 == 1 else 2.0  # the flash pass is the first of seven

    monkeypatch.setattr(gpu, "_gpu", lambda device: gpu.GPUS["H100"])
    rows = gpu.measure(device="cpu", timer=clock, rounds=2, quick=True)
    assert {r.ratio for r in rows} == {2.0}
    expected = {r.quantity: r.at_most for r in rows}
    assert expected["JVP, all tangents, with the value"] > expected["mean, G, entropy"] >= 1.0
    for other in ("the math backend", "jvp_flash_attention"):
        assert expected[f"JVP by {other}"] == math.inf
    with pytest.raises(gpu.InputError, match="no GPU"):
        gpu.measure(device="cuda", timer=clock)
    with pytest.raises(gpu.InputError, match="CUDA and ROCm"):
        gpu.measure(device="meta", timer=clock)
