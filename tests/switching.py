"""Switching models to test with, and their exact posterior by enumeration of all mode paths.

The oracle knows nothing of filters: for each path it writes down the joint Gaussian of all states
and observations and conditions it, in numpy.
"""

import itertools

import numpy as np
import torch
from scipy.special import logsumexp
from scipy.stats import multivariate_normal

import cumulant as cm


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def covariance(*shape, generator=None, scale=0.7):
    x = torch.randn(*shape, shape[-1], generator=generator, dtype=torch.float64) * scale
    return x @ x.mT + 0.3 * torch.eye(shape[-1], dtype=torch.float64)


def parameters(modes=2, n=2, p=1, seed=0, inputs=0, own_start=False, lead=()):
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    out = {
        "transition": (2 * normal(*lead, modes, modes)).softmax(-1),
        "initial": normal(modes).softmax(-1),
        "dynamics": 0.7 * normal(*lead, modes, n, n),
        "dynamics_noise": covariance(*lead, modes, n, generator=g),
        "dynamics_bias": normal(*lead, modes, n),
        "emission": normal(*lead, modes, p, n),
        "emission_noise": covariance(*lead, modes, p, generator=g),
        "emission_bias": normal(*lead, modes, p),
        "initial_mean": normal(modes, n) if own_start else normal(n),
        "initial_covariance": covariance(modes, n, generator=g)
        if own_start
        else covariance(n, generator=g),
    }
    if inputs:
        out |= {
            "dynamics_input": normal(*lead, modes, n, inputs),
            "emission_input": normal(*lead, modes, p, inputs),
        }
    return out


def model(*args, **kwargs):
    return cm.filtering.SwitchingLinearGaussian(**parameters(*args, **kwargs))


def means(transition, centers, noise, **rest):
    """Switching means without a state."""
    M = len(centers)
    nothing = torch.zeros(M, 0, 0, dtype=torch.float64)
    return cm.filtering.SwitchingLinearGaussian(
        transition=torch.tensor(transition, dtype=torch.float64),
        dynamics=nothing,
        dynamics_noise=nothing,
        emission=torch.zeros(M, 1, 0, dtype=torch.float64),
        emission_bias=torch.tensor(centers, dtype=torch.float64)[:, None],
        emission_noise=torch.tensor(noise, dtype=torch.float64).reshape(-1, 1, 1),
        initial_mean=torch.zeros(0, dtype=torch.float64),
        initial_covariance=torch.zeros(0, 0, dtype=torch.float64),
        **rest,
    )


def _of(given, name, t, j, zero):
    """A parameter at step t in mode j, as an array."""
    x = given.get(name)
    if x is None:
        return zero
    x = x.numpy()
    events = {"dynamics_bias": 1, "emission_bias": 1, "initial_mean": 1}.get(name, 2)
    if x.ndim > events + 1:
        x = x[t if x.shape[0] > 1 else 0]
    return x if x.ndim == events else x[j]


def enumerate_paths(given, y, u=None):
    """Every path of modes A_0..A_T: its log-weight log p(path, y) and the states given it."""
    y = np.asarray(y, float)
    T, p = y.shape
    M = given["transition"].shape[-1]
    n = given["dynamics"].shape[-1]
    for path in itertools.product(range(M), repeat=T + 1):
        initial = given["initial"].numpy()
        with np.errstate(divide="ignore"):
            log_weight = np.log(initial[path[0]])
            for t in range(T):
                A = given["transition"].numpy()
                A = A if A.ndim == 2 else A[t if A.shape[0] > 1 else 0]
                log_weight += np.log(A[path[t], path[t + 1]])
        means = [_of(given, "initial_mean", 0, path[0], np.zeros(n))]
        blocks = {(0, 0): _of(given, "initial_covariance", 0, path[0], np.zeros((n, n)))}
        offsets, maps, noises = [], [], []
        for t in range(T):
            j = path[t + 1]
            W = _of(given, "dynamics", t, j, None)
            b = _of(given, "dynamics_bias", t, j, np.zeros(n))
            d = _of(given, "emission_bias", t, j, np.zeros(p))
            if u is not None:
                b = b + _of(given, "dynamics_input", t, j, None) @ u[t]
                d = d + _of(given, "emission_input", t, j, None) @ u[t]
            means.append(W @ means[-1] + b)
            for s in range(t + 1):
                blocks[t + 1, s] = W @ blocks[t, s]
                blocks[s, t + 1] = blocks[t + 1, s].T
            blocks[t + 1, t + 1] = W @ blocks[t, t] @ W.T + _of(given, "dynamics_noise", t, j, None)
            maps.append(_of(given, "emission", t, j, None))
            offsets.append(d)
            noises.append(_of(given, "emission_noise", t, j, None))
        yield path, log_weight, means, blocks, maps, offsets, noises


def exact(given, y, u=None):
    """log p(y), modes and moments given all of y, by enumeration.

    A dict: log_likelihood; modes (T + 1, M); pairs (T, M, M); mean (T + 1, n); covariance
    (T + 1, n, n); mode_means (T + 1, M, n); mode_covariances.
    """
    y = np.asarray(y, float)
    T, p = y.shape
    seen = ~np.isnan(y.reshape(-1))
    M, n = given["transition"].shape[-1], given["dynamics"].shape[-1]
    logs, paths, centers, spreads = [], [], [], []
    for path, log_weight, means, blocks, maps, offsets, noises in enumerate_paths(given, y, u):
        X = np.block([[blocks[s, t] for t in range(T + 1)] for s in range(T + 1)])
        C = np.zeros((T * p, (T + 1) * n))
        R = np.zeros((T * p, T * p))
        for t in range(T):
            C[t * p : (t + 1) * p, (t + 1) * n : (t + 2) * n] = maps[t]
            R[t * p : (t + 1) * p, t * p : (t + 1) * p] = noises[t]
        mean = np.concatenate(means)
        C, R = C[seen], R[np.ix_(seen, seen)]
        expected = C @ mean + np.concatenate(offsets)[seen]
        S = C @ X @ C.T + R
        away = y.reshape(-1)[seen] - expected
        if seen.any():
            log_weight = log_weight + multivariate_normal.logpdf(away, np.zeros(len(away)), S)
            gain = np.linalg.solve(S, C @ X).T
            mean, X = mean + gain @ away, X - gain @ C @ X
        logs.append(log_weight)
        paths.append(path)
        centers.append(mean.reshape(T + 1, n))
        spreads.append([X[t * n : (t + 1) * n, t * n : (t + 1) * n] for t in range(T + 1)])
    logs, paths = np.array(logs), np.array(paths)
    centers, spreads = np.array(centers), np.array(spreads)
    total = logsumexp(logs)
    w = np.exp(logs - total)

    def moments(weights):
        weights = weights / weights.sum()
        mean = np.einsum("k,ktn->tn", weights, centers)
        away = centers - mean
        second = spreads + away[..., :, None] * away[..., None, :]
        return mean, np.einsum("k,ktab->tab", weights, second)

    mean, spread = moments(w)
    out = {"log_likelihood": total, "mean": mean, "covariance": spread}
    hot = np.eye(M)[paths]  # (K, T + 1, M)
    out["modes"] = np.einsum("k,ktm->tm", w, hot)
    out["pairs"] = np.einsum("k,kti,ktj->tij", w, hot[:, :-1], hot[:, 1:])
    means, covs = np.zeros((T + 1, M, n)), np.zeros((T + 1, M, n, n))
    for t in range(T + 1):
        for j in range(M):
            if hot[:, t, j] @ w > 0:
                a, b = moments(w * hot[:, t, j])
                means[t, j], covs[t, j] = a[t], b[t]
    out["mode_means"], out["mode_covariances"] = means, covs
    return out
