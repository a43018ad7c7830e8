"""The `tensorforge` command: each module here without a leading underscore is one command.

A module offers `app`, a Typer application, and is imported only when its command is asked for.
`main` is the entry point.
"""
