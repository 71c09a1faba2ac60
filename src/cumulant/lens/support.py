"""Which Hugging Face models can run our attention; the others are refused by name."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from functools import cache, wraps
from itertools import takewhile
from typing import Any

from torch import nn

from cumulant.core.errors import InputError

__all__ = ["guard", "refusal"]

# How a modeling file asks for the implementation that the user named ...
_ASKS = re.compile(r"\bALL_ATTENTION_FUNCTIONS\b[\s\S]{0,80}?_attn_implementation")
# ... or chooses one of its own classes by that name, which knows no name but its own,
_CHOOSES = re.compile(r"_CLASSES\[\w*\.?config\._attn_implementation\]")
# and what attention that asks nobody looks like.
_LAYER = re.compile(r"^class \w*(Attention|Attn)\w*\(", re.MULTILINE)


def refusal(kind: type[nn.Module], name: str) -> str | None:
    """Why a model class cannot run the implementation `name`, or None if it can.

    A model asks transformers' attention interface for an implementation, or it does not: then its
    attention is written out in its own file, and another name would change nothing. That is read
    from the files that define the class and its bases; of a file that cannot be read, nothing is
    assumed.
    """
    own = takewhile(lambda base: base.__name__ != "PreTrainedModel", kind.__mro__)
    sources = [_source(file) for file in {base.__module__ for base in own}]
    chooses = any(_CHOOSES.search(text) for text in sources)
    asks = any(_ASKS.search(text) for text in sources)
    layers = any(_LAYER.search(text) for text in sources)
    if not chooses and (asks or not layers):
        return None
    return (
        f'attn_implementation="{name}" cannot run in {kind.__name__}: its attention is written out '
        "in its own code, which does not ask transformers' attention interface. Use "
        'attn_implementation="eager" (or "sdpa", where the model has it), whose derivatives are '
        "those of the operators it calls; in a composite model, name ours for the other parts "
        f'alone, as in attn_implementation={{"text_config": "{name}"}}.'
    )


@cache
def _source(module: str) -> str:
    try:
        return inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):
        return ""


def guard(base: type[nn.Module], name: str) -> None:
    """Have every model of transformers refuse the implementation `name` where it would not run.

    `base` is transformers' ``PreTrainedModel``. A model checks the name when it is built and, for
    itself and its parts, when it is set; there the refusal is raised, before anything changed.
    """
    checks: Any = base
    check, change = checks.get_correct_attn_implementation, checks.set_attn_implementation
    if getattr(check, "refuses", None) == name:
        return

    @wraps(check)
    def get_correct_attn_implementation(self: Any, requested: str | None, *args: Any, **kw: Any):
        if requested == name:
            _demand(self, name)
        return check(self, requested, *args, **kw)

    @wraps(change)
    def set_attn_implementation(self: Any, attn_implementation: Any, *args: Any, **kw: Any) -> None:
        # transformers only logs a warning for parts that it cannot change.
        asked = [id(config) for config in _asked(self.config, attn_implementation, name)]
        for part in self.modules():
            if isinstance(part, base) and (attn_implementation == name or id(part.config) in asked):
                _demand(part, name)
        change(self, attn_implementation, *args, **kw)

    vars(get_correct_attn_implementation)["refuses"] = name
    checks.get_correct_attn_implementation = get_correct_attn_implementation
    checks.set_attn_implementation = set_attn_implementation


def _demand(model: nn.Module, name: str) -> None:
    reason = refusal(type(model), name)
    if reason is not None:
        raise InputError(reason)


def _asked(config: Any, request: Any, name: str) -> Iterator[Any]:
    """The configurations, nested ones included, for which a request names `name`."""
    parts = (
        request if isinstance(request, dict) else dict.fromkeys(["", *config.sub_configs], request)
    )
    if parts.get("") == name:
        yield config
    for key in config.sub_configs:
        part = getattr(config, key, None)
        if part is not None and key in parts:
            yield from _asked(part, parts[key], name)
