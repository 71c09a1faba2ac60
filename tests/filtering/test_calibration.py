"""Standard errors by simulation: intervals cover the truth as often as they say."""

import math

import pytest
import torch

import cumulant as cm
from cumulant.kernels.engines import engines
from switching import means, seeded

F = cm.filtering
ROUNDS = 200


@pytest.mark.skipif(not engines()["native"].available, reason="takes minutes without the engine")
def test_intervals_cover_the_truth_as_often_as_they_say():
    """Two regimes of mean and variance, 1500 observations: within three binomial deviations.

    With 400, intervals of variances cover 88 % instead of 90: the errors are asymptotic.
    """
    truth = means([[0.9, 0.1], [0.15, 0.85]], [-1.0, 1.5], [0.4, 1.0])
    errors = {"emission_bias": [], "emission_noise": [], "transition": []}
    for y in F.sample(truth, 1500, (ROUNDS,), generator=seeded(0)).observations:
        found = F.fit(truth, y)
        for name, each in errors.items():
            away = found.model.parameters[name] - truth.parameters[name]
            each.append((away / found.standard_errors[name]).flatten())
    for name, each in errors.items():
        z = torch.stack(each).abs()
        for level, quantile in ((0.90, 1.6449), (0.95, 1.9600)):
            covered = (z <= quantile).double().mean(0)
            slack = 3 * math.sqrt(level * (1 - level) / ROUNDS)
            assert (covered - level).abs().max() <= slack, (name, level, covered)
