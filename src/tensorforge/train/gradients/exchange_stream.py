"""The order between the work of a step and of its exchange, on devices that work later than they are called.

On the CPU, work is done when a call returns, so nothing here has an effect there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

Mark = torch.Event | None
"""A point in a stream's work; `None` on the CPU."""


class ExchangeStream:
    """A stream of a device for exchanges, beside the streams on which a model computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = None if device.type == "cpu" else torch.Stream(device=device)

    def mark(self) -> Mark:
        """The end of the work that was given to the calling thread's current stream so far."""
        if self._stream is None:
            return None
        return torch.accelerator.current_stream(self._device).record_event()

    @contextmanager
    def used(self) -> Iterator[None]:
        """Let the calling thread give its work to the exchange's stream inside."""
        if self._stream is None:
            yield
        else:
            with self._stream:
                yield

    def wait_for(self, mark: Mark) -> None:
        """Let the exchange's later work begin after `mark`. The calling thread does not wait."""
        if self._stream is not None and mark is not None:
            self._stream.wait_event(mark)

    def join(self) -> None:
        """Let the later work of the calling thread's current stream begin after the exchange's work so far."""
        if self._stream is not None:
            torch.accelerator.current_stream(self._device).wait_stream(self._stream)
