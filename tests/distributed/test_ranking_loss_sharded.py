"""The ranking loss for sentence-transformers with candidates gathered from all ranks."""

from __future__ import annotations

import pytest
import torch

from cumulant.integrations.sentence_transformers import MultipleNegativesRankingLoss

EACH = 3
DIRECTIONS = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")


def draw(size):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(size * EACH, 5, generator=g, dtype=torch.float64) for _ in range(3)]


def on_rank(group, rank, size, directions):
    """DDP averages over ranks: so must losses and gradients be right on average."""
    loss = MultipleNegativesRankingLoss(
        torch.nn.Identity(), gather_across_devices=True, directions=directions
    )
    alone = MultipleNegativesRankingLoss(torch.nn.Identity(), directions=directions)
    mine = slice(rank * EACH, (rank + 1) * EACH)
    own = [x[mine].clone().requires_grad_() for x in draw(size)]
    every = [x.requires_grad_() for x in draw(size)]
    value = loss.compute_loss_from_embeddings(own)
    whole = alone.compute_loss_from_embeddings(every)
    for a, b in zip(
        torch.autograd.grad(value, own), torch.autograd.grad(whole, every), strict=True
    ):
        torch.testing.assert_close(a / size, b[mine])
    return float(value), float(whole)


@pytest.mark.parametrize("directions", [DIRECTIONS[:1], DIRECTIONS])
def test_as_in_a_single_process(crew, directions):
    values = crew.run(on_rank, 4, directions)  # all processes: the loss takes no group
    assert sum(x for x, _ in values) / 4 == pytest.approx(values[0][1], rel=1e-12)
