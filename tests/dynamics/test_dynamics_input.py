"""Bad input gets one clear error."""

from __future__ import annotations

import math

import pytest
import torch

import cumulant as cm

D = cm.dynamics
X = torch.randn(5, 3)


@pytest.mark.parametrize(
    "call", [D.step, lambda x, **k: D.simulate(x, 3, **k), lambda x, **k: D.flow(x, [1.0], **k)]
)
@pytest.mark.parametrize(
    ("x", "how", "message"),
    [
        (torch.full((5, 3), math.nan), {}, "NaN"),
        (torch.full((5, 3), math.inf), {}, "infinity"),
        (torch.randn(3), {}, "must have shape"),
        (torch.randn(0, 3), {}, "must have shape"),
        (X.to(torch.complex64), {}, "must be real"),
        ("points", {}, "must be a tensor"),
        (X, {"beta": -1.0}, "must not be negative"),
        (X, {"beta": math.nan}, "beta must be finite"),
        (X, {"beta": "hot"}, "beta must be a number"),
        (X, {"beta": torch.ones(4, 1)}, "broadcast"),
        (X, {"beta": torch.tensor(-1.0)}, "must not be negative"),
        (X, {"patterns": torch.randn(4, 2)}, "patterns must have shape"),
        (X, {"patterns": torch.randn(0, 3)}, "patterns must have shape"),
        (X, {"patterns": torch.randn(2, 4, 3)}, "batch dimensions"),
        (X, {"patterns": torch.full((4, 3), math.nan)}, "NaN"),
        (X, {"query_weight": torch.randn(2, 3)}, "query_weight must have shape"),
        (X, {"query_weight": torch.randn(3, 2)}, "one dimension to be compared"),
        (X, {"value_weight": torch.randn(3, 2)}, "must map back"),
        (X, {"contraction": D.LayerNorm(torch.ones(4))}, "gain must have 3 entries"),
        (X, {"contraction": torch.nn.LayerNorm(4)}, "does not fit"),
        (X, {"contraction": lambda x: x[..., :2]}, "must keep the shape"),
        (X, {"contraction": "sphere"}, "contraction must be"),
        (X, {"contraction": D.Sphere}, r"write Sphere\(\)"),
        (X[:2], {"contraction": D.Whiten()}, "more points than dimensions"),
        (X[:, :1], {"contraction": D.LayerNorm()}, "two coordinates"),
    ],
)
def test_clouds(call, x, how, message):
    with pytest.raises(cm.InputError, match=message):
        call(x, **how)


@pytest.mark.parametrize("bad", [math.inf, "far", torch.ones(2, 2)])
def test_step_size(bad):
    with pytest.raises(cm.InputError, match="step_size"):
        D.step(X, step_size=bad)


@pytest.mark.parametrize("steps", [-1, 2.5, "many"])
def test_steps(steps):
    with pytest.raises(cm.InputError, match="steps must be"):
        D.simulate(X, steps)


@pytest.mark.parametrize("times", [[], [[0.0]], [1.0, 0.5], [-1.0], [math.nan], "now", [0.0, 0.0]])
def test_times(times):
    for call in (
        lambda: D.flow(X, times),
        lambda: D.gaussian_flow(torch.zeros(2), torch.eye(2), times),
    ):
        with pytest.raises(cm.InputError, match="times must"):
            call()


def test_flow_refuses_to_lose_a_gradient():
    with pytest.raises(cm.InputError, match="no derivative"):
        D.flow(X.clone().requires_grad_(), [1.0])
    with torch.no_grad():
        D.flow(X.clone().requires_grad_(), [0.1])
    with pytest.raises(cm.InputError, match="rtol must be"):
        D.flow(X, [1.0], rtol=0.0)


@pytest.mark.parametrize("contraction", [D.Sphere(), D.RMSNorm(), D.LayerNorm()])
def test_points_without_direction(contraction):
    with pytest.raises(cm.InputError, match="undefined"):
        D.step(torch.zeros(2, 3), contraction=contraction)


def test_collapsed_clouds_cannot_be_whitened():
    x = torch.randn(10, 1).expand(10, 2)
    with pytest.raises(cm.InputError, match="flat"):
        D.step(x, contraction=D.Whiten())


@pytest.mark.parametrize(
    ("mean", "covariance", "how", "message"),
    [
        (torch.zeros(2), torch.eye(3), {}, "must agree"),
        (torch.zeros(2), -torch.eye(2), {}, "positive semi-definite"),
        (torch.zeros(2), torch.tensor([[1.0, 0.5], [0.0, 1.0]]), {}, "symmetric"),
        (torch.zeros(2), torch.eye(2), {"scores": torch.eye(3)}, "scores must be"),
        (torch.zeros(2), torch.eye(2), {"values": torch.full((2, 2), math.nan)}, "NaN"),
        (torch.full((2,), math.inf), torch.eye(2), {}, "finite"),
    ],
)
def test_gaussians(mean, covariance, how, message):
    with pytest.raises(cm.InputError, match=message):
        D.gaussian_flow(mean, covariance, [0.0], **how)
    with pytest.raises(cm.InputError, match=message):
        D.gaussian_map(mean, covariance, 1, **how)


def test_starts():
    for name in ("gaussian", "ring", "sphere", "clusters"):
        assert D.initial_cloud(name, 12, 3).shape == (12, 3)
    basis = D.initial_cloud("orthonormal", 3, 5, dtype=torch.float64)
    torch.testing.assert_close(basis @ basis.mT, torch.eye(3, dtype=torch.float64))
    assert (
        D.clusters(
            D.initial_cloud("clusters", 40, 3, generator=torch.Generator().manual_seed(0)),
            distance=0.3,
        ).count
        == 4
    )
    assert torch.equal(
        D.initial_cloud("gaussian", 5, 2, generator=torch.Generator().manual_seed(1)),
        D.initial_cloud("gaussian", 5, 2, generator=torch.Generator().manual_seed(1)),
    )
    for how, message in (
        (("star", 3, 2), "the names are"),
        (("ring", 3, 1), "dimension 2"),
        (("orthonormal", 3, 2), "at most d = 2"),
        (("sphere", 0, 2), "an integer >= 1"),
        (("sphere", 2.5, 2), "an integer"),
    ):
        with pytest.raises(cm.InputError, match=message):
            D.initial_cloud(*how)
