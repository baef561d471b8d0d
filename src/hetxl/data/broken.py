"""Examples that cannot be read: a few are left out, many end the run."""

from pathlib import Path

from hetxl.data.classes import printable
from hetxl.data.dataset import Broken, Fetched

SHOWN = 20


class BrokenLimit:
    """Gathers what could not be read, and raises when it is too much.

    Args:
        share: of the rows seen that may be broken.
        minimum: rows to see before the share counts; `finish` counts it in any case.
        path: a file for the full list, written by `finish` and before raising; None for none.
    """

    def __init__(self, share: float = 0.01, minimum: int = 100, path: Path | None = None) -> None:
        if not 0 <= share <= 1:
            raise ValueError(f"share must be from 0 to 1, found {share}")
        self.share, self.minimum, self.path = share, minimum, path
        self.seen = self.count = 0
        self._found: dict[str, Broken] = {}

    @property
    def broken(self) -> list[Broken]:
        """What could not be read so far, each path once."""
        return list(self._found.values())

    def add(self, fetched: Fetched) -> None:
        """Count what was read, and raise a ValueError if too much of it was broken."""
        self.seen += len(fetched.rows) + len(fetched.broken)
        self.count += len(fetched.broken)
        for broken in fetched.broken:
            self._found.setdefault(broken.path, broken)
        if self.seen >= self.minimum:
            self._check()

    def finish(self) -> None:
        """At the end of an epoch: write the list, and raise a ValueError if too much was broken."""
        self._write()
        self._check()

    def _check(self) -> None:
        if self.count <= self.share * self.seen:
            return
        self._write()
        lines = [f"{printable(broken.path)}: {printable(broken.reason)}" for broken in self.broken]
        more = [f"and {len(lines) - SHOWN:,} more"] if len(lines) > SHOWN else []
        where = f"; the full list is in {self.path}" if self.path is not None else ""
        raise ValueError(
            f"{self.count:,} of {self.seen:,} examples could not be read, more than {self.share:.1%}{where}. Repair "
            "them or leave them out:\n  " + "\n  ".join([*lines[:SHOWN], *more])
        )

    def _write(self) -> None:
        if self.path is not None and self._found:
            lines = (f"{printable(broken.path)}\t{printable(broken.reason)}\n" for broken in self.broken)
            self.path.write_text("".join(lines), encoding="utf-8")
