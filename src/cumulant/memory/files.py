"""Memories as safetensors files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cumulant.core.errors import InputError
from cumulant.core.files import whole_file

__all__ = ["read", "write"]

_FORMAT = {"format": "cumulant.memory", "version": "1"}


def write(path: str | os.PathLike[str], tensors: Mapping[str, Tensor]) -> None:
    """Write tensors, whole or not at all."""
    save: Any = import_module("safetensors.torch").save_file
    failure: Any = import_module("safetensors").SafetensorError
    with whole_file(path) as part:
        try:
            save({n: x.contiguous() for n, x in tensors.items()}, str(part), metadata=_FORMAT)
        except failure as error:  # a full disk is one, too
            raise OSError(str(error)) from None


def read(path: str | os.PathLike[str], device: str | torch.device) -> dict[str, Tensor]:
    """Tensors of a file that `write` made."""
    package: Any = import_module("safetensors")
    try:
        source = Path(path)
    except TypeError:
        raise InputError(f"load: path must be a path, not {path!r}.") from None
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise InputError(f"load: device {device!r} cannot be used: {error}") from None
    try:
        if not source.is_file():
            raise InputError(f"load: there is no file {source}.")
        with package.safe_open(str(source), framework="pt", device=str(place)) as file:
            told: dict[str, str] = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (package.SafetensorError, OSError) as error:
        raise InputError(f"load: {source} is not a safetensors file ({error}).") from None
    if told.get("format") != _FORMAT["format"] or not {"patterns", "beta"} <= tensors.keys():
        raise InputError(f"load: {source} was not written by Memory.save.")
    return tensors
