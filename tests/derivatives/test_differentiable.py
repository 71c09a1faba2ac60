"""`differentiable`: whole models, every word of forward and reverse mode to second order."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn
from torch.autograd import forward_ad

import cumulant as cm

SIZES = {
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 12,
}
PATCHED = [
    (F, "scaled_dot_product_attention"),
    (torch, "layer_norm"),
    (torch, "batch_norm"),
    (torch, "instance_norm"),
    (torch.backends.mha, "get_fastpath_enabled"),
]


class DiTBlock(nn.Module):
    """A diffusion transformer's block: norms without weights, modulated by the time."""

    def __init__(self, width=8, heads=2):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(width, 12), nn.GELU(approximate="tanh"), nn.Linear(12, width)
        )
        self.modulation = nn.Sequential(nn.Linear(1, width), nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x, t):
        shift, scale, gate, shift2, scale2, gate2 = self.modulation(t)[:, None].chunk(6, -1)
        y = self.norms[0](x) * (1 + scale) + shift
        x = x + gate * self.attention(y, y, y, need_weights=False)[0]
        y = self.norms[1](x) * (1 + scale2) + shift2
        return x + gate2 * self.mlp(y)


class DiT(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(DiTBlock() for _ in range(2))

    def forward(self, x, t):
        for block in self.blocks:
            x = block(x, t)
        return x


def bert():
    config = hf.BertConfig(vocab_size=16, **SIZES, attn_implementation="sdpa")
    return hf.BertModel(config, add_pooling_layer=False), {"inputs_embeds": torch.randn(1, 4, 8)}


def llama():
    config = hf.LlamaConfig(
        vocab_size=16, **SIZES, num_key_value_heads=1, attn_implementation="sdpa", use_cache=False
    )
    return hf.LlamaModel(config), {"inputs_embeds": torch.randn(1, 4, 8)}


def vit():
    config = hf.ViTConfig(image_size=4, patch_size=2, **SIZES, attn_implementation="sdpa")
    return hf.ViTModel(config, add_pooling_layer=False), {"pixel_values": torch.randn(1, 3, 4, 4)}


def dit():
    return DiT(), {"x": torch.randn(1, 4, 8), "t": torch.rand(1, 1)}


@pytest.mark.parametrize("build", [bert, vit, llama, dit])
@pytest.mark.parametrize("training", [False, True])
def test_whole_models(build, training):
    model, inputs = build()
    model.train(training)
    before = [getattr(*place) for place in PATCHED]
    with cm.differentiable():
        report = cm.check_derivatives(model, inputs, order=2, tolerance=1e-6)
        assert [getattr(*place) for place in PATCHED] != before
    assert report.ok, str(report)
    for row in report.rows:
        assert abs(row.value - row.expected) <= 1e-6 * abs(row.expected)
    assert all(getattr(*place) is found for place, found in zip(PATCHED, before, strict=True))


@pytest.mark.parametrize("build", [bert, vit, dit])
def test_without_it_the_same_models_are_not_right(build):
    model, inputs = build()
    with cm.sdpa_replaced():
        report = cm.check_derivatives(model.eval(), inputs)
    assert set(report.words("wrong")) == {"FF", "RF"}
    assert [f.operator for f in report.faults] == ["torch.nn.functional.layer_norm"]


def test_convolutional_model_with_batch_norm():
    model = nn.Sequential(
        *(nn.Conv1d(3, 4, 2), nn.BatchNorm1d(4), nn.GELU(), nn.InstanceNorm1d(4, affine=True)),
        *(nn.Conv1d(4, 4, 2), nn.GroupNorm(2, 4), nn.Tanh()),
    )
    with cm.differentiable():
        report = cm.check_derivatives(model, torch.randn(3, 3, 6), order=3)
    assert report.ok, str(report)


def test_a_loss_with_a_jvp_in_it_backpropagated():
    """The gradient of <tangent, tangent> in a parameter, against differences in that parameter."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True).double()
    x, v = torch.randn(2, 1, 5, 8, dtype=torch.float64)

    def loss():
        return torch.func.jvp(layer, (x,), (v,))[1].square().sum()

    with cm.differentiable():
        loss().backward()
        weight = layer.norm1.weight
        gradient = weight.grad[3].item()
        values = []
        for step in (1e-4, -1e-4):
            with torch.no_grad():
                weight[3] += step
                values.append(loss().item())
                weight[3] -= step
    assert gradient == pytest.approx((values[0] - values[1]) / 2e-4, rel=1e-6)


def test_backward_may_run_outside():
    layer, x = nn.LayerNorm(6), torch.randn(4, 6, requires_grad=True)
    with cm.differentiable():
        y = layer(x).square().sum()
    (ours,) = torch.autograd.grad(y, x, create_graph=True)
    (theirs,) = torch.autograd.grad(layer(x).square().sum(), x)
    torch.testing.assert_close(ours, theirs)


def test_values_are_torchs():
    model = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.BatchNorm1d(6))
    x = torch.randn(5, 6)
    with cm.differentiable():
        ours = model(x)
    torch.testing.assert_close(ours, model(x))


def test_torchs_own_names_and_keywords():
    x = torch.randn(4, 6)
    with cm.differentiable():
        found = torch.layer_norm(x, (6,), eps=1e-3, cudnn_enable=False)
    torch.testing.assert_close(found, F.layer_norm(x, (6,), eps=1e-3))


def test_other_threads_keep_torchs_norms():
    seen = []

    def forward():
        x = torch.randn(3, 6, requires_grad=True)
        seen.append(type(F.layer_norm(x, (6,)).grad_fn).__name__)

    with cm.differentiable():
        forward()
        thread = threading.Thread(target=forward)
        thread.start()
        thread.join()
    assert seen == ["_FusedBackward", "NativeLayerNormBackward0"]


def test_dual_numbers_over_backward():
    """Forward over reverse by hand: torch.autograd.grad of dual numbers, no torch.func."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        8, 2, 12, dropout=0.0, activation="gelu", batch_first=True, dtype=torch.float64
    )
    x, v = torch.randn(2, 2, 5, 8, dtype=torch.float64)

    def gradient(x):
        return torch.autograd.grad(layer(x).sin().sum(), x)[0]

    with cm.differentiable():
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x.clone().requires_grad_(), v)
            tangent = forward_ad.unpack_dual(gradient(dual)).tangent
        h = 1e-4
        ahead, behind = (gradient((x + s * v).requires_grad_()) for s in (h, -h))
    torch.testing.assert_close(tangent, (ahead - behind) / (2 * h), rtol=1e-6, atol=1e-6)
