"""What bad input looks like on the command line."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Bad input ends with a message on stderr and exit code 2, without a traceback; one line unless it is a list."""
    try:
        yield
    except (ValueError, TypeError, ImportError, OSError) as error:
        lines = [" ".join(line.split()) for line in str(error).splitlines()]
        typer.echo("Error: " + "\n  ".join(filter(None, lines)), err=True)
        raise typer.Exit(2) from None
    except FloatingPointError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from None
