"""The tables of the lens written out: M x N weights, covariance matrices, sorts, in float64."""

from __future__ import annotations

import math

import numpy as np
import pandas
import torch

import cumulant as cm
from cumulant.lens.patterns import PATTERNS

KEYS = ["input", "layer", "head", "token"]
NUMBERS = [
    *("log_normalizer", "entropy", "effective_keys", "score_variance", "top_weight"),
    *("self_mass", "sink_mass", "sink_logit_mass", "fisher_trace", "leading_eigenvalue"),
]
COLUMNS = [*KEYS, "attention", "k90", "class", "visible", "top_key", *NUMBERS]


def numbered(real):
    """Numbers of the real tokens of each text; -1 for padding."""
    return torch.where(real, real.long().cumsum(-1) - 1, -1)


def dense_table(
    query,
    key,
    seen,
    *,
    scale,
    real,
    real_keys=None,
    own=None,
    weights=None,
    bias=None,
    cap=None,
    sinks=None,
    cross=False,
    layer=0,
    inputs=None,
    token=None,
):
    """One row per real query of one call.

    `seen` (B, 1 or H, M, N) says which keys a query sees, `real` (B, M) and `real_keys` (B, N)
    what is no padding, `own` which key is the query's own. `weights` are the model's, where it
    tells; otherwise they follow from the scores.
    """
    query, key = query.double(), key.double()
    batch, heads, m, _ = query.shape
    n = key.shape[2]
    key = key.repeat_interleave(heads // key.shape[1], 1)
    real_keys = real if real_keys is None else real_keys
    seen = seen.expand(batch, heads, m, n)
    score = scale * query @ key.mT
    score = score if cap is None else cap * torch.tanh(score / cap)
    total = score if bias is None else score + bias.double()
    key_token = numbered(real_keys)
    if sinks is not None:  # one more key, at zero, before the others
        key = torch.nn.functional.pad(key, (0, 0, 1, 0))
        score = torch.nn.functional.pad(score, (1, 0))
        logit = sinks.double().reshape(1, -1, 1, 1).expand(batch, heads, m, 1)
        total = torch.cat([logit, total], -1)
        seen = torch.nn.functional.pad(seen, (1, 0), value=True)
        key_token = torch.nn.functional.pad(key_token, (1, 0), value=-1)
        if weights is not None:
            rest = 1 - weights.double().sum(-1, keepdim=True)
            weights = torch.cat([rest.clamp_min(0.0), weights.double()], -1)
    total = total.masked_fill(~seen, -math.inf)
    normalizer = total.logsumexp(-1)
    p = (total - normalizer[..., None]).exp().nan_to_num(0.0)
    told = p if weights is None else weights.double()
    key_mean = p @ key
    apart = (key[:, :, None] - key_mean[..., None, :]) * p.sqrt()[..., None]
    covariance = apart.mT @ apart
    mean = (p * score).sum(-1, keepdim=True)
    falling, order = told.sort(-1, descending=True)
    first = (key_token == 0)[:, None, None].expand_as(told)
    shift = 0 if sinks is None else 1
    own = torch.arange(m).expand(batch, m) if own is None else own
    before = own - 1 if not cross else torch.full_like(own, -1)
    there = (before >= 0) & numbered(real_keys).gather(-1, before.clamp_min(0)).ge(0)
    previous = (before + shift).clamp_min(0)[:, None, :, None].expand(batch, heads, m, 1)
    own = (own + shift)[:, None, :, None].expand(batch, heads, m, 1)
    sink = told[..., 0] if shift else torch.zeros_like(normalizer)
    entropy = torch.special.entr(told).sum(-1)
    names = key_token[:, None, None].expand_as(told)
    second = falling[..., 1] if falling.shape[-1] > 1 else torch.zeros_like(normalizer)
    columns = {
        "log_normalizer": normalizer,
        "entropy": entropy,
        "effective_keys": entropy.exp(),
        "score_variance": (p * (score - mean) ** 2).sum(-1),
        "top_weight": falling[..., 0],
        "self_mass": torch.zeros_like(normalizer) if cross else told.gather(-1, own)[..., 0],
        "previous_mass": told.gather(-1, previous)[..., 0].where(there[:, None], math.nan),
        "sink_mass": (told * first).sum(-1) + sink,
        "sink_logit_mass": sink,
        "fisher_trace": covariance.diagonal(dim1=-2, dim2=-1).sum(-1),
        "leading_eigenvalue": torch.linalg.eigvalsh(covariance.nan_to_num(0.0))[..., -1],
        "visible": seen.sum(-1),
        "top_key": names.gather(-1, order[..., :1])[..., 0],
        "second_weight": second,
        "falling": falling.cumsum(-1),
    }
    token = numbered(real) if token is None else token
    keep = real[:, None].expand(batch, heads, m)
    inputs = torch.arange(batch) if inputs is None else torch.as_tensor(inputs)
    grid = {
        "input": inputs[:, None, None].expand(batch, heads, m),
        "layer": torch.full((batch, heads, m), layer),
        "head": torch.arange(heads)[None, :, None].expand(batch, heads, m),
        "token": token[:, None].expand(batch, heads, m),
    }
    out = {name: x[keep].numpy() for name, x in grid.items()}
    out |= {name: list(x[keep].numpy()) for name, x in columns.items()}
    return pandas.DataFrame({**out, "attention": "cross" if cross else "self"})


def class_of(k, visible):
    """T21: I > N/2, II (N/8, N/2], III (N/32, N/8], IV <= N/32."""
    return (
        "I" if 2 * k > visible else "II" if 8 * k > visible else "III" if 32 * k > visible else "IV"
    )


def assert_tables(table, wanted, tolerance):
    """Every column; where rounding decides (k90, top key) any answer within it is right."""
    wanted = wanted.sort_values(KEYS, ignore_index=True)
    assert set(COLUMNS) <= set(table.columns)
    for name in KEYS:
        assert table[name].tolist() == wanted[name].tolist(), name
    assert table["attention"].astype(str).tolist() == wanted["attention"].tolist()
    assert table["visible"].tolist() == wanted["visible"].tolist()
    assert not table.drop(columns=list(PATTERNS)).isna().any().any()
    previous = table["previous_mass"].to_numpy(dtype=float, na_value=math.nan)
    np.testing.assert_allclose(previous, wanted["previous_mass"], rtol=tolerance, atol=tolerance)
    for name in NUMBERS:
        theirs = wanted[name].to_numpy(dtype=float)
        np.testing.assert_allclose(
            table[name].to_numpy(), theirs, rtol=tolerance, atol=tolerance, err_msg=name
        )
    slack = max(tolerance, 1e-12)
    rows = zip(table["k90"], wanted["falling"], strict=True)
    for k, falling in rows:
        assert falling[k - 1] >= 0.9 - slack
        assert k == 1 or falling[k - 2] < 0.9 + slack
    rows = zip(table["class"], table["k90"], wanted["visible"], strict=True)
    assert all(found == class_of(k, visible) for found, k, visible in rows)
    clear = wanted["top_weight"] - wanted["second_weight"] > slack
    assert table["top_key"][clear].tolist() == wanted["top_key"][clear].tolist()


def assert_equal_tables(first, second, tolerance):
    """Two tables of the lens say the same."""
    for name in (*KEYS, "visible"):
        assert first[name].tolist() == second[name].tolist(), name
    assert first["attention"].tolist() == second["attention"].tolist()
    for name in NUMBERS:
        np.testing.assert_allclose(
            first[name], second[name], rtol=tolerance, atol=tolerance, err_msg=name
        )


def seen_while(model, *args, **kwargs):
    """The lens after one call without gradients."""
    with torch.no_grad(), cm.lens.observe(model) as lens:
        model(*args, **kwargs)
    return lens
