"""`compare_regimes`: how many regimes a series has, by criteria and likelihood ratios."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from cumulant.core.checks import whole
from cumulant.core.errors import InputError
from cumulant.core.randomness import generator_or
from cumulant.filtering.fitting import Fit, fit
from cumulant.filtering.forecasting import sample
from cumulant.filtering.frames import PandasLike, need_pandas
from cumulant.filtering.model import SwitchingLinearGaussian
from cumulant.pages.cards import Markup, card, note

if TYPE_CHECKING:
    from cumulant.filtering.frames import DataFrame

__all__ = ["RegimeComparison", "compare_regimes"]

CAVEAT = (
    "The likelihood ratio is not chi-squared: with fewer regimes, the parameters and the",
    "probabilities of the others are not identified. Trust the criteria, or p-values from",
    "simulation (draws=).",
)


class Compared(NamedTuple):
    """A number of regimes, its fit, and the ratio against the number before it."""

    regimes: int
    found: Fit
    ratio: float
    p_value: float


@dataclass(frozen=True)
class RegimeComparison:
    """Fits with several numbers of regimes: print it, or take ``table`` as a data frame.

    Attributes:
        rows: one for each number of regimes.
        draws: how many series were simulated for each p-value.
    """

    rows: tuple[Compared, ...]
    draws: int

    def __repr__(self) -> str:
        numbers = ", ".join(str(row.regimes) for row in self.rows)
        return f"RegimeComparison({numbers} regimes; {self.draws} draws; print it for the table)"

    @property
    def fits(self) -> dict[int, Fit]:
        """The fit with each number of regimes."""
        return {row.regimes: row.found for row in self.rows}

    def best(self, criterion: Literal["aic", "bic", "hqic"] = "bic") -> Fit:
        """The fit with the smallest criterion, of those that converged if any did."""
        if criterion not in ("aic", "bic", "hqic"):
            raise InputError(f"best: criterion must be aic, bic or hqic, not {criterion!r}.")
        able = [x for x in self.fits.values() if x.converged] or list(self.fits.values())
        return min(able, key=lambda x: getattr(x, criterion))

    @property
    def table(self) -> DataFrame:
        """One row for each number of regimes."""
        pd = need_pandas()
        index = pd.Index([row.regimes for row in self.rows], name="regimes")
        return pd.DataFrame([self._cells(row) for row in self.rows], index=index, columns=COLUMNS)

    def _cells(self, row: Compared) -> list[Any]:
        found = row.found
        numbers = [found.parameter_count, found.log_likelihood, found.aic, found.bic, found.hqic]
        return [*numbers, row.ratio, row.p_value, found.converged]

    def __str__(self) -> str:
        heads = zip(COLUMNS, WIDTHS, strict=True)
        lines = ["regimes" + "".join(name.rjust(w) for name, w in heads)]
        for row in self.rows:
            cells = zip(map(_shown, self._cells(row)), WIDTHS, strict=True)
            lines.append(f"{row.regimes:>7}" + "".join(cell.rjust(w) for cell, w in cells))
        return "\n".join([*lines, *CAVEAT])

    def _repr_html_(self) -> str:
        heads = "".join(f"<th>{html.escape(x)}</th>" for x in ("regimes", *COLUMNS))
        body = "".join(
            f"<tr><th>{row.regimes}</th>"
            + "".join(f"<td>{_shown(x)}</td>" for x in self._cells(row))
            + "</tr>"
            for row in self.rows
        )
        inner = Markup(f"<table><tr>{heads}</tr>{body}</table>")
        return card("Numbers of regimes", "", inner, note(" ".join(CAVEAT)))


COLUMNS = ["parameters", "log-likelihood", "AIC", "BIC", "HQIC", "ratio", "p", "converged"]
WIDTHS = [12, 16, 10, 10, 10, 9, 7, 11]


def _shown(x: Any) -> str:
    if isinstance(x, bool):
        return "yes" if x else "no"
    if isinstance(x, int):
        return str(x)
    return "" if math.isnan(x) else f"{x:.3f}" if abs(x) < 10 else f"{x:.2f}"


def compare_regimes(
    make: Callable[[int], SwitchingLinearGaussian],
    observations: Tensor | PandasLike,
    regimes: Sequence[int] = (1, 2, 3),
    *,
    draws: int = 0,
    starts: int = 4,
    generator: torch.Generator | None = None,
    **how: Any,
) -> RegimeComparison:
    """Fit a model with each number of regimes, and compare.

    Likelihood ratios 2 (L_M - L_m) are against the number m before M in `regimes`. They are not
    chi-squared: under m regimes, the parameters of the others are not identified (Davies 1977,
    Hansen 1992). Their p-values come from `draws` series simulated under m regimes, to which both
    models are fitted again.

    Args:
        make: the model with so many regimes, as ``lambda n: autoregression(1, regimes=n)``.
        observations: as in `fit`.
        regimes: numbers of regimes, rising.
        draws: how many series to simulate for each p-value; 0 for none.
        starts: as in `fit`; more regimes have more local maxima.
        generator: source of the draws. By default they are the same in every call.
        how: further arguments of `fit`.

    >>> import torch, cumulant as cm
    >>> y = torch.tensor([0.1, -0.2, 0.0, 5.1, 4.9, 5.0, 5.2, 0.1, -0.1, 0.2])[:, None].double()
    >>> make = lambda n: cm.filtering.switching_mean_variance(n, switching="mean")
    >>> cm.filtering.compare_regimes(make, y, (1, 2)).best("bic").model.modes
    2
    """
    counts = [whole("compare_regimes", "regimes", m, 1) for m in regimes]
    if len(counts) < 2 or counts != sorted(set(counts)):
        raise InputError(f"compare_regimes: regimes must be two or more, rising, not {regimes!r}.")
    draws = whole("compare_regimes", "draws", draws, 0)
    source = generator_or("compare_regimes", generator, 0)
    how = {"throw": False, "starts": starts, **how}
    rows: list[Compared] = []
    for count in counts:
        found = fit(make(count), observations, **how)
        ratio = p = math.nan
        if rows:
            fewer = rows[-1]
            ratio = 2 * (found.log_likelihood - fewer.found.log_likelihood)
            if draws:
                pair = [make(fewer.regimes), make(count)]
                p = _bootstrap(fewer.found, pair, ratio, draws, source, how)
        rows.append(Compared(count, found, ratio, p))
    return RegimeComparison(tuple(rows), draws)


def _bootstrap(
    null: Fit,
    models: Sequence[SwitchingLinearGaussian],
    ratio: float,
    draws: int,
    generator: torch.Generator,
    how: dict[str, Any],
) -> float:
    """The share of simulated ratios at least as large, the observed one counted among them."""
    seen, start = null.evidence, null.smoothed
    # A vague start would throw simulated series far away: they start where the data did.
    model = null.model.replace(
        initial_mean=start.initial_mean, initial_covariance=start.initial_covariance
    )
    quick: dict[str, Any] = {**how, "standard_errors": False}
    steps, size = seen.observations.shape[-2], tuple(seen.observations.shape[:-2])
    more = 0
    for _ in range(draws):
        y = sample(model, steps, size, inputs=seen.inputs, generator=generator).observations
        y = torch.where(seen.observations.isnan(), torch.nan, y)
        ends = [fit(m, y, **quick).log_likelihood for m in models]
        more += 2 * (ends[1] - ends[0]) >= ratio
    return (1 + more) / (1 + draws)
