"""`Hopfield`: a modern Hopfield network as a layer (docs/theory.md, T19; Ramsauer et al.)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cumulant.attention import attend, scaled_dot_product_attention
from cumulant.core.checks import broadcasts_to, real, whole
from cumulant.core.describing import readable, shape_of
from cumulant.core.errors import InputError
from cumulant.core.lazy import Lazy, Snapshot, kept
from cumulant.core.precision import wide, widened, without_autocast
from cumulant.core.typed import linalg
from cumulant.kernels.search import largest
from cumulant.memory.retrieval import Settled, energy, plan, settle

__all__ = ["Association", "Hopfield"]


@dataclass(frozen=True)
class _Space:
    """States and stored patterns per head, ``(batch, heads, length, features)``."""

    state: Tensor
    stored: Tensor
    value: Tensor
    beta: Tensor
    mask: Tensor | None
    dtype: torch.dtype

    def read(self, state: Tensor, value: Tensor, dropout: float = 0.0) -> Tensor:
        """softmax(beta state stored') value."""
        with without_autocast(state):
            return scaled_dot_product_attention(
                state * self.beta, self.stored, value, self.mask, dropout_p=dropout, scale=1.0
            )


class Association(Lazy):
    """Result of a Hopfield layer; ``state`` and ``energy`` are computed on first access.

    ============= =================================== ==========================================
    field         shape                               meaning
    ============= =================================== ==========================================
    ``output``    ``(batch, L, output_size)``         output of the layer
    ``steps``     ``(batch, heads, L)``               number of associations
    ``converged`` ``(batch, heads, L)``               whether the last move was within `tol`
    ``state``     ``(batch, heads, L, head_size)``    states after the last association
    ``energy``    ``(batch, heads, L)``               energy of those states
    ============= =================================== ==========================================
    """

    def __init__(self, output: Tensor, space: _Space, found: Settled, tol: float | None) -> None:
        self.output = output
        self.steps = found.steps + 1
        self.converged = found.change <= (0.0 if tol is None else tol)
        self._inputs = Snapshot((space.stored, space.beta, found.state))
        self._space, self._found = space, found

    def __repr__(self) -> str:
        output = shape_of(self.output)
        if not readable(self.converged):
            return f"Association(output {output})"
        rest, size = int(self.converged.sum()), self.converged.numel()
        return f"Association(output {output}; {rest} of {size} states at rest)"

    @kept
    def state(self) -> Tensor:
        """States after the last association, ``(batch, heads, L, head size)``."""
        self._inputs.check("state", "states, patterns or beta were")
        return self._space.read(self._found.state, self._space.stored)

    @kept
    def energy(self) -> Tensor:
        """Energy of `state` over its visible patterns, ``(batch, heads, L)``; never negative, and
        0 where every pattern is masked."""
        s, state = self._space, self.state
        with without_autocast(state):
            a = attend(state * s.beta, s.stored, attn_mask=s.mask, scale=1.0)
            nothing = torch.zeros_like(state[..., :1])
            count = attend(nothing, torch.zeros_like(s.stored[..., :1]), attn_mask=s.mask)
            G, log_count = a.log_normalizer, count.log_normalizer
            largest = self._largest_norm()
            update = partial(s.read, value=s.stored)
            return energy(state, G, log_count, s.beta[..., 0], largest, update=update)

    def _largest_norm(self) -> Tensor:
        """M, the largest norm of the visible patterns, ``(batch, heads, L or 1)``."""
        s = self._space
        norms = linalg.vector_norm(s.stored, dim=-1)
        if norms.shape[-1] == 0:
            return norms.new_zeros(1)
        if s.mask is None:
            return norms.amax(-1, keepdim=True)
        seen = s.mask if s.mask.dtype == torch.bool else s.mask > -math.inf
        named = {
            "query": torch.ones_like(self.state[..., :1]),
            "key": norms.detach()[..., None],
            "mask": seen[(None,) * (4 - seen.ndim)],
        }
        at = largest(named).index[..., 0]
        return norms.gather(-1, at.clamp_min(0)).masked_fill(at < 0, 0.0)


class Hopfield(nn.Module):
    """Association of states with stored patterns: a modern Hopfield network as a layer (T19).

    State patterns (queries) move to softmax(beta state stored') stored, `steps` times; the last
    association reads the values instead of the stored patterns. One step without the norms is
    multi-head attention. Runs on the streaming kernels: linear memory, derivatives of every order.

    Args:
        state_size: number of state features.
        stored_size, value_size: features of the stored patterns (default `state_size`) and of the
            values (default `stored_size`).
        heads: number of heads, each its own Hopfield space.
        head_size: features per head; default state_size / heads, or the input's own size where it
            is not projected.
        read_size: features each head reads; default `head_size`.
        output_size: features of the output; default `state_size`.
        beta: inverse temperature >= 0, a number or one per head; default 1/sqrt(head_size). A head
            with beta 0 reads the mean of its visible values.
        learn_beta: learn it as the parameter ``log_beta``; the logarithm keeps beta positive.
            Otherwise beta is the buffer ``fixed_beta``.
        steps: exact number of associations; with `tol`, the maximum.
        tol: freeze a state once it moves by at most this (Euclidean norm). A batch runs as long as
            its slowest state, up to 1000 steps: set `steps` too.
        norm_state, norm_stored, norm_value: layer norms of the inputs.
        norm_space: layer norm of the projected states and stored patterns, per head.
        project_state, project_stored, project_value, project_output: linear maps. An unprojected
            input (`head_size` or `read_size` features) is shared by every head; an unprojected
            output concatenates the heads.
        value_through_stored: apply the stored-pattern projection to the values first.
        bias: biases in the linear maps.
        bias_pattern: add a learned pattern with a learned value.
        zero_pattern: add a zero pattern with value zero, so that a state can associate with
            nothing.
        dropout: on the weights that read the values.

    >>> import torch, cumulant as cm
    >>> layer = cm.nn.Hopfield(32, heads=4, steps=3)
    >>> states, stored = torch.randn(2, 5, 32), torch.randn(2, 100, 32)
    >>> layer(states, stored).shape, layer.associate(states, stored).energy.shape
    (torch.Size([2, 5, 32]), torch.Size([2, 4, 5]))
    """

    def __init__(
        self,
        state_size: int,
        *,
        stored_size: int | None = None,
        value_size: int | None = None,
        heads: int = 1,
        head_size: int | None = None,
        read_size: int | None = None,
        output_size: int | None = None,
        beta: float | Tensor | None = None,
        learn_beta: bool = False,
        steps: int | None = None,
        tol: float | None = None,
        norm_state: bool = True,
        norm_stored: bool = True,
        norm_value: bool = True,
        norm_space: bool = False,
        project_state: bool = True,
        project_stored: bool = True,
        project_value: bool = True,
        project_output: bool = True,
        value_through_stored: bool = False,
        bias: bool = True,
        bias_pattern: bool = False,
        zero_pattern: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        me = type(self).__name__
        self.state_size = whole(me, "state_size", state_size, 1)
        self.stored_size = _size(me, "stored_size", stored_size, self.state_size)
        self.value_size = _size(me, "value_size", value_size, self.stored_size)
        self.heads = whole(me, "heads", heads, 1)
        self.head_size = _head_size(me, self, head_size, project_state, project_stored)
        width = self.heads * self.head_size
        unread = self.head_size if project_value else self.value_size
        self.read_size = _size(me, "read_size", read_size, unread)
        joined = self.heads * self.read_size
        self.output_size = _size(
            me, "output_size", output_size, self.state_size if project_output else joined
        )
        self.steps, self.tol = plan(me, steps, tol)
        if self.steps == 0:
            raise InputError(f"{me}: steps must be at least 1; the last of them reads the values.")
        self.dropout = real(me, "dropout", dropout, least=0.0, most=1.0)
        self.value_through_stored, self.zero_pattern = value_through_stored, zero_pattern

        def norm(wanted: bool, size: int) -> nn.LayerNorm | None:
            return nn.LayerNorm(size) if wanted else None

        def linear(wanted: bool, inputs: int, outputs: int) -> nn.Linear | None:
            return nn.Linear(inputs, outputs, bias=bias) if wanted else None

        self.norm_state = norm(norm_state, self.state_size)
        self.norm_stored = norm(norm_stored, self.stored_size)
        self.norm_value = norm(norm_value, self.value_size)
        self.norm_space = norm(norm_space, self.head_size)
        source = width if value_through_stored else self.value_size
        self.project_state = linear(project_state, self.state_size, width)
        self.project_stored = linear(project_stored, self.stored_size, width)
        self.project_value = linear(project_value, source, joined)
        self.project_output = linear(project_output, joined, self.output_size)
        _check_unprojected(me, self)
        self.bias_stored = self.bias_value = None
        if bias_pattern:
            self.bias_stored = nn.Parameter(torch.empty(self.heads, 1, self.head_size))
            self.bias_value = nn.Parameter(torch.empty(self.heads, 1, self.read_size))
        self._set_beta(1 / math.sqrt(self.head_size) if beta is None else beta, learn_beta)
        self.reset_parameters()

    def _set_beta(self, beta: Any, learn: bool) -> None:
        me = type(self).__name__
        start = _per_head(me, beta, self.heads)
        if learn and not bool((start > 0).all()):
            raise InputError(
                f"{me}: a learned beta must start above 0, because the parameter is its "
                "logarithm. Start from a small beta, or set learn_beta=False."
            )
        self.fixed_beta: Tensor | None
        self.log_beta: nn.Parameter | None
        self.register_buffer("fixed_beta", None if learn else start)
        self.register_parameter("log_beta", nn.Parameter(start.log()) if learn else None)

    def reset_parameters(self) -> None:
        """Draw weights as `torch.nn.MultiheadAttention` does: Xavier uniform, biases zero."""
        for layer in (
            self.project_state,
            self.project_stored,
            self.project_value,
            self.project_output,
        ):
            if layer is not None:
                nn.init.xavier_uniform_(layer.weight)
                if layer.bias is not None:  # pyright: ignore[reportUnnecessaryComparison]
                    nn.init.zeros_(layer.bias)
        for row in (self.bias_stored, self.bias_value):
            if row is not None:
                nn.init.normal_(row, std=0.02)
        for norm in (self.norm_state, self.norm_stored, self.norm_value, self.norm_space):
            if norm is not None:
                norm.reset_parameters()
        for name in ("states", "patterns", "values"):  # of pooling and lookup
            rows = getattr(self, name, None)
            if rows is not None:
                nn.init.normal_(rows, std=0.02)

    def extra_repr(self) -> str:
        return f"heads={self.heads}, head_size={self.head_size}, steps={self.steps}, tol={self.tol}"

    @property
    def beta(self) -> Tensor:
        """Inverse temperature per head, ``(heads,)``."""
        if self.log_beta is not None:
            return wide(self.log_beta).exp()
        if self.fixed_beta is None:
            raise RuntimeError("a layer has a fixed or a learned beta")
        return self.fixed_beta

    def forward(
        self,
        state: Tensor,
        stored: Tensor | None = None,
        value: Tensor | None = None,
        *,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Associate ``(batch, L, state_size)`` with ``(batch, S, stored_size)``.

        Args:
            state: the states.
            stored: the stored patterns; default `state`.
            value: the values to read, ``(batch, S, value_size)``; default `stored`.
            mask: boolean (True = may associate) or added to the scores; broadcasts to
                ``(batch, heads, L, S)``. Pass padding ``(batch, S)`` as
                ``~padded[:, None, None, :]``.

        Returns:
            Tensor ``(batch, L, output_size)``.
        """
        return self.associate(state, stored, value, mask=mask).output

    def associate(
        self,
        state: Tensor,
        stored: Tensor | None = None,
        value: Tensor | None = None,
        *,
        mask: Tensor | None = None,
    ) -> Association:
        """Like `forward`, but also returns the states per head, their energy and step counts."""
        space = self._space(state, stored, value, mask)
        # The last association reads the values, so the states move one time fewer.
        found = settle(
            lambda x: space.read(x, space.stored),
            space.state,
            self.steps - 1,
            self.tol,
            separate=False,
        )
        heads = space.read(found.state, space.value, self.dropout if self.training else 0.0)
        output = heads.transpose(-3, -2).flatten(-2).to(space.dtype)
        if self.project_output is not None:
            output = self.project_output(output)
        return Association(output, space, found, self.tol)

    def _space(
        self, state: Tensor, stored: Tensor | None, value: Tensor | None, mask: Tensor | None
    ) -> _Space:
        stored = state if stored is None else stored
        value = stored if value is None else value
        self._check(state, stored, value)
        mask = self._checked_mask(mask, (len(state), self.heads, state.shape[1], stored.shape[1]))
        q = self._heads(state, self.norm_state, self.project_state, self.head_size)
        k = self._heads(stored, self.norm_stored, self.project_stored, self.head_size)
        if self.value_through_stored and self.project_stored is not None:
            x = value if self.norm_value is None else self.norm_value(value)
            v = self._heads(self.project_stored(x), None, self.project_value, self.read_size)
        else:
            v = self._heads(value, self.norm_value, self.project_value, self.read_size)
        if self.norm_space is not None:
            q, k = self.norm_space(q), self.norm_space(k)
        k, v, mask = self._with_own_patterns(k, v, mask)
        kind = q.dtype
        compute = widened(kind)
        q, k, v = (x.to(compute) for x in (q, k, v))
        if mask is not None and mask.is_floating_point():
            mask = mask.to(compute)
        return _Space(q, k, v, self.beta.to(compute)[:, None, None], mask, kind)

    def _check(self, state: Tensor, stored: Tensor, value: Tensor) -> None:
        me = type(self).__name__
        for name, x, size in (
            ("state", state, self.state_size),
            ("stored", stored, self.stored_size),
            ("value", value, self.value_size),
        ):
            if not isinstance(x, Tensor) or x.ndim != 3 or x.shape[-1] != size:  # pyright: ignore[reportUnnecessaryIsInstance]
                came = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__  # pyright: ignore[reportUnnecessaryIsInstance]
                raise InputError(
                    f"{me}: {name} must have shape (batch, length, {size}), not {came}. "
                    "Pass a single example as x[None]."
                )
        if stored.shape[:-1] != value.shape[:-1] or state.shape[0] != stored.shape[0]:
            raise InputError(
                f"{me}: stored and value must have the same batch and length, and state the same "
                f"batch; got {tuple(stored.shape)}, {tuple(value.shape)} and "
                f"{tuple(state.shape)}."
            )

    def _with_own_patterns(
        self, stored: Tensor, value: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The learned pattern and the zero pattern, which every state sees."""
        length = stored.shape[-2]
        if self.bias_stored is not None and self.bias_value is not None:
            stored, value = _append(stored, self.bias_stored), _append(value, self.bias_value)
        if self.zero_pattern:
            stored, value = (
                _append(x, x.new_zeros(self.heads, 1, x.shape[-1])) for x in (stored, value)
            )
        more = stored.shape[-2] - length
        if mask is not None and more:
            mask = mask.expand(*mask.shape[:-1], length)
            visible = mask.new_ones if mask.dtype == torch.bool else mask.new_zeros
            mask = torch.cat([mask, visible(*mask.shape[:-1], more)], -1)
        return stored, value, mask

    def _checked_mask(self, mask: Any, shape: tuple[int, ...]) -> Tensor | None:
        if mask is None:
            return None
        plain = isinstance(mask, Tensor) and (mask.dtype == torch.bool or mask.is_floating_point())
        if not plain or not broadcasts_to(mask.shape, shape):
            came = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, Tensor) else repr(mask)
            raise InputError(
                f"{type(self).__name__}: mask must be boolean (True = may associate) or floating "
                f"point (added) and broadcast to (batch, heads, L, S) = {shape}; got "
                f"{came[:60]}. Pass padding (batch, S) as ~padded[:, None, None, :]."
            )
        return mask

    def _heads(
        self, x: Tensor, norm: nn.LayerNorm | None, project: nn.Linear | None, size: int
    ) -> Tensor:
        """``(batch, heads, length, size)``; an unprojected input is shared by every head."""
        x = x if norm is None else norm(x)
        if project is None:
            return x[:, None].expand(-1, self.heads, -1, -1)
        return torch.unflatten(project(x), -1, (self.heads, size)).transpose(-3, -2)


def _append(x: Tensor, row: Tensor) -> Tensor:
    return torch.cat([x, row.to(x.dtype).expand(x.shape[0], *row.shape)], -2)


def _size(me: str, name: str, given: Any, default: int) -> int:
    return default if given is None else whole(me, name, given, 1)


def _check_unprojected(me: str, layer: Hopfield) -> None:
    """Set the sizes that the input fixes where there is no projection."""
    if layer.project_value is None and layer.read_size != layer.value_size:
        raise InputError(
            f"{me}: without a projection of the values, read_size is value_size, "
            f"{layer.value_size}, not {layer.read_size}."
        )
    joined = layer.heads * layer.read_size
    if layer.project_output is None and layer.output_size != joined:
        raise InputError(
            f"{me}: without a projection of the output, output_size is heads * read_size, "
            f"{joined}, not {layer.output_size}."
        )
    if not layer.value_through_stored:
        return
    if layer.project_stored is None or layer.project_value is None:
        raise InputError(f"{me}: value_through_stored needs project_stored and project_value.")
    if layer.value_size != layer.stored_size:
        raise InputError(
            f"{me}: value_through_stored needs value_size == stored_size, but value_size is "
            f"{layer.value_size} and stored_size {layer.stored_size}."
        )


def _head_size(me: str, layer: Hopfield, given: Any, state: bool, stored: bool) -> int:
    fixed = {
        size
        for projected, size in ((state, layer.state_size), (stored, layer.stored_size))
        if not projected
    }
    if len(fixed) > 1:
        raise InputError(
            f"{me}: without projections, state_size and stored_size must be equal; got "
            f"{layer.state_size} and {layer.stored_size}."
        )
    if given is not None:
        size = whole(me, "head_size", given, 1)
    elif fixed:
        size = next(iter(fixed))
    elif layer.state_size % layer.heads:
        raise InputError(
            f"{me}: state_size {layer.state_size} is not a multiple of {layer.heads} heads; give "
            "head_size."
        )
    else:
        size = layer.state_size // layer.heads
    if fixed and size not in fixed:
        raise InputError(
            f"{me}: without a projection, head_size is the input's {next(iter(fixed))}, not {size}."
        )
    return size


def _per_head(me: str, beta: Any, heads: int) -> Tensor:
    try:
        x = torch.as_tensor(beta, dtype=torch.get_default_dtype()).detach().clone()
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"{me}: beta must be a number or a tensor, not {beta!r:.40}.") from None
    if x.ndim > 1 or x.numel() not in (1, heads):
        raise InputError(
            f"{me}: beta must be a number or one for each of {heads} heads, but has shape "
            f"{tuple(x.shape)}."
        )
    if not bool(((x >= 0) & x.isfinite()).all()):
        raise InputError(f"{me}: beta must be finite and at least 0; got {beta}.")
    return x.expand(heads).clone()
