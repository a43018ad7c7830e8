import ipaddress
import json
import socket
import threading

import httpx
import pytest
import sqlalchemy as sa
from tests.unit.registry.sample_values import S, bring, metadata, v

from tensorforge.errors import InvalidInputError, NotFoundError, PermissionDeniedError
from tensorforge.registry.addresses import check_target, is_public, resolve_target
from tensorforge.registry.database.outbox import Outbox
from tensorforge.registry.database.tables import WEBHOOKS
from tensorforge.registry.database.times import to_micros
from tensorforge.registry.webhooks import (
    DELIVERY,
    SIGNATURE,
    WebhookSender,
    verify_signature,
)
from tensorforge.resilience import RetryPolicy

PUBLIC = "93.184.215.14"


class Receiver:
    """Stands where a receiver would, and answers as it is told."""

    def __init__(self) -> None:
        self.requests: list[httpx.Request] = []
        self.status = 200

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        if self.status == 0:
            raise httpx.ConnectError("refused")
        headers = {"Location": "http://127.0.0.1/"} if self.status == 302 else {}
        return httpx.Response(self.status, headers=headers)


@pytest.fixture
def receiver():
    return Receiver()


@pytest.fixture
def sender(registry, clock, receiver):
    with WebhookSender(
        registry.database,
        clock=lambda: clock.utc,
        retries=RetryPolicy(max_attempts=3, base_delay=10, max_delay=100),
        resolver=lambda host, port: [PUBLIC],
        transport=httpx.MockTransport(receiver),
    ) as made:
        yield made


def subscribe(registry, clock, url="https://hooks.example.com/x", **options):
    return Outbox(registry.database).subscribe(
        url, created_by="ann", now_us=to_micros(clock.utc), **options
    )


def test_a_change_is_told_signed_and_once(registry, clock, sender, receiver):
    hook = subscribe(registry, clock, actions=["transition"], model_id="ranker")
    registry.register(metadata())
    registry.register(metadata(model_id="other"))
    bring(registry, "1.0.0", S.VALIDATING, model_id="other")
    bring(registry, "1.0.0", S.VALIDATING)
    assert sender.deliver_due() == 1
    assert sender.deliver_due() == 0
    (request,) = receiver.requests
    body = request.content.decode()
    event = json.loads(body)
    assert (event["model_id"], event["to_state"]) == ("ranker", "validating")
    assert event["hash"] == registry.history("ranker")[-1].hash
    seconds = int(clock.utc.timestamp())
    assert verify_signature(hook.secret, request.headers[SIGNATURE], body, now=seconds)
    assert not verify_signature(hook.secret, request.headers[SIGNATURE], body + " ", now=seconds)
    assert not verify_signature("other", request.headers[SIGNATURE], body, now=seconds)
    assert not verify_signature(hook.secret, request.headers[SIGNATURE], body, now=seconds + 301)
    assert not verify_signature(hook.secret, "t=x,v1=y", body, now=seconds)
    assert request.headers[DELIVERY] == "1"


def test_the_connection_goes_to_the_address_that_was_judged(registry, clock, sender, receiver):
    subscribe(registry, clock, "https://hooks.example.com:8443/path?q=1")
    registry.create_model("m")
    sender.deliver_due()
    (request,) = receiver.requests
    assert str(request.url) == f"https://{PUBLIC}:8443/path?q=1"
    assert request.headers["host"] == "hooks.example.com:8443"
    assert request.extensions["sni_hostname"] == "hooks.example.com"


def test_a_change_that_failed_is_not_told(registry, clock, sender):
    subscribe(registry, clock)
    registry.register(metadata())
    sender.deliver_due()
    with pytest.raises(Exception, match="already"):
        registry.register(metadata())
    assert sender.deliver_due() == 0


@pytest.mark.parametrize("status", [0, 500, 404, 302])
def test_what_is_not_received_is_tried_again_later_and_given_up_in_the_end(
    registry, clock, sender, receiver, status
):
    hook = subscribe(registry, clock)
    registry.create_model("m")
    receiver.status = status
    outbox = Outbox(registry.database)
    for attempt in (1, 2, 3):
        assert sender.deliver_due() == 1
        assert len(receiver.requests) == attempt
        assert sender.deliver_due() == 0
        clock.advance(101)
    assert sender.deliver_due() == 0
    (delivery,) = outbox.deliveries(hook.webhook_id)
    assert (delivery.status, delivery.attempts) == ("failed", 3)
    assert "answer" in delivery.last_error


def test_a_message_is_delivered_once_the_receiver_is_back(registry, clock, sender, receiver):
    hook = subscribe(registry, clock)
    registry.create_model("m")
    receiver.status = 503
    sender.deliver_due()
    receiver.status = 200
    clock.advance(11)
    sender.deliver_due()
    (delivery,) = Outbox(registry.database).deliveries(hook.webhook_id)
    assert (delivery.status, delivery.attempts) == ("delivered", 2)
    assert Outbox(registry.database).pending_count() == 0


def test_what_a_dead_sender_claimed_is_taken_by_another(registry, clock, sender, receiver):
    subscribe(registry, clock)
    registry.create_model("m")
    outbox = Outbox(registry.database)
    assert len(outbox.claim(to_micros(clock.utc), claim_us=60_000_000, webhook_id=1)) == 1
    assert sender.deliver_due() == 0
    clock.advance(61)
    assert sender.deliver_due() == 1


def test_a_removed_webhook_hears_nothing_more(registry, clock, sender, receiver):
    hook = subscribe(registry, clock)
    registry.create_model("m")
    outbox = Outbox(registry.database)
    outbox.unsubscribe(hook.webhook_id)
    assert sender.deliver_due() == 0
    with pytest.raises(NotFoundError):
        outbox.unsubscribe(hook.webhook_id)
    with pytest.raises(NotFoundError):
        outbox.deliveries(hook.webhook_id)


def test_a_thread_delivers_by_itself(tmp_path, clock, receiver):
    from tensorforge.registry import ModelRegistry

    with ModelRegistry(tmp_path / "r.db", clock=lambda: clock.utc) as registry:
        subscribe(registry, clock)
        registry.create_model("m")
        sender = WebhookSender(
            registry.database,
            clock=lambda: clock.utc,
            resolver=lambda host, port: [PUBLIC],
            transport=httpx.MockTransport(receiver),
        ).start()
        outbox = Outbox(registry.database)
        while outbox.pending_count():
            pass
        sender.close()
    assert len(receiver.requests) == 1


INSIDE = [
    *(
        "127.0.0.1",
        "127.8.8.8",
        "0.0.0.0",
        "10.1.2.3",
        "172.16.0.1",
        "192.168.1.1",
        "169.254.169.254",
    ),
    *("100.64.0.1", "224.0.0.1", "255.255.255.255", "::1", "::", "fe80::1", "fc00::1", "ff02::1"),
    *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "2002:7f00:1::", "64:ff9b::7f00:1", "2001:0:1::1"),
]


@pytest.mark.parametrize("address", INSIDE)
def test_an_inside_address_is_refused_in_every_notation(registry, clock, address):
    assert not is_public(ipaddress.ip_address(address))
    host = f"[{address}]" if ":" in address else address
    with pytest.raises(PermissionDeniedError, match="not on the public internet"):
        subscribe(registry, clock, f"http://{host}/")
    assert Outbox(registry.database).webhooks() == []
    check_target(f"http://{host}/", allow_private=True)


@pytest.mark.parametrize("address", [PUBLIC, "8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8"])
def test_a_public_address_is_allowed(address):
    assert is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize(
    "answers", [["127.0.0.1"], [PUBLIC, "10.0.0.1"], ["fe80::1%eth0"], ["::1"]]
)
def test_a_name_that_resolves_inside_is_refused_when_it_is_used(registry, clock, receiver, answers):
    hook = subscribe(registry, clock, "http://innocent.example.com/")
    registry.create_model("m")
    with WebhookSender(
        registry.database,
        clock=lambda: clock.utc,
        resolver=lambda host, port: answers,
        transport=httpx.MockTransport(receiver),
    ) as sender:
        sender.deliver_due()
    assert receiver.requests == []
    (delivery,) = Outbox(registry.database).deliveries(hook.webhook_id)
    assert delivery.status == "failed"
    assert "not on the public internet" in delivery.last_error


def test_inside_addresses_can_be_allowed():
    parts = check_target("http://localhost:1/", allow_private=True)
    answer = resolve_target(parts, allow_private=True, resolver=lambda host, port: ["127.0.0.1"])
    assert answer == "127.0.0.1"


@pytest.mark.parametrize(
    "url",
    [
        *(
            "",
            "x",
            "ftp://example.com/",
            "file:///etc/passwd",
            "http://",
            "http:///x",
            "//example.com",
        ),
        *("http://u:p@example.com/", "http://example.com:0/", "http://example.com:99999/"),
        *("http://exa mple.com/", "http://example.com/\n", "http://[::1", "javascript:alert(1)"),
    ],
)
def test_what_is_no_plain_url_is_refused(registry, clock, url):
    with pytest.raises(InvalidInputError):
        subscribe(registry, clock, url)


def test_an_unknown_action_is_refused(registry, clock):
    with pytest.raises(InvalidInputError, match="'explode' is no action"):
        subscribe(registry, clock, actions=["explode"])


def test_deprecation_and_rollback_are_told_too(registry, clock, sender, receiver):
    for version in ("1.0.0", "1.1.0"):
        registry.register(metadata(version))
        bring(registry, version, S.PRODUCTION)
    subscribe(registry, clock, actions=["rollback", "set_alias"])
    registry.rollback("ranker", reason="slow")
    registry.set_alias("ranker", "champion", v("1.0.0"))
    sender.deliver_due()
    told = [json.loads(request.content)["action"] for request in receiver.requests]
    assert told == ["rollback", "set_alias"]


def test_a_url_that_no_request_can_be_sent_to_is_refused(registry, clock):
    with pytest.raises(InvalidInputError):
        subscribe(registry, clock, "http://\u24db" + "ocalhost:9/")


def test_a_secret_is_not_stored_as_plain_text(registry, clock):
    hook = subscribe(registry, clock)
    with registry.database.read() as connection:
        stored = connection.scalar(sa.select(WEBHOOKS.c.secret))
    assert hook.secret not in stored
    assert Outbox(registry.database).get(hook.webhook_id).secret == hook.secret


def test_a_receiver_that_breaks_the_sender_in_any_way_costs_only_its_own_message(
    registry, clock, receiver
):
    broken = subscribe(registry, clock, "https://broken.example.com/")
    subscribe(registry, clock, "https://good.example.com/")
    registry.create_model("m")

    def answer(request):
        if request.headers["host"] == "broken.example.com":
            raise RuntimeError("a bug")
        return receiver(request)

    with WebhookSender(
        registry.database,
        clock=lambda: clock.utc,
        resolver=lambda host, port: [PUBLIC],
        transport=httpx.MockTransport(answer),
    ) as sender:
        assert sender.deliver_due() == 2
    assert len(receiver.requests) == 1
    (delivery,) = Outbox(registry.database).deliveries(broken.webhook_id)
    assert (delivery.status, delivery.attempts) == ("pending", 1)


def test_a_receiver_that_drips_its_answer_is_left_at_the_deadline(registry, clock):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        stop = threading.Event()

        def drip():
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 200 OK\r\n")
                while not stop.wait(0.05):
                    try:
                        connection.sendall(b"X-More: x\r\n")
                    except OSError:
                        return

        thread = threading.Thread(target=drip)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        hook = subscribe(registry, clock, url, allow_private=True)
        registry.create_model("m")
        with WebhookSender(
            registry.database, clock=lambda: clock.utc, allow_private=True, deadline=0.5
        ) as sender:
            assert sender.deliver_due() == 1
        stop.set()
        thread.join()
    (delivery,) = Outbox(registry.database).deliveries(hook.webhook_id)
    assert (delivery.status, delivery.attempts) == ("pending", 1)


def test_an_endless_body_is_not_read(registry, clock):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def flood():
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 999999999999\r\n\r\n")
                try:
                    while True:
                        connection.sendall(b"x" * 65536)
                except OSError:
                    return

        thread = threading.Thread(target=flood)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        hook = subscribe(registry, clock, url, allow_private=True)
        registry.create_model("m")
        with WebhookSender(
            registry.database, clock=lambda: clock.utc, allow_private=True
        ) as sender:
            assert sender.deliver_due() == 1
        thread.join()
    (delivery,) = Outbox(registry.database).deliveries(hook.webhook_id)
    assert delivery.status == "delivered"
