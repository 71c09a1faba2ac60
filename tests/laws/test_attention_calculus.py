"""T1, T7, T12: attention as the calculus of its log-normalizer. Oracles: autograd of log-sum-exp,
finite sums written out, mpmath at 50 digits."""

from __future__ import annotations

import itertools

import mpmath
import pytest
import torch
from torch.func import grad, hessian, jacfwd, jacrev, jvp

import cumulant as cm

DOUBLE = torch.float64


def setting(m=1, n=6, d=3, e=2):
    return (torch.randn(*s, dtype=DOUBLE) for s in ((m, d), (n, d), (n, e)))


def weights(q, k, scale):
    return (scale * q @ k.mT).softmax(-1)


def test_gradient_of_the_log_normalizer_is_the_scaled_key_mean():
    q, k, _ = setting(m=4)
    scale = 3**-0.5
    slope = grad(lambda q: cm.attend(q, k).log_normalizer.sum())(q)
    torch.testing.assert_close(slope, scale * weights(q, k, scale) @ k)
    torch.testing.assert_close(slope, scale * cm.attend(q, k).mean)


def test_jacobian_of_attention_is_the_covariance_of_values_and_keys():
    q, k, v = setting()
    scale = 0.8
    p = weights(q, k, scale)[0]
    jacobian = jacrev(lambda q: cm.attend(q, k, v, scale=scale).mean)(q)[0, :, 0]
    centred = v - p @ v
    covariance = torch.einsum("n,ne,nd->ed", p, centred, k - p @ k)
    torch.testing.assert_close(jacobian, scale * covariance)


def test_hessian_of_the_log_normalizer_is_the_covariance_of_keys():
    q, k, _ = setting()
    p = weights(q, k, 1.0)[0]
    curvature = hessian(lambda q: cm.attend(q, k, scale=1.0).log_normalizer.sum())(q)[0, :, 0]
    centred = k - p @ k
    torch.testing.assert_close(curvature, torch.einsum("n,nd,ne->de", p, centred, centred))
    assert torch.linalg.eigvalsh(curvature).min() >= -1e-12


@pytest.mark.parametrize("outer", [jacfwd, jacrev])
@pytest.mark.parametrize("middle", [jacfwd, jacrev])
@pytest.mark.parametrize("inner", [jacfwd, jacrev])
def test_third_derivative_is_the_third_cumulant(outer, middle, inner):
    q, k, _ = setting()
    p = weights(q, k, 1.0)[0]
    g = lambda q: cm.attend(q[None], k, scale=1.0).log_normalizer[0]
    third = outer(middle(inner(g)))(q[0])
    c = k - p @ k
    torch.testing.assert_close(third, torch.einsum("n,na,nb,nc->abc", p, c, c, c))


def test_fourth_derivative_is_the_fourth_cumulant():
    """kappa_4 = E[c^4] minus the three pairings of covariances: an order no shortcut knows."""
    q, k, _ = setting(d=2)
    p = weights(q, k, 1.0)[0]
    g = lambda q: cm.attend(q[None], k, scale=1.0).log_normalizer[0]
    fourth = jacfwd(jacrev(jacfwd(jacrev(g))))(q[0])
    c = k - p @ k
    cov = torch.einsum("n,na,nb->ab", p, c, c)
    expected = torch.einsum("n,na,nb,nc,nd->abcd", p, c, c, c, c)
    for pairing in ("ab,cd->abcd", "ac,bd->abcd", "ad,bc->abcd"):
        expected = expected - torch.einsum(pairing, cov, cov)
    torch.testing.assert_close(fourth, expected)


def test_entropy_is_the_log_normalizer_less_the_mean_score():
    q, k, v = setting(m=4)
    bias = torch.randn(4, 6, dtype=DOUBLE)
    a = cm.attend(q, k, v, attn_mask=bias, scale=1.0)
    p = (q @ k.mT + bias).softmax(-1)
    score = (p * (q @ k.mT + bias)).sum(-1)
    torch.testing.assert_close(a.entropy, a.log_normalizer - score)
    torch.testing.assert_close(a.entropy, torch.distributions.Categorical(p).entropy())


def test_score_variance_is_the_heat_capacity():
    """Var[s] = d^2/db^2 G(b q) at b = 1, and also -d entropy / d log b."""
    q, k, _ = setting(m=4)
    a = cm.attend(q, k, scale=1.0)
    g = lambda b: cm.attend(b * q, k, scale=1.0)
    one = torch.ones((), dtype=DOUBLE)
    second = jacfwd(jacfwd(lambda b: g(b).log_normalizer))(one)
    torch.testing.assert_close(a.score_variance, second)
    cooling = jacfwd(lambda b: g(b).entropy)(one)
    torch.testing.assert_close(a.score_variance, -cooling)


def test_a_shared_bias_is_a_base_measure():
    """T12: a log-weight shared by all queries equals repeating the key e^b times."""
    q, k, v = setting(m=3, n=4)
    counts = torch.tensor([1, 3, 2, 1])
    a = cm.attend(q, k, v, attn_mask=counts.log().to(DOUBLE))
    repeated = [x.repeat_interleave(counts, 0) for x in (k, v)]
    b = cm.attend(q, *repeated)
    for name in ("mean", "log_normalizer", "value_variance", "score_variance"):
        torch.testing.assert_close(getattr(a, name), getattr(b, name))


def test_directional_derivative_is_a_covariance_too():
    q, k, v = setting(m=5)
    u = torch.randn_like(q)
    _, pushed = jvp(lambda q: cm.attend(q, k, v, scale=1.0).mean, (q,), (u,))
    p = weights(q, k, 1.0)
    t = u @ k.mT
    t = t - (p * t).sum(-1, keepdim=True)
    torch.testing.assert_close(pushed, (p * t) @ v)


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e2, 1e4])
def test_against_fifty_digits(size):
    """G, mean, entropy, variances and the gradient in the query, at scores up to +-1e4."""
    mpmath.mp.dps = 50
    generator = torch.Generator().manual_seed(int(size) + 1)
    q = torch.randn(1, 2, generator=generator, dtype=DOUBLE) * size**0.5
    k = torch.randn(4, 2, generator=generator, dtype=DOUBLE) * size**0.5
    v = torch.randn(4, 1, generator=generator, dtype=DOUBLE)

    exact = [[mpmath.mpf(x) for x in row] for row in k.tolist()]
    values = [mpmath.mpf(x[0]) for x in v.tolist()]
    query = [mpmath.mpf(x) for x in q[0].tolist()]
    s = [sum(a * b for a, b in zip(query, key, strict=True)) for key in exact]
    z = sum(mpmath.exp(x) for x in s)
    p = [mpmath.exp(x) / z for x in s]
    mean = mpmath.fsum(a * b for a, b in zip(p, values, strict=True))
    score = mpmath.fsum(a * b for a, b in zip(p, s, strict=True))
    expected = {
        "log_normalizer": mpmath.log(z),
        "mean": mean,
        "entropy": -mpmath.fsum(a * mpmath.log(a) for a in p),
        "score_variance": mpmath.fsum(a * (b - score) ** 2 for a, b in zip(p, s, strict=True)),
        "value_variance": mpmath.fsum(a * (b - mean) ** 2 for a, b in zip(p, values, strict=True)),
    }
    a = cm.attend(q, k, v, scale=1.0)
    # rounding of the scores themselves: eps * size in the exponent
    relative = 1e-13 * max(1.0, size)
    for name, want in expected.items():
        got = getattr(a, name).item()
        assert got == pytest.approx(float(want), rel=10 * relative, abs=1e-14), name
    (slope,) = grad(lambda q: cm.attend(q, k, v, scale=1.0).log_normalizer.sum(), argnums=(0,))(q)
    for i, got in enumerate(slope[0].tolist()):
        want = mpmath.fsum(a * b[i] for a, b in zip(p, exact, strict=True))
        assert got == pytest.approx(float(want), rel=10 * relative, abs=1e-12)


def test_every_mixed_second_derivative_is_symmetric():
    """d2G/dq dk = (d2G/dk dq)': Schwarz, across two different code paths."""
    q, k, _ = setting(n=3, d=2)
    g = lambda q, k: cm.attend(q, k, scale=1.0).log_normalizer.sum()
    for i, j in itertools.combinations(range(2), 2):
        one = jacfwd(jacrev(g, argnums=i), argnums=j)(q, k)
        two = jacrev(jacfwd(g, argnums=j), argnums=i)(q, k)
        torch.testing.assert_close(one, two.permute(2, 3, 0, 1))
