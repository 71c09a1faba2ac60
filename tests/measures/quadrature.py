"""Nodes and masses of laws that are not ours: torch's densities on grids, or counting."""

from __future__ import annotations

import numpy as np
import torch

DOUBLE = torch.float64


def legendre(low, high, n):
    x, w = np.polynomial.legendre.leggauss(n)
    x, w = torch.tensor(x, dtype=DOUBLE), torch.tensor(w, dtype=DOUBLE)
    return low + (high - low) * (x + 1) / 2, (w * (high - low) / 2).log()


def line(distribution, low, high, n=400):
    """Gauss and Legendre for a density on an interval."""
    x, log_w = legendre(low, high, n)
    return x[:, None], distribution.log_prob(x) + log_w


def plane(log_density, half, n=160):
    """The trapezoidal rule on a square, exact to rounding for Gaussian tails."""
    axis = torch.linspace(-half, half, n, dtype=DOUBLE)
    x = torch.cartesian_prod(axis, axis)
    return x, log_density(x) + 2 * (axis[1] - axis[0]).log()


def counts(distribution, top):
    x = torch.arange(top + 1, dtype=DOUBLE)
    return x[:, None], distribution.log_prob(x)
