"""What a study is: variants, seeds, a search that is the same for all, a budget, and a rule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

__all__ = ["Job", "Judged", "Study", "Tuning"]

Stage = Literal["tuning", "final"]
Form = Literal["statement", "correction", "control", "noted"]


@dataclass(frozen=True)
class Tuning:
    """The search every variant gets: all pairs of rate and beta, on seeds of its own.

    Attributes:
        rates, betas: learning rates and inverse temperatures.
        seeds: seeds that no final run uses.
        steps: length of each run of the search; 0 takes the first pair without a search.
    """

    rates: tuple[float, ...] = (0.003,)
    betas: tuple[float, ...] = (1.0,)
    seeds: tuple[int, ...] = (100,)
    steps: int = 0


@dataclass(frozen=True)
class Judged:
    """One line of a decision rule, fixed before the numbers are seen.

    It speaks of one quantity of one variant, with a 95 % interval over seeds. It passes if the
    whole interval is on the right side of the bound, fails if all of it is on the wrong side.

    Attributes:
        name, says: a word for tables, and a sentence.
        form: for whom it speaks, as in the ledger.
        quantity, variant: what is judged.
        below, above: variants it must beat, seed by seed; the hardest of them counts.
        by: at least by this much.
        at_least, at_most: a bound on the quantity itself.
        ranks: another quantity; then the rank correlation of the two over all variants is judged.
    """

    name: str
    says: str
    quantity: str
    variant: str = ""
    form: Form = "statement"
    below: tuple[str, ...] = ()
    above: tuple[str, ...] = ()
    by: float = 0.0
    at_least: float | None = None
    at_most: float | None = None
    ranks: str = ""


@dataclass(frozen=True)
class Job:
    """One run: a variant with one seed, learning rate and temperature."""

    task: str
    variant: str
    stage: Stage
    seed: int
    rate: float
    beta: float
    settings: Mapping[str, Any]

    @property
    def id(self) -> str:
        """Its name, for files."""
        return f"{self.variant}-{self.stage}-rate{self.rate:g}-beta{self.beta:g}-seed{self.seed}"

    def as_dict(self) -> dict[str, Any]:
        """For a journal, which compares it before it resumes."""
        return asdict(self) | {"settings": dict(self.settings)}


@dataclass(frozen=True)
class Study:
    """A question, and everything that decides how it is answered.

    Attributes:
        name: of the file.
        title, question: for people.
        task: what a run does; see `tasks.py`.
        minutes: budget of real time; a study that would take longer is refused.
        seeds: of the final runs.
        settings: of the task, the same for every variant unless it says otherwise.
        variants: what each changes.
        tuning: the search.
        rules: what decides.
        quick: what ``--quick`` changes: settings, seeds, tuning.
        claim: what the ledger says of it, once its runs are recorded; see `claiming.py`.
    """

    name: str
    title: str
    question: str
    task: str
    minutes: float
    seeds: tuple[int, ...]
    settings: Mapping[str, Any]
    variants: Mapping[str, Mapping[str, Any]]
    tuning: Tuning = Tuning()
    rules: tuple[Judged, ...] = ()
    quick: Mapping[str, Any] = field(default_factory=dict[str, Any])
    claim: Mapping[str, str] = field(default_factory=dict[str, str])

    def quickly(self) -> Study:
        """The same machinery on a problem too small to decide anything."""
        made = self.quick
        return replace(
            self,
            settings={**self.settings, **made.get("settings", {})},
            seeds=tuple(made.get("seeds", self.seeds[:2])),
            tuning=replace(self.tuning, **made.get("tuning", {})),
        )

    def settings_of(self, variant: str) -> dict[str, Any]:
        """What a run of the variant is made of."""
        return {**self.settings, **self.variants[variant]}

    def tuning_jobs(self) -> Iterator[Job]:
        """The search: as many runs for each variant."""
        if not self.tuning.steps:
            return
        for variant in self.variants:
            made = {**self.settings_of(variant), "steps": self.tuning.steps}
            for rate in self.tuning.rates:
                for beta in self.tuning.betas:
                    for seed in self.tuning.seeds:
                        yield Job(self.task, variant, "tuning", seed, rate, beta, made)

    def final_jobs(self, variant: str, rate: float, beta: float) -> list[Job]:
        """The runs that count, one for each seed."""
        made = self.settings_of(variant)
        return [Job(self.task, variant, "final", seed, rate, beta, made) for seed in self.seeds]
