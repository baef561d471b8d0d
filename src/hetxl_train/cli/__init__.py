"""The `hetxl` command. A command's module parses, then calls the app; it is imported when that command runs."""

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
    app(prog_name="hetxl")
