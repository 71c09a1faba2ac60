"""`examples/evict_cache.py` on a tiny model: each rule against attention with a mask."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "evict_cache.py"
TOKENS, BUDGET = 70, 20


@pytest.fixture(scope="module")
def example():
    return SimpleNamespace(**runpy.run_path(str(EXAMPLE)))


@pytest.fixture(scope="module")
def model():
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.4,  # attention far from uniform
    )
    return LlamaModel(config).eval()


@torch.no_grad()
def masked(model, tokens, seen):
    """Losses of the model where each token sees the keys that `seen` says."""
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    states = model(tokens[None, :-1], attention_mask=mask[None, None]).last_hidden_state[0]
    logits = states @ model.get_input_embeddings().weight.T
    return torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="none")


def test_rules_that_are_masks(example, model):
    tokens = torch.randint(0, 50, (TOKENS,))
    i, j = torch.arange(TOKENS - 1)[:, None], torch.arange(TOKENS - 1)[None]
    causal, start = j <= i, i // example.STEP * example.STEP
    whole = example.losses(model, tokens, TOKENS)
    for row in whole:
        torch.testing.assert_close(row, masked(model, tokens, causal))
    cut = example.losses(model, tokens, BUDGET)
    recent = masked(model, tokens, causal & (j >= start - BUDGET))
    torch.testing.assert_close(cut[0], recent)
    latest = j >= start - (BUDGET - example.SINKS)
    sinks = masked(model, tokens, causal & (latest | (j < example.SINKS)))
    torch.testing.assert_close(cut[1], sinks)
    assert not torch.allclose(cut[2], cut[0])
    assert not torch.allclose(cut[3], cut[2])


def test_the_rules_of_received_mass_keep_the_heaviest(example):
    """Two steps of one layer, with weights written out and summed over the heads of a group."""
    evicting, budget = example.Evicting(), 6
    q, k = torch.randn(4, 4, 24, 8), torch.randn(4, 2, 24, 8)
    module = SimpleNamespace(layer_idx=0)
    for step in (slice(0, 16), slice(16, 24)):
        keys = k[:, :, : step.stop]
        evicting(module, q[:, :, step], keys, keys, scaling=0.3)
    scores = 0.3 * q @ k.repeat_interleave(2, 1).mT
    scores = scores.masked_fill(~torch.ones(24, 24).tril().bool(), -torch.inf)
    G = scores.logsumexp(-1, keepdim=True)
    plain = scores.softmax(-1)
    typical = G[:, :, 15:16]  # of the last query of the first step
    for row, weights in ((2, plain), (3, plain * (G - typical).exp())):
        mass = weights[row].sum(-2).unflatten(0, (2, 2)).sum(1)
        torch.testing.assert_close(evicting.received[0].total[row], mass)
        mass[:, 21:] = torch.inf
        expected = mass.topk(budget).indices.sort(-1).values
        cache = SimpleNamespace(layers=[SimpleNamespace(keys=k.clone(), values=k.clone())])
        kept = example.Evicting()
        kept.received = dict(evicting.received)
        kept.cut(cache, budget)
        found = cache.layers[0].keys[row]
        torch.testing.assert_close(found, k[row].gather(-2, expected[..., None].expand(2, 6, 8)))
        assert kept.received[0].total.shape == (4, 2, budget)
