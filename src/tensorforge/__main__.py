"""`python -m tensorforge` is the `tensorforge` command."""

from tensorforge.cli.main import main

main()
