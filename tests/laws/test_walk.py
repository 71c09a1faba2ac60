"""T38: a walk of contexts. Oracles: enumeration, quadrature on the circle, torch's attention."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.special import iv
from torch.nn.functional import scaled_dot_product_attention

import cumulant as cm

D = cm.dynamics
DOUBLE = torch.float64


def draws(*shape, seed=0):
    return torch.randn(*shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


def a_walk(d, places=4, words=3, size=0.6):
    """A vocabulary, what was seen at each place, and how many words were not."""
    vocabulary = size * draws(words, d)
    unseen = torch.tensor([n % 2 for n in range(places)], dtype=DOUBLE)
    seen = (1 - unseen)[:, None] * vocabulary[torch.arange(places) % words]
    return vocabulary, seen, unseen


def test_attention_and_normalization_alternate():
    v, seen, unseen = a_walk(3)
    found = D.walk_mean_field(cm.Empirical(v), seen, unseen=unseen, stiffness=1.5, tol=1e-13)
    m = found.context
    attended = scaled_dot_product_attention(m[None], v[None], v[None], scale=1.0)[0]
    torch.testing.assert_close(found.word, attended, atol=1e-12, rtol=0)
    for t in range(len(m)):
        beside = sum(m[s] for s in (t - 1, t + 1) if 0 <= s < len(m))
        eta = 1.5 * beside + seen[t] + unseen[t] * attended[t]
        kappa = float(eta.norm())
        length = iv(1.5, kappa) / iv(0.5, kappa)
        torch.testing.assert_close(m[t], length * eta / kappa, atol=1e-10, rtol=0)


@pytest.mark.parametrize("stiffness", [0.0, 0.3, 1.0, 4.0])
def test_the_free_energy_bounds_that_of_enumeration(stiffness):
    """d = 1: contexts are plus or minus one, and all of them with all words are summed up."""
    v, seen, unseen = a_walk(1)
    places = len(seen)
    total = []
    for c in itertools.product([-1.0, 1.0], repeat=places):
        for w in itertools.product(range(len(v)), repeat=int(unseen.sum())):
            own = iter(w)
            height = stiffness * sum(a * b for a, b in itertools.pairwise(c))
            for t in range(places):
                height += c[t] * float(v[next(own)] if unseen[t] else seen[t])
            total.append(height - places * math.log(2))
    log_z = np.logaddexp.reduce(total)
    found = D.walk_mean_field(cm.Empirical(v), seen, unseen=unseen, stiffness=stiffness, tol=1e-12)
    assert found.free_energy >= -log_z - 1e-12

    def free(m):  # written out, at words that are the best for m
        up, down = (1 + m) / 2, (1 - m) / 2
        entropy = (up * (2 * up).log() + down * (2 * down).log()).sum()
        potential = (unseen * torch.logsumexp(m * v[:, 0], -1)).sum() + (seen * m).sum()
        return entropy - potential - stiffness * (m[1:] * m[:-1]).sum()

    assert found.free_energy.item() == pytest.approx(free(found.context).item(), abs=1e-10)
    slope = torch.func.grad(free)(found.context) * (1 - found.context**2)  # steep where |m| is 1
    assert slope.abs().max() < 1e-10


def on_the_circle(v, seen, unseen, stiffness, points=128):
    """(log Z, means of contexts) by sums over angles, forwards and backwards."""
    angle = 2 * np.pi * np.arange(points) / points
    c = np.stack([np.cos(angle), np.sin(angle)], -1)
    pull = np.exp(c @ seen.numpy().T) * np.exp(c @ v.numpy().T).sum(-1)[:, None] ** unseen.numpy()
    pass_on = np.exp(stiffness * c @ c.T) / points
    forward = [pull[:, 0] / points]
    for t in range(1, len(seen)):
        forward.append(pull[:, t] * (pass_on @ forward[-1]))
    backward = [np.ones(points)]
    for t in range(len(seen) - 1, 0, -1):
        backward.append(pass_on @ (pull[:, t] * backward[-1]))
    both = np.stack([f * b for f, b in zip(forward, backward[::-1], strict=True)])
    return math.log(both[0].sum()), both @ c / both.sum(-1, keepdims=True)


def test_the_second_order_is_what_is_missing_at_weak_coupling():
    """log Z + F over couplings squared tends to the term of Plefka's expansion."""
    v, seen, unseen = a_walk(2, places=5)
    ratios = []
    for weak in (0.2, 0.1, 0.05):
        small = weak * (v - v.mean(0))
        found = D.walk_mean_field(
            cm.Empirical(small), seen, unseen=unseen, stiffness=weak, tol=1e-13
        )
        log_z, means = on_the_circle(small, seen, unseen, weak)
        ratios.append(float(found.free_energy + log_z) / float(found.second_order))
        assert np.abs(means - found.context.numpy()).max() < weak
    off = [abs(x - 1) for x in ratios]
    assert off[0] > off[1] > off[2]
    assert off[2] < 0.02


def test_words_alone_are_exact():
    """Without coupling between contexts each is its own von Mises-Fisher law."""
    v, seen, _ = a_walk(2)
    found = D.walk_mean_field(cm.Empirical(v), seen, stiffness=0.0, tol=1e-13)
    log_z, means = on_the_circle(v, seen, 0 * seen[:, 0], 0.0)
    assert found.free_energy.item() == pytest.approx(-log_z, abs=1e-10)
    np.testing.assert_allclose(found.context, means, atol=1e-10)
    assert found.second_order == 0


@pytest.mark.parametrize("d", [2, 3, 6])
def test_mean_field_orders_by_itself_where_the_walk_does_not(d):
    """No word seen, as many words v as -v: the exact means are 0, but mean field takes a side
    from stiffness * 2 cos(pi / (T + 1)) + largest eigenvalue of Cov v = d."""
    places = 6
    v = 0.4 * draws(8, d)
    v = torch.cat([v, -v])
    widest = torch.linalg.eigvalsh(v.mT @ v / len(v))[-1]
    critical = float(d - widest) / (2 * math.cos(math.pi / (places + 1)))
    nothing = torch.zeros(places, d, dtype=DOUBLE)
    for ratio, ordered in ((0.9, False), (1.1, True)):
        found = D.walk_mean_field(
            cm.Empirical(v), nothing, unseen=1.0, stiffness=ratio * critical, tol=1e-10
        )
        assert (float(found.context.norm(dim=-1).max()) > 0.1) == ordered


def test_gradients():
    v, seen, unseen = a_walk(2)
    f = lambda v, seen: (
        D.walk_mean_field(cm.Empirical(v), seen, unseen=unseen, stiffness=0.8, tol=1e-13).context
    )
    assert torch.autograd.gradcheck(f, (v.requires_grad_(), seen.requires_grad_()))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"seen": torch.zeros(4, 3)}, r"seen must have shape \(T, 2\)"),
        ({"unseen": torch.ones(3)}, r"unseen must be a number or have shape \(4,\)"),
        ({"unseen": -1.0}, "must be >= 0"),
        ({"stiffness": -1.0}, "stiffness must be finite and at least 0"),
        ({"start": torch.zeros(2, 2)}, r"start must have shape \(4, 2\)"),
        ({"vocabulary": cm.Empirical(torch.zeros(2, 5, 2))}, "one measure"),
    ],
)
def test_bad_input(given, message):
    usual = {"vocabulary": cm.Empirical(torch.ones(3, 2)), "seen": torch.zeros(4, 2)}
    with pytest.raises(cm.InputError, match=message):
        D.walk_mean_field(**({"stiffness": 1.0} | usual | given))
