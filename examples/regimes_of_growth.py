"""Two regimes of growth in US real GDP, fitted by maximum likelihood, against NBER recessions.

Quarterly growth is one of two means plus noise, and a Markov chain says which. With one variance
for both regimes, the lower mean is that of recessions. NBER's dates played no part in the fit, yet
its smoothed probabilities find 26 of 30 recession quarters and 162 of 172 others; the recession of
2001, in which growth hardly fell, is missed. With a variance for each regime the likelihood is far
higher, but the regimes differ: volatile times, mostly before 1984, and quiet ones after, with equal
means. What you let switch decides what the regimes are.

The data come with statsmodels, which also fits the same models: it finds the same maxima, in less
time. Without it, the regimes are those of the inflation series that ships with the package.
Run it: python examples/regimes_of_growth.py [picture.png] (with statsmodels, if it is there; a few
seconds; matplotlib to draw)
"""

import importlib.util
import sys
import time
import warnings
from pathlib import Path

import torch
from torch import Tensor

import cumulant as cm

STARTS = 6
# Peak and trough quarters by the NBER's dating committee; a recession begins after its peak.
RECESSIONS = [
    *(("1960Q2", "1961Q1"), ("1969Q4", "1970Q4"), ("1973Q4", "1975Q1"), ("1980Q1", "1980Q3")),
    *(("1981Q3", "1982Q4"), ("1990Q3", "1991Q1"), ("2001Q1", "2001Q4"), ("2007Q4", "2009Q2")),
]
REGIMES = ["low", "high"]


def growth() -> tuple[Tensor, list[str]]:
    """100 times the change of log real GDP ``(T, 1)``, and the quarters."""
    from statsmodels.api import datasets

    data = datasets.macrodata.load_pandas().data
    quarters = [f"{y:.0f}Q{q:.0f}" for y, q in zip(data["year"], data["quarter"], strict=True)]
    level = torch.tensor(data["realgdp"].to_numpy(copy=True)).log()
    return 100 * level.diff()[:, None], quarters[1:]


def inflation() -> tuple[Tensor, list[str]]:
    """The shipped series."""
    path = Path(cm.filtering.__file__).parent / "data" / "us_inflation.csv"
    series = cm.filtering.read_series(path)
    return series.values, list(series.labels or [])


def two_regimes(variances: int) -> cm.filtering.ReadyModel:
    """Two means, and one or two variances."""
    what = ["mean", "variance"] if variances == 2 else ["mean"]
    return cm.filtering.switching_mean_variance(REGIMES, switching=what)


def compare(probability: Tensor, quarters: list[str]) -> None:
    """The smoothed probability of low growth, in each recession and outside of all."""
    outside = torch.ones(len(quarters), dtype=torch.bool)
    print("NBER recession       quarters  P > 0.5  highest P")
    for peak, trough in RECESSIONS:
        during = slice(quarters.index(peak) + 1, quarters.index(trough) + 1)
        outside[during] = False
        p = probability[during]
        print(f"{quarters[during][0]} - {trough}{len(p):>13}{(p > 0.5).sum():>9}{p.max():>11.2f}")
    inside, calm = probability[~outside] > 0.5, probability[outside] <= 0.5
    print(
        f"P > 0.5 in {inside.sum()} of {len(inside)} recession quarters ({100 * share(inside):.0f} "
        f"%), below in {calm.sum()} of {len(calm)} others ({100 * share(calm):.0f} %)"
    )


def share(x: Tensor) -> float:
    return float(x.double().mean())


def statsmodels_fit(y: Tensor, variances: int) -> str:
    """The log-likelihood that statsmodels reaches with as many starts, and its seconds.

    With two variances one of its starts may shrink a variance to nothing; rounding decides.
    """
    import numpy as np
    from statsmodels.tsa.api import MarkovRegression

    begin = time.perf_counter()
    np.random.seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = MarkovRegression(y[:, 0].numpy(), k_regimes=2, switching_variance=variances == 2)
        try:
            found = f"{model.fit(search_reps=STARTS).llf:.4f}"
        except (RuntimeError, ValueError) as error:
            found = f"gave up ({error})"
    return f"{found}, {time.perf_counter() - begin:.1f} s"


def main() -> None:
    known = importlib.util.find_spec("statsmodels") is not None
    y, quarters = growth() if known else inflation()
    name = "growth of US real GDP, % in a quarter" if known else "US inflation, % in a year"
    print(f"{name}: {len(y)} quarters, {quarters[0]} - {quarters[-1]}")
    for variances in (1, 2):
        begin = time.perf_counter()
        start = two_regimes(variances)
        found = cm.filtering.fit(start, y, starts=STARTS, tol=1e-7, order_by="emission_bias")
        spent = time.perf_counter() - begin
        low = found.smoothed
        print(f"\n{'one variance' if variances == 1 else 'two variances'}")
        print(found.summary())
        reached = sum(value > found.log_likelihood - 0.01 for value in found.starts)
        print(
            f"log-likelihood {found.log_likelihood:.4f}, by {reached} of {STARTS} starts, "
            f"AIC {found.aic:.1f}, {spent:.1f} s"
        )
        if variances == 1 and len(sys.argv) > 1:
            told = {"labels": quarters, "names": REGIMES, "columns": [name]}
            cm.filtering.picture(found.posterior, low, sys.argv[1], **told)
            print(f"wrote {sys.argv[1]}")
        if known:
            print(f"statsmodels    {statsmodels_fit(y, variances)}")
            if variances == 1:
                compare(low.mode_probabilities[:, 0], quarters)
        early = torch.tensor([quarter < "1984" for quarter in quarters])
        p = low.mode_probabilities[:, 0]
        print(
            f"mean probability of the low regime: {p[early].mean():.2f} before 1984, "
            f"{p[~early].mean():.2f} after"
        )


if __name__ == "__main__":
    main()
