"""The `hetxl` command. The module of a command parses arguments and calls the app; it is imported on use."""

import io
import sys


def main() -> None:
    """Run the `hetxl` script; its packages are in the extra `train`."""
    try:
        from hetxl_train.cli.commands import app
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("hetxl"):
            raise
        print("the hetxl command needs more packages: pip install 'hetxl[train]'", file=sys.stderr)
        sys.exit(2)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # terminals that cannot show τ print an escape sequence
            stream.reconfigure(errors="backslashreplace")
    app(prog_name="hetxl")
