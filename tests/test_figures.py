"""The house style: numbers on logarithmic axes."""

from __future__ import annotations

import math

import pytest

from cumulant.figures import new_figure, short_logarithms, style


def numbers(low: float, high: float, **scale) -> list[str]:
    """What a vertical axis over this range shows."""
    with style():
        figure = new_figure(3, 2)
        axes = figure.subplots()
        axes.set_yscale("log", **scale)
        axes.set_ylim(low, high)
        short_logarithms(figure)
        figure.canvas.draw()
    shown = [*axes.yaxis.get_major_ticks(), *axes.yaxis.get_minor_ticks()]
    return [
        t.label1.get_text() for t in shown if low <= t.get_loc() <= high and t.label1.get_text()
    ]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.06, 0.13, ["0.08", "0.1"]),
        (1.3, 2.6, ["1.5", "2", "2.5"]),
        (0.3, 4.0, ["0.5", "1", "2"]),
        (1.0, 300.0, ["1", "10", "100"]),
    ],
)
def test_short_axes_have_few_numbers_written_out(low, high, expected):
    found = numbers(low, high)
    assert set(expected) <= set(found)
    assert 2 <= len(found) <= 7
    assert all(math.isfinite(float(text)) for text in found)


@pytest.mark.parametrize(("low", "high"), [(1e-9, 1e-7), (1.0, 1e6)])
def test_long_axes_keep_powers(low, high):
    assert all("10^" in text for text in numbers(low, high))


def test_other_bases_stay():
    assert all("2^" in text for text in numbers(4, 256, base=2))
