"""What torch is known to get wrong: operator, words, issue, remedy.

The table explains faults; it never decides that one is there. Tests pin the entries: one that
fails says that torch was fixed and the entry can go.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["KNOWN", "KnownFault", "known_fault"]

_ISSUES = "https://github.com/pytorch/pytorch/issues/"
_OURS = "use cumulant.differentiable(), or the function of this name in cumulant.derivatives"
_DETACHED = "use reverse over reverse, or forward over reverse"


@dataclass(frozen=True)
class KnownFault:
    """A documented fault of torch: where it is tracked, and what to do instead."""

    issue: str | None
    remedy: str
    summary: str


def _entry(number: int, summary: str, remedy: str) -> KnownFault:
    return KnownFault(f"{_ISSUES}{number}", remedy, summary)


_ATTENTION = _entry(
    128971,
    "the fused kernels have no forward mode and no second derivative",
    "use cumulant.scaled_dot_product_attention, sdpa_replaced() or differentiable()",
)
_LINEAR_ALGEBRA = "the forward-mode rule treats a saved factorization as a constant"

# By the last part of torch's name for the function: F.layer_norm and torch.layer_norm are one.
KNOWN: dict[str, KnownFault] = {
    "layer_norm": _entry(196700, "the forward-mode rule is not differentiable", _OURS),
    "native_layer_norm": _entry(196700, "the forward-mode rule is not differentiable", _OURS),
    "batch_norm": _entry(196699, "the forward-mode rule is not differentiable", _OURS),
    "instance_norm": _entry(196699, "it is computed by batch_norm", _OURS),
    "scaled_dot_product_attention": _ATTENTION,
    "multi_head_attention_forward": _ATTENTION,  # calls it by itself
    "solve": _entry(196695, _LINEAR_ALGEBRA, _OURS),
    "det": _entry(196696, _LINEAR_ALGEBRA, _OURS),
    "slogdet": _entry(196697, _LINEAR_ALGEBRA, _OURS),
    "logdet": _entry(196697, _LINEAR_ALGEBRA, _OURS),
    "householder_product": _entry(196698, _LINEAR_ALGEBRA, _OURS),
    "cholesky_inverse": _entry(196682, "factors in the wrong order", _OURS),
    "cholesky_solve": _entry(196694, "factors in the wrong order", "solve with L @ L.mT instead"),
    "cumprod": _entry(196701, "wrong at a zero factor", _DETACHED),
    "mse_loss": _entry(123996, "a zero tangent is written to", "use (input - target).square()"),
    "linear_cross_entropy": KnownFault(
        None,
        "use cumulant.differentiable(), or pass options=None",
        "the chunked form has no forward mode: its tangent is 0",
    ),
    "autograd.Function": _entry(
        197867,
        "torch runs jvp with forward mode switched off, which drops outer tangents",
        "in jvp, take unpack_dual(x).primal of saved tensors and compute under "
        "_set_fwd_grad_enabled(True), both of torch.autograd.forward_ad",
    ),
}


def known_fault(name: str, *, custom: bool = False) -> KnownFault | None:
    """The entry for an operator as torch names it; `custom` for an ``autograd.Function``."""
    return KNOWN.get("autograd.Function" if custom else name.rsplit(".", 1)[-1])
