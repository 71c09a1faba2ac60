"""Linear algebra and the chunked loss: torch's values, and derivatives that are right."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

import cumulant as cm
from cumulant import derivatives

torch.manual_seed(0)
A, B = torch.randn(4, 4, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)
L = torch.linalg.cholesky(A @ A.mT + torch.eye(4))
MANY = torch.randn(3, 4, 4, dtype=torch.float64)
LABELS = torch.tensor([0, 3, 1, 2])

CALLS = {
    "solve": (lambda a, b: torch.linalg.solve(a, b), (A, B)),
    "solve, batches and the other side": (
        lambda a, b: torch.linalg.solve(a, b, left=False),
        (MANY, B.mT),
    ),
    "solve, a vector": (lambda a, b: torch.linalg.solve(a, b), (A, B[:, 0])),
    "det": (lambda a: torch.linalg.det(a), (A,)),
    "det, batches": (lambda a: torch.det(a), (MANY,)),
    "slogdet": (lambda a: torch.linalg.slogdet(a), (MANY,)),
    "slogdet, by name": (lambda a: torch.slogdet(a).logabsdet, (A,)),
    "logdet": (lambda a: torch.logdet(a @ a.mT), (A,)),
    "cholesky_inverse": (lambda x: torch.cholesky_inverse(x), (L,)),
    "cholesky_inverse, upper": (lambda x: torch.cholesky_inverse(x, upper=True), (L.mT,)),
    "householder_product": (lambda a, t: torch.linalg.householder_product(a, t), (A, B[:3, 0])),
    "householder_product, tall": (
        lambda a, t: torch.linalg.householder_product(a, t),
        (MANY[:, :, :3], MANY[:, 0, :2]),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_word_to_third_order(name):
    call, inputs = CALLS[name]
    with cm.differentiable():
        report = cm.check_derivatives(call, inputs, order=3)
    assert report.ok, str(report)
    assert all(abs(r.value - r.expected) <= 1e-6 * abs(r.expected) for r in report.rows)


@pytest.mark.parametrize("name", CALLS)
def test_values_are_torchs(name):
    call, inputs = CALLS[name]
    expected = call(*inputs)
    with cm.differentiable():
        plain = call(*inputs)
        under, _ = torch.func.jvp(call, inputs, inputs)
    for found in (plain, under):
        torch.testing.assert_close(*(pytree.tree_leaves(x) for x in (found, expected)))


def test_a_singular_matrix_is_refused_where_torchs_derivative_is_wrong():
    singular = torch.tensor([[1.0, 2.0], [2.0, 4.0]], dtype=torch.float64)
    move = torch.tensor([[1.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    ahead, behind = (torch.linalg.det(singular + s * move) for s in (1e-3, -1e-3))
    assert (ahead - behind).item() / 2e-3 == pytest.approx(4.0)
    assert torch.func.jvp(torch.linalg.det, (singular,), (move,))[1].item() == 0.0, (
        "torch mended det at singular matrices: say so in derivatives/algebra.py"
    )
    with pytest.raises(RuntimeError, match="zero"):
        torch.func.jvp(derivatives.det, (singular,), (move,))


@pytest.mark.parametrize(
    "call",
    [
        lambda a: torch.linalg.solve(a, torch.ones(3, 1, dtype=a.dtype)),
        lambda a: torch.linalg.det(a[:2]),
        lambda a: torch.linalg.householder_product(a, torch.ones(5, dtype=a.dtype)),
    ],
)
def test_what_does_not_fit_is_refused_in_every_mode(call):
    with cm.differentiable():
        for run in (call, lambda a: torch.func.jvp(call, (a,), (a,))):
            with pytest.raises(RuntimeError):
                run(A)


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="from torch 2.13 on")
def test_linear_cross_entropy_in_chunks_has_a_tangent():
    from torch.nn import LinearCrossEntropyOptions

    options = LinearCrossEntropyOptions(batch_chunk_size=2)
    x, w = torch.randn(2, 4, 4, dtype=torch.float64)

    def loss(x, w):
        return F.linear_cross_entropy(x, w, LABELS, options=options)

    def plain(x, w):
        return F.cross_entropy(x @ w.mT, LABELS)

    tangent = torch.func.jvp(loss, (x, w), (w, x))[1]
    assert tangent == 0.0, "torch mended this: drop the composite"
    with cm.differentiable():
        tangent = torch.func.jvp(loss, (x, w), (w, x))[1]
        report = cm.check_derivatives(loss, (x, w))
        leaf = x.clone().requires_grad_()
        gradient = torch.autograd.grad(loss(leaf, w), leaf)[0]  # torch's own chunks
    torch.testing.assert_close(tangent, torch.func.jvp(plain, (x, w), (w, x))[1])
    torch.testing.assert_close(gradient, torch.func.grad(plain)(x, w))
    assert report.words("right") == ("F", "R", "FF", "FR", "RF")
    assert report.words("not supported") == ("RR",)  # create_graph: torch says options=None
