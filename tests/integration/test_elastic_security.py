"""Strangers, old tokens, wrong roles, missing certificates: refused with a reason, and logged."""

import datetime as dt
import ipaddress
import logging
import time

import grpc
import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tensorforge.elastic import (
    CoordinatorClient,
    ElasticCoordinator,
    ElasticTrainingConfig,
    ElasticWorker,
    TlsOptions,
    WorkerId,
)
from tensorforge.elastic.protocol import messages
from tensorforge.elastic.protocol.commands import SERVICE
from tensorforge.errors import (
    AuthenticationError,
    ConfigurationError,
    InvalidInputError,
    NotFoundError,
    PermissionDeniedError,
    UnavailableError,
)
from tensorforge.security import TokenStore

CONFIG = ElasticTrainingConfig(worker_heartbeat_timeout_ms=3_000, stability_window_ms=100)


def worker(name="w", **options):
    return ElasticWorker(WorkerId(name, "127.0.0.1", 0), CONFIG, **options)


@pytest.fixture
def tokens():
    return TokenStore()


def test_beyond_loopback_a_token_is_required():
    with pytest.raises(ConfigurationError, match="a job token is required"):
        ElasticCoordinator(CONFIG, host="0.0.0.0")


def test_a_stranger_is_refused_and_logged(tokens, caplog):
    with ElasticCoordinator(CONFIG, tokens=tokens) as coordinator:
        for token in (None, "tf_0_0", TokenStore().issue("other", ["join"])):
            with pytest.raises(AuthenticationError):
                worker(token=token).connect_to_cluster(coordinator.address)
        assert coordinator.status().waiting == []
    refusals = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert len(refusals) == 3
    assert "refused ipv4:127.0.0.1" in refusals[0].getMessage()


def test_each_role_may_do_its_own_and_nothing_else(tokens):
    join, observe = tokens.issue("w", ["join"]), tokens.issue("o", ["observe"])
    control = tokens.issue("c", ["control"])
    with ElasticCoordinator(CONFIG, tokens=tokens) as coordinator:
        address = coordinator.address
        with worker(token=join) as accepted:
            accepted.connect_to_cluster(address)
        with pytest.raises(PermissionDeniedError, match="this needs join"):
            worker(token=observe).connect_to_cluster(address)
        with CoordinatorClient(address, token=observe) as client:
            client.status()
            next(client.watch())
            with pytest.raises(PermissionDeniedError, match="this needs control"):
                client.scale(2)
        with CoordinatorClient(address, token=control) as client:
            client.scale(2)
            with pytest.raises(PermissionDeniedError, match="this needs observe"):
                client.status()


def test_a_revoked_token_opens_no_new_stream(tokens):
    token = tokens.issue("w", ["join"])
    with ElasticCoordinator(CONFIG, tokens=tokens) as coordinator:
        tokens.revoke(tokens.authenticate(token).token_id)
        with pytest.raises(AuthenticationError, match="was revoked"):
            worker(token=token).connect_to_cluster(coordinator.address)


def test_commands_that_make_no_sense_are_refused_by_name():
    with ElasticCoordinator(CONFIG) as leader, CoordinatorClient(leader.address) as client:
        with pytest.raises(InvalidInputError, match="at least min_workers"):
            client.scale(0)
        with pytest.raises(
            NotFoundError, match="there is no worker 'ghost'; known workers: nobody"
        ):
            client.remove("ghost")


def exchange(address, *payloads, limit=10):
    """Send raw bytes as a worker would and return what comes back."""
    with grpc.insecure_channel(address) as channel:
        call = channel.stream_stream(f"/{SERVICE}/Join")(iter(payloads))
        answers = []
        try:
            for data in call:
                answers.append(messages.from_coordinator(data))
                if len(answers) == limit:
                    break
        except grpc.RpcError as error:
            answers.append(error)
        call.cancel()
        return answers


def test_bytes_that_are_no_message_end_the_stream_with_a_reason():
    with ElasticCoordinator(CONFIG) as coordinator:
        answers = exchange(coordinator.address, b"cos\nsystem\n(S'true'\ntR.")
        assert answers[0].code == messages.REFUSED_INVALID
        assert "not a message of a worker" in answers[0].reason
        assert coordinator.status().waiting == []


def test_an_oversized_message_is_cut_off():
    with ElasticCoordinator(CONFIG) as coordinator:
        (error,) = exchange(coordinator.address, b" " * (messages.MAX_UPLOAD_BYTES + 1))
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_flood_is_slowed_down_and_harms_nobody():
    hello = messages.Hello(
        protocol=messages.PROTOCOL, worker=WorkerId("f", "h", 1), incarnation="i"
    )
    beat = messages.Heartbeat(incarnation="i", generation=0, sequence=1)
    flood = [messages.to_bytes(hello), *[messages.to_bytes(beat)] * 600]
    with ElasticCoordinator(CONFIG) as coordinator:
        started = time.monotonic()
        exchange(coordinator.address, *flood, limit=601)
        assert time.monotonic() - started > 0.5
        assert coordinator.status().refusals == 0


def test_a_message_before_hello_is_refused():
    beat = messages.Heartbeat(incarnation="i", generation=0, sequence=1)
    with ElasticCoordinator(CONFIG) as coordinator:
        answers = exchange(coordinator.address, messages.to_bytes(beat))
        assert answers[0].code == messages.REFUSED_INVALID


def _issue(folder, name, issuer=None):
    """A certificate and key in PEM files; signed by `issuer`, or by itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = dt.datetime.now(dt.UTC)
    issuer_name, issuer_key = (subject, key) if issuer is None else issuer
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer_name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]),
            critical=False,
        )
    )
    certificate = builder.sign(issuer_key, hashes.SHA256())
    files = folder / f"{name}.pem", folder / f"{name}.key"
    files[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    files[1].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return files, (subject, key)


@pytest.fixture
def certificates(tmp_path):
    (ca, _), authority = _issue(tmp_path, "ca")
    server, _ = _issue(tmp_path, "server", authority)
    client, _ = _issue(tmp_path, "client", authority)
    return ca, server, client


def test_with_tls_a_client_that_knows_the_authority_gets_in(certificates):
    ca, (certificate, key), _ = certificates
    tls = TlsOptions(certificate=certificate, key=key)
    with ElasticCoordinator(CONFIG, tls=tls) as coordinator:
        with worker(tls=TlsOptions(ca=ca)) as accepted:
            accepted.connect_to_cluster(coordinator.address)
        with pytest.raises(UnavailableError):
            worker().connect_to_cluster(coordinator.address, timeout=0.5)


def test_with_mutual_tls_a_client_without_a_certificate_stays_out(certificates):
    ca, (certificate, key), (client_certificate, client_key) = certificates
    tls = TlsOptions(ca=ca, certificate=certificate, key=key)
    with ElasticCoordinator(CONFIG, tls=tls) as coordinator:
        proven = TlsOptions(ca=ca, certificate=client_certificate, key=client_key)
        with worker(tls=proven) as accepted:
            accepted.connect_to_cluster(coordinator.address)
        with pytest.raises(UnavailableError):
            worker(tls=TlsOptions(ca=ca)).connect_to_cluster(coordinator.address, timeout=0.5)


def test_missing_certificates_are_named(tmp_path):
    with pytest.raises(InvalidInputError, match="cannot read the ca"):
        worker(tls=TlsOptions(ca=tmp_path / "none.pem")).connect_to_cluster("127.0.0.1:1")
    with pytest.raises(InvalidInputError, match="both a certificate and a key"):
        ElasticCoordinator(CONFIG, tls=TlsOptions()).start()


def test_no_python_object_crosses_the_wire():
    assert msgspec.json.decode(messages.to_bytes(messages.Pong(sequence=1))) == {
        "kind": "pong",
        "sequence": 1,
    }
