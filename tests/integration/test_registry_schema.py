"""Requests made from the service's own description, good and bad, against a running server."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.registry_server import RunningServer, running_server

# Left out: `positive_data_acceptance`, since names are checked by rules that a schema cannot state; and
# `missing_required_header`, which does not know 428, the answer that HTTP has for a missing If-Match.
CHECKS = [
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
    "allow_header_conformance",
    "use_after_free",
    "ensure_resource_availability",
    "ignored_auth",
]

# Bad input may be too long as well; that answer is not among those that the tool expects by itself.
SETTINGS = """
[checks]
negative_data_rejection.expected-statuses = [400, 401, 403, 404, 405, 406, 409, 414, 415, 422, 428, 429, "5xx"]
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[RunningServer]:
    with running_server(str(tmp_path_factory.mktemp("registry") / "registry.db")) as running:
        yield running


def explore(server: RunningServer, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "schemathesis.toml").write_text(SETTINGS)
    tool = Path(sys.executable).with_name("st")
    command = [str(tool), "run", f"{server.url}/openapi.json", "--checks", ",".join(CHECKS)]
    command += [
        "--header",
        f"Authorization: Bearer {server.token}",
        "--suppress-health-check",
        "all",
    ]
    return subprocess.run(
        [*command, "--continue-on-failure", "--no-color", *options],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


def failures(done: subprocess.CompletedProcess[str]) -> str:
    """What the tool found, without the very long URLs that it may have tried."""
    _, _, found = done.stdout.partition(" FAILURES ")
    return "\n".join(line[:300] for line in found.splitlines())[:10_000] + done.stderr[-2000:]


def test_no_request_finds_a_5xx_or_an_undocumented_answer(server, tmp_path):
    options = ["--phases", "examples,coverage,fuzzing", "--max-examples", "3", "--seed", "1"]
    done = explore(server, tmp_path, *options)
    assert done.returncode == 0, failures(done)
    assert "Tested: 30" in done.stdout


@pytest.mark.soak
def test_no_sequence_of_requests_finds_one_either(server, tmp_path):
    done = explore(server, tmp_path, "--max-examples", "200")
    assert done.returncode == 0, failures(done)
