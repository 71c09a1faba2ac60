"""`MomentAttention` against loops over tokens, against its random experiment, against torch."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import cumulant as cm
from cumulant.nn import MomentAttention, TokenMoments, moment_blocks

DOUBLE = torch.float64
SIZE, LENGTH = 6, 5
FORMS = ("dense", "diagonal", "low_rank")
READINGS = ("mixture", "average")


def layer_of(heads=2, form="dense", reading="mixture", noise=0.0, size=SIZE, **more):
    if form == "low_rank":
        more.setdefault("rank", 3)
    layer = MomentAttention(
        size, heads, covariance=form, reading=reading, noise=noise, **more
    ).double()
    for p in layer.parameters():
        nn.init.normal_(p, std=0.6)
    return layer


def tokens(*batch, size=SIZE, length=LENGTH):
    return torch.randn(*batch, length, size, dtype=DOUBLE)


def covariance_of(form, x, columns=2):
    """A covariance in this form for tokens x, and the same as dense matrices."""
    if form == "diagonal":
        variance = torch.rand_like(x) + 0.1
        return variance, torch.diag_embed(variance)
    factor = torch.randn(*x.shape, columns if form == "low_rank" else x.shape[-1], dtype=x.dtype)
    return (factor, factor @ factor.mT) if form == "low_rank" else (factor @ factor.mT,) * 2


def numbers(layer):
    """Weights and biases as numpy arrays: value map of every head, output map."""
    d = layer.embed_dim // layer.num_heads
    W, b = (x.detach().numpy() for x in (layer.project_value.weight, layer.project_value.bias))
    heads = [slice(h * d, (h + 1) * d) for h in range(layer.num_heads)]
    return (
        [W[s] for s in heads],
        [b[s] for s in heads],
        layer.project_output.weight.detach().numpy(),
    )


def weights_of(layer, x, bias=None):
    """p^h(i|j) of one sequence, ``(heads, j, i)``, by a dense softmax; rows of -inf are zero."""
    d = layer.embed_dim // layer.num_heads
    q, k = (
        f(x).unflatten(-1, (-1, d)).transpose(0, 1).detach()
        for f in (layer.project_query, layer.project_key)
    )
    scores = q @ k.mT / math.sqrt(d)
    scores = scores if bias is None else scores + bias
    return scores.softmax(-1).nan_to_num(0.0).numpy()


def naive(layer, x, S, bias=None, residual=False):
    """Moments of one sequence, block by block and token by token, as the formulas are written."""
    W, b, Wo = numbers(layer)
    p, x, S = weights_of(layer, x, bias), x.detach().numpy(), S.detach().numpy()
    H, n, E, d = len(W), len(x), layer.embed_dim, layer.embed_dim // layer.num_heads
    noise = np.full(E, layer.noise)
    if layer.log_noise is not None:
        noise = layer.log_noise.detach().exp().numpy()
    means, out = [], []
    for j in range(n):
        m = [[W[h] @ x[i] + b[h] for i in range(n)] for h in range(H)]
        center = [sum(p[h, j, i] * m[h][i] for i in range(n)) for h in range(H)]
        C = np.diag(noise)
        for h, g in itertools.product(range(H), repeat=2):
            block = np.zeros((d, d))
            for i in range(n):
                if h == g and layer.reading == "mixture":
                    apart = m[h][i] - center[h]
                    block += p[h, j, i] * (W[h] @ S[i] @ W[h].T + np.outer(apart, apart))
                else:
                    block += p[h, j, i] * p[g, j, i] * W[h] @ S[i] @ W[g].T
            C[h * d : (h + 1) * d, g * d : (g + 1) * d] += block
        own = np.repeat(p[:, j, j], d)
        shared = S[j] @ np.concatenate(W).T @ np.diag(own) @ Wo.T
        if layer.covariance == "diagonal":  # coordinates independent after each map
            kept = noise.copy()
            for h in range(H):
                for i in range(n):
                    carried = W[h] ** 2 @ np.diag(S[i])
                    if layer.reading == "mixture":
                        kept[h * d : (h + 1) * d] += p[h, j, i] * (
                            carried + (m[h][i] - center[h]) ** 2
                        )
                    else:
                        kept[h * d : (h + 1) * d] += p[h, j, i] ** 2 * carried
            var = Wo**2 @ kept
            if residual:
                var = np.maximum(np.diag(S[j]) + var + 2 * np.diag(shared), 0)
            out.append(var)
        else:
            full = Wo @ C @ Wo.T
            out.append(S[j] + full + shared + shared.T if residual else full)
        output = Wo @ np.concatenate(center) + layer.project_output.bias.detach().numpy()
        means.append(x[j] + output if residual else output)
    return torch.from_numpy(np.stack(means)), torch.from_numpy(np.stack(out))


def nearest_of_rank(covariance, rank):
    """Eckart-Young by the singular values."""
    u, s, v = np.linalg.svd(covariance.numpy())
    return torch.from_numpy((u[..., :rank] * s[..., None, :rank]) @ v[..., :rank, :])


def assert_moments(layer, found, mean, covariance, tolerance=1e-10):
    torch.testing.assert_close(found.mean, mean, atol=tolerance, rtol=tolerance)
    got = found.covariance
    if layer.covariance == "low_rank":
        assert got.shape[-1] == layer.rank
        got, covariance = got @ got.mT, nearest_of_rank(covariance, layer.rank)
    torch.testing.assert_close(got, covariance, atol=tolerance, rtol=tolerance)


def masks(heads):
    """Arguments of a call, and the same as one additive (heads, N, N)."""
    never = torch.tensor(-math.inf, dtype=DOUBLE)
    zero = torch.zeros((), dtype=DOUBLE)
    causal = torch.where(torch.ones(LENGTH, LENGTH).tril().bool(), zero, never)
    padded = torch.tensor([False, True, False, False, True])
    some = torch.rand(heads, LENGTH, LENGTH) > 0.5
    some[:, 1] = False  # a query that sees nothing
    some[0, 2] = False  # nothing in one head only
    added = torch.randn(heads, LENGTH, LENGTH, dtype=DOUBLE)
    added[:, 3] = -math.inf
    added[0, 0, :3] = -math.inf
    row = torch.tensor([[0.5, -1.0, -math.inf, 0.0, 2.0]], dtype=DOUBLE)
    return {
        "none": ({}, zero),
        "causal": ({"is_causal": True}, causal),
        "padding": ({"key_padding_mask": padded}, torch.where(padded, never, zero)),
        "both": (
            {"key_padding_mask": padded, "is_causal": True},
            causal + torch.where(padded, never, zero),
        ),
        "boolean": ({"attn_mask": some}, torch.where(some, zero, never)),
        "boolean for all heads": ({"attn_mask": some[0]}, torch.where(some[0], zero, never)),
        "added": ({"attn_mask": added}, added),
        "added and padding": (
            {"attn_mask": added[0], "key_padding_mask": padded},
            added[0] + torch.where(padded, never, zero),
        ),
        "one row": ({"attn_mask": row, "is_causal": True}, row + causal),
    }


MASKS = tuple(masks(1))


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("heads", [1, 2, 3])
@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("form", FORMS)
def test_formulas_as_written(form, reading, heads, residual):
    layer = layer_of(heads, form, reading, noise=0.3)
    x = tokens()
    given, S = covariance_of(form, x)
    found = layer(x, given, residual=residual)
    assert isinstance(found, TokenMoments)
    assert_moments(layer, found, *naive(layer, x, S, residual=residual))


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("form", FORMS)
def test_masks(form, reading, name, small_tiles):
    layer = layer_of(2, form, reading, noise=0.1)
    x = tokens()
    given, S = covariance_of(form, x)
    arguments, bias = masks(2)[name]
    for residual in (False, True):
        found = layer(x, given, residual=residual, **arguments)
        assert_moments(layer, found, *naive(layer, x, S, bias, residual))


@pytest.mark.parametrize("form", FORMS)
def test_batches_are_separate(form):
    layer = layer_of(3, form, noise=0.1)
    x = tokens(2, 3)
    given, _ = covariance_of(form, x)
    padded = torch.rand(2, 3, LENGTH) > 0.6
    mask = torch.rand(2, 3, 1, LENGTH, LENGTH) > 0.3
    whole = layer(x, given, attn_mask=mask, key_padding_mask=padded, residual=True)
    for at in itertools.product(range(2), range(3)):
        one = layer(
            x[at], given[at], attn_mask=mask[at], key_padding_mask=padded[at], residual=True
        )
        torch.testing.assert_close(whole.mean[at], one.mean)
        a, b = whole.covariance[at], one.covariance
        if form == "low_rank":
            a, b = a @ a.mT, b @ b.mT
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", MASKS)
def test_mean_is_torchs_attention(name):
    plain = nn.MultiheadAttention(SIZE, 2, batch_first=True, dtype=DOUBLE)
    for p in plain.parameters():
        nn.init.normal_(p)
    layer = MomentAttention.from_attention(plain, covariance="dense")
    x = tokens(3)
    arguments, bias = masks(2)[name]
    bias = bias.expand(2, LENGTH, LENGTH)
    if "key_padding_mask" in arguments:
        arguments["key_padding_mask"] = arguments["key_padding_mask"].expand(3, -1)
    theirs, _ = plain(x, x, x, attn_mask=bias.repeat(3, 1, 1), need_weights=False)
    ours = layer(x, **arguments).mean
    blind = (bias == -math.inf).all(-1).any(0)  # torch: NaN where a head sees nothing
    torch.testing.assert_close(ours[:, ~blind], theirs[:, ~blind])
    assert ours.isfinite().all()


def test_weights_are_copied():
    plain = nn.MultiheadAttention(8, 2, bias=False, batch_first=True).eval()
    layer = MomentAttention.from_attention(plain, covariance="low_rank", rank=2, noise=0.1)
    assert not layer.training
    assert (layer.rank, layer.noise, layer.covariance) == (2, 0.1, "low_rank")
    x = torch.randn(2, 4, 8)
    torch.testing.assert_close(layer(x).mean, plain(x, x, x)[0])
    with torch.no_grad():
        layer.project_key.weight.zero_()
    assert plain.in_proj_weight.abs().min() > 0


def drawn(layer, x, S, p, count, residual):
    """The random experiment: tokens, then a key for each head and query, or the average."""
    W, b, Wo = (torch.as_tensor(np.stack(a) if isinstance(a, list) else a) for a in numbers(layer))
    p, (n, E) = torch.from_numpy(p), x.shape
    root = torch.linalg.cholesky(S)
    X = x + (root @ torch.randn(count, n, E, 1, dtype=DOUBLE))[..., 0]
    V = torch.einsum("hde,cne->chnd", W, X) + b[:, None]
    if layer.reading == "average":
        z = p @ V
    else:
        flat = p.flatten(0, 1)
        key = torch.multinomial(flat, count, replacement=True).T.unflatten(1, p.shape[:2])
        z = V.gather(2, key[..., None].expand(-1, -1, -1, V.shape[-1]))
    z = z + math.sqrt(layer.noise) * torch.randn_like(z)
    out = z.transpose(1, 2).flatten(2) @ Wo.T + layer.project_output.bias.detach()
    return X + out if residual else out


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("reading", READINGS)
def test_the_random_experiment(reading, residual):
    layer = layer_of(2, "dense", reading, noise=0.2, size=4)
    x = tokens(size=4)
    _, S = covariance_of("dense", x)
    found = layer(x, S, residual=residual)
    count = 100_000
    y = drawn(layer, x, S, weights_of(layer, x), count, residual) - found.mean.detach()
    products = y[..., :, None] * y[..., None, :]
    for sample, fact in ((y, torch.zeros_like(x)), (products, found.covariance)):
        error = sample.std(0) / math.sqrt(count)
        assert ((sample.mean(0) - fact).abs() / error).max() < 5  # of 80 + 20 numbers


def test_without_uncertainty_the_spread_of_the_tokens_remains():
    """One head, identity maps: the variance that `attend` knows."""
    layer = MomentAttention(SIZE, 1, covariance="diagonal", bias=False).double()
    for p in layer.parameters():
        nn.init.eye_(p)
    x = tokens(2)
    fact = cm.attend(x, x).value_variance
    torch.testing.assert_close(layer(x).covariance, fact)
    torch.testing.assert_close(layer(x, torch.zeros_like(x)).covariance, fact)
    averaged = layer_of(2, "dense", "average")
    assert (averaged(x).covariance == 0).all()
    full = MomentAttention(SIZE, 1, covariance="dense", bias=False).double()
    full.load_state_dict(layer.state_dict())
    torch.testing.assert_close(full(x).covariance.diagonal(dim1=-2, dim2=-1), fact)


def test_equal_tokens_average_their_errors():
    """Equal means give uniform weights: N independent errors average to S / N."""
    layer = MomentAttention(SIZE, 1, covariance="dense", reading="average", bias=False).double()
    for p in layer.parameters():
        nn.init.eye_(p)
    x = torch.ones(LENGTH, SIZE, dtype=DOUBLE)
    _, S = covariance_of("dense", x[:1])
    out = layer(x, S.expand(LENGTH, -1, -1))
    torch.testing.assert_close(out.covariance, S.expand(LENGTH, -1, -1) / LENGTH)
    layer.reading = "mixture"
    out = layer(x, S.expand(LENGTH, -1, -1))
    torch.testing.assert_close(out.covariance, S.expand(LENGTH, -1, -1))


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("form", FORMS)
def test_derivatives(form, reading, residual):
    layer = layer_of(2, form, reading, size=4, learn_noise=True, noise=0.2)
    x = tokens(size=4, length=3).requires_grad_()
    given = covariance_of(form, x.detach())[0].requires_grad_()
    causal = torch.ones(3, 3).tril().bool()
    causal[1] = False  # sees nothing

    def moments(x, given, noise, value, output):
        if form == "dense":
            given = (given + given.mT) / 2
        named = {
            "log_noise": noise,
            "project_value.weight": value,
            "project_output.weight": output,
        }
        arguments = {"attn_mask": causal, "residual": residual}
        out = torch.func.functional_call(layer, named, (x, given), arguments)
        if form == "low_rank":  # columns have a sign of their own
            return out.mean, out.covariance @ out.covariance.mT
        return out

    inputs = (x, given, layer.log_noise, layer.project_value.weight, layer.project_output.weight)
    # The residual contains the rest, so that one is checked entry by entry.
    assert torch.autograd.gradcheck(moments, inputs, fast_mode=not residual)
    if form != "low_rank":
        assert torch.autograd.gradgradcheck(moments, inputs, atol=1e-4, fast_mode=True)


@pytest.mark.parametrize("form", FORMS)
def test_transforms(form):
    layer = layer_of(2, form, noise=0.1)
    x = tokens(4)
    given, _ = covariance_of(form, x)
    mask = torch.rand(LENGTH, LENGTH) > 0.3

    def spread(x, given):
        out = layer(x, given, attn_mask=mask, residual=True).covariance
        return out @ out.mT if form == "low_rank" else out

    mapped = torch.func.vmap(spread)(x, given)
    torch.testing.assert_close(mapped, spread(x, given))
    direction = torch.randn_like(x)
    _, tangent = torch.func.jvp(lambda x: spread(x, given), (x,), (direction,))
    step = 1e-5
    ahead, behind = spread(x + step * direction, given), spread(x - step * direction, given)
    torch.testing.assert_close(tangent, (ahead - behind) / (2 * step), atol=1e-6, rtol=1e-6)
    gradient = torch.func.vmap(torch.func.grad(lambda x, s: spread(x, s).sum()))(x, given)
    leaf = x.clone().requires_grad_()
    spread(leaf, given).sum().backward()
    torch.testing.assert_close(gradient, leaf.grad)


@pytest.mark.parametrize("covariance", ["given", "none"])
@pytest.mark.parametrize("noise", [0.0, 0.5])
@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("form", FORMS)
def test_tokens_that_see_nothing(form, reading, noise, covariance):
    layer = layer_of(2, form, reading, noise)
    x = tokens().requires_grad_()
    given = covariance_of(form, x.detach())[0] if covariance == "given" else None
    blind = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
    out = layer(x, given, attn_mask=blind)
    bias = layer.project_output.bias
    torch.testing.assert_close(out.mean, bias.expand(LENGTH, -1))
    Wo = layer.project_output.weight
    fact = noise * Wo @ Wo.mT
    got = out.covariance[0]
    if form == "diagonal":
        fact = fact.diagonal()
    elif form == "low_rank":
        got, fact = got @ got.mT, nearest_of_rank(fact.detach(), 3)
    torch.testing.assert_close(got, fact)
    added = torch.zeros(LENGTH, LENGTH, dtype=DOUBLE).masked_fill(~blind, -math.inf)
    for mask in (blind, added.requires_grad_()):
        out = layer(x, given, attn_mask=mask, residual=True)
        wanted = [x, *layer.parameters(), *([mask] if mask is added else [])]
        sum_ = out.mean.square().sum() + out.covariance.square().sum()
        for gradient in torch.autograd.grad(sum_, wanted, allow_unused=True):
            assert gradient is None or gradient.isfinite().all()


def test_a_mask_of_the_most_negative_number_hides_nothing_of_a_padded_row():
    layer = layer_of(2, "dense", "average").float()
    x = tokens().float()
    S = covariance_of("dense", x)[0]
    lowest = torch.full((LENGTH, LENGTH), torch.finfo(torch.float32).min)
    same = layer(x, S, attn_mask=torch.zeros(LENGTH, LENGTH))
    found = layer(x, S, attn_mask=lowest)
    torch.testing.assert_close(found.covariance, same.covariance)


@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("form", FORMS)
def test_queries_in_chunks(form, reading, monkeypatch):
    layer = layer_of(2, form, reading, noise=0.1)
    x = tokens(2)
    given, S = covariance_of(form, x)
    mask = torch.rand(2, LENGTH, LENGTH) > 0.3
    monkeypatch.setattr(moment_blocks, "_BUDGET", 2 * 2 * SIZE**2)
    with torch.no_grad():
        for arguments in ({"attn_mask": mask}, {"is_causal": True}):
            found = layer(x, given, residual=True, **arguments)
            seen = arguments.get("attn_mask", torch.ones(LENGTH, LENGTH).tril().bool())
            bias = torch.zeros(seen.shape, dtype=DOUBLE).masked_fill(~seen, -math.inf)
            for at in range(2):
                part = TokenMoments(found.mean[at], found.covariance[at])
                assert_moments(layer, part, *naive(layer, x[at], S[at], bias, True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("form", FORMS)
def test_precision(form, dtype):
    layer = layer_of(2, form, noise=0.1)
    low = layer_of(2, form, noise=0.1).to(dtype)
    low.load_state_dict(layer.state_dict())
    layer.load_state_dict(low.state_dict())
    x = tokens(2).to(dtype)
    given, _ = covariance_of(form, x)
    if form == "dense":
        given = (given + given.mT) / 2
    with torch.no_grad():
        found = low(x, given, residual=True)
        fact = layer(x.double(), given.double(), residual=True)
    assert found.mean.dtype == found.covariance.dtype == dtype
    tolerance = 16 * torch.finfo(dtype).eps
    for a, b in zip(found, fact, strict=True):
        a = a.double()
        if form == "low_rank" and a is not found.mean and a.shape[-1] == layer.rank:
            a, b = a @ a.mT, b @ b.mT
        torch.testing.assert_close(a, b, atol=tolerance * b.abs().max().item(), rtol=tolerance)


def test_peaked_rows_keep_their_small_variance():
    """Far from the origin, in float32, rows that see one token have its covariance alone."""
    layer = MomentAttention(4, 1, covariance="dense", bias=False)
    for p in layer.parameters():
        nn.init.eye_(p)
    x = 100 * torch.randn(6, 4) + 3000
    S = 1e-4 * torch.eye(4).expand(6, 4, 4)
    out = layer(x, S, attn_mask=torch.eye(6).bool())
    torch.testing.assert_close(out.covariance, S, rtol=1e-2, atol=1e-7)


def test_autocast():
    layer = MomentAttention(8, 2, covariance="dense", noise=0.1)
    x = torch.randn(2, 5, 8)
    exact = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
    assert out.mean.dtype == out.covariance.dtype == torch.bfloat16
    torch.testing.assert_close(out.covariance.float(), exact.covariance, atol=0.02, rtol=0.1)


@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("residual", [False, True])
def test_symmetric_and_semidefinite(reading, residual):
    layer = MomentAttention(8, 4, covariance="dense", reading=reading)
    for p in layer.parameters():
        nn.init.normal_(p)
    x = 3 * torch.randn(3, 20, 8)
    factor = torch.randn(3, 20, 8, 1)
    out = layer(x, factor @ factor.mT, residual=residual, is_causal=True).covariance
    assert torch.equal(out, out.mT)
    values = torch.linalg.eigvalsh(out.double())
    assert (values[..., 0] >= -1e-6 * values[..., -1]).all()


def test_variances_are_never_negative():
    """Every value coordinate copies feature 0 and the output takes them all off: 1 - 2n + n."""
    layer = MomentAttention(4, 1, bias=False)
    for p in layer.parameters():
        nn.init.zeros_(p)
    with torch.no_grad():
        layer.project_value.weight[:, 0] = 1.0
        layer.project_output.weight[0] = -1.0
    x = torch.zeros(3, 4)
    variance = torch.eye(4)[:1].expand(3, 4)
    out = layer(x, variance, attn_mask=torch.eye(3).bool(), residual=True)
    assert (out.covariance == 0).all()


def test_layers_stack():
    for form in FORMS:
        layers = [layer_of(2, form, noise=0.1) for _ in range(3)]
        out = TokenMoments(tokens(2), None)
        for layer in layers:
            out = layer(*out, residual=True)
        assert out.covariance.isfinite().all()


def test_low_rank_is_dense_where_nothing_is_lost():
    full, cut = layer_of(2, "dense"), layer_of(2, "low_rank", rank=SIZE)
    cut.load_state_dict(full.state_dict())
    x = tokens(2)
    F = covariance_of("low_rank", x)[0]
    a, b = full(x, F @ F.mT, residual=True), cut(x, F, residual=True)
    torch.testing.assert_close(b.covariance @ b.covariance.mT, a.covariance)


def test_learned_noise():
    layer = MomentAttention(4, 2, learn_noise=True)
    torch.testing.assert_close(layer.log_noise.exp(), torch.full((4,), 0.01))
    optimizer = torch.optim.Adam(layer.parameters(), 0.05)
    x = torch.randn(8, 5, 4)
    for _ in range(150):
        loss = (layer(x).covariance - 3.0).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.5
    assert MomentAttention(4, 2, noise=0.5).state_dict().keys() == (
        MomentAttention(4, 2).state_dict().keys()
    )


@pytest.mark.parametrize("form", FORMS)
def test_empty(form):
    layer = layer_of(2, form)
    for shape in ((0, LENGTH, SIZE), (2, 0, SIZE)):
        x = torch.zeros(shape, dtype=DOUBLE)
        given = covariance_of(form, x)[0]
        for covariance in (None, given):
            out = layer(x, covariance, residual=True)
            assert out.mean.shape == shape
            assert out.covariance.shape[: len(shape)] == shape


OPTIONS = [
    ({"num_heads": 4}, "multiple of num_heads"),
    ({"embed_dim": 0}, "embed_dim must be an integer"),
    ({"covariance": "full"}, "covariance must be one of"),
    ({"reading": "mean"}, "reading must be one of"),
    ({"covariance": "low_rank"}, "needs rank"),
    ({"covariance": "low_rank", "rank": 7}, "at most embed_dim = 6"),
    ({"covariance": "low_rank", "rank": 0}, "rank must be an integer"),
    ({"rank": 2}, "rank belongs to"),
    ({"noise": -1.0}, "noise must be finite and at least 0"),
    ({"noise": 0.0, "learn_noise": True}, "cannot start at 0"),
]


@pytest.mark.parametrize(("options", "message"), OPTIONS)
def test_options_that_do_not_fit(options, message):
    with pytest.raises(cm.InputError, match=message):
        MomentAttention(**{"embed_dim": 6, "num_heads": 2, **options})


def test_layers_that_cannot_be_copied():
    with pytest.raises(cm.InputError, match=r"takes a torch\.nn\.MultiheadAttention"):
        MomentAttention.from_attention(nn.Linear(3, 3))
    for options in ({"kdim": 3}, {"add_bias_kv": True}, {"add_zero_attn": True}):
        with pytest.raises(cm.InputError, match="takes self-attention"):
            MomentAttention.from_attention(nn.MultiheadAttention(4, 2, **options))


def broken(x, at, value):
    x = x.clone()
    x[at] = value
    return x


X, EYE = torch.zeros(2, 3, 4), torch.eye(4).expand(2, 3, 4, 4)
CALLS = [
    ("dense", (torch.zeros(2, 3, 5),), {}, r"mean must be a tensor \(\*batch, N, 4\)"),
    ("dense", ([[1.0]],), {}, "mean must be a tensor"),
    ("dense", (X.double(),), {}, "mean has dtype torch.float64"),
    ("dense", (broken(X, (0, 1, 2), math.nan),), {}, "mean must be finite, but holds NaN"),
    ("dense", (X, X), {}, r"dense form must be a floating-point tensor \(2, 3, 4, 4\)"),
    ("diagonal", (X, EYE), {}, r"diagonal form must be a floating-point tensor \(2, 3, 4\)"),
    ("low_rank", (X, X), {}, r"low_rank form must be a floating-point tensor \(2, 3, 4, any\)"),
    ("diagonal", (X, 0.1), {}, "but is float"),
    ("diagonal", (X, broken(X, (0, 1, 2), -1.0)), {}, "smallest is -1"),
    ("diagonal", (X, broken(X, (0, 1, 2), math.inf)), {}, "holds an infinity"),
    ("low_rank", (X, broken(X[..., None], (0, 1, 2), math.nan)), {}, "holds NaN"),
    ("dense", (X, -EYE), {}, "smallest is -1"),
    ("dense", (X, broken(EYE, (0, 1, 2, 3), 0.5)), {}, "must be symmetric.*by up to 0.5"),
    ("dense", (X, EYE + 2.0 * (1 - EYE)), {}, "correlation beyond 1"),
    ("dense", (X,), {"attn_mask": torch.ones(2, 3, 3).bool()[:, :2]}, "attn_mask must be"),
    ("dense", (X,), {"attn_mask": torch.ones(3, 3).long()}, "attn_mask must be boolean"),
    (
        "dense",
        (X,),
        {"attn_mask": torch.full((3, 3), math.nan)},
        "attn_mask must be finite or -inf",
    ),
    ("dense", (X,), {"key_padding_mask": torch.ones(3).bool()}, r"boolean \(2, 3\)"),
    ("dense", (X,), {"key_padding_mask": torch.ones(2, 3)}, "True at padding"),
]


@pytest.mark.parametrize(("form", "inputs", "named", "message"), CALLS)
def test_calls_that_do_not_fit(form, inputs, named, message):
    layer = MomentAttention(4, 2, covariance=form, rank=2 if form == "low_rank" else None)
    with pytest.raises(cm.InputError, match=message):
        layer(*inputs, **named)


class Largest(TorchDispatchMode):
    """How many entries the largest tensor made inside has."""

    entries = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, torch.Tensor):
                self.entries = max(self.entries, x.untyped_storage().nbytes() // x.element_size())
        return out


@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("form", FORMS)
def test_no_array_of_all_pairs(form, reading):
    layer = layer_of(2, form, reading, size=4, **({"rank": 1} if form == "low_rank" else {}))
    length = 4096
    x = tokens(size=4, length=length)
    given, _ = covariance_of(form, x, columns=1)
    with torch.no_grad(), Largest() as largest:
        layer(x, given, residual=True)
    assert largest.entries < length**2 / 8


@pytest.mark.parametrize("form", ["diagonal", "dense", "low_rank"])
def test_numbers_out_of_range_are_told(form):
    layer = cm.nn.MomentAttention(4, 2, covariance=form, rank=2 if form == "low_rank" else None)
    with pytest.raises(cm.InputError, match="not finite"):
        layer(torch.randn(3, 4) * 1e20)
    with pytest.raises(cm.InputError, match="attn_mask must be finite or -inf"):
        layer(torch.randn(3, 4), attn_mask=torch.full((3, 3), torch.inf))
    with torch.no_grad():
        layer.project_value.weight[0, 0] = torch.nan
    with pytest.raises(cm.InputError, match="not finite"):
        layer(torch.randn(3, 4))
