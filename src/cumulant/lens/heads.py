"""What one attention call says about Hopfield's energy and about the link.

See docs/theory.md, T19, T29.

Shape legend: B texts, H heads, M queries, N keys, d features.
"""

from __future__ import annotations

from math import nan
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.attention.calls import AttentionCall
from cumulant.core.errors import InputError
from cumulant.core.precision import widened
from cumulant.core.typed import linalg
from cumulant.measures.empirical import Empirical

__all__ = ["Link", "energy_change", "link"]

_FOLDS = 5
# Of the heads whose link must be solved for, so many in a call: half a second to seconds each.
SOLVED_HEADS = 2
# Penalties of the affine map, in units of the largest eigenvalue of its inputs' moments.
_PENALTIES = tuple(10.0**k for k in range(-10, 3))
# Nearer to the boundary of the hull than this (the least variance left, in units of the keys' own)
# a mean in double precision no longer tells its natural parameter: errors exceed a thousandth.
_RESOLVED = 1e-11


@torch.no_grad()
def energy_change(call: AttentionCall) -> Tensor:
    """E(E[k]) - E(q) ``(B, H, M)`` for the Hopfield energy whose patterns are the keys (T19).

    E(x) = -G(beta x)/beta + |x|^2/2 with beta the scale and G the log-normalizer of what that query
    sees: mask, bias and sink logit make its measure. The head's own update x <- E[k] never raises
    it, and lowers it by |q - E[k]|^2 / 2 at least; only a softcap, which makes G another function,
    can. In double precision, because the terms are large and nearly cancel. At scale 0 attention is
    the mean m of what the query sees, and E(x) = |x|^2/2 - <m, x> + const is the limit. NaN where a
    query sees no key.

    Raises:
        InputError: a negative scale has no energy.
    """
    if not call.scale >= 0:
        raise InputError(f"energy_change: the scale must be at least 0, but is {call.scale}.")
    query = call.query.double()
    # Only G and E[k] are asked for, so the keys stand in for the values.
    first = call.attend(query=query, value=call.key.double())
    after = first.mean
    if call.scale == 0:
        potential = ((after - query) * after).sum(-1).where(first.log_normalizer.isfinite(), nan)
    else:
        second = call.attend(query=after, value=call.key[..., :0].double())
        potential = (second.log_normalizer - first.log_normalizer) / call.scale
    change = (after.square().sum(-1) - query.square().sum(-1)) / 2 - potential
    kind = widened(call.query.dtype)
    return change.masked_fill(~change.isfinite(), torch.nan).to(kind)


class Link(NamedTuple):
    """What `link` found, each ``(H,)``; NaN for a head where too few means have a link.

    ``linear``: R^2 of the best affine map from means to natural parameters, on points held out.
    ``trained``: R^2 of the map that the trained weights make, nothing fitted.
    ``exists``: the share of the means that have a natural parameter, as far as double precision can
    tell: a mean that all but coincides with one key has none.
    """

    linear: Tensor
    trained: Tensor
    exists: Tensor


@torch.no_grad()
def link(call: AttentionCall, real: Tensor, *, means: int = 64, seed: int = 0) -> Link | None:
    """How linear the canonical link of a head's keys is, and how near the weights come (T29).

    The measure h of a text and head has mass one at the keys of its real tokens, and the sink
    logit's mass at 0 if there is one. Attention puts token i at the mean mu_i = E_i[k]; its true
    natural parameter is eta_i = link of h at mu_i (T8). Without mask and bias that is scale q_i, as
    far as the keys' affine span shows it; with a causal mask h has keys that token i did not see,
    and it is solved for: in two heads of a layer, at tokens of the later half (the mean of a few
    keys lies on a face of the hull of all, where there is no link).

    - linear: ridge regression of eta on mu, tried in five folds on means it was not fitted to: 1
      for Gaussian keys, where eta = Cov^-1 (mu - m). The penalty is the best of thirteen on the
      same folds, which flatters a little; more means would fit better;
    - trained: eta^_i = scale sum_j p_ij q_j, what W_q makes of the mean of the tokens under the
      head's own weights (with rotary positions each q_j stands at its own position).

    Every text has its own h, so maps are fitted text by text; R^2 = 1 - residual / total sum of
    squares is taken over all texts, about each text's own mean. It is negative where a constant
    would do better.

    Args:
        call: a self-attention call.
        real: ``(B, M)``, True for tokens that are not padding.
        means: so many tokens of each text at most, drawn at random.
        seed: of tokens and folds.

    Returns:
        None for cross-attention, and where keys and queries are not the same tokens (a cache).
    """
    batch, heads, length, _ = call.query.shape
    if real.shape != (batch, length):
        raise InputError(
            f"link: real must have shape {(batch, length)}, one flag for each token, but has "
            f"{tuple(real.shape)}."
        )
    if call.cross or call.key.shape[2] != length:
        return None
    query, key = call.query.double(), call.key.double()
    key = key.repeat_interleave(heads // key.shape[1], 1)
    both = call.attend(query=query, value=torch.cat([key, call.scale * query], -1)).mean
    generator = torch.Generator().manual_seed(seed)
    tally = _Tally(heads)
    for text, flags in enumerate(real.cpu()):
        tokens = flags.nonzero()[:, 0]
        late = tokens[len(tokens) // 2 :] if _hides(call, text, tokens) else tokens
        chosen = late[torch.randperm(len(late), generator=generator)[:means]]
        if len(chosen):
            measure = _measure(key[text][:, tokens.to(key.device)], call.sinks)
            mean, guess = both[text][:, chosen.to(key.device)].chunk(2, -1)
            tally.add(measure, mean, guess, call.scale * query[text][:, chosen.to(key.device)])
    return tally.link()


def _hides(call: AttentionCall, text: int, tokens: Tensor) -> bool:
    """Whether some token of a text does not see all of its tokens; padding aside."""
    if call.mask is None:
        return call.causal
    mask = call.mask.expand(call.query.shape[0], -1, call.query.shape[2], call.key.shape[2])
    own = mask[text][:, tokens.to(mask.device)][..., tokens.to(mask.device)]
    return call.causal or not bool(own.all())


def _measure(key: Tensor, sinks: Tensor | None) -> Empirical:
    """The keys ``(H, n, d)`` of one text, and the atom of a sink logit at 0 (T12)."""
    if sinks is None:
        return Empirical(key)
    points = torch.cat([torch.zeros_like(key[:, :1]), key], 1)
    logs = torch.cat([sinks.to(key)[:, None], key.new_zeros(key.shape[:2])], 1)
    return Empirical(points, logs)


class _Tally:
    """Sums of squares ``(H,)`` over texts."""

    def __init__(self, heads: int) -> None:
        self._found, self._asked = torch.zeros(2, heads)
        self._linear, self._trained, self._total = torch.zeros(3, heads, dtype=torch.float64)

    def add(self, measure: Empirical, mean: Tensor, guess: Tensor, made_by: Tensor) -> None:
        """One text: means ``(H, m, d)``, what the trained weights make of them, what made them."""
        eta, converged, asked = _solved(measure, mean, made_by)
        center, spread = measure._extent()
        whiten, blind = _frame(spread)
        spread = whiten[:, None] @ measure.covariance(eta) @ whiten[:, None] + blind[:, None]
        good = converged & (linalg.eigvalsh(spread)[..., 0] > _RESOLVED)
        guess = measure._visible(guess)
        self._asked += good.shape[1] * asked.cpu()
        self._found += good.sum(1).cpu()
        inputs = (mean - center) @ whiten
        for head, rows in enumerate(good):
            if int(rows.sum()) >= 2 * _FOLDS:
                x, y = inputs[head, rows], eta[head, rows]
                self._linear[head] += _held_out(x, y).cpu()
                self._trained[head] += (y - guess[head, rows]).square().sum().cpu()
                self._total[head] += (y - y.mean(0)).square().sum().cpu()

    def link(self) -> Link:
        scores = (1 - residual / self._total for residual in (self._linear, self._trained))
        linear, trained = (x.masked_fill(~x.isfinite(), torch.nan).float() for x in scores)
        return Link(linear, trained, self._found / self._asked)


def _solved(measure: Empirical, mean: Tensor, made_by: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The link at the means, where it was found, and which heads were asked.

    Where a token saw all keys, its query made the mean: if it gives that mean, it is the link,
    because there is no other (T8). Heads where some query does not are solved.
    """
    eta = measure._visible(made_by)
    size = 1 + mean.abs().amax((-1, -2))
    solved = (measure.mean(eta) - mean).abs().amax(-1) <= 1e-10 * size[:, None]
    left = (~solved.all(-1)).nonzero()[:, 0]
    asked = torch.ones(len(mean), dtype=torch.bool, device=mean.device)
    if len(left) > SOLVED_HEADS:  # evenly spaced; the others are not asked
        asked[left] = False
        left = left[torch.linspace(0, len(left) - 1, SOLVED_HEADS, device=left.device).long()]
        asked[left] = True
    if len(left):
        some = measure._rebuilt({n: x[left] for n, (x, _) in measure._leaves().items()})
        found = some.link(mean[left], throw=False)
        eta[left], solved[left] = found.value, found.status.converged
    return eta, solved & asked[:, None], asked


def _frame(covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Cov^(-1/2) on the range of a covariance, and the projector on its complement.

    In whitened coordinates a penalty treats all directions alike.
    """
    values, axes = linalg.eigh(covariance)
    small = values <= 1e-10 * values[..., -1:]
    root = torch.where(small, 0.0, values.where(~small, 1.0).rsqrt())
    return (axes * root[..., None, :]) @ axes.mT, (axes * small[..., None, :]) @ axes.mT


def _held_out(x: Tensor, y: Tensor) -> Tensor:
    """The squared error of affine maps x -> y at points they were not fitted to, at its best.

    Ridge regression: with x = U s V' about its mean, the map is V s/(s^2 + penalty) U' y. One
    penalty serves all folds, so that a lone point far from all others is not met unprepared.
    """
    errors = y.new_zeros(len(_PENALTIES))
    for fold in range(_FOLDS):
        test = torch.arange(len(x), device=x.device) % _FOLDS == fold  # rows come in random order
        center, level = x[~test].mean(0), y[~test].mean(0)
        left, size, right = linalg.svd(x[~test] - center, full_matrices=False)
        penalty = x.new_tensor(_PENALTIES)[:, None] * size[0].square().clamp_min(1e-300)
        shrunk = size / (size.square() + penalty)
        seen = ((x[test] - center) @ right.mT) * shrunk[:, None, :]
        guess = seen @ (left.mT @ (y[~test] - level))
        errors += (y[test] - level - guess).square().sum((1, 2))
    return errors.min()
