"""The log of a run: one JSON object a line, which a resumed run takes up where its checkpoint was made."""

import json
from pathlib import Path
from typing import IO, Any

from hetxl.training.files import write_bytes


class Log:
    """Appends to `log.jsonl`, and to TensorBoard's files if asked to.

    Args:
        path: of the file.
        after: keep the lines up to this step, and drop those of steps that will be done again.
        tensorboard: directory of TensorBoard's event files; None for none.
    """

    def __init__(self, path: Path, after: int = 0, tensorboard: Path | None = None):
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line in read_log(path) if line.get("step", 0) <= after]
        write_bytes(path, "".join(json.dumps(line) + "\n" for line in kept).encode())
        self._file: IO[str] = open(path, "a", encoding="utf-8")  # noqa: SIM115, open as long as the run is
        self._events: Any = None
        if tensorboard is not None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise ImportError("--tensorboard needs tensorboard: pip install tensorboard") from None
            self._events = SummaryWriter(str(tensorboard), purge_step=after + 1)

    def write(self, kind: str, **values: Any) -> None:
        """Add a line; numbers also go to TensorBoard."""
        self._write({"kind": kind, **values})
        if self._events is not None:
            for name, value in values.items():
                if name != "step" and isinstance(value, int | float):
                    self._events.add_scalar(f"{kind}/{name.replace('@', '_at_')}", value, values["step"])

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        """No more lines."""
        self._file.close()
        if self._events is not None:
            self._events.close()


def read_log(path: Path) -> list[dict[str, Any]]:
    """The lines of a log; what a killed process left of its last line is dropped."""
    if not path.exists():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        if isinstance(line, dict):
            lines.append(line)
    return lines
