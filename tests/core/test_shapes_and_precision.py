"""Whether shapes broadcast, and which precision to compute in."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cumulant.core.checks import broadcast, broadcasts_to, common_shape
from cumulant.core.errors import InputError
from cumulant.core.precision import wide, widened, widest

SHAPES = st.lists(st.integers(0, 3), max_size=4).map(tuple)


@given(SHAPES, SHAPES)
def test_a_shape_broadcasts_to_another_exactly_if_torch_can_expand_it(shape, target):
    try:
        expands = torch.empty(shape).expand(target).shape == target
    except RuntimeError:
        expands = False
    assert broadcasts_to(shape, target) == expands


@given(SHAPES, SHAPES)
def test_the_common_shape_is_that_of_a_sum(first, second):
    try:
        expected = (torch.empty(first) + torch.empty(second)).shape
    except RuntimeError:
        expected = None
    assert common_shape(first, second) == expected


def test_shapes_that_do_not_broadcast_are_named():
    with pytest.raises(InputError, match=r"me: batch .* but are mean \(2,\), covariance \(3,\)"):
        broadcast("me", mean=(2,), covariance=torch.Size([3]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_half_precision_is_widened_and_nothing_else(dtype):
    expected = torch.float64 if dtype == torch.float64 else torch.float32
    assert widened(dtype) == expected
    assert wide(torch.ones(2, dtype=dtype)).dtype == expected
    assert widest(torch.ones(2, dtype=dtype)) == torch.float64
    slow = SimpleNamespace(device=torch.device("mps"), dtype=dtype)
    assert widest(slow) == expected
