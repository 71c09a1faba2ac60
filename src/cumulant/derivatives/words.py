"""Orders of differentiation as words: F is forward mode, R is reverse mode, outermost first.

``RF`` is reverse over forward: the gradient of a Jacobian-vector product. Every word of length n
computes the same number, the n-th derivative of a scalar function along n directions,

    D^n g(x)[v_1, ..., v_n],

where v_1 belongs to the innermost (last) letter.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor

__all__ = ["ScalarFunction", "Tensors", "evaluate_word", "words"]

Tensors = tuple[Tensor, ...]
ScalarFunction = Callable[..., Tensor]


def words(order: int) -> tuple[str, ...]:
    """All words of length 1 to `order`, shortest first.

    >>> words(2)
    ('F', 'R', 'FF', 'FR', 'RF', 'RR')
    """
    return tuple("".join(w) for n in range(1, order + 1) for w in product("FR", repeat=n))


def _dot(first: Tensors, second: Tensors) -> Tensor:
    return torch.stack([(a * b).sum() for a, b in zip(first, second, strict=True)]).sum()


def _forward(g: ScalarFunction, v: Tensors) -> ScalarFunction:
    return lambda *x: torch.func.jvp(g, x, v)[1]


def _reverse(g: ScalarFunction, v: Tensors) -> ScalarFunction:
    return lambda *x: _dot(torch.func.grad(g, argnums=tuple(range(len(x))))(*x), v)


def _recorded(g: ScalarFunction, v: Tensors) -> ScalarFunction:
    """Reverse mode as training does it: ``torch.autograd.grad`` on a recorded graph."""

    def derivative(*x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = tuple(a if a.requires_grad else a.detach().requires_grad_() for a in x)
            y = g(*x)
            if not y.requires_grad:  # g cut the graph, or does not depend on x
                return torch.zeros_like(y)
            gradient = torch.autograd.grad(
                y, x, create_graph=True, allow_unused=True, materialize_grads=True
            )
            return _dot(gradient, v)

    return derivative


def evaluate_word(
    word: str, function: ScalarFunction, point: Tensors, directions: tuple[Tensors, ...]
) -> float:
    """The derivative of `function` along `directions` that `word` computes.

    The R's before the first F are ``torch.autograd.grad``; everything from the first F on is
    ``torch.func``. So ``RF`` is a loss with ``torch.func.jvp`` in it that is backpropagated.
    """
    plain = len(word) - len(word.lstrip("R"))
    g = function
    for depth, letter in reversed(list(enumerate(word))):
        v = directions[len(word) - 1 - depth]
        if letter == "F":
            g = _forward(g, v)
        else:
            g = _recorded(g, v) if depth < plain else _reverse(g, v)
    return g(*point).item()
