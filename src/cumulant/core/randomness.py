"""Randomness from a `torch.Generator`, even where torch accepts none."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch

from cumulant.core.errors import InputError
from cumulant.core.typed import random

__all__ = ["checked_generator", "drawing_from", "generator_or"]


def checked_generator(owner: str, generator: torch.Generator | None) -> torch.Generator | None:
    """Check the generator; None means torch's global one."""
    if generator is not None and not isinstance(generator, torch.Generator):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(
            f"{owner}: generator must be a torch.Generator, not {type(generator).__name__}. For a "
            "seed, write torch.Generator().manual_seed(seed)."
        )
    return generator


def generator_or(
    owner: str, generator: torch.Generator | None, seed: int | None
) -> torch.Generator:
    """The generator, or a new one seeded with `seed` or from torch's global generator."""
    if (source := checked_generator(owner, generator)) is not None:
        return source
    drawn = int(torch.randint(1 << 62, ())) if seed is None else seed
    return torch.Generator().manual_seed(drawn)


@contextmanager
def drawing_from(
    owner: str, generator: torch.Generator | None, device: torch.device
) -> Generator[None]:
    """Draws inside the block come from `generator`; torch's global generators stay unchanged.

    torch.distributions takes no generator, so the generator draws a seed, and inside the block
    torch's global generators of the CPU and of that device run from it.

    >>> import torch
    >>> from cumulant.core.randomness import drawing_from
    >>> def draw(seed):
    ...     with drawing_from("draw", torch.Generator().manual_seed(seed), torch.device("cpu")):
    ...         return float(torch.distributions.Gamma(2.0, 1.0).sample())
    >>> draw(0) == draw(0), draw(0) == draw(1)
    (True, False)
    """
    source = checked_generator(owner, generator)
    if source is None:
        yield
        return
    drawn = torch.randint(2**63 - 1, (), generator=source, device=source.device)
    seed, elsewhere = int(drawn), device.type != "cpu"
    devices = [device.index or 0] if elsewhere else []
    kind = device.type if elsewhere else "cuda"
    with random.fork_rng(devices, device_type=kind):
        torch.default_generator.manual_seed(seed)
        if elsewhere:
            torch.get_device_module(device).manual_seed(seed)
        yield
