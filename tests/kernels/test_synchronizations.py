"""How often the host waits for a device: never in a training step, once where a check is asked for.

Counted on the device of `other_device`, whose values are compared with the CPU's.
"""

from __future__ import annotations

import pytest
import torch
from torch.func import grad, jvp

import cumulant as cm
from cumulant.kernels.attention import Options
from cumulant.kernels.rows import summarize
from cumulant.kernels.tiles import Band
from other_device import counted, to_host, to_other

SDPA = cm.scaled_dot_product_attention


def given(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 2, 37, 8, generator=generator) for _ in range(6)]


def masks():
    generator = torch.Generator().manual_seed(3)
    boolean = torch.rand(37, 37, generator=generator) > 0.3
    boolean[5] = False  # a query without keys
    padding = torch.ones(2, 1, 1, 37, dtype=torch.bool)
    padding[1, ..., 20:] = False
    additive = torch.where(boolean, torch.randn(37, 37, generator=generator), -torch.inf)
    return {"boolean": boolean, "padding": padding, "additive": additive}


KINDS = (
    "plain",
    "causal",
    "window",
    "boolean",
    "padding",
    "additive",
    "dropout",
    "sink",
    "softcap",
)


def options(kind, move):
    if kind in (found := masks()):
        return {"attn_mask": move(found[kind])}
    return {
        "plain": {},
        "causal": {"is_causal": True},
        "window": {"window": (3, 0)},
        "dropout": {"dropout_p": 0.0},
        "sink": {"sink": 0.5},
        "softcap": {"softcap": 5.0},
    }[kind]


def mean(q, k, v, **more):
    return cm.attend(q, k, v, **more).mean


CALLS = {
    "attend": lambda q, k, v, a, b, c, **more: [
        getattr(cm.attend(q, k, v, **more), n) for n in ("mean", "log_normalizer", "entropy")
    ],
    "gradient": lambda q, k, v, a, b, c, **more: grad(
        lambda *x: (mean(*x, **more).nan_to_num() * a).sum(), (0, 1, 2)
    )(q, k, v),
    "jvp": lambda q, k, v, a, b, c, **more: jvp(lambda *x: mean(*x, **more), (q, k, v), (a, b, c)),
    "hvp": lambda q, k, v, a, b, c, **more: jvp(
        grad(lambda q: mean(q, k, v, **more).nan_to_num().square().sum()), (q,), (a,)
    ),
    "fields": lambda q, k, v, a, b, c, **more: [
        getattr(cm.attend(q, k, v, **more), n)
        for n in ("key_mean", "score_variance", "value_variance", "score_max")
    ],
}


def agree(ours, theirs):
    ours, theirs = (x if isinstance(x, tuple | list) else [x] for x in (ours, theirs))
    for x, y in zip(ours, theirs, strict=True):
        assert x.device.type == "other"
        torch.testing.assert_close(to_host(x), y.detach(), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("kind", KINDS)
def test_attention_never_waits(kind, name):
    there = to_other(*given())
    there_options = options(kind, to_other)
    with counted() as waits:
        ours = CALLS[name](*there, **there_options)
    assert not waits
    agree(ours, CALLS[name](*given(), **options(kind, lambda x: x)))


def test_torch_s_signature_never_waits():
    q, k, v, *_ = (x.requires_grad_() for x in given())
    there = to_other(q, k, v)
    with counted() as waits:
        SDPA(*there, is_causal=True, dropout_p=0.1).sum().backward()
        out = SDPA(*there, is_causal=True)
        gradients = torch.autograd.grad(out.sum(), there)
    assert not waits
    agree(
        [out, *gradients],
        [
            SDPA(q, k, v, is_causal=True),
            *torch.autograd.grad(SDPA(q, k, v, is_causal=True).sum(), (q, k, v)),
        ],
    )


LOSSES = {
    "info_nce": lambda x, y: cm.contrastive.info_nce(x, y),
    "labels": lambda x, y: cm.contrastive.nt_xent(x, y),
    "symmetric": lambda x, y: cm.contrastive.info_nce(x, y, symmetric=True),
    "sigmoid": lambda x, y: cm.contrastive.sigmoid_loss(x, y),
    "vocabulary": lambda x, y: cm.linear_cross_entropy(
        x,
        y,
        torch.arange(37, device=x.device).masked_fill(
            torch.arange(37, device=x.device) % 5 == 0, -100
        ),
        ignore_index=-100,
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_with_gradient_never_wait(name):
    host = [x[0, 0].clone().requires_grad_() for x in given()[:2]]
    there = to_other(*host)
    with counted() as waits:
        loss = LOSSES[name](*there)
        gradients = torch.autograd.grad(loss, there)
    assert not waits
    expected = LOSSES[name](*host)
    agree([loss, *gradients], [expected, *torch.autograd.grad(expected, host)])


def test_a_mean_s_gradient_is_kept_off_the_cpu_too(monkeypatch):
    """A mean repeats one cotangent in memory, so all are known to be equal."""
    from cumulant.kernels import calculus

    taken = []
    original = calculus._kept_gradient
    monkeypatch.setattr(
        calculus, "_kept_gradient", lambda *a: taken.append(original(*a)) or taken[-1]
    )
    x, y = to_other(*(x[0, 0].clone().requires_grad_() for x in given()[:2]))
    cm.contrastive.info_nce(x, y).backward()
    assert taken[0] is not None


def test_value_checks_wait_once():
    x, y = to_other(*(x[0, 0] for x in given()[:2]))
    with counted() as waits, cm.value_checks():
        cm.contrastive.info_nce(x, y)
        cm.contrastive.info_nce(y, x)
    assert sum(waits.values()) == 1
    zero = x.clone()
    zero[3] = 0
    for bad, words in ((zero, "zero vector"), (x * torch.nan, "holds NaN")):
        cm.contrastive.info_nce(bad, y)  # a NaN, no error
        with pytest.raises(cm.InputError, match=words), cm.value_checks():
            cm.contrastive.info_nce(bad, y)
    hot = to_other(torch.tensor(-1.0))
    with pytest.raises(cm.InputError, match="temperature must be positive"), cm.value_checks():
        cm.contrastive.info_nce(x, y, temperature=hot)


def test_numbers_and_shapes_are_checked_on_any_device():
    x, y = to_other(*(x[0, 0] for x in given()[:2]))
    with pytest.raises(cm.InputError, match="temperature must be positive"):
        cm.contrastive.info_nce(x, y, temperature=-1.0)
    with pytest.raises(cm.InputError, match="same number of features"):
        cm.attend(x, y[:, :3])


@pytest.mark.parametrize("band", [Band(), Band(upper=0)])
def test_statistics_of_rows_never_wait(band):
    q, k, *_ = given()
    there = dict(zip(("query", "key"), to_other(q, k), strict=True))
    with counted() as waits:
        ours = summarize(there, Options(scale=0.4, band=band))
    assert not waits
    assert {"coverage", "leading"} <= ours.keys()
    theirs = summarize({"query": q, "key": k}, Options(scale=0.4, band=band))
    agree([ours[n] for n in theirs], list(theirs.values()))


@pytest.mark.parametrize("kind", ["causal", "window", "boolean", "padding", "additive"])
@pytest.mark.parametrize("what", [torch.nan, torch.inf])
def test_hidden_garbage_stays_hidden_without_asking(kind, what):
    """As on the CPU, NaN in a key or value reaches only the rows that see it."""
    q, k, v, a, *_ = given()
    hides = options(kind, lambda x: x)
    hidden = 36
    k[..., hidden, :] = what
    v[..., hidden, 1] = what
    where = torch.ones(2, 2, 37, dtype=torch.bool)  # rows that do not see that key
    if kind in ("boolean", "additive", "padding"):
        mask = masks()[kind]
        seen = mask > -torch.inf if mask.is_floating_point() else mask
        where = ~seen.expand(2, 2, 37, 37)[..., hidden]
    else:
        where[..., 36] = False

    def results(q, k, v, a, hides):
        value, tangent = jvp(lambda q: mean(q, k, v, **hides), (q,), (a,))
        return value, tangent, cm.attend(q, k, v, **hides).log_normalizer

    with counted() as waits:
        ours = results(*to_other(q, k, v, a), options(kind, to_other))
    assert not waits
    theirs = results(q, k, v, a, hides)
    for x, y in zip(map(to_host, ours), theirs, strict=True):
        assert not x[where].isnan().any()
        torch.testing.assert_close(x[where], y[where], rtol=1e-4, atol=1e-5)
    assert to_host(ours[0])[~where].isnan().any(-1).all()


@pytest.mark.parametrize("what", [torch.nan, torch.inf])
def test_gradients_where_nobody_sees_garbage(what):
    """First and second derivatives of padded keys are those of the keys without the padding."""
    q, k, v, a, b, c = given()
    mask = torch.arange(37) < 30

    def derivatives(q, k, v, a, b, c, **hides):
        def loss(q, k, v):
            return (mean(q, k, v, **hides).sin() * a).sum()

        return [
            *grad(loss, (0, 1, 2))(q, k, v),
            *jvp(grad(loss, (0, 1, 2)), (q, k, v), (a, b, c))[1],
        ]

    expected = derivatives(
        q, *(x[..., :30, :] for x in (k, v)), a, *(x[..., :30, :] for x in (b, c))
    )
    k[..., 30:, :] = v[..., 33:, :] = what
    there = to_other(q, k, v, a, b, c)
    hides = to_other(mask)
    with counted() as waits:
        ours = derivatives(*there, attn_mask=hides)
    assert not waits
    rows = [x[..., : y.shape[-2], :] for x, y in zip(ours, expected, strict=True)]
    agree(rows, expected)
    assert all(not to_host(x[..., 30:, :]).any() for x in (*ours[1:3], *ours[4:]))
