"""Fixtures shared by the whole suite."""

from __future__ import annotations

import os

import pytest
import torch

# Some virtual machines announce AMX and then fault on its instructions ("Illegal instruction" in a
# bfloat16 matrix product of torch's oneDNN). oneDNN reads this at its first use, and does without.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

from cumulant.kernels import tiles


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _modes():
    """A test that leaves a mode of torch's switched fails itself, not the tests after it."""
    yield
    left = {"grad": torch.is_grad_enabled(), "dtype": torch.get_default_dtype()}
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    assert left == {"grad": True, "dtype": torch.float32}


@pytest.fixture
def small_tiles(monkeypatch):
    """Cut even tiny problems into many tiles, so that every seam is crossed."""
    original = tiles.iterate

    def iterate(batch, grid, area, *, whole_rows=False):
        return original(batch, grid, 6, whole_rows=whole_rows)

    monkeypatch.setattr(tiles, "SIDE", 3)
    monkeypatch.setattr(tiles, "iterate", iterate)
