"""What fails with torch's own function, working with one line of change. Oracles: eager attention
and torch's math backend."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch.func import functional_call, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

import cumulant as cm

DOUBLE = torch.float64


def encoder():
    torch.manual_seed(0)
    return torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, dtype=DOUBLE)


def hugging_face(name, implementation, **options):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        vocab_size=20,
        hidden_size=8,
        num_hidden_layers=2,
        intermediate_size=16,
        attn_implementation=implementation,
        **options,
    )
    return getattr(transformers, f"{name}Model")(config).to(DOUBLE)


MODELS = {
    "Bert": {
        "num_attention_heads": 2,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    },
    "Llama": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "Qwen3": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4},
}


MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])


def of_embeddings(model):
    def run(x):
        return model(inputs_embeds=x, attention_mask=MASK).last_hidden_state[MASK.bool()]

    return run


def derivatives(function, x):
    """Tangent, gradient and Hessian-vector product."""
    tangent = jvp(function, (x,), (torch.ones_like(x),))[1]
    leaf = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(function(leaf).sin().sum(), leaf, create_graph=True)
    (second,) = torch.autograd.grad(first.sin().sum(), leaf)
    return tangent, first, second


def assert_equal(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def test_torchs_own_function_still_lacks_forward_mode():
    """The premise; when it falls, the README must say so."""
    q = torch.randn(1, 1, 8, 4)
    with pytest.raises((RuntimeError, NotImplementedError)):
        jvp(lambda q: F.scaled_dot_product_attention(q, q, q), (q,), (q,))
    leaf = q.clone().requires_grad_()
    out = F.scaled_dot_product_attention(leaf, leaf, leaf).sum()
    (first,) = torch.autograd.grad(out, leaf, create_graph=True)
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.autograd.grad(first.sum(), leaf)


def test_transformer_encoder_layer():
    layer, x = encoder(), torch.randn(2, 5, 8, dtype=DOUBLE)
    with cm.sdpa_replaced():
        ours = derivatives(layer, x)
    with sdpa_kernel(SDPBackend.MATH):
        theirs = derivatives(layer, x)
    assert_equal(ours, theirs)


def test_multihead_attention_with_padding():
    torch.manual_seed(0)
    layer = torch.nn.MultiheadAttention(8, 2, batch_first=True, dtype=DOUBLE)
    x = torch.randn(2, 5, 8, dtype=DOUBLE)
    run = lambda x: layer(x, x, x, key_padding_mask=MASK == 0, need_weights=False)[0]
    with cm.sdpa_replaced():
        ours = derivatives(run, x)
    with sdpa_kernel(SDPBackend.MATH):
        theirs = derivatives(run, x)
    assert_equal(ours, theirs)


@pytest.mark.parametrize("name", list(MODELS))
def test_hugging_face(name):
    x = torch.randn(2, 5, 8, dtype=DOUBLE)
    fused, eager = (hugging_face(name, how, **MODELS[name]) for how in ("sdpa", "eager"))
    eager.load_state_dict(fused.state_dict())
    with cm.sdpa_replaced():
        ours = derivatives(of_embeddings(fused), x)
    with sdpa_kernel(SDPBackend.MATH):
        assert_equal(ours, derivatives(of_embeddings(fused), x))
    # Llama's eager attention takes its softmax in float32, whatever the model's precision
    for a, b in zip(ours, derivatives(of_embeddings(eager), x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", list(MODELS))
def test_our_implementation_by_name(name):
    """`attn_implementation="cumulant"` under forward mode and twice differentiated."""
    cm.lens.register()
    x = torch.randn(2, 5, 8, dtype=DOUBLE)
    ours, eager = (hugging_face(name, how, **MODELS[name]) for how in ("cumulant", "eager"))
    eager.load_state_dict(ours.state_dict())
    given = derivatives(of_embeddings(ours), x)
    for a, b in zip(given, derivatives(of_embeddings(eager), x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_mean_flow_training_step():
    """A JVP inside a loss that is then backpropagated into the weights (Geng et al., 2025):
    u(z, t) is trained towards v - t du/dt, du/dt a JVP along (v, 1)."""
    model, time = encoder(), torch.nn.Linear(1, 8, dtype=DOUBLE)
    parameters = dict(model.named_parameters())
    x, noise = torch.randn(2, 2, 5, 8, dtype=DOUBLE)
    t = torch.rand(2, 1, 1, dtype=DOUBLE)

    def loss(parameters, *, stop_gradient):
        def field(z, t):
            return functional_call(model, parameters, (z + time(t),))

        z, v = (1 - t) * x + t * noise, noise - x
        u, slope = jvp(field, (z, t), (v, torch.ones_like(t)))
        target = v - t * (slope.detach() if stop_gradient else slope)
        return ((u - target) ** 2).mean()

    for stop_gradient in (True, False):
        results = []
        for context in (cm.sdpa_replaced, lambda: sdpa_kernel(SDPBackend.MATH)):
            with context():
                value = loss(parameters, stop_gradient=stop_gradient)
                results.append([value, *torch.autograd.grad(value, list(parameters.values()))])
        assert_equal(*results)
