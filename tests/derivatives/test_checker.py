"""`check_derivatives`: it finds what is wrong, names it, and never calls something else right."""

from __future__ import annotations

import functools
import math
import random
import time

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd import forward_ad

import cumulant as cm
from cumulant.derivatives.words import evaluate_word, words


def test_every_word_computes_the_same_number():
    x = torch.tensor([0.3, -1.2, 0.7], dtype=torch.float64)
    v = [torch.randn(3, dtype=torch.float64) for _ in range(3)]

    def cubic(x):
        return (x**3).sum()

    exact = [3 * (x**2 * v[0]).sum(), 6 * (x * v[0] * v[1]).sum(), 6 * (v[0] * v[1] * v[2]).sum()]
    for word in words(3):
        n = len(word)
        found = evaluate_word(word, cubic, (x,), tuple((d,) for d in v[:n]))
        assert found == pytest.approx(exact[n - 1].item(), rel=1e-12)
    assert len(words(3)) == 2 + 4 + 8


def test_right_function_is_ok():
    report = cm.check_derivatives(
        lambda x, y: (x.sin() @ y.exp()).tanh(), (torch.randn(3, 4), torch.randn(4, 2)), order=3
    )
    assert report.ok
    assert report.faults == ()
    assert len(report.rows) == 14
    assert all(r.value == pytest.approx(r.expected, rel=1e-6, abs=1e-6) for r in report.rows)


def test_report_is_a_plain_table():
    text = str(cm.check_derivatives(nn.LayerNorm(5), torch.randn(2, 5)))
    assert "RF    wrong" in text
    assert "torch.nn.functional.layer_norm: FF RF wrong" in text
    assert "issues/196700" in text
    with pytest.raises(AttributeError):
        cm.check_derivatives(torch.sin, torch.randn(2)).rows = ()


class Planted(torch.autograd.Function):
    """x^3 with a wrong factor in backward or jvp, at the order chosen."""

    wrong_backward = 1.0
    wrong_jvp = 1.0

    @staticmethod
    def forward(x):
        return x**3

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return Planted.wrong_backward * 3 * x**2 * gradient

    @staticmethod
    def jvp(ctx, tangent):
        x = forward_ad.unpack_dual(ctx.saved_tensors[0]).primal
        with forward_ad._set_fwd_grad_enabled(True):  # torch switches outer tangents off in jvp
            return Planted.wrong_jvp * 3 * x**2 * tangent


class Cube(nn.Module):
    def forward(self, x):
        return Planted.apply(x)


def deep_model(position, depth=4):
    layers = []
    for i in range(depth):
        layers += [nn.Linear(3, 3), Cube() if i == position else nn.Tanh()]
    return nn.Sequential(*layers)


@settings(max_examples=5, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(
    position=st.integers(0, 3),
    where=st.sampled_from(["backward", "jvp", "both"]),
    seed=st.integers(0, 99),
)
def test_planted_fault_is_named_in_every_word_it_is_wrong_in(position, where, seed):
    torch.manual_seed(seed)
    Planted.wrong_backward = 1.25 if where in ("backward", "both") else 1.0
    Planted.wrong_jvp = 1.25 if where in ("jvp", "both") else 1.0
    report = cm.check_derivatives(deep_model(position), torch.randn(2, 3))
    letters = {"backward": "R", "jvp": "F", "both": "FR"}[where]
    # What follows is nonlinear, so every word that uses the wrong mode anywhere is wrong.
    assert set(report.words("wrong")) == {w for w in words(2) if set(w) & set(letters)}
    (fault,) = report.faults
    assert fault.operator.endswith("Planted")
    assert set(fault.wrong) == set(report.words("wrong"))
    assert fault.places[0].startswith(str(2 * position + 1))
    assert "test_checker.py" in fault.places[0]


cube = Planted.apply  # as torch's documentation has it


def test_a_function_bound_before_is_named():
    Planted.wrong_backward, Planted.wrong_jvp = 1.25, 1.0
    report = cm.check_derivatives(lambda x: cube(x.sin()).cos(), torch.randn(3))
    assert [fault.operator.rsplit(".", 1)[-1] for fault in report.faults] == ["Planted"]
    assert set(report.faults[0].wrong) == {"R", "FF", "FR", "RF", "RR"} - {"FF"}
    assert "apply" not in vars(torch.autograd.function._SingleLevelFunction)


def test_a_function_inside_compiled_code_is_named():
    Planted.wrong_backward, Planted.wrong_jvp = 1.25, 1.0
    compiled = torch.compile(lambda x: cube(x.sin()).cos(), backend="eager")
    report = cm.check_derivatives(compiled, torch.randn(3))
    assert "R" in report.words("wrong")
    assert [fault.operator.rsplit(".", 1)[-1] for fault in report.faults] == ["Planted"]


@pytest.mark.parametrize(
    "outputs",
    [
        lambda x: (1e8 * x.sin(), cube(x)),  # a large tensor beside a small wrong one
        lambda x: (x.sin(), torch.fft.fft(cube(x))),  # a complex one
        lambda x: {"a": x.sin(), "b": [1, {"c": cube(x)}]},
    ],
)
def test_a_fault_in_one_output_of_several(outputs):
    Planted.wrong_backward = Planted.wrong_jvp = 1.25
    report = cm.check_derivatives(outputs, torch.randn(4))
    assert set(report.words("wrong")) == set(words(2))


def test_outputs_that_are_not_looked_into_are_named():
    class Held:
        def __init__(self, x):
            self.x = x

    report = cm.check_derivatives(lambda x: (x.sin(), Held(x)), torch.randn(3))
    assert any("type Held were not checked" in note for note in report.notes)


def test_a_right_custom_function_passes():
    Planted.wrong_backward = Planted.wrong_jvp = 1.0
    assert cm.check_derivatives(deep_model(1), torch.randn(2, 3), order=3).ok


def test_fault_only_in_the_second_derivative():
    class Frozen(torch.autograd.Function):
        """A gradient that is right and not differentiable: its factor is detached."""

        @staticmethod
        def forward(x):
            return x**2

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx, gradient):
            return 2 * ctx.saved_tensors[0].detach() * gradient

    report = cm.check_derivatives(lambda x: Frozen.apply(x.sin()).cos(), torch.randn(3))
    assert report.words("right") == ("R",)
    assert report.words("wrong") == ("RR",)
    assert set(report.words("not supported")) == {"F", "FF", "FR", "RF"}  # it has no jvp
    assert report.faults[0].operator.endswith("Frozen")


def test_not_supported_is_not_wrong():
    q = torch.randn(1, 2, 5, 4)
    report = cm.check_derivatives(torch.nn.functional.scaled_dot_product_attention, (q, q, q))
    assert report.words("wrong") == ()
    assert set(report.words("not supported")) == {"F", "FF", "FR", "RF", "RR"}
    (fault,) = report.faults
    assert fault.operator.endswith("scaled_dot_product_attention")
    assert fault.inside == ("aten._scaled_dot_product_flash_attention_for_cpu",)
    assert not report.ok


@pytest.mark.parametrize("function", [torch.relu, torch.abs, nn.functional.hardtanh])
def test_kink_is_said(function):
    x = torch.ones(3) if function is nn.functional.hardtanh else torch.zeros(3)
    report = cm.check_derivatives(function, x)
    assert set(report.words("kink")) == set(words(2))
    assert not report.ok


def test_kink_of_the_second_derivative_leaves_the_first():
    report = cm.check_derivatives(
        lambda x: x.clamp_min(0.0) ** 2 + x, torch.zeros(3), tolerance=1e-3
    )
    assert set(report.words("kink")) == {"FF", "FR", "RF", "RR"}
    assert "wrong" not in {r.status for r in report.rows}


@pytest.mark.parametrize(
    "f",
    [
        torch.sqrt,  # one-sided, and infinite there
        lambda x: x.abs().sqrt(),  # an even function: central differences are 0
        lambda x: x.abs() ** 1.5,  # has a first derivative, and no second
        lambda x: torch.cat([x.abs(), (torch.linspace(-0.1, 0.1, 400) + x[0]).abs()]),
    ],
)
def test_no_operator_is_blamed_where_there_is_no_derivative(f):
    report = cm.check_derivatives(f, torch.zeros(4))
    assert not report.ok
    assert report.words("wrong") == ()
    assert report.faults == ()


def test_a_jump_is_unclear():
    report = cm.check_derivatives(lambda x: x.floor() + x, torch.zeros(3))
    assert set(report.words("unclear")) == set(words(2))


@pytest.mark.parametrize(
    ("cut", "name"),
    [
        (lambda x: x.detach(), "detach"),
        (lambda x: x.data, "data"),
        (lambda x: x.sum().item(), "item"),
    ],
)
def test_cuts_are_named(cut, name):
    report = cm.check_derivatives(lambda x: x.sin() * cut(x), torch.randn(3))
    assert "R" in report.words("wrong")
    assert [f.operator.rsplit(".", 1)[-1] for f in report.faults] == [name]
    assert "test_checker.py" in report.faults[0].places[0]


def test_no_grad_is_named():
    def f(x):
        with torch.no_grad():
            y = x * 2
        return x * y

    report = cm.check_derivatives(f, torch.randn(3))
    assert "R" in report.words("wrong")
    assert [x.operator for x in report.faults] == ["torch.no_grad"]


def test_writing_in_place_is_no_fault_by_itself():
    def f(x):
        x.mul_(3)
        y = x.sin()
        y[0] = x[1] * x[2]
        return y

    x = torch.randn(3)
    before = x.clone()
    assert cm.check_derivatives(f, x, order=3).ok
    assert torch.equal(x, before)


def test_in_place_where_reverse_mode_needs_the_value():
    def f(x):
        y = x.exp()
        y.mul_(2.0)  # exp keeps its result for backward
        return y.sin()

    report = cm.check_derivatives(f, torch.randn(3))
    assert set(report.words("not supported")) == {"R", "FR", "RF", "RR"}
    assert any(x.operator.endswith("mul_") for x in report.faults)


def test_dropout_is_checked_with_a_fixed_seed():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.5))
    assert cm.check_derivatives(model, torch.randn(2, 4)).ok


def test_dropout_in_place_writes_and_bad_rates_are_refused():
    def f(x):
        nn.functional.dropout(x, 1.0, inplace=True)
        return x.exp()

    report = cm.check_derivatives(f, torch.randn(3))
    assert [row.expected for row in report.rows] == [0.0] * 6  # all of x is dropped
    with pytest.raises(cm.InputError, match="between 0 and 1"):
        cm.check_derivatives(lambda x: nn.functional.dropout(x, 1.5), torch.randn(3))


def test_random_state_is_left_alone():
    x = torch.randn(3)
    state = torch.get_rng_state()
    cm.check_derivatives(lambda x: nn.functional.dropout(x, 0.5), x)
    assert torch.equal(torch.get_rng_state(), state)


def test_single_precision_inside_is_no_obstacle():
    def f(x):
        return torch.softmax(x.float(), -1, dtype=torch.float32).to(torch.float32).sin()

    report = cm.check_derivatives(f, torch.randn(2, 5), order=3)
    assert report.ok


def test_module_parameters_and_buffers():
    layer = nn.BatchNorm1d(4)
    state = {k: v.clone() for k, v in layer.state_dict().items()}
    report = cm.check_derivatives(layer, torch.randn(6, 4))
    assert set(report.words("wrong")) == {"FF", "RF"}
    assert all(torch.equal(v, state[k]) for k, v in layer.state_dict().items())
    assert all(p.grad is None and p.dtype == torch.float32 for p in layer.parameters())


def test_parameters_alone_with_integer_inputs():
    table = nn.Embedding(5, 3)
    assert cm.check_derivatives(
        lambda *, ids, w: w[ids].sin(), {"ids": torch.arange(3), "w": table.weight}
    ).ok
    assert cm.check_derivatives(nn.Sequential(table, nn.Tanh()), torch.arange(4)).ok
    with pytest.raises(cm.InputError, match="floating-point"):
        cm.check_derivatives(table, torch.arange(4), parameters=False)


@pytest.mark.parametrize(
    ("f", "inputs", "message"),
    [
        (torch.sin, torch.arange(3), "at least one floating-point tensor"),
        (torch.sin, torch.randn(3, dtype=torch.complex64), "real inputs"),
        (torch.argmax, torch.randn(3), "no floating-point or complex tensor"),
        (lambda x: x * random.random(), torch.randn(3), "two different results"),
        (
            lambda x: x @ torch.randn(4, 4),
            torch.randn(3),
            r"RuntimeError: .*f runs on these inputs",
        ),
        (functools.partial(nn.functional.linear, weight=torch.eye(3)), torch.randn(3), "float64"),
        (torch.log, -torch.ones(3), "no finite number"),
        (torch.sin, torch.tensor([math.nan]), "NaN"),
        (3, torch.randn(3), "a function or a module"),
    ],
)
def test_bad_input_is_one_clear_error(f, inputs, message):
    with pytest.raises(cm.InputError, match=message):
        cm.check_derivatives(f, inputs)


@pytest.mark.parametrize(
    "options", [{"order": 0}, {"order": 5}, {"order": True}, {"tolerance": 0.0}, {"seconds": -1.0}]
)
def test_bad_options(options):
    with pytest.raises(cm.InputError):
        cm.check_derivatives(torch.sin, torch.randn(3), **options)


def test_out_of_time_is_left_out():
    report = cm.check_derivatives(torch.sin, torch.randn(3), seconds=1e-9)
    assert set(report.words("left out")) == set(words(2))
    assert not report.ok
    assert "seconds=" in report.notes[0]


def test_the_time_budget_holds_inside_a_single_difference():
    calls = 0

    def slow(x):
        nonlocal calls
        calls += 1
        time.sleep(0.02)
        return x.sin()

    report = cm.check_derivatives(slow, torch.randn(3), seconds=0.3)
    assert set(report.words("left out")) == set(words(2))  # F alone takes about fifty calls
    assert calls <= 0.3 / 0.02 + 1


def test_outputs_that_are_not_finite_are_left_out():
    report = cm.check_derivatives(lambda x: torch.cat([x.sin(), x / 0.0]), torch.rand(3) + 0.5)
    assert any("3 outputs are not finite" in note for note in report.notes)


def test_a_step_out_of_the_domain():
    def f(p):
        if not bool(((p > 0) & (p < 1)).all()):
            raise ValueError("not a probability")
        return (p / (1 - p)).log()

    assert cm.check_derivatives(f, torch.tensor([0.02, 0.5, 0.97])).ok


def test_dropout_has_one_mask_in_every_mode():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, activation="gelu", batch_first=True)
    with cm.differentiable():
        report = cm.check_derivatives(layer, torch.randn(2, 5, 8))
    assert report.ok, str(report)


@pytest.mark.parametrize("kind", [nn.Dropout, nn.Dropout1d, nn.AlphaDropout])
def test_dropout_alone(kind):
    report = cm.check_derivatives(nn.Sequential(nn.Linear(4, 4), kind(0.5)), torch.randn(3, 4))
    assert report.ok, str(report)


def test_a_function_with_another_value_in_another_mode_is_neither_right_nor_wrong():
    def f(x):
        return x.sin() * (2.0 if x.requires_grad else 1.0)

    report = cm.check_derivatives(f, torch.randn(3))
    assert not report.ok
    assert report.words("unclear") == ("R", "FR", "RR")
    assert report.words("right") == ("F", "FF", "RF")
