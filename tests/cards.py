"""One object of each kind that a notebook shows as a card."""

from __future__ import annotations

import pandas as pd
import torch

import cumulant as cm
from cumulant.lab import claims
from cumulant.lens import Examination
from report_data import made_up
from switching import means

HOSTILE = "<script>alert(1)</script> & \"quoted\" 'x' ]]> \x00\x1b[0m \ud800 --> http://a.b/c.png"


def series():
    """A series with two levels and a gap, and its fit."""
    y = torch.cat([torch.zeros(20), torch.full((15,), 4.0), torch.zeros(10)])
    y = (y + 0.5 * torch.randn(45, generator=torch.Generator().manual_seed(0))).double()
    y[7] = torch.nan
    half = torch.tensor([0.5, 0.5])
    model = means([[0.9, 0.1], [0.1, 0.9]], [0.5, 3.0], [1.0, 1.0], initial=half)
    name = HOSTILE.replace("\ud800", "")  # pandas encodes its labels
    data = pd.DataFrame({name: y.numpy()}, index=pd.RangeIndex(1950, 1995))
    return cm.filtering.fit(model, data, collapse="gpb1", free=["emission_bias", "transition"])


def examination():
    data = made_up(layers=3, heads=5)
    tables = {"heads": data.heads, "layers": data.layers}
    facts = {"name": HOSTILE, "type": "bert", "layers": 3, "heads": 5}
    return Examination(facts, {"texts": 2, "tokens": 40}, [HOSTILE], tables)


def cards():
    x = torch.randn(60, 3, generator=torch.Generator().manual_seed(1))
    sphere = cm.dynamics.Sphere()
    found, claim = series(), claims.claims()["T12"]
    return {
        "Attended": cm.attend(x, x, is_causal=True),
        "Examination": examination(),
        "Posterior": found.posterior,
        "Smoothed": found.smoothed,
        "Fit": found,
        "Summary": found.summary([HOSTILE, "b"]),
        "Trajectory": cm.dynamics.simulate(sphere(x), 30, beta=4.0, contraction=sphere),
        "Claim": claim,
        "Entry": claims.run(claim, quick=True),
        "Result": claim.experiment(claims.Trial(0, quick=True)),
    }
