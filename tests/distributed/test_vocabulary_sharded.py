"""`linear_cross_entropy` with the classes on ranks: loss and gradients of a single process."""

from __future__ import annotations

import pytest
import torch

import cumulant as cm
from cumulant.core.errors import GroupError, InputError

# How many classes each rank has.
COUNTS = {2: [4, 7], 3: [6, 0, 5], 4: [2, 3, 1, 5]}
ROWS, CLASSES, FEATURES = 6, 11, 4

CASES = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "smooth": {"label_smoothing": 0.2},
    "weights": {"weight": "classes", "label_smoothing": 0.1},
    "bias": {"linear_bias": "classes"},
    "softcap": {"linear_bias": "classes", "softcap": 1.5, "label_smoothing": 0.1},
    "z": {"z_loss": 0.1},
    "probabilities": {"target": "classes", "weight": "classes"},
    "entropy": {"return_lse": True, "return_entropy": True, "linear_bias": "classes"},
}


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def call(case, mine=slice(None), group=None):
    """The call of the rank that has the classes `mine`; (number to differentiate, leaves)."""
    options = dict(CASES[case])
    x, W = (
        draw(0, ROWS, FEATURES).requires_grad_(),
        draw(1, CLASSES, FEATURES)[mine].requires_grad_(),
    )
    leaves = [x, W]
    y = torch.tensor([0, 10, 5, -100, 6, 3])
    if options.pop("target", None):
        y = draw(2, ROWS, CLASSES).softmax(-1)[:, mine]
    if "weight" in options:
        options["weight"] = draw(3, CLASSES).exp()[mine]
    if "linear_bias" in options:
        options["linear_bias"] = draw(4, CLASSES)[mine].requires_grad_()
        leaves.append(options["linear_bias"])
    out = cm.linear_cross_entropy(x, W, y, group=group, **options)
    parts = out if isinstance(out, tuple) else (out,)
    return sum(((i + 1) * z**2).sum() for i, z in enumerate(parts)), leaves


def derivatives(value, leaves):
    first = torch.autograd.grad(value, leaves, create_graph=True)
    squares = (first[0] ** 2).sum()  # of the input, which is whole on every rank
    return first, torch.autograd.grad(squares, leaves)


def on_rank(group, rank, size, case):
    start = sum(COUNTS[size][:rank])
    mine = slice(start, start + COUNTS[size][rank])
    value, leaves = call(case, mine, group)
    got = derivatives(value, leaves)
    whole, every = call(case)
    expected = derivatives(whole, every)
    torch.testing.assert_close(value, whole)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours[0], theirs[0])
        for a, b in zip(ours[1:], theirs[1:], strict=True):
            torch.testing.assert_close(a, b[mine])
    return float(value)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("case", CASES)
def test_as_in_a_single_process(crew, size, case):
    """Uneven shards, and a rank without classes: value, first and second derivatives."""
    assert len(set(crew.run(on_rank, size, case))) == 1


def forward_mode(group, rank, size):
    mine = slice(0, 4) if rank == 0 else slice(4, CLASSES)
    x, W, t = draw(0, ROWS, FEATURES), draw(1, CLASSES, FEATURES), draw(5, CLASSES, FEATURES)
    y = torch.arange(ROWS)

    def ours(W):
        return cm.linear_cross_entropy(x, W, y, group=group)

    def whole(W):
        return torch.nn.functional.cross_entropy(x @ W.T, y)

    got = torch.func.jvp(ours, (W[mine],), (t[mine],))[1]
    torch.testing.assert_close(got, torch.func.jvp(whole, (W,), (t,))[1])


def test_forward_mode(crew):
    crew.run(forward_mode, 2)


def refused(group, rank, size):
    x, W, y = draw(0, ROWS, FEATURES), draw(1, 5, FEATURES), torch.zeros(ROWS, dtype=torch.long)
    with pytest.raises(InputError, match=r"agree on the sum of the targets"):
        cm.linear_cross_entropy(x, W, y + rank, group=group)
    with pytest.raises(InputError, match=r"between 0 and 9"):
        cm.linear_cross_entropy(x, W, y + 10, group=group)
    with pytest.raises(InputError if rank else GroupError):
        cm.linear_cross_entropy(x, W[:, rank:], y, group=group)
    return True


def test_what_ranks_refuse_together(crew):
    assert all(crew.run(refused, 2))
