"""A second torch device for tests: real values, no mixing of devices, counted synchronizations.

The device "other" exists in Python alone (torch's PrivateUse1 backend). Its tensors hold CPU
tensors and compute on them, so results are real numbers. As on a GPU, an operation on tensors of
two devices raises, and whatever makes the host wait for the device is counted: reading a number, a
shape that depends on values, copies between host and device.

`counted` counts. `moved` runs existing tests on the device: factory functions called from the tests
themselves make tensors there, while those called from the package do what they always do, so a
forgotten ``device=`` meets a tensor of the other device and raises.
"""

from __future__ import annotations

import sys
import traceback
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)

NAME = "other"
DEVICE = torch.device("privateuseone:0")

_TESTS = str(Path(__file__).parent)
_PACKAGE = str(Path(__file__).parents[1] / "src" / "cumulant")

# Operators whose result, or its shape, the host must wait for.
_WAITS = {
    *("_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "bincount"),
    *("_unique2", "unique_dim", "unique_consecutive", "linalg_eigh", "_linalg_eigh"),
    *("linalg_eig", "linalg_eigvals", "linalg_svd", "_linalg_svd", "linalg_lstsq", "multinomial"),
}
# These raise where a matrix is singular, so they read a number.
_RAISE = {"linalg_cholesky", "linalg_inv", "linalg_solve", "_linalg_solve_ex", "cholesky_inverse"}
_COPIES = {"_to_copy", "copy_", "_copy_from", "lift_fresh", "lift_fresh_copy"}

_counts: list[Counter[str]] = []


class OtherTensor(torch.Tensor):
    """A tensor of the device; `host` holds its values."""

    host: torch.Tensor

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> OtherTensor:
        out = torch.Tensor._make_wrapper_subclass(
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=DEVICE,
        )
        out.host = host
        return out

    def __init__(self, host: torch.Tensor) -> None: ...

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def numpy(self, *, force: bool = False):
        if not _called_from_a_test(1):
            raise TypeError("a tensor of another device has no numpy array: use .cpu() first")
        return self.host.detach().numpy()

    def tolist(self) -> list:
        _count("to the host")
        return self.host.tolist()

    def __array__(self, dtype=None, copy=None):
        if not _called_from_a_test(1):
            raise TypeError("a tensor of another device has no numpy array: use .cpu() first")
        return self.host.detach().__array__(dtype)

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"OtherTensor({self.host!r})"

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        return _run(op, args, kwargs or {})


def _run(op, args, kwargs):
    """The operator on the values of its arguments, the result on the device."""
    name = op._schema.name.removeprefix("aten::")
    flat = tree_flatten((args, kwargs))[0]
    given = [x for x in flat if isinstance(x, OtherTensor)]
    strangers = [x for x in flat if isinstance(x, torch.Tensor) and not isinstance(x, OtherTensor)]
    if given and name not in _COPIES and any(x.ndim for x in strangers):
        raise RuntimeError(f"tensors of two devices meet in {name}")
    target = kwargs.get("device")
    where = None if target is None else torch.device(target).type
    leaves = name in ("_to_copy", "to") and where in ("cpu", "meta")
    into_host = name == "copy_" and not isinstance(args[0], OtherTensor)
    if (leaves and where == "cpu") or into_host:
        _count("to the host")
    elif strangers and name in _COPIES:
        _count("from the host")
    elif name in _WAITS or name in _RAISE or _is_masked_index(name, args):
        _count(name)

    def host(x):
        if isinstance(x, OtherTensor):
            return x.host
        if isinstance(x, torch.device) and x.type != "meta":
            return torch.device("cpu")
        return x

    out = op(*tree_map(host, args), **tree_map(host, kwargs))
    if leaves:
        return out
    known = {id(x.host): x for x in given}  # operations in place return their argument

    def device(x):
        if not isinstance(x, torch.Tensor) or (into_host and x is args[0]):
            return x
        if x._is_zerotensor():  # a zero without memory; here torch no longer looks after it
            return OtherTensor(torch.zeros(x.shape, dtype=x.dtype))
        return known[id(x)] if id(x) in known else OtherTensor(x)

    return tree_map(device, out)


def _is_masked_index(name, args):
    """x[mask]: how many rows that gives, only the device knows."""
    if name not in ("index", "index_put_", "index_put", "_index_put_impl_"):
        return False
    return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])


def _count(what: str) -> None:
    if not _counts:
        return
    frames = [f for f in traceback.extract_stack() if f.filename.startswith(_PACKAGE)]
    place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "the test"
    for counter in _counts:
        counter[f"{what} at {place}"] += 1


@contextmanager
def counted() -> Generator[Counter[str]]:
    """Counts what makes the host wait for the device: operator and place, how often."""
    counter: Counter[str] = Counter()
    _counts.append(counter)
    try:
        yield counter
    finally:
        _counts.remove(counter)


class _Module(_DummyBackendModule):
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]


_setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
_library = torch.library.Library("_", "IMPL")
_library.fallback(lambda op, *args, **kwargs: _run(op, args, kwargs), "PrivateUse1")

# torch makes these by resizing an empty tensor, which a tensor written in Python cannot do.
_aten = torch.library.Library("aten", "IMPL")
for _name in ("arange", "arange.start", "arange.start_step", "eye", "eye.m", "randperm"):
    _packet, _, _overload = _name.partition(".")
    _op = getattr(getattr(torch.ops.aten, _packet), _overload or "default")
    _aten.impl(_name, lambda *args, _op=_op, **kwargs: _run(_op, args, kwargs), "PrivateUse1")


def to_other(*tensors):
    """Copies on the device, leaves of autograd if the originals require a gradient."""
    out = [OtherTensor(x.detach().clone()).requires_grad_(x.requires_grad) for x in tensors]
    return out if len(out) > 1 else out[0]


def to_host(x):
    """The values, without autograd."""
    x = x.detach()
    return x.host if isinstance(x, OtherTensor) else x


_MAKE = {
    *(torch.empty, torch.zeros, torch.ones, torch.full, torch.eye, torch.arange, torch.linspace),
    *(torch.rand, torch.randn, torch.randint, torch.randperm, torch.logspace),
    *(torch.tril_indices, torch.triu_indices),
}
_COPY = {torch.tensor, torch.as_tensor, torch.from_numpy}


class moved(TorchFunctionMode):  # noqa: N801  (a context, like torch.device)
    """Factory functions called from the tests make tensors of the device."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function in _MAKE and "device" not in kwargs and _called_from_a_test():
            return function(*args, **kwargs, device=DEVICE)
        if function in _COPY:  # torch cannot copy numbers to a device written in Python
            there = DEVICE if _called_from_a_test() else torch.device("cpu")
            place = kwargs.pop("device", None)
            device = torch.device(place) if place is not None else there
            if isinstance(args[0], torch.Tensor):
                return function(*args, **kwargs, device=device if place is not None else None)
            out = function(*args, **kwargs)
            return out.to(device) if device.type != "cpu" else out
        return function(*args, **kwargs)


def _called_from_a_test(level: int = 1) -> bool:
    return sys._getframe(1 + level).f_code.co_filename.startswith(_TESTS)
