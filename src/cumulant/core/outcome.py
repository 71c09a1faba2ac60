"""How an iteration ended: one code per problem of a batch, and what each code means.

Every iteration that can fail returns an object with a ``status``, an `Outcome`, and takes
``throw=``: True (the default) raises a `ConvergenceError` unless every problem converged, False
returns the result as it stands. In an implementation::

    result = Solution(value, Outcome(code))            # or a dataclass with a `status`
    return result.status.check("sinkhorn", result) if throw else result

An `Outcome` is a named tuple of one tensor, so it passes through ``torch.func.vmap`` and can be
indexed and compared in a batch; `Outcome.check` raises inside vmap too.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from cumulant.core.checks import holds
from cumulant.core.describing import described_fields, readable, shape_of
from cumulant.core.errors import ConvergenceError, NoSolutionError
from cumulant.core.typed import Function

__all__ = ["Code", "Diagnosis", "Outcome", "Solution"]

_T = TypeVar("_T")


class Code(IntEnum):
    """How one problem ended."""

    CONVERGED = 0
    BOUNDARY = 1
    OUTSIDE = 2
    STALLED = 3
    DIVERGING = 4
    CYCLING = 5
    UNFINISHED = 6
    NOT_FINITE = 7
    INTERRUPTED = 8


class Diagnosis(NamedTuple):
    """What a code means: what happened, the likely cause, and what to try."""

    happened: str
    cause: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.happened}. Likely cause: {self.cause}. Try: {self.remedy}"


DIAGNOSES = {
    Code.BOUNDARY: Diagnosis(
        "the mean lies on the boundary of the convex hull of the support",
        "an extreme point, or a count of zero; the natural parameter would be infinite",
        "move the mean inside, a little towards mean(0)",
    ),
    Code.OUTSIDE: Diagnosis(
        "the mean lies outside the convex hull of the support, so no natural parameter has it",
        "different units, or a mean of other points",
        "compare the mean with the support",
    ),
    Code.STALLED: Diagnosis(
        "the residual stopped falling",
        "the rounding limit, or no solution nearby",
        "float64, a larger tol, another start or another solver",
    ),
    Code.DIVERGING: Diagnosis(
        "the residual grew without bound",
        "the map expands here",
        "damping below 1, solver='broyden', or a start closer to the solution",
    ),
    Code.CYCLING: Diagnosis(
        "the iteration returns to the same states after two to eight steps",
        "the map overshoots",
        "damping=0.5 or solver='anderson'",
    ),
    Code.UNFINISHED: Diagnosis(
        "the step limit was reached while the iteration was still improving",
        "slow convergence",
        "a larger max_steps or a larger tol",
    ),
    Code.NOT_FINITE: Diagnosis(
        "a value became NaN or infinite",
        "a singularity of the function, or overflow",
        "look at the function there, or start elsewhere",
    ),
    Code.INTERRUPTED: Diagnosis(
        "the iteration was interrupted",
        "Ctrl-C",
        "run it again from this result",
    ),
}


class Outcome(NamedTuple):
    """How each problem ended: `code` ``(*batch,)`` holds members of `Code`.

    ``status.converged``, ``status.stalled`` and so on are boolean tensors, one per code;
    ``status == "converged"`` is true if it holds for the whole batch. As a string it is a
    diagnosis: what happened, the likely cause, what to try.

    >>> import torch
    >>> from cumulant.core.outcome import Code, Outcome
    >>> status = Outcome(torch.tensor([Code.CONVERGED, Code.UNFINISHED]))
    >>> status.converged, status == "converged"
    (tensor([ True, False]), False)
    >>> print(status)
    1 of 2 converged; 1 of 2 unfinished: the step limit was reached while the iteration was still \
improving. Likely cause: slow convergence. Try: a larger max_steps or a larger tol
    """

    code: Tensor

    @classmethod
    def of(cls, converged: Tensor | bool, otherwise: Code = Code.UNFINISHED) -> Outcome:
        """Converged where the condition holds, `otherwise` elsewhere."""
        good = torch.as_tensor(converged)
        return cls(torch.where(good, int(Code.CONVERGED), int(otherwise)))

    @property
    def converged(self) -> Tensor:
        """The tolerance was reached."""
        return self.code == Code.CONVERGED

    @property
    def boundary(self) -> Tensor:
        """The mean lies on the boundary of the hull: the solution is at infinity."""
        return self.code == Code.BOUNDARY

    @property
    def outside(self) -> Tensor:
        """The mean lies outside the hull: there is no solution."""
        return self.code == Code.OUTSIDE

    @property
    def stalled(self) -> Tensor:
        """The residual stopped falling above the tolerance."""
        return self.code == Code.STALLED

    @property
    def diverging(self) -> Tensor:
        """The residual grew without bound."""
        return self.code == Code.DIVERGING

    @property
    def cycling(self) -> Tensor:
        """The iteration returns to the same states."""
        return self.code == Code.CYCLING

    @property
    def unfinished(self) -> Tensor:
        """The step limit was reached first."""
        return self.code == Code.UNFINISHED

    @property
    def not_finite(self) -> Tensor:
        """A value became NaN or infinite."""
        return self.code == Code.NOT_FINITE

    @property
    def interrupted(self) -> Tensor:
        """Ctrl-C interrupted the iteration."""
        return self.code == Code.INTERRUPTED

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str) and other.upper() in Code.__members__:
            return bool((self.code == Code[other.upper()]).all())
        return isinstance(other, Outcome) and torch.equal(self.code, other.code)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __str__(self) -> str:
        if holds(self.converged) is None:  # inside vmap, where no value can be read
            return f"Outcome(code={shape_of(self.code)})"
        total = self.code.numel()
        if total == 1:
            return _sentence(Code(int(self.code)))
        if total == 0:
            return "nothing to solve"
        counts = ((kind, int((self.code == kind).sum())) for kind in Code)
        return "; ".join(f"{n} of {total} {_sentence(kind)}" for kind, n in counts if n)

    def __repr__(self) -> str:
        return str(self) if readable(self.code) else f"Outcome(code={shape_of(self.code)})"

    def check(self, call: str, result: _T, note: str = "") -> _T:
        """Return `result` if every problem converged.

        Args:
            call: name of the function, for the message.
            result: what ``throw=False`` returns; the error carries it as ``result``. Inside vmap
                it must be a named tuple of tensors, and the error carries the whole batch.
            note: figures to add to the message, such as the residual and the tolerance.

        Raises:
            NoSolutionError: some problem has no solution (outside, or on the boundary of, a hull).
            ConvergenceError: some problem has not converged.
        """
        fine = holds(self.converged)
        if fine is False:
            raise _error(call, self, result, note)
        if fine is None:
            leaves, layout = pytree.tree_flatten(result)
            _Checked.apply(self.code, (call, note, layout), *(x.detach() for x in leaves))
        return result


class Solution(NamedTuple):
    """A value and how each problem ended; where the status is not converged, the value is finite
    but meaningless."""

    value: Tensor
    status: Outcome

    __repr__ = described_fields


def _sentence(kind: Code) -> str:
    return "converged" if kind == Code.CONVERGED else f"{kind.name.lower()}: {DIAGNOSES[kind]}"


def _error(call: str, status: Outcome, result: Any, note: str) -> ConvergenceError:
    kind = NoSolutionError if bool((status.outside | status.boundary).any()) else ConvergenceError
    figures = f" ({note})" if note else ""
    return kind(f"{call}: {status}{figures}. throw=False returns the result as it stands.", result)


class _Checked(Function):
    """Identity on codes that raises on a bad one; inside vmap it sees the whole batch."""

    @staticmethod
    def forward(code: Tensor, said: tuple[str, str, Any], *leaves: Tensor) -> Tensor:
        status, (call, note, layout) = Outcome(code), said
        if status != "converged":
            raise _error(call, status, pytree.tree_unflatten(leaves, layout), note)
        return code.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return (None,) * len(ctx.needs_input_grad)

    @staticmethod
    def jvp(ctx: Any, *grads: Any) -> Any:
        return None

    @staticmethod
    def vmap(  # pyright: ignore[reportIncompatibleMethodOverride]
        info: Any, in_dims: tuple[int | None, ...], code: Tensor, said: Any, *leaves: Tensor
    ) -> Any:
        front = [
            x if dim is None else x.movedim(dim, 0)
            for x, dim in zip((code, *leaves), (in_dims[0], *in_dims[2:]), strict=True)
        ]
        out = _Checked.apply(front[0], said, *front[1:])
        return cast(Tensor, out), None if in_dims[0] is None else 0
