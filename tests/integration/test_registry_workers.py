"""One server, several processes: what they count is counted together."""

from __future__ import annotations

import http.client
import re

import psutil
from tests.integration.registry_server import running_server

COUNTED = re.compile(
    r'tensorforge_registry_requests_total\{operation="get_model",status="404"\} ([0-9.]+)'
)
REQUESTS = 40


def ask(server, path: str) -> str:
    """One request on a connection of its own, which any of the workers may accept."""
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=30)
    connection.request("GET", path, headers={"Authorization": f"Bearer {server.token}"})
    text = connection.getresponse().read().decode()
    connection.close()
    return text


def test_every_worker_tells_the_figures_of_all_workers(tmp_path):
    with running_server(str(tmp_path / "registry.db"), "--workers", "2") as server:
        for _ in range(REQUESTS):
            ask(server, "/api/v1/models/nobody")
        workers = psutil.Process(server.pid).children()
        told = [ask(server, "/metrics") for _ in range(REQUESTS)]
    assert len(workers) == 2
    counts = {float(COUNTED.search(text).group(1)) for text in told}
    assert counts == {REQUESTS}
    assert all("tensorforge_registry_webhooks_waiting 0\n" in text for text in told)
    assert all(
        'tensorforge_registry_request_seconds_count{operation="get_model"}' in t for t in told
    )
