"""How fast a small departure from a stationary law grows, and what it grows into (T34).

Two laws are stationary under the flow x' = grad G(beta x) with a contraction: the Gaussian, if the
population is whitened, and the uniform law on the sphere. Both are unstable.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cumulant.core.checks import real, whole
from cumulant.measures.bessel import sphere

__all__ = ["circle_growth_rate", "fastest_degree", "gaussian_growth_rate", "sphere_growth_rate"]


def gaussian_growth_rate(order: int, beta: float) -> float:
    """The rate n beta^(n-1) at which a small n-th cumulant of a whitened N(0, I) grows (T34).

    The flow is x' = grad G(beta x), whitened. A cumulant kappa_n adds kappa_n eta^n / n! to G,
    hence kappa_n beta^(n-1) x^(n-1) / (n-1)! to the field, and E[He_(n-1)(x) x^(n-1)] = (n-1)!.
    The rate is positive for every beta > 0: the Gaussian is unstable. For beta < 1 the largest
    rate is at n near -1 / log(beta), for beta >= 1 it has no bound. Higher cumulants feed lower
    ones of the same parity, never the reverse.

    Args:
        order: n, an integer >= 3; whitening removes the first two.
        beta: inverse temperature, >= 0, relative to unit variance.

    Raises:
        InputError: order or beta out of range.

    >>> import cumulant as cm
    >>> cm.dynamics.gaussian_growth_rate(3, 0.5), cm.dynamics.gaussian_growth_rate(4, 0.5)
    (0.75, 0.5)
    """
    n = whole("gaussian_growth_rate", "order", order, 3)
    return n * real("gaussian_growth_rate", "beta", beta, least=0.0) ** (n - 1)


def circle_growth_rate(mode: int, beta: float) -> float:
    """The rate k^2 I_k(beta) / (beta I_0(beta)) of mode k of the uniform law on the circle (T34).

    >>> import cumulant as cm
    >>> [round(cm.dynamics.circle_growth_rate(k, 8.0), 3) for k in (1, 2, 3, 4, 5)]
    [0.117, 0.383, 0.621, 0.704, 0.625]
    """
    return sphere_growth_rate(mode, beta)


def sphere_growth_rate(degree: int, beta: float, *, dimension: int = 2) -> float:
    """The rate at which a spherical harmonic in the density grows from the uniform law (T34).

    A harmonic Y of degree l changes G(beta x) by I_(l+nu)(beta) / I_nu(beta) Y, nu = d/2 - 1
    (Funk and Hecke), the flow is G's tangential gradient over beta, and Y's Laplacian is
    -l (l + d - 2) Y: the rate is l (l + d - 2) I_(l+nu)(beta) / (beta I_nu(beta)).

    Args:
        degree: l, an integer >= 1.
        beta: inverse temperature, >= 0.
        dimension: d >= 2 of the space around the sphere; 2 is the circle.

    Raises:
        InputError: an argument out of range.

    >>> import cumulant as cm
    >>> cm.dynamics.sphere_growth_rate(1, 0.0, dimension=3)  # uniform attention: 2 / 3
    0.666...
    """
    call = "sphere_growth_rate"
    k, d = whole(call, "degree", degree, 1), whole(call, "dimension", dimension, 2)
    return float(_rates(k, real(call, "beta", beta, least=0.0), d)[-1])


def fastest_degree(beta: float, *, dimension: int = 2) -> int:
    """The degree that grows fastest; on the circle, the number of clusters that form first (T34).

    Near sqrt(2 beta) for large beta, in every dimension. So the clusters that form first are about
    1 / sqrt(beta) apart, and there are of the order of beta^((d-1)/2) of them.

    >>> import cumulant as cm
    >>> [cm.dynamics.fastest_degree(beta) for beta in (1.0, 8.0, 32.0, 128.0)]
    [1, 4, 8, 16]
    """
    call = "fastest_degree"
    b, d = real(call, "beta", beta, least=0.0), whole(call, "dimension", dimension, 2)
    # Since I_(l+nu) / I_nu <= exp(-l^2 / (2 (beta + l + nu))), rates fall beyond this degree.
    most = int(3 * (b + d) ** 0.5) + 3
    return int(_rates(most, b, d).argmax()) + 1


def _rates(most: int, beta: float, d: int) -> Tensor:
    """The rates of the degrees 1, ..., most.

    I_(l+nu) / I_nu is a product of ratios I_(n+1) / I_n = beta r_n, and 1 / r_n = 2 (n + 1) +
    beta^2 r_(n+1), all terms positive.
    """
    s = torch.tensor(beta, dtype=torch.float64).square()
    ratios = [sphere(d + 2 * (most - 1), s)[1]]
    for j in range(most - 2, -1, -1):
        ratios.append(1 / (d + 2 * j + s * ratios[-1]))
    steps = torch.stack(ratios[::-1])
    steps[1:] *= beta
    degree = torch.arange(1, most + 1, dtype=torch.float64)
    return degree * (degree + d - 2) * steps.cumprod(0)
