"""Transfers over TLS, with real certificates."""

import datetime as dt
import ipaddress
import socket
import ssl
import threading

import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tensorforge.cluster.workers import WorkerId
from tensorforge.data import (
    DatasetInfo,
    DataShard,
    DataTransfer,
    DataTransferManager,
    PackedDataset,
    SampleSchema,
    ShardServer,
    ShardStore,
    pack_array,
)
from tensorforge.errors import (
    AuthenticationError,
    EncodingError,
    TransferCancelledError,
    TransferError,
)
from tensorforge.resilience import RetryPolicy
from tensorforge.storage.memory_store import MemoryStore

SIZE = 24
INFO = DatasetInfo(size=SIZE, schema=SampleSchema(dtype="|u1", shape=(100_000,)))
SAMPLES = np.random.default_rng(5).integers(0, 256, (SIZE, 100_000), dtype=np.uint8)
ME = WorkerId("me", "127.0.0.1", 1)


class Authority:
    """Issues certificates for an address, and contexts for both sides."""

    def __init__(self, folder, name):
        self.folder, self.name = folder, name
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.certificate = self._sign(name, self.key, is_authority=True)
        self.file = folder / f"{name}.pem"
        self.file.write_bytes(self.certificate.public_bytes(serialization.Encoding.PEM))

    def _sign(self, name, key, *, is_authority=False, address="127.0.0.1"):
        now = dt.datetime.now(dt.UTC)
        identity = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
        return (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, self.name)]))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(days=1))
            .not_valid_after(now + dt.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
            .add_extension(identity, critical=False)
            .sign(self.key, hashes.SHA256())
        )

    def issue(self, name, address="127.0.0.1"):
        """A file with a certificate and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._sign(name, key, address=address)
        file = self.folder / f"{self.name}-{name}.pem"
        secret = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM) + secret)
        return file

    def server(self, *, mutual=False, address="127.0.0.1"):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.issue("server", address))
        if mutual:
            context.load_verify_locations(self.file)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def client(self, certificate=None):
        context = ssl.create_default_context(cafile=str(self.file))
        if certificate is not None:
            context.load_cert_chain(certificate)
        return context


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path, "ours")


@pytest.fixture
def fetch(tmp_path):
    """Fetch everything from a server with one context by a manager with another one."""

    def fetch(server_tls, client_tls, **options):
        with (
            ShardStore(tmp_path / "source", INFO) as source,
            ShardStore(tmp_path / "mine", INFO) as mine,
            ShardServer(source, generation=1, token="job", tls=server_tls, timeout=5.0) as server,
            DataTransferManager(
                worker=ME,
                store=mine,
                generation=1,
                token="job",
                tls=client_tls,
                timeout=5.0,
                retry=RetryPolicy(max_attempts=3, base_delay=0.0, max_delay=0.0),
                **options,
            ) as manager,
        ):
            source.put(0, SIZE, SAMPLES)
            transfer = DataTransfer(
                source_worker=WorkerId("source", *server.address),
                destination_worker=ME,
                shard=DataShard(0, 0, SIZE),
            )
            report = manager.transfer(transfer)
            assert all(np.array_equal(mine[index], SAMPLES[index]) for index in range(SIZE))
            return report

    return fetch


@pytest.mark.parametrize("silent", [True, False], ids=["before the handshake", "after it"])
def test_a_cancelled_transfer_ends_although_its_connection_waits(authority, tmp_path, silent):
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        ShardStore(tmp_path / "mine", INFO) as mine,
        DataTransferManager(
            worker=ME, store=mine, generation=1, tls=authority.client(), timeout=600.0
        ) as manager,
    ):
        transfer = DataTransfer(
            source_worker=WorkerId("source", *listener.getsockname()),
            destination_worker=ME,
            shard=DataShard(0, 0, SIZE),
        )
        job = manager.launch([transfer])
        raw, _ = listener.accept()
        with raw if silent else authority.server().wrap_socket(raw, server_side=True):
            job.cancel()
            with pytest.raises(TransferCancelledError):
                job.wait(60)


def test_a_server_closes_although_a_secure_connection_is_waiting(authority, tmp_path):
    with ShardStore(tmp_path / "source", INFO) as store:
        server = ShardServer(store, tls=authority.server(), timeout=600.0)
        with (
            socket.create_connection(server.address) as raw,
            authority.client().wrap_socket(raw, server_hostname="127.0.0.1") as sock,
        ):
            assert sock.recv(1)  # the greeting has begun; now the server waits for a request
            closing = threading.Thread(target=server.close)
            closing.start()
            closing.join(60)
            assert not closing.is_alive()


def refusal(fetch, *contexts, **options):
    with pytest.raises(TransferError) as caught:
        fetch(*contexts, **options)
    (error,) = caught.value.failures.values()
    return error


def test_shards_arrive_over_tls(authority, fetch):
    report = fetch(authority.server(), authority.client())
    assert (report.bytes_received, report.retries) == (SAMPLES.nbytes, 0)


def test_shards_arrive_over_mutual_tls(authority, fetch):
    mine = authority.issue("me")
    report = fetch(authority.server(mutual=True), authority.client(mine))
    assert (report.bytes_received, report.retries) == (SAMPLES.nbytes, 0)


def test_a_server_of_another_authority_is_not_trusted(authority, fetch, tmp_path):
    other = Authority(tmp_path, "theirs")
    error = refusal(fetch, other.server(), authority.client())
    assert isinstance(error, AuthenticationError)
    assert "the certificate of source@127.0.0.1" in str(error)
    assert "is not trusted" in str(error)


def test_a_server_with_anothers_address_is_not_trusted(authority, fetch):
    error = refusal(fetch, authority.server(address="10.0.0.7"), authority.client())
    assert isinstance(error, AuthenticationError)
    assert "127.0.0.1" in str(error)


def test_distrust_does_not_end_in_a_quiet_fetch_from_the_origin(authority, fetch, tmp_path):
    blobs = MemoryStore()
    pack_array(blobs, SAMPLES, segments=2)
    other = Authority(tmp_path, "theirs")
    error = refusal(fetch, other.server(), authority.client(), origin=PackedDataset(blobs))
    assert isinstance(error, AuthenticationError)


def test_with_mutual_tls_a_client_without_a_certificate_stays_out(authority, fetch):
    error = refusal(fetch, authority.server(mutual=True), authority.client())
    assert isinstance(error, AuthenticationError)
    assert "does not accept this side's certificate" in str(error)


def test_with_mutual_tls_a_client_of_another_authority_stays_out(authority, fetch, tmp_path):
    stranger = Authority(tmp_path, "theirs").issue("me")
    error = refusal(fetch, authority.server(mutual=True), authority.client(stranger))
    assert isinstance(error, AuthenticationError)
    assert "does not accept this side's certificate" in str(error)


def test_a_plain_client_is_told_that_the_server_speaks_tls(authority, fetch):
    error = refusal(fetch, authority.server(), None)
    assert isinstance(error, EncodingError)
    assert "speaks TLS and this side does not" in str(error)


def test_a_client_with_tls_is_told_that_the_server_does_not_speak_it(authority, fetch):
    error = refusal(fetch, None, authority.client())
    assert isinstance(error, EncodingError)
    assert "this side speaks TLS and source@127.0.0.1" in str(error)
