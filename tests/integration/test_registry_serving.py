"""A served registry: races over its stages, TLS, its port, and MLflow's own server in front of it."""

from __future__ import annotations

import datetime as dt
import importlib.util
import ipaddress
import json
import os
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.integration.registry_server import free_port, running_server

from tensorforge.registry import DeploymentState, ModelRegistry
from tensorforge.testing.postgres import fresh_database

API = "/api/2.0/mlflow"
ROUNDS, CALLERS = 4, 4


def call(server, method, path, body=None):
    request = urllib.request.Request(
        server.url + path,
        data=None if body is None else json.dumps(body).encode(),
        method=method,
        headers={"Authorization": f"Bearer {server.token}", "Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_of_racing_moves_into_production_one_version_remains_and_every_answer_is_true(
    kind, tmp_path, request
):
    if kind == "sqlite":
        race(str(tmp_path / "registry.db"))
        return
    with fresh_database(request.getfixturevalue("postgres_server")) as url:
        race(url)


def race(database):
    with running_server(database, "--workers", "3") as server:
        call(server, "POST", f"{API}/registered-models/create", {"name": "ranker"})
        for _ in range(CALLERS):
            made = {"name": "ranker", "source": "s3://b"}
            call(server, "POST", f"{API}/model-versions/create", made)

        def enter(number):
            body = {"name": "ranker", "version": str(number), "stage": "Production"}
            body["archive_existing_versions"] = True
            return call(server, "POST", f"{API}/model-versions/transition-stage", body)

        with ThreadPoolExecutor(CALLERS) as pool:
            for _ in range(ROUNDS):
                answers = list(pool.map(enter, range(1, CALLERS + 1)))
                assert [status for status, _ in answers] == [200] * CALLERS
                stages = {a["model_version"]["current_stage"] for _, a in answers}
                assert stages == {"Production"}
                with ModelRegistry(database) as registry:
                    assert len(registry.find_by_state(DeploymentState.PRODUCTION)) == 1
    with ModelRegistry(database) as registry:
        registry.verify_audit()


def test_a_second_server_on_the_same_port_refuses_to_start(tmp_path):
    with running_server(str(tmp_path / "one.db")) as server:
        port = server.url.rpartition(":")[2]
        command = [sys.executable, "-m", "tensorforge", "serve", "--port", port]
        second = subprocess.run(
            [*command, "--database", str(tmp_path / "two.db")],
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
    assert second.returncode != 0
    assert "Another server listens there" in second.stderr


def certificate(folder):
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = dt.datetime.now(dt.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]),
            critical=False,
        )
        .sign(key, hashes.SHA256())
    )
    (folder / "cert.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    (folder / "key.pem").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return folder / "cert.pem", folder / "key.pem"


def wait_for(url, process, context=None):
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        assert process.poll() is None
        try:
            with urllib.request.urlopen(url, timeout=5, context=context) as answer:
                return answer.read()
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.1)
    raise AssertionError(f"{url} did not answer")


def test_a_server_with_a_certificate_speaks_tls(tmp_path):
    cert, key = certificate(tmp_path)
    port = free_port()
    command = [sys.executable, "-m", "tensorforge", "serve", "--port", str(port)]
    command += [
        "--database",
        str(tmp_path / "r.db"),
        "--tls-cert",
        str(cert),
        "--tls-key",
        str(key),
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        context = ssl.create_default_context(cafile=str(cert))
        assert b"ok" in wait_for(f"https://127.0.0.1:{port}/healthz", process, context)
    finally:
        process.terminate()
        process.wait(timeout=30)


@pytest.mark.skipif(
    importlib.util.find_spec("flask") is None, reason="MLflow's own server is not installed"
)
def test_mlflows_own_server_shows_our_models(tmp_path):
    with running_server(str(tmp_path / "registry.db")) as server:
        call(server, "POST", f"{API}/registered-models/create", {"name": "ranker"})
        port = free_port()
        command = [sys.executable, "-m", "mlflow", "server", "--port", str(port), "--workers", "1"]
        command += ["--host", "127.0.0.1", "--backend-store-uri", f"sqlite:///{tmp_path}/m.db"]
        command += ["--registry-store-uri", server.url.replace("http://", "tensorforge://")]
        environment = {
            **os.environ,
            "MLFLOW_TRACKING_TOKEN": server.token,
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "TMPDIR": str(tmp_path),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        with (tmp_path / "mlflow.log").open("wb") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        try:
            wait_for(f"http://127.0.0.1:{port}/health", process)
            url = f"http://127.0.0.1:{port}{API}/registered-models/search?max_results=10"
            found = json.loads(wait_for(url, process))
        finally:
            os.killpg(process.pid, 15)
            process.wait(timeout=60)
    assert [model["name"] for model in found["registered_models"]] == ["ranker"]
