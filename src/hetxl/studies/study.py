"""What a study is: the trainings that it needs, what is measured on them, and what a page says of it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hetxl.studies.cache import CACHE, AnyTraining, Cache, Training
from hetxl.studies.forms import Form
from hetxl.studies.paper import paper_table
from hetxl.studies.runs import over_seeds
from hetxl.studies.tables import Table
from hetxl.training.progress import Narrator

Summary = Mapping[str, Any]
"""What a study found, as JSON holds it: all that a page is made of."""


@dataclass(frozen=True)
class Lab:
    """What a study works with.

    Attributes:
        form: which data and sizes.
        seeds: of the trainings.
        cache: where the trainings are.
        narrator: tells how far it is.
    """

    form: Form
    seeds: tuple[int, ...]
    cache: Cache
    narrator: Narrator = field(default_factory=Narrator)

    def results(self, trainings: Sequence[Training]) -> dict[str, Any] | None:
        """What trainings that differ in their seeds found, see `over_seeds`; None where a loss was not finite."""
        found = [self.cache.result(one) for one in trainings]
        known = [one for one in found if one is not None]
        return over_seeds(known) if len(known) == len(found) else None


class Study(ABC):
    """One table or figure of the paper.

    Attributes:
        name: as on the command line; its entry in the registry has its title and cost.
        question: in a sentence.
        paper: labels of the paper's tables that ours stand beside.
        claim: what the paper concludes.
    """

    name: str
    question: str
    paper: tuple[str, ...] = ()
    claim: str

    def seeds(self, form: Form) -> tuple[int, ...]:
        """Those of the trainings, unless others are asked for."""
        return tuple(range(form.seeds))

    def home(self, form: Form) -> Path:
        """Where its trainings are kept, unless told."""
        return CACHE

    def trainings(self, form: Form, seeds: Sequence[int]) -> Sequence[AnyTraining]:
        """All that can be started at once."""
        return ()

    def follow_ups(self, lab: Lab) -> Sequence[AnyTraining]:
        """Trainings that depend on what the first ones found."""
        return ()

    @abstractmethod
    def measure(self, lab: Lab) -> dict[str, Any]:
        """What was found, from the trainings or by measuring; nothing but what JSON holds."""

    @abstractmethod
    def tables(self, summary: Summary) -> Sequence[Table]:
        """Our tables, in the form of the paper's."""

    @abstractmethod
    def plot(self, summary: Summary, path: Path) -> Path:
        """Draw what was found."""

    @abstractmethod
    def conclusion(self, summary: Summary) -> str:
        """Two or three sentences on whether the paper's conclusion holds here, from the numbers."""

    def paper_tables(self) -> Sequence[Table]:
        """The paper's tables, in its own numbers."""
        return [paper_table(label) for label in self.paper]
