"""Finite differences against closed forms: values, error bars, kinks."""

from __future__ import annotations

import math

import mpmath
import pytest

from cumulant.derivatives.differences import mixed_derivative, noise_of

SMOOTH = {
    "sin": mpmath.sin,
    "exp": lambda t: mpmath.exp(3 * t),
    "rational": lambda t: 1 / (1 + (t - mpmath.mpf("0.4")) ** 2),
    "polynomial": lambda t: t**5 - 2 * t**3 + t,
}


def along(function, start=0.0):
    return lambda coefficients: lambda t: float(function(start + sum(coefficients) * t))


@pytest.mark.parametrize("order", [1, 2, 3, 4])
@pytest.mark.parametrize("name", SMOOTH)
def test_value_and_error_bar(name, order):
    line = along(SMOOTH[name], 0.3)
    found = mixed_derivative(line, order, noise_of(line((1.0,))))
    exact = float(mpmath.diff(SMOOTH[name], mpmath.mpf("0.3"), order))
    assert abs(found.value - exact) <= 3 * found.error
    assert found.error <= [1e-11, 1e-9, 1e-6, 1e-3][order - 1] * max(1.0, abs(exact))
    assert not found.kink


def test_mixed_derivative_of_several_variables():
    # g = x y z + sin(x) z^2: d^3 g / dx dy dz = 1, d^2 g / dx dz = y + 2 z cos x
    def line_along(a):
        a = (*a, 0.0)[:3]

        def line(t):
            x, y, z = (p + t * c for p, c in zip((0.2, -0.5, 0.7), a, strict=True))
            return x * y * z + math.sin(x) * z**2

        return line

    assert mixed_derivative(line_along, 3, 1e-16).value == pytest.approx(1.0, abs=1e-7)
    xz = mixed_derivative(lambda a: line_along((a[0], 0.0, a[1])), 2, 1e-16)
    assert xz.value == pytest.approx(-0.5 + 1.4 * math.cos(0.2), abs=1e-10)


@pytest.mark.parametrize(
    ("function", "order"),
    [(abs, 1), (lambda t: max(t, 0.0), 1), (lambda t: t * abs(t), 2), (lambda t: t**2 * abs(t), 3)],
)
def test_kink_at_the_point(function, order):
    line = along(function)
    assert mixed_derivative(line, order, noise_of(line((1.0,)))).kink


@pytest.mark.parametrize("distance", [1e-3, 3e-4])
def test_a_kink_close_by_is_no_kink(distance):
    line = along(lambda t: max(t + distance, 0.0))
    found = mixed_derivative(line, 1, noise_of(line((1.0,))))
    assert not found.kink
    assert found.value == pytest.approx(1.0, abs=1e-9)


def test_noise_widens_the_error_bar():
    import numpy as np

    line = along(lambda t: float(np.float32(math.sin(t))), 0.3)
    noise = noise_of(line((1.0,)))
    assert 3e-10 < noise < 1e-7  # float32 rounds to 3e-8 / 2 here
    for order, exact in ((1, math.cos(0.3)), (2, -math.sin(0.3))):
        found = mixed_derivative(line, order, noise)
        assert abs(found.value - exact) <= 3 * found.error


def test_a_jump_does_not_settle():
    line = along(math.floor)
    found = mixed_derivative(line, 1, noise_of(line((1.0,))))
    assert not found.kink
    assert found.error > 1.0
