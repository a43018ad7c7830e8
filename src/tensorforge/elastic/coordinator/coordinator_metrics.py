"""The coordinator's metrics for Prometheus, and `/healthz` for whoever restarts processes that are stuck."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
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


HEALTHY_SECONDS = 15.0
"""A coordinator that handled no input for longer than this is stuck: heartbeats arrive more often."""
_REQUEST_SECONDS = 10.0


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _SilentHandler(WSGIRequestHandler):
    timeout = _REQUEST_SECONDS

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the base's signature
        """Write no line for each request."""


class MetricsServer:
    """Serves `/metrics` and `/healthz` on a thread until it is closed.

    `/healthz` answers 200 while the coordinator decides, and 503 with the reason if it does not.
    """

    def __init__(self, host: str, port: int, coordinator: ElasticCoordinator) -> None:
        registry = CollectorRegistry()
        registry.register(_Collector(coordinator))
        self._coordinator = coordinator
        self._metrics = make_wsgi_app(registry)
        try:
            self._server = make_server(
                host, port, self._answer, server_class=_Server, handler_class=_SilentHandler
            )
        except OSError as error:
            raise UnavailableError(f"cannot serve metrics on {host}:{port}: {error}") from error
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics")
        self._thread.start()
        self.address = f"{host}:{self._server.server_port}"

    def _answer(self, request: dict[str, Any], start: Callable[..., Any]) -> Any:
        if request["PATH_INFO"] != "/healthz":
            return self._metrics(request, start)
        problem = self._problem()
        start("503 Service Unavailable" if problem else "200 OK", [("Content-Type", "text/plain")])
        return [f"{problem or 'ok'}\n".encode()]

    def _problem(self) -> str | None:
        try:
            silent = self._coordinator.seconds_since_decision()
        except TensorForgeError as error:
            return str(error)
        stuck = f"nothing was decided for {silent:.0f} s"
        return stuck if silent > HEALTHY_SECONDS else None

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
