"""Contrastive losses over a group: the loss and the gradients of a single process."""

from __future__ import annotations

import pytest
import torch

import cumulant as cm
from cumulant.contrastive import contrast, info_nce, nt_xent
from cumulant.core.errors import GroupError, InputError
from cumulant.distributed import total

# How many anchors and keys each rank has.
COUNTS = {1: [9], 2: [4, 5], 3: [6, 0, 3], 4: [2, 3, 1, 3]}


def part(rank, size):
    start = sum(COUNTS[size][:rank])
    return slice(start, start + COUNTS[size][rank])


def points(seed, n=9, d=5):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def case(name, mine):
    """Options of the whole call, and of the call of the rank that has the rows `mine`."""
    if name == "plain":
        return {}, {}
    if name == "dot sum":
        return ({"similarity": "dot", "temperature": 1.3, "reduction": "sum"},) * 2
    if name == "symmetric":
        return ({"symmetric": True},) * 2
    if name == "none":
        return ({"reduction": "none"},) * 2
    if name == "positives":
        index = torch.arange(9).flip(0)
        return {"positives": index}, {"positives": index[mine]}
    if name == "mask":
        pairs = torch.eye(9, dtype=torch.bool).roll(2, 1) | torch.eye(9, dtype=torch.bool)
        left_out = torch.zeros(9, 9, dtype=torch.bool)
        left_out[:, 4] = ~pairs[:, 4]
        return (
            {"positives": pairs, "exclude": left_out},
            {"positives": pairs[mine], "exclude": left_out[mine]},
        )
    if name == "labels":
        labels = torch.tensor([0, 7, 7, 0, -1, 7, -1, 0, 7])
        return (
            {"labels": labels, "exclude": "self"},
            {"labels": labels[mine], "exclude": "self"},
        )
    if name == "log_weights":
        weights = points(3)[:, 0]
        return {"log_weights": weights}, {"log_weights": weights[mine]}
    queue = points(4, n=4)
    if name == "queue":
        return ({"queue": queue},) * 2
    return ({"queue": queue, "in_batch": False},) * 2


CASES = (
    *("plain", "dot sum", "symmetric", "none", "positives", "mask", "labels", "log_weights"),
    *("queue", "moco"),
)


def same_as_alone(group, rank, size, name):
    mine = part(rank, size)
    whole_options, own_options = map(dict, case(name, mine))
    t = torch.tensor(0.3, dtype=torch.float64)
    full = [points(k).requires_grad_() for k in (1, 2)]
    own = [points(k)[mine].requires_grad_() for k in (1, 2)]
    heats = [t.clone().requires_grad_() for _ in range(2)]
    for options, heat in zip((whole_options, own_options), heats, strict=True):
        options.setdefault("temperature", heat)
    expected = info_nce(*full, **whole_options)
    found = info_nce(*own, **own_options, group=group)
    if name == "none":
        torch.testing.assert_close(found, expected[mine], rtol=1e-10, atol=1e-12)
        expected, found = expected.sin().sum(), total(found.sin().sum(), group)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    first = torch.autograd.grad(expected, full, create_graph=True)
    ours = torch.autograd.grad(found, own, create_graph=True)
    for x, y in zip(ours, first, strict=True):
        torch.testing.assert_close(x, y[mine], rtol=1e-10, atol=1e-12)
    if whole_options["temperature"] is heats[0]:
        (whole,) = torch.autograd.grad(expected, heats[0], retain_graph=True)
        (share,) = torch.autograd.grad(found, heats[1], retain_graph=True)
        torch.testing.assert_close(total(share, group), whole, rtol=1e-10, atol=1e-12)
    second = torch.autograd.grad(sum((x**2).sum() for x in first), full)
    square = total(sum((x**2).sum() for x in ours), group)
    ours = torch.autograd.grad(square, own)
    for x, y in zip(ours, second, strict=True):
        torch.testing.assert_close(x, y[mine], rtol=1e-9, atol=1e-10 * float(y.abs().max()))
    options = [
        {n: x.detach() if isinstance(x, torch.Tensor) else x for n, x in o.items()}
        for o in (whole_options, own_options)
    ]
    tangents = [points(k) for k in (5, 6)]
    detached = [x.detach() for x in full]
    _, expected = torch.func.jvp(
        lambda q, k: info_nce(q, k, **options[0]), tuple(detached), tuple(tangents)
    )
    _, found = torch.func.jvp(
        lambda q, k: info_nce(q, k, **options[1], group=group),
        tuple(x[mine] for x in detached),
        tuple(x[mine] for x in tangents),
    )
    expected = expected[mine] if name == "none" else expected
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_the_loss_of_one_process(crew, name):
    crew.run(same_as_alone, 3, name)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", ["plain", "symmetric", "labels"])
def test_other_numbers_of_ranks(crew, name, size):
    crew.run(same_as_alone, size, name)


def details(group, rank, size):
    mine = part(rank, size)
    whole = contrast(points(1), points(2))
    ours = contrast(points(1)[mine], points(2)[mine], group=group)
    torch.testing.assert_close(ours.loss, whole.loss)
    for name in ("log_normalizer", "entropy", "effective_negatives"):
        torch.testing.assert_close(getattr(ours, name), getattr(whole, name)[mine])
    # SimCLR: a rank's views are side by side, which only reorders the points
    expected = nt_xent(points(1), points(2), 0.4)
    found = nt_xent(points(1)[mine], points(2)[mine], 0.4, group=group)
    torch.testing.assert_close(found, expected)


def test_details_and_views(crew):
    crew.run(details, 3)


def refusals(group, rank, size):
    x = points(1)[part(rank, size)]
    bad = {"positives": torch.tensor([0, 1, 2, 77]) if rank == 0 else torch.arange(5)}
    with pytest.raises(
        InputError if rank == 0 else GroupError, match=r"^info_nce: pos|rank 0: info_nce: pos"
    ):
        info_nce(x, x, **bad, group=group)
    y = x[:, : 4 + rank]
    with pytest.raises(InputError, match="features of anchors"):
        info_nce(y, y, group=group)
    with pytest.raises(InputError, match="symmetric over a group"):
        info_nce(x, x, symmetric=True, positives=torch.arange(len(x)), group=group)
    with pytest.raises(InputError, match="one rank must have anchors and keys"):
        info_nce(x[:0], x[:0], group=group)
    # and the group still works
    assert info_nce(x, x, group=group).isfinite()


def test_bad_input_stops_all_ranks_and_spoils_nothing(crew):
    crew.run(refusals, 2)


def test_without_a_group_a_process_is_alone():
    x = points(1)
    torch.testing.assert_close(info_nce(x, x), cm.contrastive.info_nce(x, x, group=None))
