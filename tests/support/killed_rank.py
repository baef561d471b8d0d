"""The example of sharded classes with one process that is killed once, to be started by torchrun.

    torchrun … killed_rank.py MARKER STEP ARGUMENTS…

Process 1 is killed after the step, and leaves the marker behind so that it is not killed again.
"""

import importlib.util
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

EXAMPLE = Path(__file__).parents[2] / "examples" / "sharded_classes.py"


def load_example() -> ModuleType:
    """The example as a module."""
    spec = importlib.util.spec_from_file_location("sharded_classes", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def killing(marker: Path, last: int) -> Callable[[int], None]:
    """What kills process 1 once, after a step."""

    def after_step(step: int) -> None:
        if step == last and os.environ["RANK"] == "1" and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    return after_step


if __name__ == "__main__":
    marker, last = Path(sys.argv[1]), int(sys.argv[2])
    del sys.argv[1:3]
    load_example().main(killing(marker, last))
