"""Which devices of this machine each local worker gets. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from tensorforge.errors import ConfigurationError
from tensorforge.validation import whole_number

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
LOCAL_RANK = "LOCAL_RANK"


class DeviceSlots:
    """Gives each worker `per_worker` devices of its own, and gives them to another once the worker is gone.

    The devices are those that `environment` makes visible to the launcher; if it names none, as many as are
    needed, from number 0 on. With `per_worker` 0 workers get no variables.
    """

    def __init__(self, per_worker: int, environment: Mapping[str, str]) -> None:
        whole_number("gpus_per_worker", per_worker, least=0)
        self._per_worker = per_worker
        listed = environment.get(VISIBLE_DEVICES)
        self._devices = None if listed is None else [d for d in listed.split(",") if d.strip()]
        self._slots: dict[str, int] = {}

    def require(self, workers: int) -> None:
        """Raise `ConfigurationError` if so many workers need more devices than are visible."""
        if self._devices is not None and workers * self._per_worker > len(self._devices):
            rule = (
                f"needs {workers * self._per_worker} devices for {workers} workers; "
                f"{VISIBLE_DEVICES} has {len(self._devices)}"
            )
            raise ConfigurationError("gpus_per_worker", self._per_worker, rule)

    def take(self, worker: str) -> dict[str, str]:
        """The variables that show a worker its devices. Inside, they are numbered from 0 on.

        A worker for which no devices are left sees none.
        """
        if not self._per_worker:
            return {}
        taken = set(self._slots.values())
        slot = next(number for number in range(len(taken) + 1) if number not in taken)
        self._slots[worker] = slot
        own = range(slot * self._per_worker, (slot + 1) * self._per_worker)
        if self._devices is not None and own.stop > len(self._devices):
            return {VISIBLE_DEVICES: "", LOCAL_RANK: "0"}
        names = [str(number) if self._devices is None else self._devices[number] for number in own]
        return {VISIBLE_DEVICES: ",".join(names), LOCAL_RANK: "0"}

    def release(self, worker: str) -> None:
        """Let other workers have the devices of a worker whose process has ended."""
        self._slots.pop(worker, None)
