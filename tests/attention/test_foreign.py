"""`Attended.from_lse`: results of other kernels merge with ours."""

from __future__ import annotations

import copy
import math

import pytest
import torch

import cumulant as cm
from oracle import FIELDS, assert_close, dense

DOUBLE = torch.float64


def normal(*shape, dtype=DOUBLE):
    return torch.randn(*shape, dtype=dtype)


def softmax_kernel(q, k, v, base="e"):
    """The mean and the log-sum-exp as a kernel returns them."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    lse = scores.logsumexp(-1)
    return scores.softmax(-1) @ v, lse if base == "e" else lse / math.log(2)


@pytest.mark.parametrize("base", ["e", 2, 2.0, "2"])
def test_merges_with_ours(base):
    q, k, v = normal(2, 3, 4), normal(2, 9, 4), normal(2, 9, 5)
    theirs = cm.Attended.from_lse(*softmax_kernel(q, k[:, :4], v[:, :4], base), base=base)
    joined, whole = cm.merge(theirs, cm.attend(q, k[:, 4:], v[:, 4:])), dense(q, k, v)
    pairs = [(x.mean, x.log_normalizer) for x in (joined, whole)]
    assert_close(*pairs, 1e-12)


def test_torchs_own_flash_kernel():
    """Heads before the length and a natural logarithm: what it returns goes in as it is."""
    q, k, v = (torch.randn(2, 3, n, 16) for n in (5, 40, 40))
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    parts = [
        cm.Attended.from_lse(*flash(q, k[..., s, :], v[..., s, :]))
        for s in (slice(17), slice(17, 40))
    ]
    joined, whole = cm.merge(*parts), dense(q.double(), k.double(), v.double())
    torch.testing.assert_close(joined.mean.double(), whole.mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        joined.log_normalizer.double(), whole.log_normalizer, rtol=1e-5, atol=1e-6
    )


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention():
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    q, k, v = (torch.randn(1, 2, n, 16) for n in (5, 40, 40))
    lse = AuxRequest(lse=True)
    mean, aux = flex_attention(q, k[..., :17, :], v[..., :17, :], return_aux=lse)
    theirs = cm.Attended.from_lse(mean, aux.lse)
    joined = cm.merge(theirs, cm.attend(q, k[..., 17:, :], v[..., 17:, :]))
    whole = dense(q.double(), k.double(), v.double())
    torch.testing.assert_close(joined.mean.double(), whole.mean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sign", [-1, 1])
def test_rows_without_keys_merge_without_nan(sign):
    """flash-attention writes +inf for them; what the mean holds there does not matter."""
    mean, lse = normal(4, 3), normal(4)
    mean[1], lse[1] = math.nan, sign * math.inf
    mean[2], lse[2] = math.inf, sign * math.inf
    a = cm.Attended.from_lse(mean, lse)
    assert (a.mean[1:3] == 0).all()
    assert (a.log_normalizer[1:3] == -math.inf).all()
    both = cm.merge(a, a)
    assert (both.mean[1:3] == 0).all()
    assert (both.log_normalizer[1:3] == -math.inf).all()
    other = cm.attend(normal(4, 2), normal(5, 2), normal(5, 3))
    joined = cm.merge(a, other)
    torch.testing.assert_close(joined.mean[1:3], other.mean[1:3])
    torch.testing.assert_close(joined.log_normalizer[1:3], other.log_normalizer[1:3])
    assert joined.mean.isfinite().all()


def test_derivatives_reach_what_was_given():
    q, k, v = (x.requires_grad_() for x in (normal(3, 4), normal(7, 4), normal(7, 5)))

    def joined():
        theirs = cm.Attended.from_lse(*softmax_kernel(q, k[:4], v[:4]))
        return cm.merge(theirs, cm.attend(q, k[4:], v[4:]))

    results = []
    for a in (joined(), dense(q, k, v)):
        total = a.mean.sin().sum() + a.log_normalizer.sin().sum()
        first = torch.autograd.grad(total, (q, k, v), create_graph=True)
        second = torch.autograd.grad(sum(g.sin().sum() for g in first), (q, k, v))
        results.append([*first, *second])
    assert_close(*results, 1e-11)


def test_empty_rows_have_no_gradient():
    mean, lse = normal(2, 3).requires_grad_(), torch.tensor([0.5, -math.inf], dtype=DOUBLE)
    lse.requires_grad_()
    other = cm.attend(normal(2, 2), normal(5, 2), normal(5, 3))
    total = cm.merge(cm.Attended.from_lse(mean, lse), other).mean.sin().sum()
    for g in torch.autograd.grad(total, (mean, lse)):
        assert g.isfinite().all()
        assert (g[1] == 0).all()


def test_unknown_fields_say_why():
    a = cm.Attended.from_lse(normal(4, 3), normal(4))
    ours = cm.attend(normal(4, 2), normal(5, 2), normal(5, 3))
    for result in (a, cm.merge(a, ours), copy.deepcopy(a), copy.deepcopy(cm.merge(a, ours))):
        _ = result.mean, result.log_normalizer
        for name in {*FIELDS, "score_max_key", "effective_keys"} - {"mean", "log_normalizer"}:
            with pytest.raises(
                cm.UnknownFieldError, match="from_lse was given the mean and the log"
            ):
                getattr(result, name)
        for ask in (result.received, lambda r=result: r.top_keys(1), lambda r=result: r.renyi(2)):
            with pytest.raises(cm.UnknownFieldError, match="Use attend on the queries and keys"):
                ask()
    assert repr(a) == "Attended(mean (4, 3) float64; computed: mean, log_normalizer)"


def test_long_streams_of_foreign_results():
    q, k, v = normal(3, 4), normal(80, 4), normal(80, 2)
    total = None
    with torch.no_grad():
        for t in range(0, 80, 2):
            part = cm.Attended.from_lse(*softmax_kernel(q, k[t : t + 2], v[t : t + 2]))
            total = part if total is None else cm.merge(total, part)
            _ = total.mean
    torch.testing.assert_close(total.mean, dense(q, k, v).mean)


def test_half_precision():
    q, k, v = (torch.randn(2, n, 16) for n in (3, 8, 8))
    mean, lse = softmax_kernel(q, k[:, :4], v[:, :4])
    theirs = cm.Attended.from_lse(mean.bfloat16(), lse)
    ours = cm.attend(*(x.bfloat16() for x in (q, k[:, 4:], v[:, 4:])))
    joined = cm.merge(theirs, ours)
    assert joined.mean.dtype == torch.bfloat16
    assert joined.log_normalizer.dtype == torch.float32
    expected = dense(q.double(), k.double(), v.double())
    torch.testing.assert_close(joined.mean.double(), expected.mean, rtol=0, atol=2e-2)


BAD = {
    "heads last": (
        (normal(2, 5, 3, 4), normal(2, 3, 5)),
        {},
        r"transpose.*mean\.transpose\(-3, -2",
    ),
    "base": ((normal(5, 4), normal(5)), {"base": 10}, 'base must be "e" or 2, not 10'),
    "kind": ((normal(5, 4), 3.0), {}, "two real tensors"),
    "integers": ((normal(5, 4), torch.ones(5).long()), {}, "two real tensors"),
    "device": ((normal(5, 4), torch.ones(5, device="meta")), {}, "one device"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case):
    given, options, message = BAD[case]
    with pytest.raises(cm.InputError, match=message):
        cm.Attended.from_lse(*given, **options)
