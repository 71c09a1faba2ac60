"""A sample of the table of tiles, compiled without a GPU; `cumulant bench gpu` does all of it."""

from __future__ import annotations

import pytest
import torch

from cumulant.kernels.triton.blocks import candidates
from cumulant.kernels.triton.compiling import TARGETS, compile_launch, launches

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
