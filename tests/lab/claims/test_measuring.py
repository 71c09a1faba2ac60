"""What experiments share, against numpy and closed forms."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
import torch

from cumulant.lab.claims.measuring import (
    fitted,
    gap,
    integrated,
    median,
    minimized,
    order,
    pair_ratios,
    relative,
    standard_error,
)


@pytest.mark.parametrize("values", [[3.0], [4.0, 1.0], [5.0, 1.0, 2.0], [7.0, 1.0, 4.0, 2.0]])
def test_the_median_of_an_even_count_is_between_the_middle_two(values):
    assert median(values) == statistics.median(values)
    assert median(torch.tensor(values)) == statistics.median(values)


def test_gap_takes_tensors_arrays_and_numbers_in_double_precision():
    x = torch.tensor([1.0, -2.0], dtype=torch.float64, requires_grad=True)
    assert gap(x, np.array([1.0, 1.0])) == 3.0
    assert gap(0.1, 0.1 + 2**-50) == abs(0.1 - (0.1 + 2**-50))
    assert math.isnan(gap(torch.tensor([math.nan, 0.0]), 0))


def test_statistics():
    x = torch.tensor([1.0, 2.0, 4.0, 8.0], dtype=torch.float64)
    assert standard_error(x) == pytest.approx(np.std(x.numpy(), ddof=1) / 2, rel=1e-14)
    assert relative(2 * x, x) == pytest.approx(1.0)
    assert order([10, 20, 40], [3.0 / n**2 for n in (10, 20, 40)]) == pytest.approx(2.0)


def test_ratios_of_all_pairs():
    before = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 2.0]])
    after = torch.tensor([[0.0, 0.0], [3.0, 0.0], [0.0, 1.0]])
    expected = [3.0, 0.5, math.sqrt(10) / math.sqrt(5)]
    assert pair_ratios(before, after).tolist() == pytest.approx(expected)


def test_solvers():
    start = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    found = integrated(lambda z: -z, start, 2.0, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found, start * math.exp(-2), rtol=1e-8, atol=0)
    least = minimized(lambda z: ((z - 3) ** 2).sum() + 1, [0.0, 0.0])
    assert least.fun == pytest.approx(1.0)
    assert least.x == pytest.approx([3.0, 3.0], abs=1e-5)
    at = fitted(lambda z: ((z - 3) ** 4).sum(), start, max_iter=100)
    torch.testing.assert_close(at, torch.full_like(at, 3.0), atol=1e-2, rtol=0)
