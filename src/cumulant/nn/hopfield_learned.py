"""Hopfield layers with learned states or learned patterns: pooling and lookup."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from cumulant.core.checks import whole
from cumulant.core.errors import InputError
from cumulant.nn.hopfield import Association, Hopfield

__all__ = ["HopfieldLookup", "HopfieldPooling"]


class HopfieldPooling(Hopfield):
    """Pooling by learned states: reduces a set of any length to `quantity` vectors.

    Args:
        input_size: features of each set member.
        quantity: number of states.
        learn_states: False keeps the random initial states.
        options: passed to `Hopfield`.

    >>> import torch, cumulant as cm
    >>> cm.nn.HopfieldPooling(32, quantity=2, heads=4)(torch.randn(8, 100, 32)).shape
    torch.Size([8, 2, 32])
    """

    def __init__(
        self, input_size: int, *, quantity: int = 1, learn_states: bool = True, **options: Any
    ) -> None:
        options = {"stored_size": input_size, **options}
        super().__init__(input_size, **options)
        count = whole("HopfieldPooling", "quantity", quantity, 1)
        states = torch.empty(count, self.state_size)
        self.states = nn.Parameter(states, requires_grad=learn_states)
        self.reset_parameters()

    def associate(
        self,
        state: Tensor,
        stored: Tensor | None = None,
        value: Tensor | None = None,
        *,
        mask: Tensor | None = None,
    ) -> Association:
        """Pool the set ``(batch, S, input_size)``, the first argument; `value` may differ."""
        if stored is not None:
            raise InputError(
                "HopfieldPooling takes one set; pass values by name: layer(x, value=v)."
            )
        count = len(state) if isinstance(state, Tensor) and state.ndim == 3 else 1  # pyright: ignore[reportUnnecessaryIsInstance]
        states = self.states.expand(count, -1, -1)
        return super().associate(states, state, value, mask=mask)


class HopfieldLookup(Hopfield):
    """Lookup in learned patterns: a memory that belongs to the layer, shared by all inputs.

    Args:
        input_size: features of the incoming states.
        quantity: number of stored patterns.
        learn_patterns: False keeps the random initial patterns.
        separate_values: store separate values; otherwise the patterns are read, through their own
            projection.
        learn_values: False keeps the random initial values.
        options: passed to `Hopfield`.

    >>> import torch, cumulant as cm
    >>> cm.nn.HopfieldLookup(32, quantity=100, heads=4)(torch.randn(8, 5, 32)).shape
    torch.Size([8, 5, 32])
    """

    def __init__(
        self,
        input_size: int,
        *,
        quantity: int = 1,
        learn_patterns: bool = True,
        separate_values: bool = False,
        learn_values: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(input_size, **options)
        count = whole("HopfieldLookup", "quantity", quantity, 1)
        if not separate_values and self.value_size != self.stored_size:
            raise InputError(
                f"HopfieldLookup: a value_size of {self.value_size} beside a stored_size of "
                f"{self.stored_size} needs separate_values=True."
            )
        self.patterns = nn.Parameter(
            torch.empty(count, self.stored_size), requires_grad=learn_patterns
        )
        self.values = None
        if separate_values:
            self.values = nn.Parameter(
                torch.empty(count, self.value_size), requires_grad=learn_values
            )
        self.reset_parameters()

    def associate(
        self,
        state: Tensor,
        stored: Tensor | None = None,
        value: Tensor | None = None,
        *,
        mask: Tensor | None = None,
    ) -> Association:
        """Look up ``(batch, L, input_size)``."""
        if stored is not None or value is not None:
            raise InputError("HopfieldLookup has its own patterns and values; pass only states.")
        count = len(state) if isinstance(state, Tensor) and state.ndim == 3 else 1  # pyright: ignore[reportUnnecessaryIsInstance]
        patterns = self.patterns.expand(count, -1, -1)
        values = None if self.values is None else self.values.expand(count, -1, -1)
        return super().associate(state, patterns, values, mask=mask)
