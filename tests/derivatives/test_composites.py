"""The norms of `cumulant.derivatives` against torch's values and against finite differences."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import cumulant as cm
from cumulant.derivatives import batch_norm, instance_norm, layer_norm, rms_norm

WEIGHT, BIAS = torch.linspace(0.5, 1.5, 6), torch.linspace(-1.0, 1.0, 6)

NORMS = {
    "layer_norm": (
        lambda x, w, b: layer_norm(x, (6,), w, b),
        lambda x, w, b: F.layer_norm(x, (6,), w, b),
        (5, 6),
    ),
    "layer_norm, two dimensions": (
        lambda x, w, b: layer_norm(x, (2, 3), w.view(2, 3), b.view(2, 3), eps=1e-3),
        lambda x, w, b: F.layer_norm(x, (2, 3), w.view(2, 3), b.view(2, 3), eps=1e-3),
        (4, 2, 3),
    ),
    "rms_norm": (
        lambda x, w, b: rms_norm(x, (6,), w) + b,
        lambda x, w, b: F.rms_norm(x, (6,), w) + b,
        (5, 6),
    ),
    "rms_norm, two dimensions": (
        lambda x, w, b: rms_norm(x, (2, 3), w.view(2, 3), eps=1e-3) * b.view(2, 3),
        lambda x, w, b: F.rms_norm(x, (2, 3), w.view(2, 3), eps=1e-3) * b.view(2, 3),
        (4, 2, 3),
    ),
    "batch_norm": (
        lambda x, w, b: batch_norm(x, None, None, w, b, training=True),
        lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
        (4, 6, 3),
    ),
    "instance_norm": (
        lambda x, w, b: instance_norm(x, weight=w, bias=b),
        lambda x, w, b: F.instance_norm(x, weight=w, bias=b),
        (4, 6, 3),
    ),
}


@pytest.mark.parametrize("name", NORMS)
def test_every_word_to_third_order(name):
    ours, _, shape = NORMS[name]
    report = cm.check_derivatives(ours, (torch.randn(shape), WEIGHT, BIAS), order=3)
    assert report.ok, str(report)


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("mode", ["inference", "reverse", "forward", "vmap", "dual"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_values_and_first_derivatives_are_torchs(name, mode, dtype):
    ours, torchs, shape = NORMS[name]
    x, w, b = (t.to(dtype) for t in (torch.randn(shape), WEIGHT, BIAS))
    v = torch.randn(shape).to(dtype)

    def compute(f, x=x, w=w, b=b, v=v):
        if mode == "inference":
            return f(x, w, b)
        if mode == "reverse":
            leaves = [t.clone().requires_grad_() for t in (x, w, b)]
            y = f(*leaves)
            return torch.cat([g.flatten() for g in torch.autograd.grad(y, leaves, v)])
        if mode == "forward":
            return torch.stack(torch.func.jvp(lambda x: f(x, w, b), (x,), (v,)))
        if mode == "vmap":
            return torch.func.vmap(lambda x: f(x, w, b))(torch.stack([x, v]))
        with torch.autograd.forward_ad.dual_level():
            y = f(torch.autograd.forward_ad.make_dual(x, v), w, b)
            return torch.stack(torch.autograd.forward_ad.unpack_dual(y))

    found, expected = compute(ours), compute(torchs)
    exact = compute(torchs, *(t.double() for t in (x, w, b, v)))
    assert found.dtype == expected.dtype
    # torch's tangents lose digits in half precision; ours may not lose more.
    error, torchs_error = ((y - exact).abs().max() for y in (found, expected))
    assert error <= 1.5 * torchs_error + 4 * torch.finfo(dtype).eps * exact.abs().max()


def test_first_gradients_run_the_fused_operator():
    x = torch.randn(5, 6, requires_grad=True)
    with torch.profiler.profile() as profile:
        layer_norm(x, (6,), WEIGHT, BIAS).sum().backward()
    names = {event.key for event in profile.key_averages()}
    assert "aten::native_layer_norm_backward" in names
    assert "aten::rsqrt" not in names


def test_a_weight_that_depends_on_the_input_is_counted_once():
    x = torch.randn(3, 6, dtype=torch.float64)
    report = cm.check_derivatives(
        lambda x: layer_norm(x, (6,), x[0].sin(), x[1] * x[2]), x, order=3
    )
    assert report.ok, str(report)


@pytest.mark.parametrize("transform", ["reverse", "forward"])
@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.InstanceNorm1d])
def test_running_statistics_are_torchs(kind, transform):
    ours, theirs = (kind(6, affine=True, track_running_stats=True) for _ in range(2))
    function = batch_norm if kind is nn.BatchNorm1d else instance_norm
    x = torch.randn(4, 6, 3)

    def run(x):
        running = (ours.running_mean, ours.running_var)
        return function(x, *running, ours.weight, ours.bias, True, 0.1)

    for _ in range(2):
        theirs(x)
        if transform == "reverse":
            run(x.clone().requires_grad_()).sum().backward()
        else:
            torch.func.jvp(run, (x,), (x,))
    torch.testing.assert_close(ours.running_mean, theirs.running_mean)
    torch.testing.assert_close(ours.running_var, theirs.running_var)


def test_evaluation_uses_the_running_statistics():
    x, mean, variance = torch.randn(4, 6), torch.randn(6), torch.rand(6) + 0.5
    expected = (x - mean) / (variance + 1e-5).sqrt()
    torch.testing.assert_close(batch_norm(x, mean, variance), expected)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: layer_norm(x, (7,)),
        lambda x: layer_norm(x, (6,), torch.ones(5)),
        lambda x: layer_norm(x, ()),
        lambda x: rms_norm(x, (7,)),
        lambda x: rms_norm(x, (6,), torch.ones(5)),
        lambda x: batch_norm(x, None, None, torch.ones(5), training=True),
        lambda x: batch_norm(x, None, None),
    ],
)
def test_what_does_not_fit_is_refused_in_every_mode(call):
    x = torch.randn(4, 6)
    for run in (
        call,
        lambda x: call(x.clone().requires_grad_()),
        lambda x: torch.func.jvp(call, (x,), (x,)),
    ):
        with pytest.raises(RuntimeError):
            run(x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_rms_norm_has_torchs_eps(dtype):
    x = (1e-4 * torch.randn(3, 6)).to(dtype)
    found = torch.func.jvp(lambda x: rms_norm(x, (6,)), (x,), (x,))[0]
    torch.testing.assert_close(found, F.rms_norm(x, (6,)))


def test_rms_norm_is_a_formula_under_forward_mode():
    """On a GPU torch has a fused operator with a rule of its own; here it must not be called."""
    x = torch.randn(3, 6)
    with cm.differentiable(), torch.profiler.profile() as profile:
        torch.func.jvp(nn.RMSNorm(6), (x,), (x,))
    assert "aten::rms_norm" not in {event.key for event in profile.key_averages()}
