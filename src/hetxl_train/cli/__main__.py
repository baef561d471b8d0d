"""`python -m hetxl_train.cli`: the `hetxl` command."""

from hetxl_train.cli import main

main()
