"""T8: maximum entropy, and the canonical link as the solution of its dual problem."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from cumulant import Empirical, maximum_entropy
from cumulant.core.typed import linalg, special
from cumulant.figures import INK, series_color
from cumulant.lab.claims.claim import Claim, Found, Trial, table
from cumulant.lab.claims.measuring import gap, minimized

CLAIM = Claim(
    id="T8",
    title="Maximum entropy and the canonical link",
    evidence="identity",
    statement="Among all laws with a given mean the tilted one has the most entropy relative to h, "
    "and its η solves the concave dual problem in the log-normalizer. So the link from μ to η "
    "exists for every mean inside the convex hull of the support, unique up to directions it does "
    "not see.",
    source="main draft, section 2.3; message passing draft, section 4 (canonical link)",
    formula=r"p_\eta = \operatorname{argmin}_{q:\, E_q[x] = \mu} \operatorname{KL}(q \| h), \qquad "
    r"\eta = \nabla G^*(\mu) = \operatorname{argmax}_\eta \left(\langle\eta, \mu\rangle - "
    r"G(\eta)\right)",
    recorded="holds",
    systems=("maximum entropy (Jaynes)",),
    tests=("tests/laws/test_duality.py", "tests/measures/test_link.py"),
    rules=table("""
      statement:
        jaynes_gap ≤ 6e-6: the die of mean 4.5 against Jaynes' five digits
        primal_gap ≤ 1e-6: probabilities against the primal by SLSQP
        more_entropy ≤ 1e-12: entropy gained by 500 other laws of that mean
        link_residual ≤ 1e-7: mean at the link, written out, minus the mean requested
        across ≤ 1e-8: component of η orthogonal to the support
        wrong_status ≤ 0: means of a square with the wrong status
      noted:
        undamped_lost: means near corners that undamped Newton misses
        unproved: share of means outside that are reported as stalled
    """),
    finding="Jaynes' die is reproduced to {jaynes_gap:.0e}, and no other law of the same mean has "
    "more entropy. The link exists exactly for means inside the hull; damped Newton finds them "
    "all, undamped Newton misses {undamped_lost:.0%} of those near corners.",
    caption="Left: the maximum-entropy die for four averages. Right: target means for nine points "
    "on a square; a natural parameter exists inside the hull, but not on its edge or outside.",
)


# E. T. Jaynes, Brandeis lectures, 1962: the die whose throws average 4.5.
JAYNES = (0.05435, 0.07877, 0.11416, 0.16545, 0.23977, 0.34749)
FACES = torch.arange(1, 7, dtype=torch.float64)


def primal(conditions: Any, wanted: Any) -> Tensor:
    """The least Σ q log q under linear conditions, by SLSQP."""

    def missed(q: Any) -> Any:
        return q @ conditions - wanted

    found = minimized(
        lambda q: (float(np.sum(q * np.log(q))), np.log(q) + 1),
        np.full(10, 0.1),
        jac=True,
        bounds=[(1e-12, 1)] * 10,
        constraints={"type": "eq", "fun": missed},
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 500},
    )
    return torch.tensor(found.x)


def entropies(trial: Trial) -> dict[str, float]:
    """Ten points with a given mean: the primal problem, and other laws of that mean."""
    x, share = trial.normal(10, 2), trial.normal(10).softmax(0)
    target = share @ x
    p = maximum_entropy(x, target)
    conditions = torch.cat([torch.ones(10, 1, dtype=torch.float64), x], -1)
    wanted = torch.cat([torch.ones(1, dtype=torch.float64), target])
    # Other laws with the same total and mean: steps in the null space of both conditions.
    away = linalg.qr(conditions, mode="complete").Q[:, 3:] @ trial.normal(7, 500)
    others = p[:, None] + trial.uniform(500) * away * (p[:, None] / away.abs()).amin(0)
    more = special.entr(others).sum(0) - special.entr(p).sum()
    return {
        "primal_gap": gap(p, primal(conditions.numpy(), wanted.numpy())),
        "more_entropy": float(more.max()),
    }


def links(trial: Trial) -> dict[str, float]:
    """Natural parameters of means in a cloud, near its corners, and in a plane of R^4."""
    n, m = trial.size(200, 60), trial.size(300, 60)
    cloud, shares = trial.normal(n, 4) ** 3, (2 * trial.normal(m, n)).softmax(-1)
    corners = 0.9 * cloud + 0.1 * cloud.mean(0)
    means = torch.cat([shares @ cloud, corners])
    eta = Empirical(cloud).link(means)
    # In a plane η is the shortest, so nothing of it leaves the plane.
    basis = linalg.qr(trial.normal(4, 4)).Q
    flat = trial.normal(20, 2) @ basis[:2] + trial.normal(4)
    across = Empirical(flat).link(shares[:20, :20].softmax(-1) @ flat) @ basis[2:].T
    return {
        "link_residual": gap((eta @ cloud.T).softmax(-1) @ cloud, means),
        "across": gap(across, 0),
        "undamped_lost": undamped(cloud, corners),
    }


def undamped(points: Tensor, means: Tensor) -> float:
    """The share of means that plain Newton steps from zero do not reach."""
    eta = torch.zeros_like(means)
    for _ in range(50):
        p = (eta @ points.T).softmax(-1)
        away = points - (p @ points)[:, None]
        fisher = torch.einsum("mn,mna,mnb->mab", p, away, away)
        step = linalg.pinv(fisher.nan_to_num(0.0, 0.0, 0.0)) @ (means - p @ points)[..., None]
        eta = eta + step[..., 0].nan_to_num(0.0, 0.0, 0.0)
    reached = ((eta @ points.T).softmax(-1) @ points - means).abs().amax(-1) < 1e-6
    return 1 - float(reached.double().mean())


def measure(trial: Trial) -> Found:
    """Jaynes' die; the primal problem by scipy; links inside, on and outside a hull."""
    die = gap(maximum_entropy(FACES, 4.5), torch.tensor(JAYNES, dtype=torch.float64))
    numbers = {"jaynes_gap": die} | entropies(trial) | links(trial)
    # A lattice, whose hull is the square |a|, |b| <= 1: there everybody knows what is outside.
    side = torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)
    lattice = Empirical(torch.cartesian_prod(side, side))
    edge = 2 * trial.uniform(40) - 1
    sign = torch.tensor([1.0, -1.0]).repeat(20)[:, None]
    rim = torch.stack([edge, torch.ones_like(edge)], -1) * sign
    asked = torch.cat([2.8 * trial.uniform(trial.size(400, 150), 2) - 1.4, rim])
    status, height = lattice.link(asked, throw=False).status, asked.abs().amax(-1)
    wrong = (status.converged != (height < 1)) | (status.boundary != (height == 1))
    numbers |= {
        "wrong_status": int(wrong.sum()),
        "unproved": float(status.stalled[height > 1].double().mean()),
    }
    return Found(numbers, asked=asked, lattice=lattice, status=status)


def draw(figure: Any, seen: Any) -> None:
    """The maximum-entropy die for four averages; which means of a square have a link."""
    left, right = figure.subplots(1, 2)
    for i, average in enumerate((2.0, 3.5, 4.5, 5.5)):
        law = maximum_entropy(FACES, average)
        left.plot(FACES, law, "o-", ms=4, color=series_color(i), label=f"average {average:g}")
    left.plot(FACES, JAYNES, "o", ms=9, mfc="none", color=INK, label="Jaynes, 1962")
    left.set(xlabel="face", ylabel="probability", ylim=(-0.02, 0.75))
    left.legend(loc="upper center", ncols=2)
    kinds = {
        "link found": seen.status.converged,
        "boundary": seen.status.boundary,
        "none": seen.status.outside | seen.status.stalled,
    }
    for i, (name, kind) in enumerate(kinds.items()):
        right.plot(*seen.asked[kind].T, "o", ms=3, color=series_color((2, 4, 1)[i]), label=name)
    right.plot(*seen.lattice.points.T, "s", ms=6, mfc="none", color=INK, label="the support")
    right.set(xlabel="mean, first coordinate", ylabel="second", aspect="equal", xlim=(-1.6, 4))
    right.set(xticks=(-1, 0, 1), yticks=(-1, 0, 1))
    right.legend(loc="center right")
