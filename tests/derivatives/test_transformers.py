"""Twelve tiny Hugging Face models inside `differentiable`, in their parameters."""

from __future__ import annotations

import pytest

import cumulant as cm
from lens.architectures import ARCHITECTURES, NAMES, build, inputs, use


@pytest.mark.parametrize("name", NAMES)
def test_every_word_to_second_order(name):
    model = use(build(name), "sdpa" if ARCHITECTURES[name].sdpa else "eager")
    given = {**inputs(name, (4,), decoded=(3,))}
    if name != "vit":
        given["use_cache"] = False
    with cm.differentiable():
        report = cm.check_derivatives(model, given, seconds=300)
    assert report.ok, str(report)
    assert all(abs(r.value - r.expected) <= 1e-6 * abs(r.expected) for r in report.rows)
