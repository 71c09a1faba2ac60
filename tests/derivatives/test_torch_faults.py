"""What torch gets wrong, pinned: a failure here says that torch was fixed."""

from __future__ import annotations

import pytest
import torch

import cumulant as cm
from cumulant.derivatives.catalog import catalog, markdown, sweep
from cumulant.derivatives.known import KNOWN

WRONG = {
    "layer_norm": {"FF", "RF"},
    "instance_norm": {"FF", "RF"},
    "batch_norm (training)": {"FF", "RF"},
    "linear_cross_entropy (chunked)": {"F", "FF", "RF"},
    "linalg.solve": {"FF", "RF"},
    "linalg.det": {"FF", "RF"},
    "linalg.slogdet": {"FF", "RF"},
    "linalg.householder_product": {"FF", "RF"},
    "cholesky_inverse": {"F", "FF", "FR", "RF"},
}
CASES = {case.name: case for case in catalog()}
# Not "2.13 only": the releases after it are the ones that may have mended something.
of_this_torch = pytest.mark.skipif(
    torch.__version__ < "2.13", reason="the list begins with torch 2.13"
)


@of_this_torch
@pytest.mark.parametrize("name", WRONG)
def test_still_wrong(name):
    (verdict,) = sweep([CASES[name]])
    mended, new = WRONG[name] - set(verdict.wrong), set(verdict.wrong) - WRONG[name]
    assert not mended, (
        f"torch mended this: drop the composite of {name} ({mended} are right now), its entry in "
        "known.py, and make docs/derivatives-torch.md again"
    )
    assert not new, f"{name} is now wrong in {new} as well"


@of_this_torch
@pytest.mark.parametrize("name", WRONG)
def test_right_in_differentiable(name):
    with cm.differentiable():
        (case,) = (c for c in catalog() if c.name == name)  # with the functions of this context
        (verdict,) = sweep([case], order=3)
    assert verdict.wrong == ()
    assert verdict.unchecked == ()


@of_this_torch
@pytest.mark.parametrize("name", ["rms_norm", "group_norm", "batch_norm (inference)"])
def test_norms_that_need_no_composite(name):
    (verdict,) = sweep([CASES[name]], order=3)
    assert verdict.ok


def test_every_wrong_function_has_a_remedy():
    for name in WRONG:
        known = KNOWN[name.split(" ")[0].rsplit(".", 1)[-1]]
        assert known.remedy
        assert known.summary


def test_the_catalog_is_the_same_for_the_same_seed():
    again = {case.name: case for case in catalog()}
    assert list(again) == list(CASES)
    for name, case in again.items():
        for a, b in zip(case.inputs, CASES[name].inputs, strict=True):
            assert torch.equal(a, b)


def test_page():
    verdicts = list(sweep([CASES["tanh"], CASES["glu"]]))
    page = markdown(verdicts, "made")
    assert "2 functions and layers" in page
    assert "1 are right" in page
    assert "| activations | glu |  | FF RF |  |" in page
