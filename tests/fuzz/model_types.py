"""Every model type of the installed transformers: attn_implementation="cumulant" against "eager".

Each type gets a tiny random model. Under both implementations, with the same weights, it runs on
padded texts (or images, or sounds) and, if it is causal, on texts padded at the left and from a
cache. It agrees, is refused by the name of its class, cannot be made here, or differs:

    python tests/fuzz/model_types.py                 # all of them; exit 1 if one differs
    python tests/fuzz/model_types.py --only mpt t5   # some
"""

from __future__ import annotations

import argparse
import copy
import importlib
import multiprocessing
import os
import platform
import re
import resource
import sys
import time
import warnings
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path

# Some virtual machines announce AMX and then fault on its instructions.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import transformers
from torch.overrides import TorchFunctionMode

import cumulant as cm
from lens.tiny_models import LENGTHS, build, padding, types

AGREES, REFUSED, ABSENT, DIFFERS = "agrees", "refused by name", "not made here", "DIFFERS"
NOWHERE = "agrees: no attention to replace"
TOLERANCE = 2e-3  # of the largest entry, in float32 through several layers of random weights


# --------------------------------------------------------------------------- one type


class Softmaxes(TorchFunctionMode):
    """Counts calls of our attention, and names classes of attention that compute their own."""

    def __init__(self):
        super().__init__()
        self.ours, self.own = 0, set()

    def __torch_function__(self, function, kinds, args=(), kwargs=None):
        if getattr(function, "__name__", "") in ("softmax", "scaled_dot_product_attention"):
            self._name(sys._getframe(1))
        return function(*args, **(kwargs or {}))

    def _name(self, frame):
        while frame is not None:
            if frame.f_code.co_filename.endswith("integrations/transformers.py"):
                return
            owner = frame.f_locals.get("self")
            if re.search("Attention|Attn", type(owner).__name__):
                self.own.add(type(owner).__name__)
                return
            frame = frame.f_back


@contextmanager
def counted():
    """Our implementation, counted."""
    interface = importlib.import_module("cumulant.integrations.transformers")
    with Softmaxes() as found:

        def forward(*args, **kwargs):
            found.ours += 1
            return interface.forward(*args, **kwargs)

        transformers.AttentionInterface.register("cumulant", forward)
        try:
            yield found
        finally:
            transformers.AttentionInterface.register("cumulant", interface.forward)


def run(model, given):
    torch.manual_seed(3)
    with torch.no_grad():
        return model(**given)


def tensors(output, name="output"):
    """(name, tensor) of all real numbers in an output, caches and weights of attention aside."""
    if isinstance(output, torch.Tensor):
        if output.is_floating_point():
            yield name, output
    elif isinstance(output, dict):
        for key, x in output.items():
            if not key.endswith("attentions"):
                yield from tensors(x, str(key))
    elif isinstance(output, list | tuple):
        for number, x in enumerate(output):
            yield from tensors(x, f"{name}[{number}]")


def distance(theirs, ours, masks=(), *, by_token=False):
    """The largest difference relative to the largest entry, and where; padding is left out.

    With `by_token`, so is what has no row for each token: the pooled output of a text padded at the
    left may be that of a padded position.
    """
    worst, where = 0.0, ""
    for (name, x), (_, y) in zip(tensors(theirs), tensors(ours), strict=True):
        if x.shape != y.shape:
            return float("inf"), f"{name} has another shape"
        mask = next((mask for mask in masks if x.shape[:2] == mask.shape), None)
        if mask is not None:
            x, y = x[mask.bool()], y[mask.bool()]
        elif by_token:
            continue
        if not bool(x.isfinite().all()):
            continue  # eager's own
        gap = float((x - y).abs().max() / (x.abs().max() + 1e-6)) if x.numel() else 0.0
        if not gap <= worst:
            worst, where = gap, name
    return worst, where


def masks_of(given):
    return [x for key, x in given.items() if key.endswith("attention_mask")]


def is_causal(model, given):
    """Whether the first token knows nothing of the last, and where that can be asked."""
    if "input_ids" not in given or "decoder_input_ids" in given or len(given) > 2:
        return False
    ids = given["input_ids"]
    other = torch.cat([ids[:, :-1], ids[:, -1:] + 1], 1)
    whole = {key: torch.ones_like(x) for key, x in given.items() if key == "attention_mask"}
    first = run(model, {**whole, "input_ids": ids})[0]
    second = run(model, {**whole, "input_ids": other})[0]
    if first.shape[:2] != ids.shape or not bool((first[:, -1] != second[:, -1]).any()):
        return False
    return bool(((first - second)[:, 0].abs() <= 1e-6 * first.abs().max()).all())


def step(model, given):
    """The last token from a cache of the others."""
    ids, mask = given["input_ids"], torch.ones_like(given["input_ids"])
    before = run(
        model, {"input_ids": ids[:, :-1], "attention_mask": mask[:, :-1], "use_cache": True}
    )
    last = {"input_ids": ids[:, -1:], "attention_mask": mask}
    return run(model, {**last, "past_key_values": before.past_key_values, "use_cache": True})[0]


def cases(eager, given):
    """(name, what is run, masks): padded inputs, and for causal texts left padding and a cache."""
    yield "as given", lambda model: run(model, given), masks_of(given)
    if "attention_mask" not in given or not is_causal(eager, given):
        return
    left = padding(LENGTHS, "left")
    yield "left padding", lambda model: run(model, {**given, "attention_mask": left}), [left]
    try:
        step(eager, given)
    except Exception:
        return
    yield "from the cache", lambda model: step(model, given), []


def refusal_of(action):
    """The refusal that an action raises, or None."""
    try:
        action()
    except cm.InputError as error:
        if "cannot run in" in str(error):
            return str(error).split("cannot run in ")[1].split(":")[0]
        if 'which "cumulant" does not support' in str(error):
            return str(error).split(" ")[0]
        raise
    return None


def examine(name):
    """(outcome, detail) of one type."""
    try:
        eager, given = build(name)
    except Exception as error:
        lines = [x.strip() for x in str(error).splitlines() if x.strip()] or [""]
        return ABSENT, f"{type(error).__name__}: {lines[-1][:100]}"
    built = []

    def construct():
        config = copy.deepcopy(eager.config)
        built.append(type(eager)._from_config(config, attn_implementation="cumulant").eval())

    refused = refusal_of(construct)
    if refused is not None:
        if refusal_of(lambda: copy.deepcopy(eager).set_attn_implementation("cumulant")) is None:
            return DIFFERS, f"{refused} is refused when built, not when set"
        return REFUSED, refused
    ours = built[0]
    ours.load_state_dict(eager.state_dict())
    for mine, theirs in zip(ours.buffers(), eager.buffers(), strict=True):
        mine.copy_(theirs)
    with counted() as found:
        refused = refusal_of(lambda: run(ours, given))
    if refused is not None:
        return REFUSED, f"{refused}, at its first call"
    return compare(eager, ours, given, found)


def compare(eager, ours, given, found):
    with counted() as theirs:
        run(eager, given)
    names = ", ".join(sorted(found.own))
    if not found.ours:
        if theirs.own:
            return DIFFERS, f"our attention never runs; {', '.join(sorted(theirs.own))} does"
        return NOWHERE, ""
    worst = 0.0
    for case, action, masks in cases(eager, given):
        expected, output, by_token = action(eager), action(ours), case == "left padding"
        gap, where = distance(expected, output, masks, by_token=by_token)
        if not gap <= TOLERANCE:
            told = f"{case}: {where} by {gap:.1e}" + (f"; own: {names}" if names else "")
            if not distance(expected, action(eager), masks, by_token=by_token)[0] <= TOLERANCE:
                return ABSENT, "its output is random under eager attention, too"
            return DIFFERS, told
        worst = max(worst, gap)
    if is_causal(eager, given) and not is_causal(ours, given):
        return DIFFERS, "the first token sees the last"
    again = copy.deepcopy(eager)
    again.set_attn_implementation("cumulant")
    gap, _ = distance(run(ours, given), run(again, given), masks_of(given))
    if not gap <= TOLERANCE:
        return DIFFERS, f"set_attn_implementation gives another model, by {gap:.1e}"
    return AGREES, f"{worst:.0e}" + (f"; beside it, attention of its own: {names}" if names else "")


# ----------------------------------------------------------------------------- all types


def worker(name, pipe, gigabytes):
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    resource.setrlimit(resource.RLIMIT_AS, (gigabytes << 30,) * 2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        pipe.send(examine(name))
    except BaseException as error:
        pipe.send((DIFFERS, f"{type(error).__name__}: {str(error).strip()[:200]}"))


def guarded(name, seconds, gigabytes):
    """`examine` in a process of its own, for a limited time."""
    here, there = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(
        target=worker, args=(name, there, gigabytes)
    )
    process.start()
    there.close()
    try:
        if here.poll(seconds):
            return here.recv()
        return ABSENT, f"it took longer than {seconds:g} s"
    except EOFError:
        process.join()
        return ABSENT, f"its process ended with {process.exitcode}"
    finally:
        process.kill()
        process.join()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="TYPE", help="these types alone")
    parser.add_argument("--seconds", type=float, default=60, help="time limit of a type")
    parser.add_argument("--gigabytes", type=int, default=12, help="address space of a type")
    given = parser.parse_args()
    known = types()
    unknown = sorted(set(given.only or ()) - set(known))
    if unknown:
        parser.error(f"transformers has no model type {', '.join(unknown)}")
    versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
    print(f"cumulant {cm.__version__}, {versions}, Python {platform.python_version()}", flush=True)
    torch.set_num_threads(1)
    cm.lens.register()
    names, found, start = given.only or known, defaultdict(list), time.monotonic()
    for number, name in enumerate(names, 1):
        outcome, detail = guarded(name, given.seconds, given.gigabytes)
        found[outcome].append(name)
        print(f"{number:4}/{len(names)} {name:32} {outcome:16} {detail}", flush=True)
    print(f"\n{len(names)} types in {time.monotonic() - start:.0f} s")
    for outcome in (AGREES, NOWHERE, REFUSED, ABSENT, DIFFERS):
        print(f"\n{outcome}: {len(found[outcome])}\n  {' '.join(found[outcome])}")
    return 1 if found[DIFFERS] else 0


if __name__ == "__main__":
    sys.exit(main())
