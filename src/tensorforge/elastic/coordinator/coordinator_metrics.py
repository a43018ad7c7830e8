"""The coordinator's metrics for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from tensorforge.elastic.protocol.rescale_record import RescaleRecord
from tensorforge.errors import TensorForgeError, UnavailableError

if TYPE_CHECKING:
    from tensorforge.elastic.coordinator.coordinator import ElasticCoordinator


class _Collector(Collector):
    """Reads the coordinator's own counters whenever Prometheus asks."""

    def __init__(self, coordinator: ElasticCoordinator) -> None:
        self._coordinator = coordinator

    def collect(self) -> Iterator[Any]:
        """All metrics at this moment; none once the coordinator has stopped."""
        try:
            view = self._coordinator.status(history=1)
            heartbeats, streams = self._coordinator.counters()
        except TensorForgeError:
            return
        labels = {"run": view.run_id}
        members = sum(1 for worker in view.workers if worker.rank >= 0)
        gauges = {
            "workers": ("Members of the current generation", members),
            "waiting_workers": ("Joiners and standbys", len(view.waiting)),
            "desired_workers": ("Workers that are wanted", view.desired_workers or 0),
            "streams": ("Open worker streams", streams),
            "generation": ("The current generation", view.generation),
            "step": ("The newest committed step", view.state.step),
            "epoch": ("The epoch of the newest committed step", view.state.epoch),
            "losses": ("Workers lost since the last committed step", view.losses),
        }
        for name, (text, value) in gauges.items():
            yield _metric(GaugeMetricFamily, name, text, labels, value)
        counters = {
            "heartbeats": ("Heartbeats received", heartbeats),
            "stale_messages": ("Messages ignored for their generation", view.stale_messages),
            "refusals": ("Streams refused", view.refusals),
        }
        for name, (text, value) in counters.items():
            yield _metric(CounterMetricFamily, name, text, labels, value)
        text, labels = "1 for the phase of the cluster", {**labels, "phase": view.phase}
        yield _metric(GaugeMetricFamily, "phase", text, labels, 1)
        yield from _last_rescale(view.run_id, view.rescales[-1:])


def _metric(family: Any, name: str, text: str, labels: dict[str, str], value: float) -> Any:
    metric = family(f"tensorforge_{name}", text, labels=list(labels))
    metric.add_metric(list(labels.values()), value)
    return metric


def _last_rescale(run_id: str, rescales: list[RescaleRecord]) -> Iterator[Any]:
    gauge = GaugeMetricFamily(
        "tensorforge_last_rescale_seconds",
        "How long each phase of the last rescale took",
        labels=["run", "part"],
    )
    for rescale in rescales:
        for phase, milliseconds in rescale.milliseconds.items():
            gauge.add_metric([run_id, phase], milliseconds / 1000)
    yield gauge


class MetricsServer:
    """Serves `/metrics` on a thread until it is closed."""

    def __init__(self, host: str, port: int, coordinator: ElasticCoordinator) -> None:
        registry = CollectorRegistry()
        registry.register(_Collector(coordinator))
        try:
            self._server, self._thread = start_http_server(port, addr=host, registry=registry)
        except OSError as error:
            raise UnavailableError(f"cannot serve metrics on {host}:{port}: {error}") from error
        self.address = f"{host}:{self._server.server_port}"

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
