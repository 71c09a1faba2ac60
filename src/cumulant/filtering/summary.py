"""`Fit.summary()`: estimates, errors and criteria as text, HTML and a data frame."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from torch import Tensor

from cumulant.core.checks import real
from cumulant.core.errors import InputError
from cumulant.core.typed import tolist
from cumulant.filtering.frames import ModeNames, mode_names, need_pandas
from cumulant.filtering.model import COVARIANCES, SHAPES, SwitchingLinearGaussian
from cumulant.filtering.series import counted
from cumulant.pages.cards import Markup, card, note, text

if TYPE_CHECKING:
    from cumulant.filtering.fitting import Fit
    from cumulant.filtering.frames import DataFrame

__all__ = ["Estimate", "Summary", "summarized"]

WIDTH = 79
Kind = Literal["location", "variance", "probability"]


class Estimate(NamedTuple):
    """One number that was fitted; errors are NaN where there are none.

    A test of z = 0 says nothing about a variance or a probability, whose zero is an edge, so theirs
    is NaN. Their intervals are symmetric in the logarithm and in the log-odds, and stay inside.
    """

    regime: str
    label: str
    value: float
    error: float
    kind: Kind

    @property
    def z(self) -> float:
        """The estimate in standard errors."""
        located = self.kind == "location" and self.error > 0
        return self.value / self.error if located else math.nan

    @property
    def p_value(self) -> float:
        """Of the two-sided test that the number is 0, by the normal law."""
        return math.erfc(abs(self.z) / math.sqrt(2))

    def interval(self, level: float) -> tuple[float, float]:
        """Where the number lies with this probability, by the normal law."""
        x, reach = self.value, NormalDist().inv_cdf((1 + level) / 2) * self.error
        if math.isnan(reach):
            return math.nan, math.nan
        if self.kind == "variance" and x > 0:
            return x * math.exp(-reach / x), x * math.exp(reach / x)
        if self.kind == "probability" and 0 < x < 1:
            center, reach = math.log(x / (1 - x)), reach / (x * (1 - x))
            return _logistic(center - reach), _logistic(center + reach)
        return x - reach, x + reach


def _logistic(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


@dataclass(frozen=True)
class Summary:
    """The table of a fit: print it, show it in a notebook, or take ``table`` as a data frame.

    Attributes:
        title: what was fitted.
        facts: names and values of the head of the table.
        estimates: every number that was fitted.
        regimes: names of the regimes.
        transition, transition_errors: ``(M, M)``; None if the transition changes with time.
        durations: the expected duration of each regime with its standard error.
        level: of the intervals.
        notes: what to know about the numbers.
    """

    title: str
    facts: tuple[tuple[str, str], ...]
    estimates: tuple[Estimate, ...]
    regimes: tuple[str, ...]
    transition: Tensor | None
    transition_errors: Tensor | None
    durations: tuple[tuple[float, float], ...]
    level: float
    notes: tuple[str, ...]

    def __repr__(self) -> str:
        return f"Summary({self.title}; {len(self.estimates)} estimates; print it for the table)"

    @property
    def table(self) -> DataFrame:
        """One row for each estimate: (regime, parameter), as in the printed table."""
        pd = need_pandas()
        rows = [self._cells(x) for x in self.estimates]
        shared = "all regimes" if len(self.regimes) > 1 else ""
        kinds = {"probability": "transition", "location": shared, "variance": shared}
        index = pd.MultiIndex.from_tuples(
            [(x.regime or kinds[x.kind], x.label) for x in self.estimates],
            names=["regime", "parameter"],
        )
        return pd.DataFrame(rows, columns=self._columns(), index=index)

    @property
    def duration_table(self) -> DataFrame:
        """The expected duration of each regime in steps, with its standard error."""
        frame = need_pandas().DataFrame
        index = list(self.regimes) if self.durations else []
        return frame(list(self.durations), columns=["duration", "std err"], index=index)

    @property
    def transition_table(self) -> DataFrame:
        """P(to | from): a row for each regime to leave, a column for each to reach."""
        if self.transition is None:
            raise InputError("summary: the transition changes with time; see model.transition.")
        index = list(self.regimes)
        return need_pandas().DataFrame(self.transition.numpy(), index=index, columns=index)

    def _columns(self) -> list[str]:
        low, high = f"[{(1 - self.level) / 2:.4g}", f"{(1 + self.level) / 2:.4g}]"
        return ["coef", "std err", "z", "P>|z|", low, high]

    def _cells(self, x: Estimate) -> list[float]:
        return [x.value, x.error, x.z, x.p_value, *x.interval(self.level)]

    def _sections(self) -> list[tuple[str, list[Estimate]]]:
        """The coefficients of each regime, then those that all share."""
        shown = [x for x in self.estimates if x.kind != "probability"]
        found = {regime: [x for x in shown if x.regime == regime] for regime in self.regimes}
        shared = [x for x in shown if x.regime == ""]
        several = len(self.regimes) > 1
        titles = [(f"{name}", rows) for name, rows in found.items() if rows]
        return [*titles, *([("all regimes" if several else "", shared)] if shared else [])]

    def __str__(self) -> str:
        lines = [self.title.center(WIDTH).rstrip(), "=" * WIDTH, *_paired(self.facts)]
        lines += ["=" * WIDTH]
        heads = self._columns()
        name = max([20, *(len(x.label) for x in self.estimates if x.kind != "probability")])
        name = min(name, 30)
        widths = [10, 9, 9, 8, 11, 11]
        lines.append(" " * name + "".join(h.rjust(w) for h, w in zip(heads, widths, strict=True)))
        for title, rows in self._sections():
            lines.append((f"-- {title} " if title else "").ljust(WIDTH, "-"))
            for x in rows:
                cells = zip(self._cells(x), [4, 3, 3, 3, 3, 3], widths, strict=True)
                lines.append(
                    x.label.ljust(name) + "".join(_fixed(v, d).rjust(w) for v, d, w in cells)
                )
        lines += [*self._chain(), "=" * WIDTH, *self.notes]
        return "\n".join(lines)

    def _chain(self) -> list[str]:
        """The transition matrix and the durations, one line for each regime."""
        if self.transition is None or len(self.regimes) == 1:
            return []
        wide = max(16, *(len(x) + 2 for x in self.regimes))
        left = max(20, *(len(x) + 6 for x in self.regimes))
        head = "".join(f"to {x}".rjust(wide) for x in self.regimes)
        lines = ["-- transition ".ljust(WIDTH, "-"), f"{'':<{left}}{head}{'duration':>18}"]
        for i, name in enumerate(self.regimes):
            cells = [_with_error(*x) for x in self._row(i)]
            last = _with_error(*self.durations[i])
            row = "".join(c.rjust(wide) for c in cells)
            lines.append(f"{'from ' + name:<{left}}{row}{last:>18}")
        return lines

    def _row(self, i: int) -> list[tuple[float, float]]:
        """The probabilities of leaving regime i, with their standard errors."""
        if self.transition is None:
            return []
        p: list[float] = tolist(self.transition[i])
        errors = [math.nan] * len(p)
        if self.transition_errors is not None:
            errors = tolist(self.transition_errors[i])
        return list(zip(p, errors, strict=True))

    def _repr_html_(self) -> str:
        return card("Summary", self.title, self.tables())

    def tables(self) -> Markup:
        """The tables and notes as HTML."""

        def cells(row: Sequence[str], tag: str = "td") -> str:
            return "".join(f"<{tag}>{text(x)}</{tag}>" for x in row)

        out = ["<table>"]
        out += [f"<tr><th>{text(a)}</th><td>{text(b)}</td></tr>" for a, b in self.facts]
        out += ["</table><table><tr>", cells(["", *self._columns()], "th"), "</tr>"]
        for title, rows in self._sections():
            if title:
                out.append(f'<tr><th colspan="7">{text(title)}</th></tr>')
            for x in rows:
                numbers = [_fixed(v, 4) for v in self._cells(x)]
                out.append(f"<tr><th>{text(x.label)}</th>{cells(numbers)}</tr>")
        out.append("</table>")
        if self.transition is not None and len(self.regimes) > 1:
            heads = ["from", *(f"to {x}" for x in self.regimes), "expected duration"]
            out.append(f"<table><tr>{cells(heads, 'th')}</tr>")
            for i, name in enumerate(self.regimes):
                row = [*(_with_error(*x) for x in self._row(i)), _with_error(*self.durations[i])]
                out.append(f"<tr><th>{text(name)}</th>{cells(row)}</tr>")
            out.append("</table>")
        return Markup("".join([*out, note(" ".join(self.notes))]))

    def as_dict(self) -> dict[str, Any]:
        """For JSON; what does not exist is None."""

        def plain(x: float) -> float | None:
            return x if math.isfinite(x) else None

        keys = ["coefficient", "standard_error", "z", "p_value", "low", "high"]
        return {
            "estimates": [
                {"regime": x.regime or None, "parameter": x.label}
                | dict(zip(keys, map(plain, self._cells(x)), strict=True))
                for x in self.estimates
            ],
            "level": self.level,
            "transition": None if self.transition is None else tolist(self.transition),
            "expected_durations": [plain(x) for x, _ in self.durations],
        }


def _paired(facts: Sequence[tuple[str, str]]) -> list[str]:
    """Two facts on a line where both are short."""
    half, lines, waiting = WIDTH // 2, list[str](), ""
    for name, value in facts:
        cell = f"{name}:"
        cell += value.rjust(half - 1 - len(cell))
        if len(cell) >= half:  # a long one has its own line
            lines += [waiting] * bool(waiting) + [f"{name}: {value}"]
            waiting = ""
        elif waiting:
            lines.append(f"{waiting}   {cell}")
            waiting = ""
        else:
            waiting = cell
    return lines + [waiting] * bool(waiting)


def _fixed(x: float, digits: int) -> str:
    if math.isnan(x):
        return ""
    if x and not 1e-3 <= abs(x) < 1e5 and abs(x) != math.inf:
        return "0.000" if digits == 3 and abs(x) < 5e-4 else f"{x:.2e}"
    return f"{x:.{digits}f}"


def _with_error(x: float, error: float) -> str:
    shown = f"{x:.4f}" if x < 100 else f"{x:.4g}"
    return shown if math.isnan(error) else f"{shown} ({error:.3g})"


def summarized(found: Fit, names: ModeNames, level: float) -> Summary:
    """The summary of a fit; see `Fit.summary`."""
    level = real("summary", "level", level, least=0.0)
    if not 0 < level < 1:
        raise InputError(f"summary: level must be between 0 and 1, not {level}.")
    regimes = tuple(mode_names(_known(found, names), found.model.modes))
    transition = found.model.parameters["transition"].detach().double().cpu()
    constant = transition.ndim == 2
    errors = None if found.standard_errors is None else found.standard_errors.get("transition")
    durations: list[tuple[float, float]] = []
    for i in range(len(regimes)) if constant and len(regimes) > 1 else ():
        leave = 1 - float(transition[i, i])
        error = math.nan if errors is None else float(errors[i, i])
        long = 1 / leave if leave > 0 else math.inf
        durations.append((long, error * long**2))
    return Summary(
        title=_title(found),
        facts=tuple(_facts(found)),
        estimates=tuple(_estimates(found, regimes)),
        regimes=regimes,
        transition=transition if constant else None,
        transition_errors=None if errors is None or not constant else errors.double().cpu(),
        durations=tuple(durations),
        level=level,
        notes=tuple(_notes(found)),
    )


def _known(found: Fit, names: ModeNames) -> ModeNames:
    return getattr(found.model, "names", None) if names is None else names


def _title(found: Fit) -> str:
    design = getattr(found.model, "design", None)
    kind = "Markov-switching" if found.model.modes > 1 else "State-space"
    return f"{kind} model" if design is None else str(design)[:1].upper() + str(design)[1:]


def _facts(found: Fit) -> list[tuple[str, str]]:
    seen = found.evidence
    y = seen.observations
    labels = seen.labels
    columns = labels.columns if labels is not None else ()
    gone = int(y.isnan().sum())
    facts = [
        ("Series", ", ".join(columns) or f"{y.shape[-1]} observed"),
        ("Log-likelihood", f"{found.log_likelihood:.4f}"),
        ("Observations", str(found.observation_count)),
        ("AIC", f"{found.aic:.4f}"),
        ("Parameters", str(found.parameter_count)),
        ("BIC", f"{found.bic:.4f}"),
        ("Converged", "yes" if found.converged else "no"),
        ("HQIC", f"{found.hqic:.4f}"),
        ("Filter", _filter_name(found.model, seen.collapse)),
    ]
    if y[..., 0, 0].numel() > 1:
        facts.append(("Number of series", str(y[..., 0, 0].numel())))
    if gone:
        facts.append(("Missing", str(gone)))
    if labels is not None and labels.index is not None:
        facts.append(("Sample", f"{_day(labels.index[0])} - {_day(labels.index[-1])}"))
    return facts


def _filter_name(model: SwitchingLinearGaussian, collapse: str | int) -> str:
    """Kalman's for one mode, Hamilton's without a state, else the scheme."""
    if model.modes == 1:
        return "Kalman"
    if not model.state_size:
        return "Hamilton"
    return f"GPB({collapse})" if isinstance(collapse, int) else collapse.upper()


def _day(x: Any) -> str:
    """A date without a time of day that is midnight."""
    return str(x).removesuffix(" 00:00:00")


def _notes(found: Fit) -> list[str]:
    notes = [
        "Standard errors from the inverse Hessian, by the delta method. Intervals of",
        "variances and probabilities are symmetric in the logarithm and the log-odds.",
    ]
    if found.standard_errors is None:
        notes = []
    if found.evidence.given:
        first = counted(found.evidence.given, "observation").removeprefix("1 ")
        notes.append(f"The likelihood takes the first {first} as given.")
    if len(found.starts) > 1:
        near = sum(x > found.log_likelihood - 0.01 for x in found.starts)
        notes.append(f"{near} of {len(found.starts)} starts reached this maximum.")
    if not found.converged or found.standard_errors is None:
        notes += textwrap.wrap(f"Note: {found.message}.", WIDTH)
    if found.observation_count <= found.parameter_count:
        notes.append("There are no more observations than parameters: this says nothing.")
    return notes


def _estimates(found: Fit, regimes: Sequence[str]) -> list[Estimate]:
    """Every free entry, parameters of a ready model by their names and in their order."""
    design = getattr(found.model, "design", None)
    labels: dict[Any, str] = {} if design is None else dict(design.labels)
    out: list[tuple[tuple[int, int], Estimate]] = []
    known = list(labels)
    for name in found.free:
        x = found.model.parameters[name].detach()
        errors = None if found.standard_errors is None else found.standard_errors[name]
        places: list[tuple[int, ...]] = [
            tuple(at) for at in tolist(found.evidence.moving[name].nonzero())
        ]
        for at in places:
            if name in COVARIANCES and at[-1] > at[-2]:
                continue  # symmetric
            tail = len(SHAPES.get(name, "M"))
            regime, inner = "", at
            if name not in ("transition", "initial") and len(at) == tail + 1:
                regime, inner = regimes[at[0]] if len(regimes) > 1 else "", at[1:]
            if labels and len(at) == tail + 2:  # changes with time: as at the first step
                regime, inner = regimes[at[1]] if len(regimes) > 1 else "", at[2:]
                if at[0]:
                    continue
            place = (name, inner)
            if labels and name in COVARIANCES and place not in labels:
                continue  # follows from an entry that has a name
            rank = known.index(place) if place in labels else len(known)
            error = math.nan if errors is None else float(errors[at])
            label = labels.get(place) or _label(name, inner, regimes)
            row = Estimate(regime, label, float(x[at]), error, _kind(name, inner))
            first = regimes.index(regime) if regime else len(regimes)
            out.append(((first + (row.kind == "probability"), rank), row))
    return [row for _, row in sorted(out, key=lambda pair: pair[0])]


def _kind(name: str, at: tuple[int, ...]) -> Kind:
    if name in ("transition", "initial"):
        return "probability"
    return "variance" if name in COVARIANCES and at[-1] == at[-2] else "location"


def _label(name: str, at: tuple[int, ...], regimes: Sequence[str]) -> str:
    """A name for an entry of a model that has none."""
    if name == "transition" and len(at) == 2:
        return f"P({regimes[at[0]]} -> {regimes[at[1]]})"
    if name == "initial" and len(at) == 1:
        return f"P({regimes[at[0]]} at the start)"
    return f"{name}[{', '.join(map(str, at))}]"
