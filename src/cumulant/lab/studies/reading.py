"""Study files: TOML in, a `Study` out, and errors that name the line and the key."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from cumulant.core.errors import InputError
from cumulant.core.files import printable
from cumulant.lab.studies.study import Judged, Study, Tuning
from cumulant.lab.studies.tasks import TASKS, settings_of

__all__ = ["known", "read", "selected"]

FOLDER = Path(__file__).parent / "files"
_TOP: dict[str, type | tuple[type, ...]] = {
    "title": str,
    "question": str,
    "task": str,
    "minutes": (int, float),
    "seeds": list,
    "settings": dict,
    "tuning": dict,
    "variants": dict,
    "rules": list,
    "quick": dict,
    "claim": dict,
}
_CLAIM = ("statement", "source", "formula", "finding", "quantity")
_FORMS = ("statement", "correction", "control", "noted")


def known() -> dict[str, Path]:
    """The studies that come with the library, by name."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.toml"))}


def read(given: str | Path) -> Study:
    """The study of that name, or of that file.

    Raises:
        InputError: no such study; TOML that cannot be read; an unknown key or a value of the wrong
            kind, with its line.
    """
    path = known().get(str(given)) or Path(given)
    if not path.is_file():
        names = ", ".join(known())
        raise InputError(
            f"there is no study {printable(str(given))!r}; the studies are {names}. A study of "
            "your own is a TOML file."
        )
    text = path.read_text("utf-8")
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{printable(path)} is not TOML: {error}.") from None
    return _Reader(path, text).study(content)


def selected(study: Study, only: Iterable[str]) -> Study:
    """The study with some of its variants.

    Raises:
        InputError: an unknown variant; the known ones are listed.
    """
    names = list(only)
    for name in names:
        if name not in study.variants:
            raise InputError(
                f"{study.name} has no variant {name!r}; the variants are "
                f"{', '.join(study.variants)}."
            )
    chosen = {n: x for n, x in study.variants.items() if not names or n in names}
    return _replaced(study, chosen)


def _replaced(study: Study, variants: Mapping[str, Mapping[str, Any]]) -> Study:
    """Without the rules that speak of variants that are gone."""

    def there(rule: Judged) -> bool:
        return {rule.variant, *rule.below, *rule.above} - {""} <= set(variants)

    return replace(study, variants=variants, rules=tuple(filter(there, study.rules)))


class _Reader:
    """One file: its text, to find lines in."""

    def __init__(self, path: Path, text: str) -> None:
        self.path, self.lines = path, text.split("\n")

    def study(self, content: dict[str, Any]) -> Study:
        self._keys(content, _TOP, "")
        for name in ("title", "question", "task", "minutes", "seeds", "variants"):
            if name not in content:
                raise InputError(f"{printable(self.path)} lacks the key {name!r}.")
        for name, x in content.items():
            self._kind(x, _TOP[name], "", name)
        task: str = content["task"]
        if task not in TASKS:
            self._wrong("", "task", f"there is no task {task!r}; the tasks are {', '.join(TASKS)}")
        seeds = tuple(content["seeds"])
        if not seeds or not all(isinstance(x, int) for x in seeds) or len({*seeds}) < len(seeds):
            self._wrong("", "seeds", "seeds are different integers, at least one")
        if content["minutes"] <= 0:
            self._wrong("", "minutes", "the budget must be positive")
        defaults = settings_of(task)
        settings = {**defaults, **self._settings(content.get("settings", {}), defaults, "settings")}
        variants: dict[str, dict[str, Any]] = {}
        for name, made in content["variants"].items():
            self._kind(made, dict, "variants", name)
            variants[name] = self._settings(made, defaults, f"variants.{name}")
        if not variants:
            self._wrong("", "variants", "a study needs a variant")
        quick: dict[str, Any] = dict(content.get("quick", {}))
        self._keys(quick, {"settings": dict, "seeds": list, "tuning": dict}, "quick")
        self._settings(quick.get("settings", {}), defaults, "quick.settings")
        quick["tuning"] = self._tuning(quick.get("tuning", {}), "quick.tuning")
        tuning = Tuning(**self._tuning(content.get("tuning", {}), "tuning"))
        if {*tuning.seeds} & {*seeds} and tuning.steps:
            self._wrong("tuning", "seeds", "the search must not use the seeds of the final runs")
        rules = tuple(self._rule(x, variants) for x in content.get("rules", ()))
        claim: dict[str, str] = content.get("claim", {})
        self._keys(claim, _CLAIM, "claim")
        return Study(
            self.path.stem,
            content["title"],
            content["question"],
            task,
            float(content["minutes"]),
            seeds,
            settings,
            variants,
            tuning,
            rules,
            quick,
            claim,
        )

    def _settings(
        self, given: dict[str, Any], defaults: Mapping[str, Any], table: str
    ) -> dict[str, Any]:
        self._keys(given, defaults, table)
        for name, x in given.items():
            self._kind(x, _kind_of(defaults[name]), table, name)
        return given

    def _tuning(self, given: dict[str, Any], table: str) -> dict[str, Any]:
        self._keys(given, ("rates", "betas", "seeds", "steps"), table)
        for name, x in given.items():
            self._kind(x, int if name == "steps" else list, table, name)
        return {n: x if n == "steps" else tuple(x) for n, x in given.items()}

    def _rule(self, given: dict[str, Any], variants: Mapping[str, Any]) -> Judged:
        self._keys(given, [f.name for f in fields(Judged)], "rules")
        for name in ("name", "says", "quantity"):
            if name not in given:
                self._wrong("rules", "name", f"a rule lacks the key {name!r}")
        listed: dict[str, Any] = {n: tuple(given[n]) for n in ("below", "above") if n in given}
        rule = Judged(**{**given, **listed})
        for name in {rule.variant, *rule.below, *rule.above} - {""}:
            if name not in variants:
                known = f"there is no variant {name!r}; the variants are {', '.join(variants)}"
                self._wrong("rules", name, known)
        if rule.form not in _FORMS:
            self._wrong("rules", "form", f"a rule's form is one of {', '.join(_FORMS)}")
        bounds = [rule.below, rule.above, rule.at_least is not None, rule.at_most is not None]
        if sum(map(bool, bounds)) != (rule.form != "noted"):
            why = f"rule {rule.name!r} needs exactly one of below, above, at_least, at_most"
            self._wrong("rules", "name", why)
        if not rule.variant and not rule.ranks:
            self._wrong("rules", "name", f"rule {rule.name!r} lacks the key 'variant'")
        return rule

    def _keys(self, given: Iterable[str], known: Iterable[str], table: str) -> None:
        for name in given:
            if name not in known:
                near = difflib.get_close_matches(name, list(known), 1)
                hint = f"did you mean {near[0]!r}?" if near else f"the keys are {', '.join(known)}"
                self._wrong(table, name, f"unknown key {name!r}; {hint}")

    def _kind(self, x: Any, kind: type | tuple[type, ...], table: str, name: str) -> None:
        if not isinstance(x, kind) or (isinstance(x, bool) and kind is not bool):
            names = [k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,))]
            wanted, got = " or ".join(names), type(x).__name__
            self._wrong(table, name, f"key {name!r} must be {wanted}, not {got}")

    def _wrong(self, table: str, name: str, why: str) -> None:
        raise InputError(f"{printable(self.path)}, line {self._line(table, name)}: {why}.")

    def _line(self, table: str, name: str) -> int:
        """Where a key is: in its table if it stands there, else the first line that names it."""
        here, anywhere = "", 0
        for number, line in enumerate(self.lines, 1):
            if header := re.fullmatch(r"\s*\[+([^\]]+)\]+\s*(#.*)?", line):
                here = header[1].strip()
                if here in (f"{table}.{name}".strip("."), name):
                    return number
            elif re.match(rf"\s*[\"']?{re.escape(name)}[\"']?\s*=", line) and here == table:
                return number
            if not anywhere and re.search(rf"\b{re.escape(name)}\b", line):
                anywhere = number
        return anywhere or 1


def _kind_of(default: object) -> type | tuple[type, ...]:
    """What may stand where this stands."""
    return (int, float) if isinstance(default, float) else type(default)
