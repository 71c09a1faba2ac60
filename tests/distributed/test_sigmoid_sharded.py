"""`sigmoid_loss` over a group: the loss and the gradients of a single process."""

from __future__ import annotations

import pytest
import torch

from cumulant.contrastive import sigmoid_loss
from cumulant.core.errors import InputError
from cumulant.distributed import total

# How many anchors and keys each rank has.
COUNTS = {2: [4, 5], 3: [6, 0, 3]}


def draw(seed, n=9, d=5):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def case(name, mine):
    """Options of the whole call, and of the call of the rank that has the rows `mine`."""
    if name == "labels":
        labels = torch.tensor([0, 7, 7, 0, -1, 7, -1, 0, 7])
        whole, part = {"labels": labels, "exclude": "self"}, {"labels": labels[mine]}
        return whole, {**part, "exclude": "self"}
    options = {"plain": {}, "sum": {"reduction": "sum", "similarity": "dot"}}[name]
    return options, options


def on_rank(group, rank, size, name):
    start = sum(COUNTS[size][:rank])
    mine = slice(start, start + COUNTS[size][rank])
    whole, part = case(name, mine)

    def both(mine, options, group):
        q, k = draw(0)[mine].requires_grad_(), draw(1)[mine].requires_grad_()
        b = torch.tensor(-3.0, dtype=torch.float64, requires_grad=True)
        loss = sigmoid_loss(q, k, temperature=0.3, bias=b, group=group, **options)
        return loss, torch.autograd.grad(loss, (q, k, b))

    loss, grads = both(mine, part, group)
    expected, (q, k, b) = both(slice(None), whole, None)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(grads[0], q[mine])
    torch.testing.assert_close(grads[1], k[mine])
    # Each rank has its part of a parameter's gradient, which DDP adds up.
    torch.testing.assert_close(total(grads[2], group), b)
    return float(loss)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", ["plain", "sum", "labels"])
def test_as_in_a_single_process(crew, size, name):
    assert len(set(crew.run(on_rank, size, name))) == 1


def refused(group, rank, size):
    x = draw(rank, n=4)
    with pytest.raises(InputError, match="agree on the value of bias"):
        sigmoid_loss(x, x, bias=float(rank), group=group)
    return True


def test_what_ranks_refuse_together(crew):
    assert all(crew.run(refused, 2))
