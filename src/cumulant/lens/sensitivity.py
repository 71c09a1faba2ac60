"""Which weights the output hangs on: queries and keys, or values and outputs.

See docs/theory.md, T23.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cumulant.core.errors import InputError
from cumulant.core.interception import Begun, Scope, Token
from cumulant.core.typed import linalg
from cumulant.lens.weights import Block

__all__ = ["Group", "Sensitivity", "sensitivity"]


class Group(NamedTuple):
    """The weights of one layer: blocks for queries and keys, blocks for values and outputs."""

    layer: int
    query_key: Sequence[Block]
    value_output: Sequence[Block]


class Sensitivity(NamedTuple):
    """Relative change of the output for a relative change of the weights; None without weights."""

    layer: int
    query_key: float | None
    value_output: float | None


def sensitivity(
    model: nn.Module,
    forward: Callable[[], Tensor],
    groups: Sequence[Group],
    *,
    probes: int = 4,
    seed: int = 0,
) -> list[Sensitivity]:
    """How much the output moves if weights are changed at random, in units of both sizes (T23).

    Every matrix W of a group gets independent noise of its own relative size eps: dW has entries
    eps |W| / sqrt(n) N(0, 1), n their number, so that |dW| is about eps |W|. To first order

        E |dy|^2 / |y|^2 = eps^2 sum_W (|W|^2 / n) |J_W|^2 / |y|^2,     |J|^2 = E_r |J' r|^2

    with r ~ N(0, I) (Hutchinson): one backward pass a probe serves all layers. What comes back is
    the root of it, without eps: 1 means that a change of one percent moves the output by one. A
    matrix that layers share counts in each with all its uses.

    Args:
        model: its parameters are frozen meanwhile, except those asked for; ``.grad`` and
            ``requires_grad`` are as before afterwards. Dropout should be off.
        forward: runs the model and returns the output, of any shape; called once.
        groups: layers with their weights, as `projections` names them.
        probes: how many backward passes; the error, 10 to 20 percent at four, falls like
            1/sqrt(probes) and is largely the same for all figures.
        seed: of the probes.

    Raises:
        InputError: no probes, weights of inference mode, an output that is zero or not finite, or
            one that does not depend on the weights.

    >>> import torch
    >>> from cumulant.lens.weights import Block
    >>> layer = torch.nn.Linear(50, 40, bias=False)
    >>> x = torch.eye(50)
    >>> group = Group(0, [], [Block(layer.weight)])
    >>> found = sensitivity(layer, lambda: layer(x), [group], probes=50)[0]
    >>> found.query_key, round(found.value_output, 1)
    (None, 1.0)
    """
    if probes < 1:
        raise InputError(f"sensitivity: probes must be at least 1, but is {probes}.")
    blocks = [b for g in groups for b in (*g.query_key, *g.value_output)]
    if not blocks:
        return [Sensitivity(group.layer, None, None) for group in groups]
    parameters = list({id(b.parameter): b.parameter for b in blocks}.values())
    sums = [0.0] * len(blocks)
    with torch.inference_mode(False), torch.enable_grad(), _only(model, parameters):
        output = forward()
        size = float(linalg.vector_norm(output.detach().double()))
        if not output.requires_grad or not 0 < size < math.inf:
            raise InputError(
                "sensitivity: forward must return an output that depends on the weights, finite "
                f"and not zero; it has norm {size} and requires_grad={output.requires_grad}. Is "
                "there a no_grad or a detach inside?"
            )
        generator = torch.Generator().manual_seed(seed)
        for probe in range(probes):
            r = torch.randn(output.shape, generator=generator).to(output)
            found = torch.autograd.grad(
                output, parameters, r, retain_graph=probe + 1 < probes, materialize_grads=True
            )
            slopes = {id(p): g for p, g in zip(parameters, found, strict=True)}
            for i, block in enumerate(blocks):
                sums[i] += _square(block.take(slopes[id(block.parameter)])) / probes
    part = iter(_square(b.take()) / b.take().numel() * s for b, s in zip(blocks, sums, strict=True))

    def figure(own: Sequence[Block]) -> float | None:
        return math.sqrt(sum(next(part) for _ in own)) / size if own else None

    return [Sensitivity(g.layer, figure(g.query_key), figure(g.value_output)) for g in groups]


def _square(x: Tensor) -> float:
    return float(x.double().square().sum())


class _Gradient:
    """Whether a parameter has a gradient, for a while."""

    def __init__(self, parameter: nn.Parameter, wanted: bool) -> None:
        self.parameter, self.wanted, self.before = parameter, wanted, parameter.requires_grad

    def put(self, token: Token) -> None:
        self.parameter.requires_grad_(self.wanted)

    def take(self) -> None:
        self.parameter.requires_grad_(self.before)


def _only(model: nn.Module, wanted: Sequence[nn.Parameter]) -> Scope[None]:
    """Gradients for these parameters and no others of the model, for a while."""
    if any(p.is_inference() for p in wanted):
        raise InputError(
            "sensitivity: the weights were made in inference mode, which has no gradients: load "
            "the model outside torch.inference_mode()."
        )
    everything = {id(p): p for p in (*model.parameters(), *wanted)}
    chosen = {id(p) for p in wanted}
    return Scope(lambda: Begun(None, [_Gradient(p, id(p) in chosen) for p in everything.values()]))
