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


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[RunningServer]:
    with running_server(str(tmp_path_factory.mktemp("registry") / "registry.db")) as running:
        yield running


def explore(server: RunningServer, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
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


def test_no_request_finds_a_5xx_or_an_undocumented_answer(server, tmp_path):
    options = ["--phases", "examples,coverage,fuzzing", "--max-examples", "3", "--seed", "1"]
    done = explore(server, tmp_path, *options)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "Tested: 30" in done.stdout


@pytest.mark.soak
def test_no_sequence_of_requests_finds_one_either(server, tmp_path):
    done = explore(server, tmp_path, "--max-examples", "200")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
