"""The files that keep what each process printed. A full disk costs lines, not the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TextIO


class LogFiles:
    """One file per process, `FOLDER/NAME.log`.

    What cannot be written is dropped; `complain` hears of it once.
    """

    def __init__(self, folder: Path, complain: Callable[[str], None]) -> None:
        self._folder = folder
        self._complain = complain
        self._files: dict[str, TextIO] = {}
        self._has_complained = False

    def open(self, name: str) -> None:
        """Begin, or go on with, the file of this process."""
        path = self._folder / f"{name}.log"
        try:
            file = path.open("a", buffering=1, encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            self._failed(error)
        else:
            self._files[name] = file

    def write(self, name: str, text: str) -> None:
        """Append a text that ends with a line end."""
        file = self._files.get(name)
        if file is not None:
            try:
                file.write(text)
            except OSError as error:
                self._failed(error)

    def close(self, name: str) -> None:
        """The process has ended."""
        file = self._files.pop(name, None)
        if file is not None:
            try:
                file.close()
            except OSError as error:
                self._failed(error)

    def close_all(self) -> None:
        """Close whatever is open."""
        for name in list(self._files):
            self.close(name)

    def _failed(self, error: OSError) -> None:
        if not self._has_complained:
            self._has_complained = True
            what = f"logs cannot be written in {self._folder}: {error.strerror or error}"
            self._complain(f"{what}; training goes on, what does not fit is lost")
