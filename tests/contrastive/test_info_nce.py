"""`info_nce` against cross-entropy on the full matrix, option by option."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from pytorch_metric_learning import losses
from torch.nn import functional as F

import cumulant as cm

contrast, info_nce = cm.contrastive.contrast, cm.contrastive.info_nce
M = 6


def randn(*shape, grad=True):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=grad)


def cross_entropy(q, k, positive, tau, *, similarity, weights, excluded, symmetric, queue):
    """torch's own cross-entropy, with the positives' shares as target probabilities."""
    if similarity == "cosine":
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        queue = None if queue is None else F.normalize(queue, dim=-1)
    scores = q @ (k if queue is None else torch.cat([k, queue])).T / tau
    if weights is not None:
        scores = scores + weights
    # far below any score, but finite: cross_entropy multiplies it by a target of zero
    scores = torch.where(excluded, -1e4, scores)

    def loss(s, pairs):
        share = pairs.double() / pairs.sum(1, keepdim=True)
        share = F.pad(share, (0, s.shape[1] - share.shape[1]))
        return F.cross_entropy(s, share, reduction="none")

    if symmetric:
        return (loss(scores, positive) + loss(scores.T, positive.T)) / 2
    return loss(scores, positive)


def pairs_of(kind):
    """(mask of positive pairs, the argument that says so)."""
    mask = torch.zeros(M, M, dtype=torch.bool)
    if kind == "diagonal":
        return mask.fill_diagonal_(True), {}
    if kind == "index":
        index = torch.arange(M).roll(2)
        mask[torch.arange(M), index] = True
        return mask, {"positives": index}
    if kind == "several":
        index = torch.stack([torch.arange(M).roll(2), torch.arange(M).roll(3)], 1)
        mask.scatter_(1, index, True)
        mask[0, index[0, 1]] = False
        index[0, 1] = -1
        return mask, {"positives": index}
    if kind == "mask":
        mask = torch.rand(M, M) < 0.4
        mask = mask.fill_diagonal_(False) | torch.eye(M, dtype=torch.bool).roll(1, 0)
        return mask, {"positives": mask}
    labels = torch.tensor([5, -1, 5, -1, 5, -1])
    return labels[:, None] == labels, {"labels": labels}


def excluded_of(kind, positive):
    """(mask of pairs that do not count, the argument)."""
    out = torch.zeros(M, M, dtype=torch.bool)
    if kind is None:
        return out, {}
    if kind == "self":
        return out.fill_diagonal_(True), {"exclude": "self"}
    first = torch.where(positive.all(1), -1, positive.long().argmin(1))  # the first that is not
    out[first >= 0] = F.one_hot(first[first >= 0], M).bool()
    return out, {"exclude": first if kind == "index" else out.clone()}


CASES = [
    case
    for case in itertools.product(
        ("cosine", "dot"),
        ("diagonal", "index", "several", "mask", "labels"),
        (None, "self", "index", "mask"),
        ("plain", "symmetric", "weights", "queue", "weights and queue"),
    )
    if case[1:3] != ("diagonal", "self")
]


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(("similarity", "kind", "excludes", "extra"), CASES)
def test_every_option_and_combination(similarity, kind, excludes, extra):
    q, k = randn(M, 4), randn(M, 4)
    tau = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    positive, options = pairs_of(kind)
    excluded, more = excluded_of(excludes, positive)
    options |= more
    positive = positive & ~excluded
    queue = weights = None
    if "queue" in extra:
        queue = options["queue"] = randn(3, 4)
        excluded = F.pad(excluded, (0, 3))
    if "weights" in extra:
        weights = options["log_weights"] = randn(M if queue is None else M + 3)
    symmetric = extra == "symmetric"
    leaves = [x for x in (q, k, tau, weights, queue) if x is not None]
    expected = cross_entropy(
        q, k, positive, tau, similarity=similarity, weights=weights, excluded=excluded,
        symmetric=symmetric, queue=queue,
    )  # fmt: skip
    seeds = torch.randn(M, dtype=torch.float64)
    for reduction in ("mean", "sum", "none"):
        ours = info_nce(
            q, k, temperature=tau, similarity=similarity, symmetric=symmetric,
            reduction=reduction, **options,
        )  # fmt: skip
        theirs = {"mean": expected.mean(), "sum": expected.sum(), "none": expected}[reduction]
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
        if reduction == "none":
            ours, theirs = (ours * seeds).sum(), (theirs * seeds).sum()
        first = [
            torch.autograd.grad(x, leaves, create_graph=True, retain_graph=True)
            for x in (ours, theirs)
        ]
        for a, b in zip(*first, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
        if reduction == "sum":
            continue
        second = [
            torch.autograd.grad(sum((g**2).sum() for g in x), leaves, retain_graph=True)
            for x in first
        ]
        for a, b in zip(*second, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("temperature", [0.01, 0.07, 1.0])
@pytest.mark.parametrize("symmetric", [False, True])
def test_single_precision_at_every_temperature(temperature, symmetric):
    q, k = torch.randn(300, 16), torch.randn(300, 16)
    loss = info_nce(q, k, temperature=temperature, symmetric=symmetric)
    scores = F.normalize(q.double(), dim=-1) @ F.normalize(k.double(), dim=-1).T / temperature
    expected = F.cross_entropy(scores, torch.arange(300))
    if symmetric:
        expected = (expected + F.cross_entropy(scores.T, torch.arange(300))) / 2
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), expected, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("symmetric", [False, True])
def test_scores_far_out_of_range_of_exp(symmetric):
    q, k = 40 * torch.randn(50, 8), 40 * torch.randn(50, 8)
    loss = info_nce(q, k, temperature=1.0, similarity="dot", symmetric=symmetric)
    scores = q.double() @ k.double().T
    expected = F.cross_entropy(scores, torch.arange(50))
    if symmetric:
        expected = (expected + F.cross_entropy(scores.T, torch.arange(50))) / 2
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-2)


class TestAgainstPytorchMetricLearning:
    losses = losses

    def test_nt_xent(self):
        a, b = randn(10, 5, grad=False), randn(10, 5, grad=False)
        theirs = self.losses.SelfSupervisedLoss(self.losses.NTXentLoss(temperature=0.3))(a, b)
        torch.testing.assert_close(cm.contrastive.nt_xent(a, b, 0.3), theirs)

    def test_supervised(self):
        x, labels = randn(12, 5, grad=False), torch.arange(12) % 3
        theirs = self.losses.SupConLoss(temperature=0.2)(x, labels)
        ours = info_nce(x, x, labels=labels, exclude="self", temperature=0.2)
        torch.testing.assert_close(ours, theirs)

    def test_gradients(self):
        x, labels = randn(12, 5), torch.arange(12) % 3
        theirs = self.losses.SupConLoss(temperature=0.2)(x, labels)
        ours = info_nce(x, x, labels=labels, exclude="self", temperature=0.2)
        (a,), (b,) = (torch.autograd.grad(y, x) for y in (ours, theirs))
        torch.testing.assert_close(a, b)


class TestDetails:
    def dense(self, scores, positive):
        p = scores.softmax(-1)
        rest = scores.masked_fill(positive, -math.inf).softmax(-1)
        entropy = [torch.special.entr(x).sum(-1) for x in (p, rest)]
        return scores.logsumexp(-1), entropy[0], entropy[1].exp()

    @pytest.mark.parametrize("kind", ["diagonal", "index", "several", "mask", "labels"])
    @pytest.mark.parametrize("queue", [False, True])
    def test_each_anchor(self, kind, queue):
        q, k = randn(M, 4, grad=False), randn(M, 4, grad=False)
        positive, options = pairs_of(kind)
        keys = k
        if queue:
            options["queue"] = randn(3, 4, grad=False)
            keys, positive = torch.cat([k, options["queue"]]), F.pad(positive, (0, 3))
        got = contrast(q, k, temperature=0.5, similarity="dot", **options)
        assert got.loss == info_nce(q, k, temperature=0.5, similarity="dot", **options)
        expected = self.dense(q @ keys.T / 0.5, positive)
        fields = (got.log_normalizer, got.entropy, got.effective_negatives)
        for a, b in zip(fields, expected, strict=True):
            torch.testing.assert_close(a, b)

    def test_moco(self):
        q, k, queue = randn(M, 4, grad=False), randn(M, 4, grad=False), randn(9, 4, grad=False)
        got = contrast(q, k, similarity="dot", queue=queue, in_batch=False)
        scores = torch.cat([(q * k).sum(-1, keepdim=True), q @ queue.T], -1) / 0.07
        positive = torch.zeros(M, 10, dtype=torch.bool)
        positive[:, 0] = True
        torch.testing.assert_close(got.loss, F.cross_entropy(scores, torch.zeros(M).long()))
        fields = (got.log_normalizer, got.entropy, got.effective_negatives)
        for a, b in zip(fields, self.dense(scores, positive), strict=True):
            torch.testing.assert_close(a, b)

    def test_equal_negatives_count_in_full(self):
        """One anchor between orthogonal keys: all three negatives score alike."""
        got = contrast(torch.eye(4)[:1], torch.eye(4))
        torch.testing.assert_close(got.effective_negatives, torch.tensor([3.0]))

    def test_an_anchor_without_negatives(self):
        x = torch.randn(1, 3)
        got = contrast(x, x)
        assert abs(got.loss) < 2e-6
        assert (got.entropy.item(), got.effective_negatives.item()) == (0.0, 0.0)


def test_moco_gradients():
    q, k, queue = randn(M, 4), randn(M, 4), randn(9, 4, grad=False)
    weights = randn(M + 9)
    ours = info_nce(q, k, queue=queue, in_batch=False, log_weights=weights, temperature=0.2)
    n = [F.normalize(x, dim=-1) for x in (q, k, queue)]
    own = (n[0] * n[1]).sum(-1) / 0.2 + weights[:M]
    scores = torch.cat([own[:, None], n[0] @ n[2].T / 0.2 + weights[M:]], -1)
    theirs = F.cross_entropy(scores, torch.zeros(M).long())
    for a, b in zip(
        *(torch.autograd.grad(x, (q, k, weights)) for x in (ours, theirs)), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_gradient_in_the_query_is_mean_key_minus_positive():
    """T24: (E[k] - k+) / t for the query as scored."""
    q, k = randn(M, 4), randn(M, 4)
    (g,) = torch.autograd.grad(
        info_nce(q, k, similarity="dot", temperature=0.5, reduction="sum"), q
    )
    weights = (q @ k.T / 0.5).softmax(-1)
    torch.testing.assert_close(g, (weights @ k - k) / 0.5)


def test_content_addressing_of_neural_turing_machines():
    """Graves et al. (2014): softmax of b cos(k, M_i), sharpened by a power g, is G at g b."""
    key, memory = randn(1, 5, grad=False), randn(7, 5, grad=False)
    weights = (3.0 * F.cosine_similarity(key, memory)).softmax(-1)
    sharpened = weights**2.5 / (weights**2.5).sum()
    every = key.expand(7, 5)
    each = info_nce(every, memory, temperature=1 / (2.5 * 3.0), reduction="none")
    torch.testing.assert_close((-each).exp(), sharpened)


def test_batches_and_shared_keys():
    q, k = randn(3, M, 4, grad=False), randn(3, M, 4, grad=False)
    per = info_nce(q, k, reduction="none")
    for i in range(3):
        torch.testing.assert_close(per[i], info_nce(q[i], k[i], reduction="none"))
    shared = info_nce(q, k[0], reduction="none")
    torch.testing.assert_close(shared[2], info_nce(q[2], k[0], reduction="none"))
    labels = torch.randint(0, 2, (3, M))
    labels[:, :2], labels[:, 2:4] = 0, 1
    both = info_nce(q, k, labels=(labels, labels), reduction="none")
    one = info_nce(q[1], k[1], labels=(labels[1], labels[1]), reduction="none")
    torch.testing.assert_close(both[1], one)


def test_half_precision_and_mixed_dtypes():
    q, k = torch.randn(8, 4), torch.randn(8, 4)
    half = info_nce(q.bfloat16(), k.bfloat16())
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), info_nce(q, k), rtol=0.05, atol=0.05)
    assert info_nce(q.double(), k).dtype == torch.float64
    assert contrast(q.bfloat16(), k.bfloat16()).entropy.dtype == torch.float32


def test_torch_func():
    q, k = randn(M, 4, grad=False), randn(M, 4, grad=False)

    def ours(q):
        return info_nce(q, k, symmetric=True)

    def theirs(q):
        s = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).T / 0.07
        target = torch.arange(M)
        return (F.cross_entropy(s, target) + F.cross_entropy(s.T, target)) / 2

    torch.testing.assert_close(torch.func.hessian(ours)(q), torch.func.hessian(theirs)(q))
    tangent = torch.randn_like(q)
    for a, b in zip(*(torch.func.jvp(f, (q,), (tangent,)) for f in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b)


def test_third_order():
    q, k = randn(4, 3), randn(4, 3)

    def third(loss):
        (a,) = torch.autograd.grad(loss, q, create_graph=True)
        (b,) = torch.autograd.grad((a**2).sum(), q, create_graph=True)
        return torch.autograd.grad((b**2).sum(), q)[0]

    ours = info_nce(q, k, similarity="dot", temperature=1.0)
    theirs = F.cross_entropy(q @ k.T, torch.arange(4))
    torch.testing.assert_close(third(ours), third(theirs), rtol=1e-7, atol=1e-9)


def test_compiled():
    q, k = torch.randn(M, 4), torch.randn(M, 4)
    compiled = torch.compile(lambda q, k: info_nce(q, k) * 2, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k), 2 * info_nce(q, k))


x, y = torch.randn(4, 3), torch.randn(4, 3)
BAD = {
    "zero temperature": ({"temperature": 0.0}, "positive"),
    "negative temperature": ({"temperature": torch.tensor(-1.0)}, "positive"),
    "nan temperature": ({"temperature": math.nan}, "positive"),
    "no number": ({"temperature": "warm"}, "number"),
    "many temperatures": ({"temperature": torch.ones(4)}, "one entry"),
    "positive too large": ({"positives": torch.tensor([0, 1, 2, 4])}, "between 0 and 3"),
    "positive too small": ({"positives": torch.tensor([0, 1, 2, -2])}, "between 0 and 3"),
    "no positive by -1": ({"positives": torch.tensor([0, 1, 2, -1])}, r"anchor 3"),
    "no positive by mask": ({"positives": torch.eye(4).bool() & (torch.arange(4) > 0)}, "anchor 0"),
    "no positive by label": (
        {"labels": torch.tensor([0, 0, 1, 2]), "exclude": "self"},
        "anchor 2, 3",
    ),
    "positives of another length": ({"positives": torch.arange(3)}, "4 anchors"),
    "real positives": ({"positives": torch.ones(4)}, "integers"),
    "a positive twice": ({"positives": torch.zeros(4, 2).long()}, "twice"),
    "both": ({"positives": torch.arange(4), "labels": torch.arange(4)}, "pass either"),
    "labels of another length": ({"labels": torch.arange(3)}, "3 labels"),
    "similarity": ({"similarity": "euclid"}, "cosine or dot"),
    "reduction": ({"reduction": "median"}, "mean, sum or none"),
    "weights and symmetric": ({"log_weights": torch.zeros(4), "symmetric": True}, "call it twice"),
    "weights of another length": ({"log_weights": torch.zeros(5)}, "4 entries"),
    "infinite weights": ({"log_weights": torch.full((4,), -math.inf)}, "finite"),
    "self is the positive": ({"exclude": "self"}, "removes a positive"),
    "positive excluded": ({"exclude": torch.eye(4).bool()}, "removes a positive"),
    "exclude out of range": ({"exclude": torch.full((4, 1), 4)}, "between -1"),
    "exclude of no kind": ({"exclude": "others"}, "exclude must be"),
    "an empty queue that is all": (
        {"queue": torch.zeros(0, 3), "in_batch": False},
        "empty; push",
    ),
    "no queue": ({"in_batch": False}, "missing"),
    "queue of another width": ({"queue": torch.zeros(2, 5)}, "same d"),
    "group": ({"group": object()}, "process group"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_options(name):
    options, message = BAD[name]
    with pytest.raises(cm.InputError, match=message):
        info_nce(x, y, **options)


@pytest.mark.parametrize(
    ("query", "key", "message"),
    [
        (torch.zeros(4, 3), y, "query holds a zero vector"),
        (x, torch.cat([y[:3], torch.zeros(1, 3)]), "key holds a zero vector"),
        (torch.full((4, 3), math.nan), y, "query"),
        (torch.full((4, 3), math.inf), y, "infinity"),
        (x[:0], y, "there must be anchors"),
        (x, y[:3], "4 anchors and 3 keys"),
        (x, y[:, :2], "same d"),
        (x[0], y, "shape"),
        (x.long(), y, "real tensor"),
        ([1.0], y, "real tensor"),
        (x.expand(2, 4, 3), y.expand(3, 4, 3), "batch shape of the anchors"),
    ],
)
def test_bad_vectors(query, key, message):
    with pytest.raises(cm.InputError, match=message):
        info_nce(query, key)


def test_defined_where_people_expect_a_value():
    """An empty queue beside a batch adds nothing; zero vectors have a dot product."""
    assert info_nce(x, y, queue=torch.zeros(0, 3)) == info_nce(x, y)
    scores = torch.zeros(4, 4)
    expected = F.cross_entropy(scores, torch.arange(4))
    torch.testing.assert_close(info_nce(torch.zeros(4, 3), y, similarity="dot"), expected)


def test_symmetric_needs_a_positive_on_both_sides():
    with pytest.raises(cm.InputError, match="seen from the keys"):
        info_nce(x, y, positives=torch.zeros(4).long(), symmetric=True)
    with pytest.raises(cm.InputError, match="as many keys"):
        info_nce(x, torch.randn(5, 3), symmetric=True)


@pytest.mark.parametrize("form", ["index", "mask", "labels"])
def test_a_key_that_nobody_claims(form):
    """From the keys' side it would have no positive: an error, not NaN."""
    pairs = torch.tensor([1, 1, 2, 3])
    options = {
        "index": {"positives": pairs},
        "mask": {"positives": F.one_hot(pairs, 4).bool()},
        "labels": {"labels": (torch.tensor([0, 0, 1, 1]), torch.tensor([0, 0, 1, 2]))},
    }[form]
    info_nce(x, y, **options)
    with pytest.raises(cm.InputError, match="seen from the keys"):
        info_nce(x, y, symmetric=True, **options)


def test_self_is_left_out_where_labels_of_the_two_sides_differ():
    q, k = randn(4, 3, grad=False), randn(4, 3, grad=False)
    mine, theirs = torch.tensor([0, 1, 0, 1]), torch.tensor([0, 0, 1, 1])
    ours = info_nce(q, k, labels=(mine, theirs), exclude="self", similarity="dot")
    scores = (q @ k.T / 0.07).fill_diagonal_(-math.inf)
    pairs = (mine[:, None] == theirs) & ~torch.eye(4).bool()
    share = pairs.double() / pairs.sum(1, keepdim=True)
    logs = scores.log_softmax(1).masked_fill(~pairs, 0.0)
    torch.testing.assert_close(ours, -(share * logs).sum(1).mean())
    with pytest.raises(cm.InputError, match="anchors and 3 keys"):
        info_nce(q, k[:3], labels=(mine, theirs[:3]), exclude="self")
