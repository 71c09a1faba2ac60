"""Study files: TOML in, a `Study` out, and errors that name the line and the key."""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from cumulant.core.errors import InputError
from cumulant.core.files import printable
from cumulant.lab.studies.study import Judged, Study, Tuning
from cumulant.lab.studies.tasks import TASKS, measured, refusal, settings_of

__all__ = ["known", "read", "selected"]

FOLDER = Path(__file__).parent / "files"
_Kind = type | tuple[type, ...]
_NUMBER = (int, float)
_WORDS = {
    **{str: "a string", int: "an integer", float: "a number with a point"},
    **{bool: "true or false", list: "a list", dict: "a table"},
}
_TOP: dict[str, _Kind] = {
    **{"title": str, "question": str, "task": str, "minutes": _NUMBER, "seeds": list},
    **{"settings": dict, "tuning": dict, "variants": dict, "rules": list},
    **{"quick": dict, "claim": dict},
}
_TUNING: dict[str, _Kind] = {"rates": list, "betas": list, "seeds": list, "steps": int}
_RULE: dict[str, _Kind] = {
    **dict.fromkeys(("name", "says", "quantity", "variant", "form", "ranks"), str),
    **{"below": list, "above": list, "by": _NUMBER, "at_least": _NUMBER, "at_most": _NUMBER},
}
_QUICK: dict[str, _Kind] = {"settings": dict, "seeds": list, "tuning": dict}
_CLAIM: dict[str, _Kind] = dict.fromkeys(
    ("statement", "theory", "source", "formula", "finding", "quantity"), str
)
_FORMS = ("statement", "correction", "control", "noted")


def known() -> dict[str, Path]:
    """The studies that come with the library, by name."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.toml"), key=lambda x: x.stem)}


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
    try:
        text = path.read_text("utf-8-sig")  # some editors begin with a mark
        content = tomllib.loads(text)
    except OSError as error:
        raise InputError(f"cannot read {printable(path)}: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:  # no UTF-8, no TOML, digits or brackets no end
        raise InputError(f"{printable(path)} is not TOML: {printable(error)}.") from None
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
        self._table(content, _TOP, "")
        for name in ("title", "question", "task", "minutes", "seeds", "variants"):
            if name not in content:
                raise InputError(f"{printable(self.path)} lacks the key {name!r}.")
        task: str = content["task"]
        if task not in TASKS:
            self._wrong("", "task", f"there is no task {task!r}; the tasks are {', '.join(TASKS)}")
        if not 0 < content["minutes"] < math.inf:
            self._wrong("", "minutes", "the budget must be positive and finite")
        seeds = self._seeds(content["seeds"], "")
        tuning = Tuning(**self._tuning(content.get("tuning", {}), "tuning"))
        quick: dict[str, Any] = dict(content.get("quick", {}))
        self._table(quick, _QUICK, "quick")
        few = self._seeds(quick["seeds"], "quick") if "seeds" in quick else seeds
        quick["tuning"] = self._tuning(quick.get("tuning", {}), "quick.tuning")
        short = replace(tuning, **quick["tuning"])
        for where, search, final in (("tuning", tuning, seeds), ("quick", short, few)):
            if search.steps and {*search.seeds} & {*final}:
                self._wrong(where, "seeds", "the search must not use the seeds of the final runs")
        claim: dict[str, str] = content.get("claim", {})
        self._table(claim, _CLAIM, "claim")
        for name in ("statement", "source", "formula", "finding") * bool(claim):
            if name not in claim:
                self._wrong("", "claim", f"a claim lacks the key {name!r}")
        study = Study(
            name=self.path.stem,
            title=content["title"],
            question=content["question"],
            task=task,
            minutes=float(content["minutes"]),
            seeds=seeds,
            settings={**settings_of(task), **content.get("settings", {})},
            variants=content["variants"],
            tuning=tuning,
            quick=quick,
            claim=claim,
        )
        self._settings(study, content)
        return replace(study, rules=self._rules(content.get("rules", []), study))

    def _settings(self, study: Study, content: dict[str, Any]) -> None:
        """Refuse settings with which a variant cannot run, quick or not."""
        tables: dict[str, dict[str, Any]] = {
            "settings": content.get("settings", {}),
            "quick.settings": study.quick.get("settings", {}),
        }
        if not study.variants:
            self._wrong("", "variants", "a study needs a variant")
        for name, made in study.variants.items():
            if not re.fullmatch(r"[^\W_][\w.+-]{0,39}", name):  # files are named after it
                why = "a variant's name has up to 40 letters, digits and . _ + -"
                self._wrong("variants", name, f"{why}, not {name!r}")
            self._kind(made, dict, "variants", name)
            tables[f"variants.{name}"] = dict(made)
        kinds = {n: _kind_of(x) for n, x in settings_of(study.task).items()}
        for where, given in tables.items():
            self._table(given, kinds, where)
        for variant in study.variants:
            for quick in ((), ("quick.settings",)):
                self._sound(study, ["settings", *quick, f"variants.{variant}"], tables)

    def _sound(self, study: Study, order: list[str], tables: dict[str, dict[str, Any]]) -> None:
        """If the task refuses the settings, blame the key without which it would say otherwise."""
        defaults = settings_of(study.task)
        made = {**defaults, **{n: x for where in order for n, x in tables[where].items()}}
        if not (why := refusal(study.task, made)):
            return
        for where in reversed(order):
            for name in tables[where]:
                if refusal(study.task, {**made, name: defaults[name]}) != why:
                    self._wrong(where, name, why.removesuffix("."))
        self._wrong("variants", order[-1].removeprefix("variants."), why.removesuffix("."))

    def _tuning(self, given: dict[str, Any], table: str) -> dict[str, Any]:
        self._table(given, _TUNING, table)
        made: dict[str, Any] = {n: x if n == "steps" else tuple(x) for n, x in given.items()}
        if given.get("steps", 0) < 0:
            self._wrong(table, "steps", "a search has at least 0 steps, which means no search")
        for name in ("rates", "betas"):
            for x in made.get(name, (1.0,)):
                if not _number(x) or not 0 < x < math.inf:
                    self._wrong(table, name, f"{name} are positive numbers, not {printable(x)}")
            if name in made and len({f"{x:g}" for x in made[name]}) < max(1, len(made[name])):
                self._wrong(table, name, f"{name} are different numbers, at least one")
        if "seeds" in given:
            self._seeds(given["seeds"], table)
        return made

    def _seeds(self, given: list[Any], table: str) -> tuple[int, ...]:
        good = all(type(x) is int and 0 <= x < 2**32 for x in given)
        if not given or not good or len({*given}) < len(given):
            self._wrong(table, "seeds", "seeds are different integers from 0, at least one")
        return tuple(given)

    def _rules(self, given: list[Any], study: Study) -> tuple[Judged, ...]:
        rules: list[Judged] = []
        for k, x in enumerate(given):
            self._kind(x, dict, "", "rules")
            rules.append(self._rule(x, study, k))
            if rules[-1].name in [rule.name for rule in rules[:-1]]:
                self._wrong("rules", "name", f"there are two rules {rules[-1].name!r}", k)
        return tuple(rules)

    def _rule(self, given: dict[str, Any], study: Study, k: int) -> Judged:
        self._table(given, _RULE, "rules", k)
        for name in ("name", "says", "quantity"):
            if name not in given:
                self._wrong("rules", "", f"a rule lacks the key {name!r}", k)
        listed: dict[str, Any] = {n: tuple(given[n]) for n in ("below", "above") if n in given}
        rule = Judged(**{**given, **listed})
        for key, names in {"variant": (rule.variant or None,), **listed}.items():
            for name in names:
                if name is not None and name not in [*study.variants]:
                    known = f"the variants are {', '.join(study.variants)}"
                    self._wrong("rules", key, f"there is no variant {name!r}; {known}", k)
        if rule.variant in (*rule.below, *rule.above):
            self._wrong("rules", "variant", f"{rule.variant!r} cannot be its own rival", k)
        for key in ("quantity", "ranks"):
            known = measured(study, rule.variant)
            if key in given and given[key] not in known:
                near = _hint(given[key], known, "the quantities")
                self._wrong("rules", key, f"unknown quantity {given[key]!r}; {near}", k)
        for key in ("by", "at_least", "at_most"):
            if not math.isfinite(given.get(key, 0.0)):
                self._wrong("rules", key, f"{key!r} must be finite", k)
        if rule.form not in _FORMS:
            self._wrong("rules", "form", f"a rule's form is one of {', '.join(_FORMS)}", k)
        bounds = [rule.below, rule.above, rule.at_least is not None, rule.at_most is not None]
        if sum(map(bool, bounds)) != (rule.form != "noted"):
            why = f"rule {rule.name!r} needs exactly one of below, above, at_least, at_most"
            self._wrong("rules", "name", why, k)
        if "by" in given and not listed:
            self._wrong("rules", "by", f"rule {rule.name!r}: 'by' goes with below or above", k)
        if not rule.variant and not rule.ranks:
            self._wrong("rules", "name", f"rule {rule.name!r} lacks the key 'variant'", k)
        return rule

    def _table(
        self, given: Mapping[str, Any], known: Mapping[str, _Kind], table: str, item: int = 0
    ) -> None:
        """Known keys only, with values of their kind."""
        for name, x in given.items():
            if name not in known:
                near = _hint(name, known, "the keys")
                self._wrong(table, name, f"unknown key {name!r}; {near}", item)
            self._kind(x, known[name], table, name, item)

    def _kind(self, x: Any, kind: _Kind, table: str, name: str, item: int = 0) -> None:
        if not isinstance(x, kind) or (isinstance(x, bool) and kind is not bool):
            wanted = "a number" if kind == _NUMBER else _named(kind)
            self._wrong(table, name, f"key {name!r} must be {wanted}, not {_named(type(x))}", item)

    def _wrong(self, table: str, name: str, why: str, item: int = 0) -> NoReturn:
        said = why if why.endswith("?") else f"{why}."
        raise InputError(f"{printable(self.path)}, line {self._line(table, name, item)}: {said}")

    def _line(self, table: str, name: str, item: int) -> int:
        """Where a key is: in its table, in the line of an inline table, or else that table's head.

        `item` counts tables of one name, which an array has.
        """
        parent, _, last = table.rpartition(".")
        here, seen, head, inline, anywhere = "", -1, 0, 0, 0
        for number, line in enumerate(self.lines, 1):
            if header := re.fullmatch(r"\s*\[+([^\]]+)\]+\s*(#.*)?", line):
                here = re.sub(r"[\s\"']", "", header[1])
                if here == f"{table}.{name}".strip("."):
                    return number
                if here == table:
                    seen += 1
                    head = head or (number if seen == item else 0)
            elif here == table and max(seen, 0) == item and _sets(line, name):
                return number
            elif table and here == parent and _sets(line, last):
                if re.search(rf"\b{re.escape(name)}\b", line):
                    return number
                inline = inline or number
            if name and not anywhere and re.search(rf"(?<!\w){re.escape(name)}(?!\w)", line):
                anywhere = number
        return inline or head or anywhere or 1


def _sets(line: str, key: str) -> bool:
    """Whether a line of TOML gives this key a value."""
    return bool(key and re.match(rf"\s*[\"']?{re.escape(key)}[\"']?\s*[=.]", line))


def _hint(name: str, known: Iterable[str], what: str) -> str:
    near = difflib.get_close_matches(name, list(known), 1)
    return f"did you mean {near[0]!r}?" if near else f"{what} are {', '.join(known)}"


def _number(x: object) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool)


def _named(kind: Any) -> str:
    """A type in the words of TOML."""
    return _WORDS.get(kind, f"a {kind.__name__}")


def _kind_of(default: object) -> _Kind:
    """What may stand where this stands."""
    return _NUMBER if isinstance(default, float) else type(default)
