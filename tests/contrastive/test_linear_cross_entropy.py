"""`linear_cross_entropy` against torch's cross-entropy of the whole logits in double precision."""

from __future__ import annotations

import itertools
import math

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch.nn import functional as F

import cumulant as cm
from cumulant.contrastive import LossAndEntropy, LossAndLse, LossLseEntropy

N, C, D = 7, 11, 5
CASES = [
    *itertools.product(
        ("counted", "ignored"), (0.0, 0.3), (False, True), (False, True), (None, 1.5), (0.0, 0.1)
    )
]


def randn(*shape, dtype=torch.float64, grad=True):
    return torch.randn(*shape, dtype=dtype).requires_grad_(grad)


def logits_of(x, W, b, softcap):
    logits = F.linear(x, W, b)
    return logits if softcap is None else softcap * (logits / softcap).tanh()


def dense(x, W, b, y, *, weight, reduction, smoothing, softcap, z_loss, ignore_index=-100):
    """torch's own, with the z-loss as its definition says."""
    logits = logits_of(x, W, b, softcap)
    loss = F.cross_entropy(
        logits, y, weight, reduction=reduction, label_smoothing=smoothing,
        ignore_index=ignore_index,
    )  # fmt: skip
    if not z_loss:
        return loss
    counted = (y != ignore_index).to(logits.dtype)
    squares = z_loss * counted * logits.logsumexp(-1) ** 2
    if reduction == "none":
        return loss + squares
    return loss + squares.sum() / (counted.sum() if reduction == "mean" else 1.0)


def problem(case, *, dtype=torch.float64):
    rows, smoothing, weighted, biased, softcap, z_loss = case
    x, W = randn(N, D, dtype=dtype), randn(C, D, dtype=dtype)
    b = randn(C, dtype=dtype) if biased else None
    y = torch.randint(C, (N,))
    if rows == "ignored":
        y[[0, 3]] = -100
    weight = torch.rand(C, dtype=dtype) + 0.1 if weighted else None
    ours = {"weight": weight, "label_smoothing": smoothing, "softcap": softcap, "z_loss": z_loss}
    theirs = {"weight": weight, "smoothing": smoothing, "softcap": softcap, "z_loss": z_loss}
    return (x, W, b), y, ours, theirs


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_option_and_combination(case, reduction):
    """Values; first, second and forward-mode derivatives, in input, weight and bias."""
    given, y, mine, theirs = problem(case)
    seeds = torch.randn(N, dtype=torch.float64)
    shape = [x.shape for x in given if x is not None]

    def unpacked(xs):
        return xs if given[2] is not None else (*xs, None)

    def ours(*xs):
        x, W, b = unpacked(xs)
        out = cm.linear_cross_entropy(x, W, y, linear_bias=b, reduction=reduction, **mine)
        return (out * seeds).sum() if reduction == "none" else out

    def expected(*xs):
        x, W, b = unpacked(xs)
        out = dense(x, W, b, y, reduction=reduction, **theirs)
        return (out * seeds).sum() if reduction == "none" else out

    leaves = [x for x in given if x is not None]
    torch.testing.assert_close(ours(*leaves), expected(*leaves), rtol=1e-11, atol=1e-11)
    first = [torch.autograd.grad(f(*leaves), leaves) for f in (ours, expected)]
    graph = [torch.autograd.grad(f(*leaves), leaves, create_graph=True) for f in (ours, expected)]
    for kept, again, b in zip(first[0], graph[0], first[1], strict=True):
        torch.testing.assert_close(kept, b, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(again, b, rtol=1e-10, atol=1e-10)
    second = [torch.autograd.grad(sum((g**2).sum() for g in x), leaves) for x in graph]
    for a, b in zip(*second, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)
    plain = tuple(x.detach() for x in leaves)
    along = tuple(torch.randn(s, dtype=torch.float64) for s in shape)
    a, b = (torch.func.jvp(f, plain, along)[1] for f in (ours, expected))
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


class TestAgainstTorchsOwn:
    """``torch.nn.functional.linear_cross_entropy``, call for call."""

    linear_cross_entropy = staticmethod(F.linear_cross_entropy)

    def both(self, *args, **kwargs):
        ours = cm.linear_cross_entropy(*args, **kwargs)
        theirs = self.linear_cross_entropy(*args, **kwargs)
        torch.testing.assert_close(ours, theirs)
        leaves = [x for x in (*args, *kwargs.values()) if getattr(x, "requires_grad", False)]
        for a, b in zip(
            *(torch.autograd.grad((x**2).sum(), leaves) for x in (ours, theirs)), strict=True
        ):
            torch.testing.assert_close(a, b)

    @pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
    def test_one_row_without_a_batch(self, reduction):
        self.both(randn(D), randn(C, D), torch.tensor(3), reduction=reduction)

    @pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
    @pytest.mark.parametrize("weighted", [False, True])
    @pytest.mark.parametrize("smoothing", [0.0, 0.2])
    def test_probabilities(self, reduction, weighted, smoothing):
        weight = torch.rand(C).double() if weighted else None
        y = torch.rand(N, C).double().requires_grad_()
        self.both(
            randn(N, D), randn(C, D), y, linear_bias=randn(C), weight=weight,
            reduction=reduction, label_smoothing=smoothing,
        )  # fmt: skip

    @pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
    @pytest.mark.parametrize("probabilities", [False, True])
    @pytest.mark.parametrize("smoothing", [0.0, 0.2])
    def test_several_losses_of_a_row(self, reduction, probabilities, smoothing):
        y = torch.rand(N, C, 2, 3).double() if probabilities else torch.randint(C, (N, 2, 3))
        if not probabilities:
            y[0, 1] = -100
        self.both(
            randn(N, D), randn(C, 2, 3, D), y, linear_bias=randn(C, 2, 3),
            weight=torch.rand(C).double(), reduction=reduction, label_smoothing=smoothing,
        )  # fmt: skip

    def test_its_options_are_accepted(self):
        x, W, y = randn(N, D), randn(C, D), torch.randint(C, (N,))
        options = torch.nn.LinearCrossEntropyOptions()
        self.both(x, W, y, options=options)

    def test_where_torchs_chunks_are_wrong(self):
        """A tangent of zero in forward mode, no second derivative: the reason for ours."""
        x, W, y = randn(N, D), randn(C, D), torch.randint(C, (N,))
        options = torch.nn.LinearCrossEntropyOptions()
        tangent = torch.randn_like(x)

        def ours(x):
            return cm.linear_cross_entropy(x, W.detach(), y)

        def chunked(x):
            return self.linear_cross_entropy(x, W.detach(), y, options=options)

        def exact(x):
            return F.cross_entropy(x @ W.detach().T, y)

        found = [torch.func.jvp(f, (x.detach(),), (tangent,))[1] for f in (chunked, ours, exact)]
        assert found[0] == 0
        torch.testing.assert_close(found[1], found[2])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("case", CASES[::7], ids=str)
def test_lower_precision(case, dtype):
    """A few roundings of the dtype from the exact loss of the same numbers."""
    given, y, mine, theirs = problem(case, dtype=dtype)
    x, W, b = given
    mine["weight"] = theirs["weight"] = None
    ours = cm.linear_cross_entropy(x, W, y, linear_bias=b, **mine)
    wide = [None if t is None else t.detach().double().requires_grad_() for t in given]
    exact = dense(*wide, y, reduction="mean", **theirs)
    assert ours.dtype == dtype
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(ours.double(), exact, rtol=8 * eps, atol=8 * eps)
    for a, b in zip(
        torch.autograd.grad(ours, [t for t in given if t is not None]),
        torch.autograd.grad(exact, [t for t in wide if t is not None]),
        strict=True,
    ):
        assert a.dtype == dtype
        torch.testing.assert_close(a.double(), b, rtol=16 * eps, atol=16 * eps)


def test_mixed_precision_is_promoted():
    x, W, y = randn(N, D, dtype=torch.bfloat16), randn(C, D, dtype=torch.float32), torch.arange(N)
    loss = cm.linear_cross_entropy(x, W, y)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, F.cross_entropy(x.float() @ W.T, y))


@pytest.mark.parametrize("scale", [1.0, 30.0, 1000.0])
def test_large_logits_in_single_precision(scale):
    """The loss of torch in float32 is off by a few roundings of the logits, and so is ours."""
    x, W = scale * torch.randn(64, 16), torch.randn(500, 16)
    y = (x @ W.T).argmax(-1)
    exact = F.cross_entropy(x.double() @ W.double().T, y, reduction="none")
    ours = cm.linear_cross_entropy(x, W, y, reduction="none")
    size = float((x @ W.T).abs().max())
    assert float((ours.double() - exact).abs().max()) <= 8 * torch.finfo(torch.float32).eps * size


class TestRequested:
    """Log-sum-exp and entropy beside the loss."""

    @pytest.mark.parametrize("softcap", [None, 1.5])
    def test_values_and_derivatives(self, softcap):
        x, W, b, y = randn(N, D), randn(C, D), randn(C), torch.randint(C, (N,))
        y[2] = -100

        def ours(x, W, b):
            return cm.linear_cross_entropy(
                x, W, y, linear_bias=b, softcap=softcap, reduction="none", return_lse=True,
                return_entropy=True,
            )  # fmt: skip

        def expected(x, W, b):
            logits = logits_of(x, W, b, softcap)
            p = logits.softmax(-1)
            entropy = -(p * logits.log_softmax(-1)).sum(-1)
            return F.cross_entropy(logits, y, reduction="none"), logits.logsumexp(-1), entropy

        for a, e in zip(ours(x, W, b), expected(x, W, b), strict=True):
            torch.testing.assert_close(a, e)
        assert torch.autograd.gradcheck(ours, (x, W, b), check_forward_ad=True)
        assert torch.autograd.gradgradcheck(lambda *a: ours(*a)[2], (x, W, b))

    def test_what_comes_back(self):
        x, W, y = randn(2, 3, D), randn(C, D), torch.randint(C, (2, 3))
        f = cm.linear_cross_entropy
        loss = f(x, W, y)
        assert isinstance(loss, torch.Tensor)
        lse = f(x, W, y, return_lse=True)
        entropy = f(x, W, y, return_entropy=True)
        both = f(x, W, y, return_lse=True, return_entropy=True)
        assert (type(lse), type(entropy), type(both)) == (
            LossAndLse, LossAndEntropy, LossLseEntropy,
        )  # fmt: skip
        for result in (lse, entropy, both):
            torch.testing.assert_close(result.loss, loss)
        assert lse.lse.shape == entropy.entropy.shape == (2, 3)
        torch.testing.assert_close(lse.lse, both.lse)
        torch.testing.assert_close(entropy.entropy, both.entropy)

    def test_a_policy_gradient(self):
        """The textbook loss: -(advantage log pi + beta H), against dense logits."""
        x, W, y = randn(N, D), randn(C, D), torch.randint(C, (N,))
        advantage = torch.randn(N, dtype=torch.float64)
        loss, H = cm.linear_cross_entropy(x, W, y, reduction="none", return_entropy=True)
        ours = (advantage * loss - 0.01 * H).mean()
        policy = torch.distributions.Categorical(logits=x @ W.T)
        theirs = -(advantage * policy.log_prob(y) + 0.01 * policy.entropy()).mean()
        torch.testing.assert_close(ours, theirs)
        for a, b in zip(*(torch.autograd.grad(z, (x, W)) for z in (ours, theirs)), strict=True):
            torch.testing.assert_close(a, b)


class TestTransforms:
    def test_vmap_over_targets_of_a_batch(self):
        x, W = randn(3, N, D, grad=False), randn(C, D, grad=False)
        y = torch.randint(C, (3, N))
        y[1, 2] = -100

        def ours(x, y):
            return cm.linear_cross_entropy(x, W, y, label_smoothing=0.1)

        def expected(x, y):
            return F.cross_entropy(x @ W.T, y, label_smoothing=0.1)

        for f in (lambda g: g, torch.func.grad):
            one_by_one = torch.stack([f(expected)(*pair) for pair in zip(x, y, strict=True)])
            torch.testing.assert_close(torch.func.vmap(f(ours))(x, y), one_by_one)

    def test_hessian(self):
        x, W, y = randn(2, 3, grad=False), randn(C, 3, grad=False), torch.tensor([1, 4])

        def ours(x):
            return cm.linear_cross_entropy(x, W, y)

        def expected(x):
            return F.cross_entropy(x @ W.T, y)

        torch.testing.assert_close(torch.func.hessian(ours)(x), torch.func.hessian(expected)(x))

    def test_third_order(self):
        x, W, y = randn(2, 3), randn(4, 3), torch.tensor([1, 3])
        out = []
        for f in (lambda: cm.linear_cross_entropy(x, W, y), lambda: F.cross_entropy(x @ W.T, y)):
            value = f()
            for _ in range(2):
                grads = torch.autograd.grad(value, (x, W), create_graph=True)
                value = sum((g**2).sum() for g in grads)
            out.append(torch.autograd.grad(value, (x, W)))
        for a, b in zip(*out, strict=True):
            torch.testing.assert_close(a, b)

    def test_without_gradients(self):
        x, W, y = randn(N, D), randn(C, D), torch.randint(C, (N,))
        with torch.no_grad():
            loss = cm.linear_cross_entropy(x, W, y)
        assert not loss.requires_grad
        torch.testing.assert_close(loss, F.cross_entropy(x @ W.T, y))


class TestEdges:
    @pytest.mark.parametrize("options", [{}, {"z_loss": 0.1}, {"label_smoothing": 0.1}])
    @pytest.mark.parametrize("rows", [0, N])
    def test_no_row_counts(self, rows, options):
        """As torch: NaN for a mean, 0 for a sum, and gradients that are 0."""
        x, W = randn(rows, D), randn(C, D)
        y = torch.full((rows,), -100)
        assert cm.linear_cross_entropy(x, W, y, **options).isnan()
        assert cm.linear_cross_entropy(x, W, y, reduction="sum", **options) == 0
        none = cm.linear_cross_entropy(x, W, y, reduction="none", **options)
        assert torch.equal(none, torch.zeros(rows).double())
        for reduction in ("mean", "sum"):
            loss = cm.linear_cross_entropy(x, W, y, reduction=reduction, **options)
            for g in torch.autograd.grad(loss, (x, W), allow_unused=True):
                assert g is None or not g.any()

    def test_weights_of_zero(self):
        x, W, y = randn(N, D), randn(C, D), torch.zeros(N, dtype=torch.long)
        weight = torch.ones(C).double()
        weight[0] = 0
        assert cm.linear_cross_entropy(x, W, y, weight=weight).isnan()
        assert F.cross_entropy(x @ W.T, y, weight).isnan()

    @pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
    def test_nan_in_a_row_that_does_not_count(self, reduction):
        x, W, y = randn(N, D), randn(C, D), torch.randint(C, (N,))
        y[4] = 7
        expected = F.cross_entropy(x @ W.T, y, ignore_index=7, reduction=reduction)
        with torch.no_grad():
            x[y == 7] = math.nan
        loss = cm.linear_cross_entropy(x, W, y, ignore_index=7, reduction=reduction)
        torch.testing.assert_close(loss, expected)
        for g in torch.autograd.grad(loss.sum(), (x, W)):
            assert g.isfinite().all()

    def test_nan_passes_through(self):
        x, W, y = randn(N, D), randn(C, D), torch.randint(C, (N,))
        with torch.no_grad():
            x[0] = math.nan
        loss = cm.linear_cross_entropy(x, W, y, reduction="none")
        assert loss[0].isnan()
        assert loss[1:].isfinite().all()

    def test_classes_that_cannot_be(self):
        x, W, b, y = randn(N, D), randn(C, D), torch.zeros(C).double(), torch.arange(N)
        b[-2:] = -math.inf
        loss = cm.linear_cross_entropy(x, W, y, linear_bias=b)
        torch.testing.assert_close(loss, F.cross_entropy(x @ W[:-2].T, y))
        (grad,) = torch.autograd.grad(loss, W)
        assert not grad[-2:].any()

    def test_one_class(self):
        x, W, y = randn(N, D), randn(1, D), torch.zeros(N, dtype=torch.long)
        assert cm.linear_cross_entropy(x, W, y).abs() < 1e-12

    def test_other_strides(self):
        x, W = torch.randn(D, N).double().T.requires_grad_(), torch.randn(D, C).double().T
        y = torch.randint(C, (2 * N,))[::2]
        loss = cm.linear_cross_entropy(x, W, y)
        torch.testing.assert_close(loss, F.cross_entropy(x @ W.T, y))
        loss.backward()

    def test_integers_of_other_sizes(self):
        x, W, y = randn(N, D), randn(C, D), torch.randint(C, (N,), dtype=torch.int32)
        torch.testing.assert_close(
            cm.linear_cross_entropy(x, W, y), F.cross_entropy(x @ W.T, y.long())
        )


BAD = {
    "features differ": ({"linear_weight": torch.zeros(C, D + 1)}, r"input must have shape"),
    "targets too large": ({"target": torch.full((N,), C)}, r"between 0 and 10.*7 do not"),
    "targets negative": ({"target": torch.full((N,), -1)}, r"first being -1"),
    "too few targets": ({"target": torch.zeros(2, dtype=torch.long)}, r"integers of shape \(7,\)"),
    "real targets": ({"target": torch.zeros(N)}, r"but is torch.float32"),
    "targets as a list": ({"target": [0] * N}, r"must be a tensor, not list"),
    "a module": ({"linear_weight": torch.nn.Linear(D, C)}, r"Pass its \.weight"),
    "integers": ({"input": torch.zeros(N, D, dtype=torch.long)}, r"dense real tensor"),
    "a bias of another size": ({"linear_bias": torch.zeros(D)}, r"linear_bias must have shape"),
    "a matrix as weight": ({"weight": torch.zeros(C, D)}, r"linear_weight is the matrix"),
    "a learned weight": ({"weight": torch.ones(C, requires_grad=True)}, r"weight is a constant"),
    "reduction": ({"reduction": "median"}, r"mean, sum or none"),
    "smoothing": ({"label_smoothing": 1.5}, r"label_smoothing must be .*at most 1"),
    "softcap": ({"softcap": 0.0}, r"softcap must be .*above 0"),
    "z_loss": ({"z_loss": -1.0}, r"z_loss must be .*at least 0"),
    "ignore_index": ({"ignore_index": 0.5}, r"ignore_index must be an integer"),
    "ignored probabilities": (
        {"target": torch.rand(N, C), "ignore_index": 0},
        r"ignore_index has no meaning",
    ),
    "no classes": ({"linear_weight": torch.zeros(0, D)}, r"a class at least"),
    "several losses of many rows": (
        {"linear_weight": torch.zeros(C, 2, D), "input": torch.zeros(2, N, D)},
        r"takes an input \(N, features\)",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    given = {
        "input": torch.randn(N, D),
        "linear_weight": torch.randn(C, D),
        "target": torch.zeros(N, dtype=torch.long),
    }
    wrong, said = BAD[name]
    with pytest.raises(cm.InputError, match=said):
        cm.linear_cross_entropy(**(given | wrong))


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
    st.integers(1, 40), st.integers(1, 70), st.integers(1, 9), st.integers(0, 2**31),
    st.floats(0, 1), st.floats(0.01, 20),
)  # fmt: skip
def test_any_shape(rows, classes, features, seed, smoothing, scale):
    g = torch.Generator().manual_seed(seed)
    x = (scale * torch.randn(rows, features, generator=g, dtype=torch.float64)).requires_grad_()
    W = torch.randn(classes, features, generator=g, dtype=torch.float64).requires_grad_()
    y = torch.randint(-1, classes, (rows,), generator=g)
    options = {"ignore_index": -1, "label_smoothing": smoothing, "reduction": "sum"}
    ours, theirs = (
        cm.linear_cross_entropy(x, W, y, **options),
        F.cross_entropy(x @ W.T, y, **options),
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-9)
    for a, b in zip(*(torch.autograd.grad(z, (x, W)) for z in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
