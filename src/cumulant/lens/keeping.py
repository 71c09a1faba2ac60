"""Where an examination grows: in memory, or in a folder with a journal that a later run resumes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cumulant.core.errors import InputError
from cumulant.core.journal import Journal
from cumulant.lens.examination import Examination
from cumulant.lens.files import part_name, read_table, write_table
from cumulant.lens.partial import PARTIAL, STATE, check_parts, clear, finish_move, is_complete
from cumulant.lens.reading import Part, Reading
from cumulant.lens.recorder import Recorder
from cumulant.lens.shards import Shards
from cumulant.lens.state import digest_of
from cumulant.lens.tables import pandas
from cumulant.lens.texts import Text

if TYPE_CHECKING:
    from cumulant.lens.tables import DataFrame

__all__ = ["InFolder", "InMemory", "Store"]


class InMemory:
    """Parts of tables in lists."""

    def __init__(self) -> None:
        self._parts: list[Part] = []

    def add(self, part: Part, reading: Reading, recorder: Recorder) -> None:
        """Keep a part."""
        self._parts.append(part)

    def tables(self, parts: int) -> dict[str, DataFrame]:
        """All inputs and tokens."""
        concat = pandas().concat
        return {n: concat([getattr(x, n) for x in self._parts], ignore_index=True) for n in _TABLES}


class InFolder:
    """Parts of tables in files, and a journal whose newest record counts them.

    Args:
        folder: of the examination.
        shards: this process among others.
        identity: makes the settings that must agree for work to be resumed.
    """

    def __init__(
        self, folder: Path, shards: Shards, identity: Callable[[], dict[str, Any]]
    ) -> None:
        self.folder, self.partial, self._shards = folder, shards.place(folder), shards
        self._make_identity = identity

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What must be the same for work to be resumed."""
        return self._make_identity()

    def journal(self, place: Path | None = None) -> Journal:
        """The journal in this rank's folder, or in another's, as it is now."""
        return Journal((place or self.partial) / STATE, self.identity)

    def refusal(self, what: str) -> InputError:
        """Work on something else is neither resumed nor thrown away."""
        return InputError(
            f"{self.folder} holds an unfinished examination of {what}: choose another folder, or "
            f"remove {self.folder}/{PARTIAL}."
        )

    def add(self, part: Part, reading: Reading, recorder: Recorder) -> None:
        """Write a part, then the record that counts it."""
        for name in _TABLES:
            place = self.partial / f"{name}.parquet"
            place.mkdir(exist_ok=True)
            write_table(getattr(part, name), place / part_name(reading.state.parts - 1), name)
        self._journal.append(reading.snapshot(recorder))
        # Every record holds all that is needed; the one before it serves if the last is damaged.
        self._journal.keep(2, most=4)

    def tables(self, parts: int) -> dict[str, DataFrame]:
        """The inputs; the table of tokens may be larger than memory."""
        return {"inputs": read_table(self.partial / "inputs.parquet", parts)}

    def check_ranks(self) -> None:
        """Raise InputError unless all ranks run the same model in the same way."""
        if self._shards.alone:
            return
        with self._shards.together():
            mine = self.identity
        for rank, other in enumerate(told := self._shards.told(mine)):
            if wrong := [name for name, x in told[0].items() if other[name] != x]:
                raise InputError(
                    f"examine: all ranks must have the same model and settings, but rank {rank} "
                    f"differs from rank 0 in {', '.join(wrong).replace('_', ' ')}."
                )

    def completed(self, source: Iterator[Text]) -> Examination | None:
        """What an earlier run had finished except for moving its files: they are moved now."""
        shards, whole = self._shards, self.folder / PARTIAL
        if not shards.told(is_complete(whole))[0]:
            return None
        with shards.together():
            journal = self.journal()
            same: bool | None = None  # the texts; None if not even the model is known
            if len(journal) and not journal.differs:
                same = _same_texts(journal.last, source) and next(source, None) is None
        verdicts = shards.told(same)
        with shards.together():
            if shards.rank == 0:
                finish_move(whole, self.folder)
        if False not in verdicts:
            return Examination.load(self.folder) if True in verdicts else None
        raise InputError(
            f"{self.folder} held a complete examination of other texts whose files were not in "
            "place yet; now they are. Do the same again to replace it, or choose another folder."
        )

    def restore(self, source: Iterator[Text]) -> dict[str, Any] | None:
        """The newest record of an interrupted run, whose texts are taken from the source.

        Raises:
            InputError: the work is damaged, or of another model, settings or texts.
        """
        self._journal = journal = self.journal()
        if not len(journal):
            if journal.damage:
                raise InputError(f"{journal.damage}: remove {self.partial} to start over.")
            clear(self.partial)  # nothing says what it is
            return None
        if journal.differs:
            differs = ", ".join(journal.differs)
            raise self.refusal(f"another model or with other settings ({differs} differ)")
        clear(self.partial, keep=(STATE, *(f"{name}.parquet" for name in _TABLES)))
        kept = journal.last
        for name in _TABLES:
            check_parts(self.partial / f"{name}.parquet", kept["run"]["parts"])
        if not _same_texts(kept, source):
            raise self.refusal("other texts")
        return kept


Store = InMemory | InFolder
_TABLES = Part._fields


def _same_texts(kept: dict[str, Any], source: Iterator[Text]) -> bool:
    """Whether the texts begin with the finished ones; they are taken from the source."""
    digest = ""
    for _ in range(kept["run"]["texts"]):
        each = next(source, None)
        if each is None:
            return False
        digest = digest_of(digest, each)
    return digest == kept["run"]["digest"]
