"""torch's own functions and layers as cases for the checker.

``cumulant doctor --derivatives torch`` runs them.

Inputs avoid kinks: they are distinct random numbers, and positive or well conditioned where a
function needs it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cumulant.core.typed import fft, functions, linalg, random, special
from cumulant.derivatives.checking import check_derivatives

__all__ = ["Case", "Verdict", "catalog", "markdown", "sweep"]


@dataclass(frozen=True)
class Case:
    """A function with inputs to check it at."""

    group: str
    name: str
    function: Callable[..., Any]
    inputs: tuple[Any, ...]


@dataclass(frozen=True)
class Verdict:
    """The words of a case that are not right."""

    group: str
    name: str
    wrong: tuple[str, ...]
    not_supported: tuple[str, ...]
    unchecked: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not (self.wrong or self.not_supported or self.unchecked)

    def as_dict(self) -> dict[str, Any]:
        return {"ok": self.ok, **asdict(self)}


# Name, function and inputs: a function of one, two or three tensors.
One = tuple[str, Callable[[Tensor], object], tuple[Tensor]]
Two = tuple[str, Callable[[Tensor, Tensor], object], tuple[Tensor, Tensor]]
Three = tuple[str, Callable[[Tensor, Tensor, Tensor], object], tuple[Tensor, Tensor, Tensor]]
Cases = Iterator[One | Two | Three]


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def _spread(*shape: int) -> Tensor:
    """Numbers from -3 to 3 far apart from each other, and from the kinks of activations."""
    count = math.prod(shape)
    return (torch.randperm(count).double() / count * 5.8 - 2.746).reshape(shape)


def _norms() -> Cases:
    x, w, b = _random(4, 6, 5), _random(6), _random(6)
    mean, variance = _random(6), torch.rand(6, dtype=torch.float64) + 0.5
    yield "layer_norm", lambda x, w, b: F.layer_norm(x, (5,), w, b), (x, _random(5), _random(5))
    yield "rms_norm", lambda x, w: F.rms_norm(x, (5,), w), (x, _random(5))
    yield "group_norm", lambda x, w, b: F.group_norm(x, 2, w, b), (x, w, b)
    yield "instance_norm", lambda x, w, b: F.instance_norm(x, weight=w, bias=b), (x, w, b)
    yield (
        "batch_norm (training)",
        lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
        (x, w, b),
    )
    yield (
        "batch_norm (inference)",
        lambda x, w, b: F.batch_norm(x, mean.clone(), variance.clone(), w, b),
        (x, w, b),
    )
    yield "local_response_norm", lambda x: F.local_response_norm(x, 2), (x,)
    yield "normalize", lambda x: F.normalize(x, dim=1), (x,)


_ACTIVATIONS = (
    *("celu", "elu", "gelu", "glu", "hardshrink", "hardsigmoid", "hardswish", "hardtanh"),
    *("leaky_relu", "logsigmoid", "mish", "relu", "relu6", "selu", "sigmoid", "silu", "softplus"),
    *("softshrink", "softsign", "tanh", "tanhshrink"),
)


def _activations() -> Cases:
    x = _spread(4, 6)
    for name in _ACTIVATIONS:
        yield name, getattr(F, name), (x,)
    yield "gelu (tanh)", partial(F.gelu, approximate="tanh"), (x,)
    yield "prelu", F.prelu, (x, _random(6))
    yield "rrelu (training)", partial(F.rrelu, training=True), (x,)
    yield "softmax", partial(F.softmax, dim=-1), (x,)
    yield "softmin", partial(F.softmin, dim=-1), (x,)
    yield "log_softmax", partial(F.log_softmax, dim=-1), (x,)
    yield "gumbel_softmax", partial(F.gumbel_softmax, dim=-1), (x,)
    yield "threshold", lambda x: F.threshold(x, 0.1, 2.0), (x,)
    yield "dropout", F.dropout, (x,)
    yield "alpha_dropout", partial(F.alpha_dropout, training=True), (x,)


def _losses() -> Cases:
    x, y, probability = _random(4, 6), _random(4, 6), 0.3 + 0.4 * torch.rand(4, 6).double()
    classes, sign = torch.tensor([0, 3, 5, 1]), torch.tensor([1.0, -1.0, 1.0, -1.0]).double()
    for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "poisson_nll_loss"):
        yield name, getattr(F, name), (x, y)
    yield "kl_div", lambda x, y: F.kl_div(x, y, log_target=True), (x, y)
    yield "cross_entropy", lambda x: F.cross_entropy(x, classes), (x,)
    yield "cross_entropy (soft)", lambda x, p: F.cross_entropy(x, p), (x, probability)
    yield (
        "cross_entropy (2d)",
        lambda x: F.cross_entropy(x, classes[:2, None].expand(2, 3)),
        (_random(2, 6, 3),),
    )
    yield "nll_loss", lambda x: F.nll_loss(x, classes), (x,)
    yield from _linear_cross_entropy(classes)
    yield "binary_cross_entropy", F.binary_cross_entropy, (probability, probability.flip(0))
    yield "binary_cross_entropy_with_logits", F.binary_cross_entropy_with_logits, (x, probability)
    yield "cosine_embedding_loss", lambda x, y: F.cosine_embedding_loss(x, y, sign), (x, y)
    yield "cosine_similarity", F.cosine_similarity, (x, y)
    yield "gaussian_nll_loss", F.gaussian_nll_loss, (x, y, probability + 0.5)
    yield (
        "hinge_embedding_loss",
        lambda x: F.hinge_embedding_loss(x, sign[:, None].expand(4, 6)),
        (x,),
    )
    yield "margin_ranking_loss", lambda x, y: F.margin_ranking_loss(x, y, sign[:, None]), (x, y)
    yield "multi_margin_loss", lambda x: F.multi_margin_loss(x, classes), (x,)
    yield (
        "multilabel_margin_loss",
        lambda x: F.multilabel_margin_loss(x, classes[:, None].expand(4, 6).contiguous()),
        (x,),
    )
    yield "multilabel_soft_margin_loss", F.multilabel_soft_margin_loss, (x, probability)
    yield "soft_margin_loss", lambda x: F.soft_margin_loss(x, sign[:, None].expand(4, 6)), (x,)
    yield "triplet_margin_loss", F.triplet_margin_loss, (x, y, _random(4, 6))
    lengths = torch.tensor([5, 5]), torch.tensor([2, 2])
    labels = torch.tensor([[1, 2], [3, 1]])
    yield "ctc_loss", lambda x: F.ctc_loss(x.log_softmax(-1), labels, *lengths), (_random(5, 2, 4),)
    yield "pairwise_distance", F.pairwise_distance, (x, y)
    yield "pdist", F.pdist, (x,)
    yield "cdist", torch.cdist, (x, _random(3, 6))


def _linear_cross_entropy(classes: Tensor) -> Cases:
    """From torch 2.13 on; the chunked form is an option."""
    function: Any = getattr(F, "linear_cross_entropy", None)
    if function is None:
        return
    x, w = _random(4, 6), _random(7, 6)
    yield "linear_cross_entropy", lambda x, w: function(x, w, classes), (x, w)
    from torch.nn.modules.linear_cross_entropy_options import LinearCrossEntropyOptions

    options = LinearCrossEntropyOptions(batch_chunk_size=2)
    chunked = partial(function, target=classes, options=options)
    yield "linear_cross_entropy (chunked)", chunked, (x, w)


def _convolutions() -> Cases:
    for d in (1, 2, 3):
        x, w = _random(2, 3, *(5,) * d), _random(4, 3, *(3,) * d)
        yield f"conv{d}d", getattr(F, f"conv{d}d"), (x, w, _random(4))
        transposed = getattr(F, f"conv_transpose{d}d")
        yield f"conv_transpose{d}d", transposed, (x, w.transpose(0, 1).contiguous())
    yield "bilinear", F.bilinear, (_random(4, 3), _random(4, 5), _random(2, 3, 5))
    yield "linear", F.linear, (_random(4, 3), _random(2, 3), _random(2))
    ids = torch.tensor([[0, 2, 1], [3, 1, 1]])
    yield "embedding", lambda w: F.embedding(ids, w), (_random(5, 4),)
    yield "embedding_bag", lambda w: F.embedding_bag(ids, w), (_random(5, 4),)
    yield "unfold", partial(F.unfold, kernel_size=2), (_random(2, 3, 4, 4),)
    yield "fold", lambda x: F.fold(x, (4, 4), 2), (_random(2, 12, 9),)


def _pooling() -> Cases:
    for d in (1, 2, 3):
        x = _spread(1, 1 if d == 3 else 3, *(4,) * d)
        for name in (f"avg_pool{d}d", f"max_pool{d}d"):
            yield name, partial(getattr(F, name), kernel_size=2), (x,)
        for name in (f"adaptive_avg_pool{d}d", f"adaptive_max_pool{d}d"):
            yield name, partial(getattr(F, name), output_size=3), (x,)
    x = _random(2, 3, 6, 6)
    yield "lp_pool2d", lambda x: F.lp_pool2d(x, 3, 2), (x.abs() + 0.1,)
    yield "fractional_max_pool2d", lambda x: F.fractional_max_pool2d(x, 2, (3, 3)), (x,)
    for mode in ("nearest", "bilinear", "bicubic"):
        yield f"interpolate ({mode})", partial(F.interpolate, scale_factor=1.5, mode=mode), (x,)
    # halfway between pixels, where the interpolation has no kink
    between = (
        torch.randint(0, 5, (2, 4, 4, 2)) + 1 + 0.1 * torch.rand(2, 4, 4, 2).double()
    ) / 3 - 1
    yield "grid_sample", partial(F.grid_sample, align_corners=False), (x, between)
    yield "pixel_shuffle", lambda x: F.pixel_shuffle(x, 2), (_random(2, 4, 3, 3),)
    for mode in ("reflect", "replicate", "circular"):
        yield f"pad ({mode})", partial(F.pad, pad=(1, 1, 1, 1), mode=mode), (x,)


def _attention() -> Cases:
    q, k, v = _random(2, 2, 5, 4), _random(2, 2, 6, 4), _random(2, 2, 6, 4)
    yield "scaled_dot_product_attention", F.scaled_dot_product_attention, (q, k, v)
    x = _random(2, 5, 8)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    yield "nn.TransformerEncoderLayer", layer, (x,)


def _layers() -> Cases:
    x = _random(2, 5, 4)
    for name in ("RNN", "LSTM", "GRU"):
        yield f"nn.{name}", getattr(nn, name)(4, 3, batch_first=True), (x,)
    for name in ("RNNCell", "LSTMCell", "GRUCell"):
        yield f"nn.{name}", getattr(nn, name)(4, 3), (x[0],)
    yield "nn.Transformer", nn.Transformer(4, 2, 1, 1, 8, 0.0, batch_first=True), (x, x)
    yield "nn.MultiheadAttention", nn.MultiheadAttention(4, 2, batch_first=True), (x, x, x)


def _algebra() -> Cases:
    a = _random(4, 4)
    spd = a @ a.mT + torch.eye(4, dtype=torch.float64)
    factor = linalg.cholesky(spd)
    yield "linalg.inv", linalg.inv, (a,)
    yield "linalg.solve", linalg.solve, (a, _random(4, 2))
    yield "linalg.det", linalg.det, (a,)
    yield "linalg.slogdet", linalg.slogdet, (a,)
    yield "linalg.cholesky", lambda a: linalg.cholesky(a @ a.mT), (a,)
    yield "cholesky_solve", lambda b, f: torch.cholesky_solve(b, f.tril()), (_random(4, 2), factor)
    yield "cholesky_inverse", lambda f: torch.cholesky_inverse(f.tril()), (factor,)
    yield "linalg.eigvalsh", lambda a: linalg.eigvalsh(a + a.mT), (a,)
    yield "linalg.svdvals", linalg.svdvals, (a,)
    yield "linalg.qr", lambda a: linalg.qr(a)[1].abs(), (a,)
    yield (
        "linalg.lstsq",
        lambda a, b: linalg.lstsq(a, b).solution,
        (_random(6, 3), _random(6, 2)),
    )
    yield "linalg.pinv", linalg.pinv, (_random(5, 3),)
    yield "linalg.matrix_exp", linalg.matrix_exp, (a,)
    yield "linalg.vector_norm", linalg.vector_norm, (a,)
    yield "linalg.matrix_norm", linalg.matrix_norm, (a,)
    yield "linalg.householder_product", linalg.householder_product, (a, _random(4))
    yield (
        "linalg.solve_triangular",
        lambda a, b: linalg.solve_triangular(a.tril(), b, upper=False),
        (factor, _random(4, 2)),
    )
    yield "logsumexp", partial(torch.logsumexp, dim=-1), (a,)
    yield "logcumsumexp", partial(torch.logcumsumexp, dim=-1), (a,)
    yield "cumprod", partial(torch.cumprod, dim=-1), (a,)
    yield "prod", partial(torch.prod, dim=-1), (a,)
    yield "std", partial(torch.std, dim=-1), (a,)
    yield "var", partial(torch.var, dim=-1), (a,)
    yield "sort", lambda a: a.sort(-1).values, (a,)
    yield "amax", partial(torch.amax, dim=-1), (a,)
    yield "sinc", torch.sinc, (a,)
    yield "lgamma", torch.lgamma, (a.abs() + 0.1,)
    yield "erfinv", torch.erfinv, (torch.tanh(a),)
    yield "special.ndtri", special.ndtri, (torch.sigmoid(a),)
    yield "special.log_ndtr", special.log_ndtr, (a,)
    yield "special.i0e", special.i0e, (a,)
    yield "fft.rfft", lambda a: torch.view_as_real(fft.rfft(a)), (a,)
    yield "einsum", lambda a, b: torch.einsum("ij,jk->ik", a, b), (a, _random(4, 3))


_GROUPS = {
    "norms": _norms,
    "activations": _activations,
    "losses": _losses,
    "convolutions": _convolutions,
    "pooling": _pooling,
    "attention": _attention,
    "layers": _layers,
    "algebra": _algebra,
}


def catalog(seed: int = 0) -> Iterator[Case]:
    """All cases, the same for the same seed."""
    for group, cases in _GROUPS.items():
        with random.fork_rng(devices=[]):
            functions.manual_seed(seed)
            made = [Case(group, *case) for case in cases()]
        yield from made


def sweep(cases: Iterable[Case], *, order: int = 2, seconds: float = 60.0) -> Iterator[Verdict]:
    """Check the cases one after another."""
    for case in cases:
        report = check_derivatives(
            case.function, case.inputs, order=order, seconds=seconds, examine=False
        )
        unchecked = (w for s in ("kink", "unclear", "left out") for w in report.words(s))
        yield Verdict(
            case.group,
            case.name,
            report.words("wrong"),
            report.words("not supported"),
            tuple(unchecked),
        )


def markdown(verdicts: Iterable[Verdict], command: str) -> str:
    """The verdicts as a page for the docs: one row per function with a fault."""
    verdicts = list(verdicts)
    failing = [v for v in verdicts if not v.ok]
    lines = [
        f"# Derivatives of torch {torch.__version__.split('+')[0]}",
        "",
        f"Look up which derivatives torch gets wrong. `{command}` checked {len(verdicts)} "
        f"functions and layers in float64 on a CPU: {len(verdicts) - len(failing)} are right in "
        "every word, a nesting of forward (F) and reverse (R) modes, outermost first. The rest:",
        "",
        "| | function | wrong | not supported | not checked |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {v.group} | {v.name} | {' '.join(v.wrong)} | {' '.join(v.not_supported)} "
        f"| {' '.join(v.unchecked)} |"
        for v in failing
    ]
    return "\n".join(lines) + "\n"
