"""The Triton engine without a GPU: interpreted, and compiled for GPUs that are not here."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cumulant.core.errors import InputError
from cumulant.kernels import engines, fused
from cumulant.kernels.attention import Options
from cumulant.kernels.calculus import pullback, pushforward
from cumulant.kernels.search import largest
from cumulant.kernels.streaming import EXTRAS, forward
from cumulant.kernels.triton import answers, recording
from cumulant.kernels.triton.blocks import KERNELS, WIDTHS, Blocks, candidates
from cumulant.kernels.triton.compiling import TARGETS, compile_launch, launches
from cumulant.kernels.triton.recording import Check, Record
from cumulant.kernels.triton.tile import Measure, View
from cumulant.lab.bench.costs import GPUS, ratio
from cumulant.lab.bench.gpu_page import Line, compile_all, markdown

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("file", "device"),
    [("triton_interpreted.py", ""), ("triton_validated.py", ""), ("triton_on_a_device.py", "1")],
)
def test_in_the_interpreter(file, device, tmp_path):
    """In a process of its own: the interpreter is chosen before Triton is imported."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    env["CUMULANT_OTHER_DEVICE"] = device
    env["CUMULANT_CACHE"] = str(tmp_path)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command.append(str(Path(__file__).with_name(file)))
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


FULLEST = [f"{name}, everything" for name in ("forward", "tangent", "gradient", "curvature")]


@pytest.mark.parametrize(
    ("target", "dtype", "width"),
    [
        ("cuda:80", torch.float32, 256),
        ("cuda:90", torch.float16, 128),
        ("hip:gfx942", torch.float32, 64),
    ],
)
def test_tiles_compile_without_spilling(target, dtype, width):
    """The fullest launch of each kernel; `cumulant bench gpu` compiles all of the table."""
    made = launches(width, width, dtype)
    fullest = {x.kernel: x for x in made if x.question in FULLEST}
    assert fullest.keys() == set(KERNELS)
    for kernel, launch in fullest.items():
        usage = compile_launch(launch, candidates(kernel, width, dtype, target)[0], TARGETS[target])
        assert usage.spilled == 0, (kernel, usage)
        assert 0 < usage.shared <= TARGETS[target].shared, (kernel, usage)
        assert 16 < usage.registers <= (512 if target.startswith("hip") else 255), (kernel, usage)


def test_one_query_and_one_key_compile():
    """Sizes of one are constants of a compiled kernel, which the interpreter does not notice."""
    made = launches(16, 16, torch.bfloat16, pairs=True, length=1)
    found = [x for x in made if x.question == "curvature, everything"]
    assert {x.kernel for x in found} == set(KERNELS) - {"forward"}
    for launch in found:
        tile = candidates(launch.kernel, 16, torch.bfloat16, "cuda:90", pairs=True)[0]
        assert compile_launch(launch, tile, TARGETS["cuda:90"]).registers > 16


def test_a_tile_that_is_too_large_is_noticed():
    launch = next(x for x in launches(256, 256, torch.float16) if x.kernel == "forward")
    target = TARGETS["cuda:80"]
    usage = compile_launch(launch, Blocks(64, 64, 256, 4, 1, "ieee"), target)
    assert usage.spilled > 0
    assert not usage.fits(target)


def test_the_table_has_a_tile_for_everything():
    for target in TARGETS:
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            for width in (16, *WIDTHS):
                for kernel in KERNELS:
                    assert candidates(kernel, width, dtype, target, pairs=True)
    single = [b for k in KERNELS for b in candidates(k, 64, torch.float32, "cuda:80")]
    assert {b.precision for b in single} <= {"tf32x3", "ieee"}  # never plain TF32
    assert candidates("forward", 64, torch.float16, None) == ()
    newer = candidates("forward", 64, torch.float16, "cuda:120")  # not in the table: the nearest
    assert newer == candidates("forward", 64, torch.float16, "cuda:90")


GPU = torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A record's identity as if there were a GPU; nothing runs on it."""
    identity = {"device": "some GPU", "kernels": recording.fingerprint()}
    monkeypatch.setenv("CUMULANT_CACHE", str(tmp_path / "new"))
    monkeypatch.setattr(recording, "identity", lambda device: dict(identity))
    monkeypatch.setattr(recording, "target_of", lambda device: "cuda:90")
    recording.forget()
    yield identity
    recording.forget()


def record(identity, *errors, **more):
    checks = tuple(Check("a check", error, 1e-3) for error in errors)
    return Record(dict(identity), "2026-01-01", checks, **more)


def test_the_engine_is_used_only_where_its_self_test_passed(gpu, monkeypatch):
    def chosen(device=GPU):
        return "triton" in getattr(engines.compiled(device), "__name__", "")

    assert not recording.validated(GPU)
    assert not chosen()
    recording.keep(record(gpu, 1e-4, 1e-2))
    assert recording.recorded(GPU) is not None
    assert not chosen()
    recording.keep(record(gpu, math.nan))
    assert not chosen()
    recording.keep(record(gpu))  # nothing was checked
    assert not chosen()
    recording.keep(record(gpu, 1e-4))
    assert chosen()
    with engines.engine("torch"):
        assert engines.compiled(GPU) is None
    assert not chosen(torch.device("cpu"))
    gpu["kernels"] = "another source"  # a change of the kernels asks for another test
    recording.forget()
    assert not chosen()


def test_kernels_run_on_the_gpu_of_their_tensors(monkeypatch):
    """Triton launches on the current GPU, which may be another one."""
    current, ran = ["cuda:0"], []

    @contextmanager
    def device(which):
        current.append(str(which))
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    kernel = {(1, 2): lambda *_, **__: ran.append(current[-1])}
    monkeypatch.setattr(answers.sums, "forward", kernel)
    with FakeTensorMode():
        z = Measure(*[None] * len(Measure._fields))
        for where in ("cuda:1", "cpu"):
            query = View(torch.empty(2, device=where), 0, 0, 0, 1, 1)
            answers.launch("forward", (1, 2), [z._replace(query=query)], warps=4, stages=1)
    assert ran == ["cuda:1", "cuda:0"]


def test_the_largest_score_is_asked_of_the_device_s_engine(gpu, monkeypatch):
    """On a validated GPU, in the caller's half precision; a bias of -inf hides as a mask does."""
    recording.keep(record(gpu, 1e-4))
    with FakeTensorMode():
        q, bias = torch.empty(1, 9, 16, device="cuda"), torch.empty(1, 9, 9, device="cuda")
        column = torch.empty(1, 9, 1, device="cuda")
    asked = []

    def forward(arguments, *, fields, **_):
        asked.append((fields, {n: x.dtype for n, x in arguments.items()}))
        return {"score_max": column, "top": column}

    monkeypatch.setattr(answers, "forward", forward)
    given = {"query": q, "key": q, "bias": bias}
    largest(given, Options(narrow=torch.float16))
    halves = dict.fromkeys(("query", "key"), torch.float16)
    kinds = {**halves, "bias": torch.float32, "mask": torch.bool}
    assert asked == [(("score_max", "top"), kinds)]


def test_on_a_validated_gpu_torch_s_operators_keep_what_they_take(gpu, monkeypatch):
    """Value and first gradient of plain calls, where flash attention does half as much."""
    recording.keep(record(gpu, 1e-4))
    with FakeTensorMode():
        q, column = torch.empty(2, 9, 16, device="cuda"), torch.empty(2, 9, 1, device="cuda")
        names = ("query", "key", "value", "mean")
        answered = {n: torch.empty(2, 9, 16, device="cuda") for n in names}
        for n in ("log_normalizer", "entropy", *EXTRAS):
            answered[n] = torch.empty(2, 9, 1, device="cuda")
    qkv = dict.fromkeys(names[:3], q)
    asked = []

    def answer(name, out):
        return lambda *_, **__: asked.append(name) or out

    monkeypatch.setattr(fused, "forward", answer("fused forward", (q, column)))
    monkeypatch.setattr(fused, "backward", answer("fused gradient", answered))
    for name in ("forward", "tangent", "gradient"):
        monkeypatch.setattr(answers, name, answer(name, answered))
    known = {**qkv, "mean": q, "log_normalizer": column}
    forward(Options(), qkv)
    pullback(Options(), known, {"mean": q}, tuple(qkv))
    assert asked == ["fused forward", "fused gradient"]
    asked.clear()
    forward(Options(entropy=True), qkv)
    pullback(Options(), known, {"mean": q, "log_normalizer": column}, tuple(qkv))
    pushforward(Options(), known, qkv)
    assert asked == ["forward", "gradient", "tangent"]
    assert engines.fused_first(GPU)
    with engines.engine("torch"):  # an engine that was asked for
        assert not engines.fused_first(GPU)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"checks": 3}', '{"checks": []}'])
def test_a_damaged_record_is_no_record(gpu, text):
    path = recording.keep(record(gpu, 0.0))
    assert recording.validated(GPU)
    path.write_text(text)
    recording.forget()
    assert recording.recorded(GPU) is None


def test_kept_choices_are_used_and_others_are_not(gpu):
    first = candidates("rows", 64, torch.float32, "cuda:90")[0]
    other = first._replace(rows=16, columns=16)
    asked = ("rows", 64, torch.float32, GPU)
    key = recording.choice_of(*asked[:3], False)
    recording.keep(record(gpu, 0.0, chosen={key: str(other)}))
    assert recording.choose(*asked, pairs=False) == first  # not a tile of the table
    several = next(
        (kernel, width, dtype)
        for dtype in (torch.float32, torch.float16)
        for width in WIDTHS
        for kernel in KERNELS
        if len(candidates(kernel, width, dtype, "cuda:90")) > 1
    )
    last = candidates(*several, "cuda:90")[-1]
    key = recording.choice_of(*several, False)
    recording.keep(record(gpu, 0.0, chosen={key: str(last)}))
    assert recording.choose(*several, GPU, pairs=False) == last


def test_a_jvp_is_expected_to_take_five_forward_passes_where_products_decide():
    """1 + 1 products forward, 3 + 5 for the tangent: 10 over 2, and more where L2 decides."""
    fast = replace(GPUS["H100"], exponentials=math.inf, l2=math.inf, memory=math.inf)
    asked = {"d": 64, "dtype": torch.float32}
    assert ratio("forward", "tangent", gpu=fast, **asked) == pytest.approx(5.0)
    assert ratio("gradient", gpu=fast, **asked) == pytest.approx(9 / 2)
    for gpu in GPUS.values():
        assert ratio("forward", "tangent", gpu=gpu, **asked) >= 5.0


def test_the_page_says_what_wrote_it():
    line = Line("cuda:80", "float32", 64, "rows", "64x32/32/8/1", True, 5, 170, 0, 8192, True)
    page = markdown([line], "cumulant bench gpu --width 64 -o gpu.md")
    assert "Written by `cumulant bench gpu --width 64 -o gpu.md`" in page
    row = "| cuda:80 | float32 | 64 | `rows` | 64x32/32/8/1 | 5 | 170 | 0 | 8192 | yes |"
    assert row in page
    assert "those not listed were not compiled" in page
    with pytest.raises(InputError, match="--width must be one of 32, 64, 128, 256, not 7"):
        compile_all(widths=[7])
