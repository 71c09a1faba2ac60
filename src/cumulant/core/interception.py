"""All temporary patches of torch and other packages.

A `Scope` is a context manager made of *effects*, each of which can be applied and undone:

- `Handler`: calls of a module's or class's function, say ``F.layer_norm``, go to our handler first;
- `Hook`: a function that runs before or after a module's forward pass;
- `Setting`: an attribute with another value;
- `Afterwards`: a call at the end.

Guarantees:

- *Any order.* Scopes may be entered and left in any order, in any thread, in any task. Leaving a
  scope removes only its own effects. After the last handler, the original object is restored.
- *Composition.* Calls pass the observers first, then the replacements, each kind from the last
  entered to the first, then the original: an observer sees the result of a replacement.
- *Contexts.* A replacement acts in the context (thread, asyncio task) that entered it, in tasks
  created inside and in backward passes begun inside, which torch may run in threads of its own
  (`Carried`); a thread started inside sees the original. An observer also sees every other
  thread, because an observed model may run in any; it does not see other tasks of its own thread.
- *Third-party patches.* We call what was there when we patched. A patch on top of ours stays when
  we leave; ours then only forwards to what it found. If ours becomes the outermost again, it
  removes itself the next time it is called, entered or left.
- *Interrupts.* Ctrl-C while entering, inside or leaving leaves nothing behind. Python leaves one
  gap: before the first instruction of ``__exit__`` (and in other context managers around ours).
  Everything is then undone when the exception's traceback is released, because nothing else refers
  to the scope.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ContextDecorator
from contextvars import ContextVar, copy_context
from functools import partial, wraps
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import get_overridable_functions

from cumulant.core.context import Carried, thread
from cumulant.core.eager import eager
from cumulant.core.errors import InputError

__all__ = ["Afterwards", "Begun", "Effect", "Handler", "Hook", "Scope", "Setting", "Token"]

T = TypeVar("T")
_lock = threading.RLock()  # re-entrant: a signal handler, or a scope that dies, may leave meanwhile


class Effect(Protocol):
    """Something that `Scope` applies and undoes. Either may be called again after an interrupt."""

    def put(self, token: Token) -> None: ...

    def take(self) -> None: ...


class Begun(NamedTuple, Generic[T]):
    """The parts of a scope: what ``as`` binds, its effects, a check after a normal exit."""

    result: T
    effects: Sequence[Effect]
    check: Callable[[], None] = lambda: None


class Scope(ContextDecorator, Generic[T]):
    """A context manager whose effects are always undone; also a decorator.

    Args:
        begin: called on each entry; must have no side effects itself.
    """

    def __init__(self, begin: Callable[[], Begun[T]]) -> None:
        self._begin = begin
        self._entered: tuple[Token, Begun[T]] | None = None

    def _recreate_cm(self) -> Scope[T]:  # ContextDecorator: each call has a scope of its own
        return Scope(self._begin)

    def __enter__(self) -> T:
        if self._entered is not None:
            raise InputError("This context was already entered: make a new one for each `with`.")
        begun = self._begin()
        try:
            token = Token(self, begun.effects)
            self._entered = token, begun
            _tokens.set(_tokens.get() | {token})
            for effect in begun.effects:
                effect.put(token)
            return begun.result
        except BaseException:
            self._leave()
            raise

    def __exit__(self, kind: Any = None, *_: object) -> None:
        try:
            check = self._leave()
        except BaseException:
            self._leave()
            raise
        if kind is None:
            check()

    def _leave(self) -> Callable[[], None]:
        if self._entered is None:
            return lambda: None
        token, begun = self._entered
        token.undo()
        self._entered = None
        return begun.check


class Token:
    """Represents one entered scope in all its effects, which act as long as it is alive.

    It refers to its scope weakly. A scope that dies without being left is undone then; a scope that
    was left drops the reference, so its finalization runs no code.
    """

    def __init__(self, scope: Scope[Any], effects: Sequence[Effect]) -> None:
        self._effects = effects
        self._live = True
        self._thread = thread.key
        self._scope: weakref.ref[Scope[Any]] | None = weakref.ref(scope, lambda _: self.undo())

    @property
    def alive(self) -> bool:
        return self._live and self._scope is not None and self._scope() is not None

    @property
    def reaches(self) -> bool:
        """Whether an observer sees what runs here: its own context, and all other threads."""
        return self.alive and (self._thread is not thread.key or self in _tokens.get())

    def undo(self) -> None:
        self._live = False  # from here on no effect acts; the rest is tidying
        for effect in reversed(self._effects):
            effect.take()
        _tokens.set(frozenset(t for t in _tokens.get() if t.alive))
        self._scope, self._effects = None, ()


_tokens: ContextVar[frozenset[Token]] = ContextVar("cumulant_tokens", default=frozenset())


class Afterwards:
    """A call at the end; may run twice.

    Args:
        call: the function to call.
    """

    def __init__(self, call: Callable[[], object]) -> None:
        self.call = call

    def put(self, token: Token) -> None:
        pass

    def take(self) -> None:
        self.call()


# --------------------------------------------------------------------------------------- attributes


class _Patch:
    """A replaced attribute `name`, which `owner` must define itself."""

    def __init__(self, owner: Any, name: str) -> None:
        if name not in vars(owner):
            raise InputError(
                f"Only what a module or class itself defines can be intercepted, but "
                f"{getattr(owner, '__name__', owner)} does not define {name!r}. Pass the owner."
            )
        self.owner, self.name = owner, name
        self.token: Token | None = None
        self.place: _Place | None = None

    @property
    def alive(self) -> bool:
        return self.token is not None and self.token.alive

    def put(self, token: Token) -> None:
        self.token = token
        with _lock:
            self.place = _place_of(self)
            self.place.hold(self)

    def take(self) -> None:
        with _lock:
            if self.place is not None:
                self.place.hold(None)
                self.place = None

    def stand_in(self, place: _Place) -> Any:
        raise NotImplementedError


class Setting(_Patch):
    """An attribute set to another value while any scope holds it; global, not per context.

    Args:
        owner: a module or class.
        name: name of the attribute.
        value: the temporary value.
    """

    def __init__(self, owner: Any, name: str, value: Any) -> None:
        super().__init__(owner, name)
        self.value = value

    def stand_in(self, place: _Place) -> Any:
        return self.value


class Handler(_Patch):
    """Replace a function by ``call(next, *args, **kwargs)``, which may call `next` or return.

    Args:
        owner: a module or class.
        name: name of a function that it defines.
        call: the handler.
        observes: run before all replacements and in all threads; it should call `next`.
    """

    def __init__(
        self, owner: Any, name: str, call: Callable[..., Any], *, observes: bool = False
    ) -> None:
        super().__init__(owner, name)
        self.call = call
        self.observes = observes

    def put(self, token: Token) -> None:
        super().put(token)
        if self.place is not None and not self.observes:
            here = _alive(_replacements.get())
            _replacements.set({**here, self.place: (self, *(here.get(self.place) or ()))})

    def take(self) -> None:
        super().take()
        _replacements.set(_alive(_replacements.get()))

    def stand_in(self, place: _Place) -> Any:
        @wraps(place.found, updated=())
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            return place.call(args, kwargs)

        setattr(stand_in, "_cumulant_place", place)  # noqa: B010
        return stand_in


class _Place:
    """A patched attribute: what we found there, what we put there, and for whom."""

    def __init__(self, patch: _Patch) -> None:
        get_overridable_functions()  # torch lists its functions once: not with ours among them
        self.owner, self.name = patch.owner, patch.name
        self.found: Any = vars(patch.owner)[patch.name]
        self.holders: tuple[_Patch, ...] = ()
        self.observers: tuple[Handler, ...] = ()
        self.ours = patch.stand_in(self)

    def hold(self, new: _Patch | None) -> None:
        """Serve another patch as well, and drop those whose scope was left."""
        self.holders = tuple(x for x in (new, *self.holders) if x is not None and x.alive)
        self.observers = tuple(x for x in self.holders if isinstance(x, Handler) and x.observes)
        if self.holders and vars(self.owner)[self.name] is self.found:
            setattr(self.owner, self.name, self.ours)
        _tidy(self.owner, self.name)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The observers, the replacements of this context, and the original."""
        here = _replacements.get().get(self, ())
        if here is None or not (here or self.observers):  # the usual case elsewhere: be quick
            if not self.holders:
                self._remove()
            return self._bottom(args, kwargs)
        chain = [x.call for x in self.observers if x.token is not None and x.token.reaches]
        chain += [x.call for x in here if x.alive]
        if not chain:
            self._remove()
        function = partial(_found, self)
        for call in reversed(chain):
            function = partial(call, function)
        return function(*args, **kwargs)

    def _remove(self) -> None:
        """Remove ourselves if an interrupt left us here, or another patch restored us."""
        with _lock:
            _tidy(self.owner, self.name)

    def _bottom(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.owner is F and self.name == "scaled_dot_product_attention":
            mask: Any = args[3] if len(args) > 3 else kwargs.get("attn_mask")
            # torch's causal bias compares the function it is given to with what has its name now.
            # What it calls in turn has passed the handlers already.
            if hasattr(mask, "variant"):
                return copy_context().run(_past_handlers, self, type(mask), args, kwargs)
        return self.found(*args, **kwargs)


def _found(place: _Place, *args: Any, **kwargs: Any) -> Any:
    return place._bottom(args, kwargs)


def _past_handlers(place: _Place, kind: Any, args: Any, kwargs: Any) -> Any:
    token = _replacements.set({**_replacements.get(), place: None})
    try:
        named = getattr(place.owner, place.name)
        return kind.__torch_function__(named, (kind,), args, kwargs)
    finally:
        _replacements.reset(token)


# By place: the handlers of this context, the last entered first; None if a call has passed them.
_replacements: Carried[Mapping[_Place, tuple[Handler, ...] | None]] = Carried(
    "cumulant_replacements", MappingProxyType({})
)


_places: dict[tuple[Any, str], _Place] = {}  # the last of each target


def _standing(owner: Any, name: str) -> _Place | None:
    """The place whose stand-in currently has the name."""
    value = cast(object, vars(owner)[name])
    marked = getattr(value, "_cumulant_place", None)  # wrappers copy marks: ask whose it is
    for place in (marked, _places.get((owner, name))):
        if isinstance(place, _Place) and place.ours is value:
            return place
    return None


def _place_of(patch: _Patch) -> _Place:
    """Our current or last place, or a new one on top of what is there now."""
    place = _standing(patch.owner, patch.name)
    if place is None:
        place = _places.get((patch.owner, patch.name))
        if place is None or place.found is not vars(patch.owner)[patch.name]:
            place = _places[patch.owner, patch.name] = _Place(patch)
    return place


def _tidy(owner: Any, name: str) -> None:
    """Remove unused stand-ins; there may be another beneath one."""
    while (place := _standing(owner, name)) and not any(x.alive for x in place.holders):
        setattr(owner, name, place.found)


def _alive(
    handlers: Mapping[_Place, tuple[Handler, ...] | None],
) -> Mapping[_Place, tuple[Handler, ...] | None]:
    kept = {
        place: None if calls is None else tuple(x for x in calls if x.alive)
        for place, calls in handlers.items()
    }
    return {place: calls for place, calls in kept.items() if calls != ()}


# ------------------------------------------------------------------------------------------ modules


def _no_hook() -> Callable[..., None]:
    return _nothing


def _nothing(*given: Any) -> None:
    """What a pickled module has in place of a hook."""


class Hook:
    """A hook of one module, before or after its forward pass, with its keyword arguments.

    Compiled code is traced without it, unless `breaks`. A pickled module is saved without it.

    Args:
        module: the module to hook.
        call: ``call(module, args, kwargs)`` before; ``call(module, args, kwargs, output)`` after.
            As in torch, anything but None that it returns replaces the arguments or the output.
        after: run after the forward pass, even if it raised; `output` is then None.
        breaks: run in compiled code too, by a graph break.
    """

    def __init__(
        self, module: nn.Module, call: Callable[..., object], *, after: bool, breaks: bool = False
    ) -> None:
        self.module = module
        self.call = call
        self.after = after
        self.breaks = breaks
        self.token: Token | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _no_hook, ()

    def __deepcopy__(self, memo: Any) -> Hook:
        """A copied module has our hook too, so `call` receives the module that runs."""
        return self

    def __call__(self, module: nn.Module, *given: Any) -> object:
        if self.breaks:
            return self._break(module, *given)
        return None if torch.compiler.is_compiling() else self._run(module, *given)

    @eager
    def _break(self, module: nn.Module, *given: Any) -> object:
        return self._run(module, *given)

    def _run(self, module: nn.Module, *given: Any) -> object:
        if self.token is None:
            return None
        if self.token.reaches:
            return self.call(module, *given)
        if not self.token.alive:
            self._drop(module)
        return None

    def put(self, token: Token) -> None:
        if self.after:
            self.module.register_forward_hook(self, with_kwargs=True, always_call=True)
        else:
            self.module.register_forward_pre_hook(self, with_kwargs=True)
        self.token = token  # last: in another thread the hook may run half registered

    def take(self) -> None:
        self._drop(self.module)

    def _drop(self, module: nn.Module) -> None:
        """By identity: an interrupt may have come before torch returned its handle."""
        kind = "_forward_hooks" if self.after else "_forward_pre_hooks"
        hooks = vars(module)[kind]
        for key in [key for key, hook in tuple(hooks.items()) if hook is self]:
            for rest in ("_with_kwargs", "_always_called"):
                vars(module).get(kind + rest, {}).pop(key, None)
            hooks.pop(key, None)
