"""The `tensorforge` command line: each module without a leading underscore is one command.

A module has `app`, a Typer application, and is imported only when its command runs. `main` is the entry point.
"""
