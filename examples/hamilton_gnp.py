"""Hamilton's business cycle: estimates and standard errors as published, and what came after.

Growth of US real GNP, 1951 to 1984, is an autoregression of order 4 around a mean that switches
between recession and expansion (Hamilton 1989; Kim and Nelson 1999, chapter 4). Here the model is
one call. It is filtered with GPB(5), which is exact: the deviations from the mean depend on five
regimes.

Published are Stata's estimates of the same model on the same series (manual of mswitch, example 5).
All agree to five decimals. Then what statsmodels does not have: forecasts, and a filter that takes
missing quarters.

Run it: python examples/hamilton_gnp.py [--order 4] (half a minute)
"""

import argparse
import time
from pathlib import Path

import torch

import cumulant as cm

SERIES = Path(__file__).parent / "data" / "us_gnp_growth.csv"
# Estimate and standard error. Stata reports the deviation 0.76900 of the noise, here its variance.
PUBLISHED = {
    ("recession", "mean"): (-0.358811, 0.2645396),
    ("expansion", "mean"): (1.163516, 0.0745187),
    ("", "ar.L1"): (0.013486, 0.1199942),
    ("", "ar.L2"): (-0.057521, 0.1376630),
    ("", "ar.L3"): (-0.246983, 0.1069103),
    ("", "ar.L4"): (-0.212923, 0.1105311),
    ("", "variance"): (0.591368, 2 * 0.769004 * 0.0667396),
    ("", "P(recession -> recession)"): (0.754673, 0.0965189),
    ("", "P(expansion -> recession)"): (0.095915, 0.0377362),
}
LOG_LIKELIHOOD = -181.26339


def compare(found: cm.filtering.Fit) -> None:
    """Estimates and standard errors beside the published ones."""
    print(f"{'':<28}{'estimate':>10}{'std err':>10}{'published':>12}{'std err':>10}")
    worst = 0.0
    for x in found.summary().estimates:
        known = PUBLISHED.get((x.regime, x.label))
        if known is None:
            continue
        name = f"{x.label}, {x.regime}" if x.regime else x.label
        print(f"{name:<28}{x.value:>10.5f}{x.error:>10.5f}{known[0]:>12.5f}{known[1]:>10.5f}")
        worst = max(worst, abs(x.value - known[0]), abs(x.error - known[1]))
    print(f"largest difference {worst:.1e}")
    print(f"log-likelihood {found.log_likelihood:.5f}, published {LOG_LIKELIHOOD:.5f}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Hamilton's model of US GNP")
    parser.add_argument("--order", type=int, default=4, help="lags; 4 is the published model")
    order = parser.parse_args().order
    series = cm.filtering.read_series(SERIES)
    y = series.values
    model = cm.filtering.autoregression(order, regimes=["recession", "expansion"])
    begin = time.perf_counter()
    found = cm.filtering.fit(model, y, collapse=order + 1)
    print(found.summary())
    print(f"{time.perf_counter() - begin:.1f} s\n")
    if order == 4:
        compare(found)
    low = found.smoothed.mode_probabilities[:, 0]
    runs, labels = torch.nonzero(low > 0.5)[:, 0].tolist(), series.labels or []
    starts = [t for t in runs if t - 1 not in runs]
    print(f"\nrecessions begin in {', '.join(labels[t] for t in starts)}")
    ahead = cm.filtering.forecast(found.posterior, 4)
    print("growth after the last quarter, expected:", end=" ")
    print(", ".join(f"{m:.2f} +- {v**0.5:.2f}" for m, v in pairs(ahead)))
    holes = y.clone()
    holes[20:40:4] = torch.nan
    post = cm.filtering.filter(found.model, holes, collapse=order + 1)
    moved = (post.mode_probabilities - found.posterior.mode_probabilities)[:, 0].abs()
    print(f"with five quarters missing, P(recession) moves by up to {moved.max():.2f}", end="")
    print(f" ({labels[int(moved.argmax())]}), and by {moved[45:].max():.4f} after {labels[44]}")


def pairs(ahead: cm.filtering.Posterior) -> list[tuple[float, float]]:
    mean, variance = ahead.observation_mean[:, 0], ahead.observation_covariance[:, 0, 0]
    return list(zip(mean.tolist(), variance.tolist(), strict=True))


if __name__ == "__main__":
    main()
