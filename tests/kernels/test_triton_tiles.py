"""A sample of the table of tiles, compiled without a GPU; `cumulant bench gpu` does all of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cumulant.kernels.triton.blocks import KERNELS, WIDTHS, candidates
from cumulant.kernels.triton.compiling import TARGETS, compile_launch, launches
from cumulant.lab.bench.gpu_page import costs, fingerprint

HALF, SINGLE = torch.bfloat16, torch.float32

# Launches in which tiles that fit the curvature, or the same call with a bias, once spilled.
SAMPLE = [
    ("cuda:80", HALF, 64, True, "gradient, plain", "to_keys"),
    ("cuda:80", SINGLE, 128, True, "curvature, plain", "means"),
    ("cuda:90", HALF, 128, False, "tangent, everything", "means"),
    ("hip:gfx942", HALF, 64, False, "curvature, plain", "means"),
]


@pytest.mark.parametrize(("target", "dtype", "width", "pairs", "question", "kernel"), SAMPLE)
def test_a_launch_spills_nothing(target, dtype, width, pairs, question, kernel):
    (launch,) = (
        x
        for x in launches(width, width, dtype, pairs=pairs)
        if (x.question, x.kernel) == (question, kernel)
    )
    for tile in candidates(kernel, width, dtype, target, pairs=pairs):
        usage = compile_launch(launch, tile, TARGETS[target])
        assert usage.fits(TARGETS[target]), (tile, usage)


@pytest.mark.parametrize("pairs", [False, True])
def test_every_question_launches(pairs):
    """Plain calls, calls with everything, and with a softcap where there is one."""
    found = {(x.question, x.kernel) for x in launches(16, 24, SINGLE, pairs=pairs)}
    calls = ["plain", "everything", "softcap"][: 3 if pairs else 2]
    kernels = {
        "forward": ["forward"],
        "tangent": ["rows", "means"],
        "gradient": ["rows", "to_queries", "to_keys"],
        "curvature": ["rows", "means", "to_queries", "to_keys"],
    }
    for question, names in kernels.items():
        for call in calls:
            if (question, call) != ("curvature", "softcap"):  # the tiles compute it
                assert {(f"{question}, {call}", name) for name in names} <= found
    assert ("gradient, everything", "to_bias") in found
    assert ("gradient, plain", "to_bias") not in found


PAGE = Path(__file__).parents[2] / "docs/benchmarks/gpu.md"


def test_the_page_is_of_these_kernels_and_this_table():
    """Others were not compiled; `cumulant bench gpu -o docs/benchmarks/gpu.md` compiles them."""
    page = PAGE.read_text()
    assert f"`{fingerprint()}`" in page
    lines = [x for x in page.splitlines() if x.startswith(("| cuda:", "| hip:"))]
    cells = [x.strip("| ").split(" | ") for x in lines]
    compiled = {(*c[:5], c[9]): c for c in cells}
    table = {
        (target, kind, str(width), f"`{kernel}`", str(b).rstrip("+"), "yes" if b.pairs else "no")
        for target in TARGETS
        for kind, dtype in (("float32", SINGLE), ("half", HALF))
        for width in WIDTHS
        for kernel in KERNELS
        for b in candidates(kernel, width, dtype, target)
    }
    assert compiled.keys() == table
    for key, (*_, launched, registers, spilled, shared, _pairs) in compiled.items():
        limit = 512 if key[0].startswith("hip") else 255
        assert int(launched) > 0, key
        assert int(spilled) == 0, key
        assert 16 < int(registers) <= limit, key
        assert 0 < int(shared) <= TARGETS[key[0]].shared, key
    assert "\n".join(costs()) in page
