"""`python -m hetxl.cli`: the `hetxl` command."""

from hetxl.cli import main

main()
