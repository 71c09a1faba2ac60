"""Energy and link of attention calls: laws, closed forms, scikit-learn and scipy (T19, T29)."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from scipy.optimize import linprog
from sklearn.linear_model import LinearRegression
from sklearn.metrics import r2_score
from sklearn.model_selection import cross_val_predict

import cumulant as cm
from cumulant.attention.calls import AttentionCall
from cumulant.lens.heads import energy_change, link

DOUBLE = torch.float64


def random_call(b=2, h=4, hk=2, m=9, n=9, d=5, **options):
    query = torch.randn(b, h, m, d, dtype=DOUBLE) * 2
    key, value = torch.randn(2, b, hk, n, d, dtype=DOUBLE)
    return AttentionCall(query, key, value, **({"scale": 0.7} | options))


def dense_scores(call, query):
    """What every query sees, with -inf for what it does not, sinks last."""
    b, h, m, _ = query.shape
    key = call.key.repeat_interleave(h // call.key.shape[1], 1)
    scores = call.scale * query @ key.mT
    if call.softcap is not None:
        scores = call.softcap * (scores / call.softcap).tanh()
    if call.bias is not None:
        scores = scores + call.bias
    if call.mask is not None:
        scores = scores.masked_fill(~call.mask, -math.inf)
    if call.causal:
        scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), -math.inf)
    if call.sinks is not None:
        sinks = call.sinks.reshape(1, -1, 1, 1).expand(b, h, m, 1)
        scores, key = torch.cat([scores, sinks], -1), torch.cat([key, 0 * key[:, :, :1]], 2)
    return scores, key


def dense_energy(call, x):
    return -dense_scores(call, x)[0].logsumexp(-1) / call.scale + x.square().sum(-1) / 2


CALLS = {
    "plain": {},
    "causal": {"causal": True},
    "bias": {"bias": torch.linspace(-2, 2, 81, dtype=DOUBLE).reshape(1, 1, 9, 9)},
    "mask": {
        "mask": torch.arange(9).reshape(1, 1, 1, 9) < torch.tensor([9, 6]).reshape(2, 1, 1, 1)
    },
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=DOUBLE)},
}


@pytest.mark.parametrize("name", CALLS)
def test_energy_of_the_heads_own_update(name):
    call = random_call(**CALLS[name])
    scores, key = dense_scores(call, call.query)
    after = scores.softmax(-1) @ key
    expected = dense_energy(call, after) - dense_energy(call, call.query)
    change = energy_change(call)
    torch.testing.assert_close(change, expected)
    # G is convex, so the update gains half its own length squared at least.
    assert (change <= -(call.query - after).square().sum(-1) / 2 + 1e-12).all()


def test_energy_is_the_memorys():
    call = random_call(b=1, h=1, hk=1)
    memory = cm.Memory(call.key[0, 0], beta=call.scale)
    state = call.query[0, 0]
    expected = memory.energy(memory.retrieve(state, steps=1).state) - memory.energy(state)
    torch.testing.assert_close(energy_change(call)[0, 0], expected)


def test_energy_of_single_precision_and_of_nothing():
    call = random_call(mask=torch.arange(9).reshape(1, 1, 9, 1).expand(1, 1, 9, 9) > 0)
    single = replace(call, query=call.query.float(), key=call.key.float(), value=call.value.float())
    change = energy_change(single)
    assert change.dtype == torch.float32
    assert change[:, :, 0].isnan().all()
    assert (change[:, :, 1:] <= 0).all()
    resting = replace(call, mask=None, query=call.attend().key_mean)  # one step from rest and on
    for _ in range(200):
        resting = replace(resting, query=resting.attend().key_mean)
    assert energy_change(resting).abs().max() < 1e-9
    with pytest.raises(cm.InputError, match="at least 0"):
        energy_change(replace(call, scale=-1.0))


@pytest.mark.parametrize("name", CALLS)
def test_energy_of_a_head_without_scores_is_the_limit(name):
    """Scale 0 is uniform attention over what is seen: each query falls to its mean m, by all of
    |q - m|^2 / 2. Small scales come there."""
    call = random_call(scale=0.0, **CALLS[name])
    scores, key = dense_scores(call, call.query)
    mean = scores.softmax(-1) @ key
    change = energy_change(call)
    torch.testing.assert_close(change, -(call.query - mean).square().sum(-1) / 2)
    torch.testing.assert_close(energy_change(replace(call, scale=1e-7)), change, rtol=1e-5, atol=0)
    blind = replace(call, mask=torch.zeros(1, 1, 9, 9).bool(), sinks=None)
    assert energy_change(blind).isnan().all()


def test_energy_with_a_softcap():
    """A softcap makes another function of the scores, for which nothing is promised."""
    call = random_call(m=50, n=50, softcap=0.5, scale=3.0)
    scores, key = dense_scores(call, call.query)
    after = scores.softmax(-1) @ key
    change = energy_change(call)
    torch.testing.assert_close(change, dense_energy(call, after) - dense_energy(call, call.query))
    small = replace(call, query=call.query / 20)
    assert (energy_change(small) > 0).any()


@pytest.mark.parametrize("tokens", [40, 4])
def test_link_of_an_unmasked_head_is_its_query(tokens):
    """The law behind T29: the natural parameter of E_i[k] is scale q_i, on the keys' span."""
    call = random_call(b=1, h=2, hk=2, m=tokens, n=tokens, d=5)
    mean = call.attend(value=call.key).mean
    for head in range(2):
        key = call.key[0, head]
        eta = cm.Empirical(key).link(mean[0, head])
        away = key - key.mean(0)
        onto = torch.linalg.pinv(away) @ away  # projects on the span
        torch.testing.assert_close(eta, call.scale * call.query[0, head] @ onto, atol=1e-6, rtol=0)


def corners(d=6, spread=1.5, **options):
    """One head whose keys are the corners of a cube, where the link is atanh, coordinatewise."""
    key = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=d)), dtype=DOUBLE)
    query = spread * torch.randn(len(key), d, dtype=DOUBLE)
    shape = (1, 1, len(key), d)
    return AttentionCall(query.reshape(shape), key.reshape(shape), key.reshape(shape), **options)


def everyone(call):
    return torch.ones(call.query.shape[0], call.query.shape[2], dtype=torch.bool)


def test_link_on_a_cube():
    call = corners()
    found = link(call, everyone(call))
    weights = (call.query[0, 0] @ call.key[0, 0].mT).softmax(-1)
    mean = weights @ call.key[0, 0]
    eta = mean.atanh()
    guess = cross_val_predict(LinearRegression(), mean, eta, cv=5)
    theirs = r2_score(eta, guess, multioutput="variance_weighted")
    assert found.linear.item() == pytest.approx(theirs, abs=0.03)
    trained = r2_score(eta, weights @ call.query[0, 0], multioutput="variance_weighted")
    assert found.trained.item() == pytest.approx(trained, abs=1e-6)
    assert found.exists.item() == 1


def test_gaussian_keys_have_a_linear_link():
    """T29, T3: eta = Cov^-1 (mu - m), whatever the covariance; far out finite samples bend it."""
    mix = torch.randn(3, 3, dtype=DOUBLE)
    key = torch.randn(3000, 3, dtype=DOUBLE) @ mix + 5
    gentle = torch.randn(3000, 3, dtype=DOUBLE) @ torch.linalg.inv(mix).mT
    scores = [
        link(AttentionCall(q[None, None], key[None, None], key[None, None]), one).linear.item()
        for one in [torch.ones(1, 3000, dtype=torch.bool)]
        for q in (0.3 * gentle, 8 * gentle)
    ]
    assert scores[0] > 0.99 > 0.95 > scores[1]


def test_trained_map_of_clusters():
    """Tokens of a cluster share a query and see their own cluster: E[q] = q, so R^2 is 1."""
    cluster = torch.arange(60) % 2
    center = torch.tensor([[4.0, 0, 0], [-4.0, 0, 0]], dtype=DOUBLE)
    key = center[cluster] + torch.randn(60, 3, dtype=DOUBLE)
    query = torch.tensor([[2.0, 0.3, -0.2], [-2.0, 0.1, 0.4]], dtype=DOUBLE)[cluster]
    call = AttentionCall(query[None, None], key[None, None], key[None, None])
    assert link(call, everyone(call)).trained.item() > 0.999


def test_padding_grouped_heads_and_texts():
    alone = random_call(b=1, h=4, hk=2, m=30, n=30)
    expected = link(alone, everyone(alone), means=20)
    wide = [torch.cat([x, 9 * torch.randn_like(x[:, :, :7])], 2) for x in (alone.query, alone.key)]
    real = torch.arange(37)[None] < 30
    padded = AttentionCall(*wide, wide[1], mask=real[:, None, None, :], scale=alone.scale)
    repeated = replace(alone, key=alone.key.repeat_interleave(2, 1))
    repeated = replace(repeated, value=repeated.key)
    for found in (link(padded, real, means=20), link(repeated, everyone(alone), means=20)):
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    twice = AttentionCall(
        *(torch.cat([x, x]) for x in (alone.query, alone.key, alone.value)), scale=0.7
    )
    torch.testing.assert_close(
        link(twice, everyone(twice), means=30).trained, link(alone, everyone(alone)).trained
    )


def depth(mean, points):
    """The largest weight that all points can have: max t with w >= t, w' points = mean."""
    n, d = points.shape
    equal = torch.cat([points.mT, torch.ones(1, n, dtype=DOUBLE)])
    equal = torch.cat([equal, torch.zeros(d + 1, 1, dtype=DOUBLE)], 1)
    below = torch.cat([-torch.eye(n, dtype=DOUBLE), torch.ones(n, 1, dtype=DOUBLE)], 1)
    target = torch.cat([mean, torch.ones(1, dtype=DOUBLE)])
    cost = torch.zeros(n + 1)
    cost[-1] = -1
    tables = (x.numpy() for x in (cost, below, torch.zeros(n), equal, target))
    found = linprog(*tables, [(0, None)] * n + [(None, None)])
    return -found.fun if found.status == 0 else -1.0


def test_causal_means_need_not_have_a_link():
    """Means of few keys may lie on faces of the hull of all (linear programs), later half too."""
    call = random_call(b=1, h=1, hk=1, m=30, n=30, d=20, causal=True)
    call = replace(call, scale=0.05)
    mean = call.attend(value=call.key).mean[0, 0, 15:]
    depths = [depth(x, call.key[0, 0]) for x in mean]
    safe, inside = (sum(t > edge for t in depths) / 15 for edge in (1e-6, 1e-12))
    assert 0 < safe <= inside < 1
    assert safe - 1e-6 <= link(call, everyone(call)).exists.item() <= inside + 1e-6


def test_sink_logits_are_part_of_the_measure():
    """Keys far from 0: with the sink's atom means have links, which are the queries."""
    call = random_call(
        b=1, h=2, hk=2, m=40, n=40, d=3, sinks=torch.tensor([3.0, 1.0], dtype=DOUBLE)
    )
    call = replace(call, key=call.key + 2)
    found = link(call, everyone(call))
    assert (found.exists == 1).all()
    scores, _ = dense_scores(call, call.query)
    guess = scores.softmax(-1)[..., :-1] @ call.query
    for head in range(2):
        target = call.query[0, head]
        theirs = r2_score(target, guess[0, head], multioutput="variance_weighted")
        assert found.trained[head].item() == pytest.approx(theirs, abs=1e-5)


def test_where_there_is_no_link_to_speak_of():
    call = random_call(b=1, m=9, n=9)
    few = link(call, everyone(call))
    assert few.linear.isnan().all()
    assert few.trained.isnan().all()
    assert (few.exists == 1).all()
    assert link(replace(call, cross=True), everyone(call)) is None
    assert link(random_call(b=1, m=3, n=9), torch.ones(1, 3, dtype=torch.bool)) is None
    assert link(call, torch.zeros(1, 9, dtype=torch.bool)).exists.isnan().all()
    with pytest.raises(cm.InputError, match="real"):
        link(call, torch.ones(9, dtype=torch.bool))
