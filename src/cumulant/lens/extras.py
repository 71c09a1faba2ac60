"""Statistics of an examination that are computed only when asked for, and what they cost."""

from __future__ import annotations

from collections.abc import Iterable

from cumulant.core.errors import InputError

__all__ = ["ALL", "EXTRAS", "chosen"]

EXTRAS = {
    "energy": "energy_change and energy_rises; a third of a forward pass per text",
    "partition": "the partition function of the embeddings; once, half a second for 49,000 words",
    "spectrum": "leading_eigenvalue and lipschitz; about one more forward pass per text",
    "sensitivity": "sensitivity_qk and sensitivity_vo; 4 backward passes over the first text",
    "link": "link_linear, link_trained, link_exists on the first text; seconds, or minutes for "
    "causal models, where it is solved for",
}
ALL = tuple(EXTRAS)


def chosen(extras: str | Iterable[str]) -> frozenset[str]:
    """The names asked for; "all" stands for every one.

    Raises:
        InputError: a name that there is not.

    >>> sorted(chosen("all"))
    ['energy', 'link', 'partition', 'sensitivity', 'spectrum']
    """
    names = {extras} if isinstance(extras, str) else set(extras)
    if unknown := sorted(names - {*EXTRAS, "all"}):
        known = ", ".join((*EXTRAS, "all"))
        raise InputError(f"there is no extra statistic {unknown[0]!r}; there are: {known}.")
    return frozenset(EXTRAS if "all" in names else names)
