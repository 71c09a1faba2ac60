"""How a monitor sees one training step: by observing it, or by a second, uncompiled pass.

An eager model is observed as by `observe`, from the end of the step before until the end of the
step. Compiled code cannot be observed, and a model that ran uncompiled for one step would round
differently. So a compiled model runs as it is, and before its forward pass the same inputs go
through it once more, uncompiled and without gradients. Random generators and buffers are restored
after that pass.
"""

from __future__ import annotations

import random
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, cast

import torch
from torch import nn

from cumulant.core.interception import Begun, Hook, Scope, Setting
from cumulant.lens.observing import is_compiled, watching
from cumulant.lens.recorder import Layer, Recorder, Wanted
from cumulant.lens.sampling import Sample
from cumulant.lens.stack import in_backward

__all__ = ["Observed", "Replayed"]

Layers = dict[tuple[str, int], Layer]


class Observed:
    """Watches steps of an eager model.

    Args:
        model: the model.
        layers: the layers known so far, which keep their numbers.
    """

    def __init__(self, model: nn.Module, layers: Layers) -> None:
        self._model, self._layers = model, layers
        self._scope: Scope[Recorder] | None = None
        self.recorder: Recorder | None = None

    def open(self, sample: Sample) -> None:
        """Watch from now on."""
        self.close()
        wanted = Wanted(order=False, spectrum=False, sample=sample)
        self._scope = watching(self._model, wanted)
        self.recorder = self._scope.__enter__()
        self.recorder.layers = self._layers

    def close(self) -> None:
        """Take everything off the model; `recorder` keeps what was seen."""
        if self._scope is not None:
            self._scope.__exit__()
            self._scope = None

    def end(self) -> None:
        """Leave for good."""
        self.close()


class Replayed:
    """Watches steps of a compiled model: one hook, before the outermost compiled modules.

    Args:
        model: the model, which holds compiled modules or is going to be compiled.
        layers: the layers known so far, which keep their numbers.
    """

    def __init__(self, model: nn.Module, layers: Layers) -> None:
        self._model, self._layers = model, layers
        self.recorder: Recorder | None = None
        self._sample: Sample | None = None
        compiled = _outermost(model) or [model]
        hooks = [Hook(module, self._enter, after=False, breaks=True) for module in compiled]
        self._scope = Scope(lambda: Begun(None, hooks))
        self._scope.__enter__()

    def open(self, sample: Sample) -> None:
        """Replay the next forward pass that has gradients."""
        self.recorder = Recorder(self._model, Wanted(sample=sample))
        self._sample = sample

    def close(self) -> None:
        """Replay nothing until `open`."""
        self._sample = None

    def end(self) -> None:
        """Leave for good."""
        self.close()
        self._scope.__exit__()

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        sample = self._sample
        if sample is None or not torch.is_grad_enabled() or in_backward():
            return
        self._sample = None  # the pass below comes here too
        wanted = Wanted(order=False, spectrum=False, sample=sample)
        plain = cast(nn.Module, getattr(module, "_orig_mod", module))
        observed = watching(self._model, wanted, warns=False)
        with _unchanged(self._model), _uncompiled(), torch.no_grad(), observed as recorder:
            recorder.layers = self._layers
            plain(*args, **kwargs)
        self.recorder = recorder


def _outermost(model: nn.Module) -> list[nn.Module]:
    """Compiled modules that no other compiled module holds."""
    found: list[nn.Module] = []
    inside: set[int] = set()
    for module in model.modules():  # parents first
        if is_compiled(module) and id(module) not in inside:
            found.append(module)
            inside |= {id(x) for x in module.modules()}
    return found


def _uncompiled() -> Scope[None]:
    """torch.compile does nothing inside, also for a model that does not say it is compiled."""
    dynamo = import_module("torch._dynamo.eval_frame")
    stance = Setting(dynamo, "_stance", dynamo.DynamoStance("force_eager"))
    return Scope(lambda: Begun(None, [stance]))


@contextmanager
def _unchanged(model: nn.Module) -> Generator[None]:
    """Random generators and buffers are afterwards what they were before."""
    tensors = [*model.parameters(), *model.buffers()]
    devices = sorted({x.device.index or 0 for x in tensors if x.device.type == "cuda"})
    buffers = [(x, x.detach().clone()) for x in model.buffers()]
    state = random.getstate()
    kept: Any = torch.random
    try:
        with kept.fork_rng(devices):
            yield
    finally:
        random.setstate(state)
        with torch.no_grad():
            for x, before in buffers:
                if not torch.equal(x, before):
                    x.copy_(before)
