"""The most likely path of modes, against enumeration of all paths."""

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal

import cumulant as cm
from switching import enumerate_paths, means, parameters, seeded

F = cm.filtering
D = torch.float64


def weights(given, y):
    """log p(A_1, ..., A_T, y) of every path, the mode at time 0 summed out."""
    logs = {}
    seen = ~np.isnan(y.reshape(-1))
    for path, log_weight, centers, blocks, maps, offsets, noises in enumerate_paths(given, y):
        T, p, n = *y.shape, centers[0].shape[0]
        X = np.block([[blocks[s, t] for t in range(T + 1)] for s in range(T + 1)])
        C, R = np.zeros((T * p, (T + 1) * n)), np.zeros((T * p, T * p))
        for t in range(T):
            C[t * p : (t + 1) * p, (t + 1) * n : (t + 2) * n] = maps[t]
            R[t * p : (t + 1) * p, t * p : (t + 1) * p] = noises[t]
        away = (y.reshape(-1) - C @ np.concatenate(centers) - np.concatenate(offsets))[seen]
        S = (C @ X @ C.T + R)[np.ix_(seen, seen)]
        found = log_weight + multivariate_normal.logpdf(away, np.zeros(len(away)), S)
        logs[path[1:]] = np.logaddexp(logs.get(path[1:], -np.inf), found)
    return logs


@pytest.mark.parametrize("seed", range(4))
def test_without_a_state_it_is_the_best_of_all_paths(seed):
    g = seeded(seed)
    T = (2 * torch.randn(3, 3, generator=g, dtype=D)).softmax(-1)
    m = means(
        T.tolist(), [-1.0, 0.0, 1.0], [0.5, 1.0, 0.5], initial=torch.full((3,), 1 / 3, dtype=D)
    )
    y = torch.randn(4, 1, generator=g, dtype=D)
    y[2] = torch.nan
    found = F.most_likely_path(m, y)
    each = weights(dict(m.parameters), y.numpy())
    best = max(each, key=each.get)
    assert tuple(found.modes.tolist()) == best
    assert abs(float(found.log_probability) - each[best]) < 1e-10


def test_with_states_the_probability_is_that_of_the_path():
    given = parameters(2, 2, 1, seed=3)
    y = torch.randn(4, 1, generator=seeded(1), dtype=D)
    found = F.most_likely_path(F.SwitchingLinearGaussian(**given), y)
    expected = weights(given, y.numpy())[tuple(found.modes.tolist())]
    assert abs(float(found.log_probability) - expected) < 1e-9
    batch = F.most_likely_path(F.SwitchingLinearGaussian(**given), torch.stack([y, 2 * y]))
    assert batch.modes.shape == (2, 4)
    assert torch.equal(batch.modes[0], found.modes)


def test_it_finds_what_was_sampled_where_modes_are_far_apart():
    m = means([[0.95, 0.05], [0.05, 0.95]], [-5.0, 5.0], [1.0, 1.0])
    drawn = F.sample(m, 200, generator=seeded(0))
    assert torch.equal(F.most_likely_path(m, drawn.observations).modes, drawn.modes)
