"""diffusers with our attention: values and JVPs of tiny models against torch's math backend."""

from __future__ import annotations

import diffusers
import pytest
import torch
import torch.nn.functional as F
from diffusers.models import attention_dispatch
from torch.func import jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

import cumulant as cm
from cumulant.integrations.diffusers import NAME, attention_backend, register, use

DOUBLE = torch.float64


def normal(*shape):
    return torch.randn(*shape, dtype=DOUBLE)


def dit():
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=4,
        in_channels=2,
        num_layers=2,
        sample_size=4,
        patch_size=2,
        num_embeds_ada_norm=5,
    )
    time, label = torch.tensor([1, 2]), torch.tensor([0, 3])
    return model, lambda m: lambda x: m(x, timestep=time, class_labels=label).sample, (2, 2, 4, 4)


def flux():
    model = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=6,
        pooled_projection_dim=5,
        axes_dims_rope=(2, 2, 4),
    )
    text, pooled, time = normal(2, 3, 6), normal(2, 5), torch.tensor([0.3, 0.7], dtype=DOUBLE)

    def function(m):
        return lambda x: (
            m(
                hidden_states=x,
                encoder_hidden_states=text,
                pooled_projections=pooled,
                timestep=time,
                img_ids=torch.zeros(4, 3, dtype=DOUBLE),
                txt_ids=torch.zeros(3, 3, dtype=DOUBLE),
            ).sample
        )

    return model, function, (2, 4, 4)


def sd3():
    model = diffusers.SD3Transformer2DModel(
        sample_size=4,
        patch_size=2,
        in_channels=2,
        num_layers=2,
        attention_head_dim=4,
        num_attention_heads=2,
        joint_attention_dim=6,
        caption_projection_dim=8,
        pooled_projection_dim=5,
        out_channels=2,
        pos_embed_max_size=4,
    )
    text, pooled, time = normal(2, 3, 6), normal(2, 5), torch.tensor([3.0, 7.0], dtype=DOUBLE)
    return (
        model,
        lambda m: lambda x: m(x, text, pooled, time).sample,
        (2, 2, 4, 4),
    )


def unet():
    model = diffusers.UNet2DConditionModel(
        sample_size=4,
        in_channels=2,
        out_channels=2,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        block_out_channels=(4, 8),
        layers_per_block=1,
        cross_attention_dim=6,
        attention_head_dim=2,
        norm_num_groups=2,
    )
    text, time = normal(2, 3, 6), torch.tensor([3, 7])
    return model, lambda m: lambda x: m(x, time, text).sample, (2, 2, 4, 4)


@pytest.fixture(params=[dit, flux, sd3, unet], ids=lambda make: make.__name__)
def case(request):
    model, function, shape = request.param()
    model = model.to(DOUBLE).eval()
    return model, function(model), normal(*shape), normal(*shape)


@pytest.fixture
def float64_throughout(monkeypatch):
    """Flux turns its queries and keys in float32; differences would divide its rounding by h."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def slope(function, x, direction, h=1e-3):
    """The derivative along a direction by differences of fourth order."""
    with torch.no_grad():
        near, far = (
            function(x + n * h * direction) - function(x - n * h * direction) for n in (1, 2)
        )
    return (8 * near - far) / (12 * h)


@pytest.mark.usefixtures("float64_throughout")
def test_value_and_tangent(case, monkeypatch):
    model, function, x, direction = case
    with sdpa_kernel(SDPBackend.MATH):
        expected = jvp(function, (x,), (direction,))
    torch.testing.assert_close(expected[1], slope(function, x, direction), rtol=1e-7, atol=1e-7)
    processors = [m.processor for m in model.modules() if hasattr(m, "processor")]

    def refuse(*args, **kwargs):
        raise AssertionError("torch's attention was called")

    with monkeypatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", refuse)
        with use(model):
            ours = jvp(function, (x,), (direction,))
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-11)
    assert processors == [m.processor for m in model.modules() if hasattr(m, "processor")]
    torch.testing.assert_close(function(x), expected[0])


def test_by_name_as_the_library_has_it():
    assert register() == register() == NAME
    model, function, shape = flux()
    model, x = model.to(DOUBLE), normal(*shape)
    with sdpa_kernel(SDPBackend.MATH):
        expected = jvp(function(model), (x,), (x,))
    with attention_dispatch.attention_backend(NAME):
        ours = jvp(function(model), (x,), (x,))
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-11)
    default = attention_dispatch._AttentionBackendRegistry._active_backend
    try:
        model.set_attention_backend(NAME)
        torch.testing.assert_close(jvp(function(model), (x,), (x,)), expected)
    finally:
        attention_dispatch._AttentionBackendRegistry.set_active_backend(default)


@pytest.mark.parametrize("kind", [torch.bool, DOUBLE])
def test_a_padding_mask(kind):
    """Of two dimensions, as the library's own backend takes it."""
    query, key, value = normal(2, 5, 2, 4), normal(2, 7, 2, 4), normal(2, 7, 2, 4)
    mask = torch.arange(7) < torch.tensor([[7], [4]])
    given = mask if kind == torch.bool else torch.where(mask, 0.0, -torch.inf).to(kind)
    theirs = attention_dispatch._native_attention(query, key, value, attn_mask=given)
    torch.testing.assert_close(attention_backend(query, key, value, given), theirs)


def test_a_model_without_processors():
    with (
        pytest.raises(cm.InputError, match="has no attention processors"),
        use(torch.nn.Linear(2, 2)),
    ):
        pass
