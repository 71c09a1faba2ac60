"""The score of a head in white coordinates (T35): closed forms, and the model's own rotation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import cumulant as cm
from cumulant.lens.forms import form_rows, mismatched, rotated, rotation, whitened
from cumulant.lens.weights import Projections, bilinear, projections


def head(query, key):
    return Projections(query, key, key, None, (), ())


def law(seed=0, d=6, n=5000):
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(d, d, generator=generator, dtype=torch.float64)
    states = torch.randn(n, d, generator=generator, dtype=torch.float64) @ root + 3
    return states, torch.cov(states.T)


def test_whitened_weights_give_the_form_between_square_roots():
    states, covariance = law()
    query, key = torch.randn(2, 3, 6, 2, dtype=torch.float64)
    found = whitened(head(query, key), states)
    values, axes = torch.linalg.eigh(covariance)
    root = axes @ values.sqrt().diag() @ axes.T
    for h in range(3):
        S = root @ query[h] @ key[h].T @ root
        eigenvalues = torch.linalg.eigvalsh((S + S.T) / 2)
        ours = bilinear(found)
        assert float(ours.symmetry[h]) == pytest.approx(
            float((S @ S).trace() / S.square().sum()), abs=1e-9
        )
        assert float(ours.definiteness[h]) == pytest.approx(
            float(eigenvalues.sum() / eigenvalues.abs().sum()), abs=1e-9
        )


def test_the_link_of_a_gaussian_is_symmetric_and_positive_only_where_states_are_white():
    states, covariance = law(1)
    turn = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64)).Q
    # The same link in coordinates stretched for the key: raw figures miss it.
    query, key = torch.linalg.inv(covariance) @ turn, turn
    [row] = form_rows(head(query[None], key[None]), states, None, (0.0,))
    assert row["whitened_symmetry"] == pytest.approx(1, abs=1e-9)
    assert row["whitened_definiteness"] == pytest.approx(1, abs=1e-9)
    [other] = form_rows(head(-query[None], key[None]), states, None, (0.0,))
    assert other["whitened_definiteness"] == pytest.approx(-1, abs=1e-9)


def test_mismatched_pairs_are_other_key_heads():
    query, key = torch.randn(4, 6, 2), torch.randn(2, 6, 2)
    swapped = mismatched(head(query, key), 1)
    assert torch.equal(swapped.key, key[[1, 1, 0, 0]])
    rows = form_rows(head(query, key), None, None, (0.0,))
    truth = bilinear(replace(head(query, key), key=key[[1, 1, 0, 0]])).symmetry
    assert [row["mismatched_symmetry"] for row in rows] == pytest.approx(truth.tolist(), abs=1e-6)


def tiny_llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaModel(config).eval()


def test_rotary_scores_at_a_distance_are_the_models_own():
    model = tiny_llama()
    attention = model.layers[0].self_attn
    found = projections(attention, heads=4, key_heads=2)
    angles = rotation(model, 8)
    x, y = torch.randn(2, 32)
    q = attention.q_proj(x).reshape(1, 4, 1, 8)
    k = attention.k_proj(y).reshape(1, 2, 1, 8)
    cos, sin = model.rotary_emb(x, torch.tensor([[9, 4]]))
    q, _ = apply_rotary_pos_emb(q, k, cos[:, :1], sin[:, :1])
    _, k = apply_rotary_pos_emb(q, k, cos[:, 1:], sin[:, 1:])
    truth = (q[0, :, 0] * k[0, :, 0].repeat_interleave(2, 0)).sum(-1)
    turned = rotated(found, angles, 5)
    keys = found.key.double().repeat_interleave(2, 0)
    ours = torch.einsum("i,hid,hjd,j->h", x.double(), turned.query, keys, y.double())
    torch.testing.assert_close(ours, truth.double(), atol=1e-6, rtol=1e-5)


def test_the_table_of_a_model():
    model = tiny_llama()
    with torch.no_grad(), cm.lens.observe(model, layers=True) as lens:
        model(torch.randint(0, 50, (4, 40)))
    forms = lens.forms((0, 3))
    assert len(forms) == 2 * 4 * 2
    assert set(forms["distance"]) == {0, 3}
    # States of the second block's attention, as the model computes them.
    with torch.no_grad(), cm.lens.observe(model) as plain:
        model(torch.randint(0, 50, (4, 40)))
    with pytest.raises(cm.InputError, match="layers=True"):
        plain.forms()


def test_distances_need_rotary_positions():
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    model = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
    with torch.no_grad(), cm.lens.observe(model, layers=True) as lens:
        model(torch.randn(2, 40, 8))
    assert "whitened_symmetry" in lens.forms()
    with pytest.raises(cm.InputError, match="rotary"):
        lens.forms((0, 1))


def test_the_covariance_is_of_what_the_attention_module_is_given():
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    model = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
    x = torch.randn(2, 40, 8) @ torch.diag(torch.linspace(0.1, 3, 8))
    with torch.no_grad(), cm.lens.observe(model, layers=True) as lens:
        model(x)
    found = projections(model.layers[0].self_attn, heads=2, key_heads=2)
    truth = bilinear(whitened(found, x.flatten(0, 1)))
    ours = lens.forms()
    assert ours["whitened_symmetry"].tolist() == pytest.approx(truth.symmetry.tolist(), abs=1e-5)
