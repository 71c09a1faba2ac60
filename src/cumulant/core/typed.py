"""Types for the untyped parts of torch.

`linalg` is `torch.linalg` and `functions` is `torch`, each typed by a protocol that lists the
functions Cumulant calls. Calls still look the function up in torch, as they would without this
module. To use another function, add it to the protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, ParamSpec, Protocol, TypeVar, cast

import torch
import torch.autograd.forward_ad
import torch.library
import torch.overrides
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

_P = ParamSpec("_P")
_T_co = TypeVar("_T_co", covariant=True)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class _Eigh(NamedTuple):
    eigenvalues: Tensor
    eigenvectors: Tensor


class _CholeskyEx(NamedTuple):
    L: Tensor
    info: Tensor


class _InvEx(NamedTuple):
    inverse: Tensor
    info: Tensor


class _Lstsq(NamedTuple):
    solution: Tensor
    residuals: Tensor
    rank: Tensor
    singular_values: Tensor


class _QR(NamedTuple):
    Q: Tensor
    R: Tensor


class _Slogdet(NamedTuple):
    sign: Tensor
    logabsdet: Tensor


class _SVD(NamedTuple):
    U: Tensor
    S: Tensor
    Vh: Tensor


class Linalg(Protocol):
    """The functions of `torch.linalg` that Cumulant calls."""

    LinAlgError: type[RuntimeError]

    def cholesky(self, A: Tensor) -> Tensor: ...
    def cholesky_ex(self, A: Tensor) -> _CholeskyEx: ...
    def det(self, A: Tensor) -> Tensor: ...
    def eig(self, A: Tensor) -> _Eigh: ...
    def eigh(self, A: Tensor) -> _Eigh: ...
    def eigvals(self, A: Tensor) -> Tensor: ...
    def eigvalsh(self, A: Tensor) -> Tensor: ...
    def householder_product(self, A: Tensor, tau: Tensor) -> Tensor: ...
    def inv(self, A: Tensor) -> Tensor: ...
    def inv_ex(self, A: Tensor) -> _InvEx: ...
    def lstsq(self, A: Tensor, B: Tensor, *, driver: str | None = None) -> _Lstsq: ...
    def lu_factor(self, A: Tensor) -> tuple[Tensor, Tensor]: ...
    def lu_solve(self, LU: Tensor, pivots: Tensor, B: Tensor, *, left: bool = True) -> Tensor: ...
    def matrix_exp(self, A: Tensor) -> Tensor: ...
    def matrix_norm(
        self,
        A: Tensor,
        ord: float | str = "fro",
        dim: tuple[int, int] = (-2, -1),
        keepdim: bool = False,
    ) -> Tensor: ...
    def matrix_power(self, A: Tensor, n: int) -> Tensor: ...
    def matrix_rank(
        self,
        A: Tensor,
        *,
        atol: float | Tensor | None = None,
        rtol: float | Tensor | None = None,
        hermitian: bool = False,
    ) -> Tensor: ...
    def pinv(
        self,
        A: Tensor,
        *,
        atol: float | Tensor | None = None,
        rtol: float | Tensor | None = None,
        hermitian: bool = False,
    ) -> Tensor: ...
    def qr(self, A: Tensor, mode: Literal["reduced", "complete", "r"] = "reduced") -> _QR: ...
    def slogdet(self, A: Tensor) -> _Slogdet: ...
    def solve(self, A: Tensor, B: Tensor, *, left: bool = True) -> Tensor: ...
    def solve_triangular(
        self,
        A: Tensor,
        B: Tensor,
        *,
        upper: bool,
        left: bool = True,
        unitriangular: bool = False,
    ) -> Tensor: ...
    def svd(self, A: Tensor, full_matrices: bool = True) -> _SVD: ...
    def svdvals(self, A: Tensor) -> Tensor: ...
    def vector_norm(
        self,
        x: Tensor,
        ord: float = 2,
        dim: int | Sequence[int] | None = None,
        keepdim: bool = False,
        *,
        dtype: torch.dtype | None = None,
    ) -> Tensor: ...


class Functions(Protocol):
    """The untyped functions of `torch` that Cumulant calls."""

    def broadcast_shapes(self, *shapes: Sequence[int]) -> torch.Size: ...
    def broadcast_tensors(self, *tensors: Tensor) -> tuple[Tensor, ...]: ...
    def from_numpy(self, ndarray: NDArray[np.generic]) -> Tensor: ...
    def unique(self, input: Tensor) -> Tensor: ...
    def manual_seed(self, seed: int) -> torch.Generator: ...


class Special(Protocol):
    """The functions of `torch.special` that Cumulant calls."""

    def entr(self, x: Tensor) -> Tensor: ...
    def i0e(self, x: Tensor) -> Tensor: ...
    def log_ndtr(self, x: Tensor) -> Tensor: ...
    def ndtri(self, x: Tensor) -> Tensor: ...


class _Fourier(Protocol):
    def rfft(self, input: Tensor) -> Tensor: ...


class _Functional(Protocol):
    def jacobian(self, func: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor: ...


class _Overrides(Protocol):
    def resolve_name(self, f: Callable[..., Any]) -> str | None: ...


class _Random(Protocol):
    def fork_rng(
        self, devices: Sequence[int] | None = None, *, device_type: str = "cuda"
    ) -> AbstractContextManager[None]: ...


class _Compiler(Protocol):
    def disable(self, fn: Callable[..., Any]) -> Callable[..., Any]: ...


class _Functorch(Protocol):
    def maybe_current_level(self) -> int | None: ...
    def is_batchedtensor(self, x: Tensor) -> bool: ...
    def is_legacy_batchedtensor(self, x: Tensor) -> bool: ...
    def is_functorch_wrapped_tensor(self, x: Tensor) -> bool: ...
    def get_unwrapped(self, x: Tensor) -> Tensor: ...


class _ForwardMode(Protocol):
    _current_level: int

    def unpack_dual(self, tensor: Tensor) -> torch.autograd.forward_ad.UnpackedDualTensor: ...


class Operator(Protocol[_P, _T_co]):
    """A custom operator of torch."""

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _T_co: ...
    def register_fake(self, fn: Callable[_P, Any], /) -> Callable[_P, Any]: ...
    def register_autograd(
        self, backward: Callable[..., Any], /, *, setup_context: Callable[..., None] | None = None
    ) -> None: ...


def operator(name: str) -> Callable[[Callable[_P, _T_co]], Operator[_P, _T_co]]:
    """`torch.library.custom_op` of a function that changes no argument."""
    return torch.library.custom_op(name, mutates_args=())


linalg: Linalg = torch.linalg
functions: Functions = torch
special: Special = torch.special
fft: _Fourier = torch.fft
# A cast, because jacobian returns tuples as well, but not for a function of one tensor.
functional = cast(_Functional, torch.autograd.functional)
overrides: _Overrides = torch.overrides
random: _Random = torch.random
compiler: _Compiler = torch.compiler
functorch: _Functorch = getattr(torch._C, "_functorch")  # noqa: B009 (torch hides it)
forward_ad: _ForwardMode = torch.autograd.forward_ad

if TYPE_CHECKING:

    class Function(torch.autograd.Function):
        """`torch.autograd.Function`, with a type for `apply`."""

        @classmethod
        def apply(cls, *args: Any, **kwargs: Any) -> Any: ...

    class DispatchMode(TorchDispatchMode):
        """`TorchDispatchMode`, with a type for its constructor."""

        def __init__(self) -> None: ...

else:
    Function = torch.autograd.Function
    DispatchMode = TorchDispatchMode


class _Stepping(Protocol):
    def step(self, closure: Any, /) -> Any: ...


def take_step(optimizer: _Stepping, closure: Callable[[], object] | None = None) -> None:
    """One step of an optimizer of torch."""
    optimizer.step(closure)


class _Listed(Protocol):
    def tolist(self) -> list[Any]: ...


def tolist(x: _Listed) -> list[Any]:
    """The entries of a tensor: numbers, or lists of them as deep as it has dimensions."""
    return x.tolist()


class _Named(Protocol):
    def named_modules(self) -> Iterator[tuple[str, nn.Module]]: ...


def named_modules(module: _Named) -> Iterator[tuple[str, nn.Module]]:
    """Name and module, for a module and all its descendants, each once."""
    return module.named_modules()


class _Differentiated(Protocol):
    def backward(self) -> None: ...


def backward(loss: _Differentiated) -> None:
    """Adds the gradient of a scalar to its leaves."""
    loss.backward()
