"""The log files with what each process printed. A full disk loses lines but does not end the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TextIO


class LogFiles:
    """One file per process, `FOLDER/NAME.log`.

    Text that cannot be written is dropped; `warn` is called for the first failure.
    """

    def __init__(self, folder: Path, warn: Callable[[str], None]) -> None:
        self._folder = folder
        self._warn = warn
        self._files: dict[str, TextIO] = {}
        self._has_warned = False

    def open(self, name: str) -> None:
        """Open the file of this process for appending."""
        path = self._folder / f"{name}.log"
        try:
            file = path.open("a", buffering=1, encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            self._failed(error)
        else:
            self._files[name] = file

    def write(self, name: str, text: str) -> None:
        """Append text, which must end with a line end."""
        file = self._files.get(name)
        if file is not None:
            try:
                file.write(text)
            except OSError as error:
                self._failed(error)

    def close(self, name: str) -> None:
        """Close the file of a process that has exited."""
        file = self._files.pop(name, None)
        if file is not None:
            try:
                file.close()
            except OSError as error:
                self._failed(error)

    def close_all(self) -> None:
        """Close all files."""
        for name in list(self._files):
            self.close(name)

    def _failed(self, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            what = f"logs cannot be written in {self._folder}: {error.strerror or error}"
            self._warn(f"{what}; training continues, these lines are lost")
