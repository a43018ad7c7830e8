"""A generation's group by itself: aborting it, dropping it, and ending the process meanwhile."""

import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tensorforge.train.group import gloo_group
from tensorforge.train.group.gloo_group import GenerationGroup, GenerationStore, GroupAbortedError


def make_group(store, rank, world_size, **options):
    return GenerationGroup(
        store=store.address, generation=1, rank=rank, world_size=world_size, **options
    )


@pytest.fixture(scope="module", autouse=True)
def first_store():
    """torch keeps one pipe for good when it serves a store for the first time; it is no test's leak."""
    GenerationStore("127.0.0.1").close()


@pytest.fixture
def trio():
    """Three members in one process, formed by a thread each, so that each sees the others' listening
    sockets appear meanwhile: gloo ends the process if one of those is shut down."""
    store = GenerationStore("127.0.0.1")
    groups = [make_group(store, rank, 3) for rank in range(3)]
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(GenerationGroup.form, groups))
    yield groups
    for group in groups:
        group.close()
    store.close()


def test_every_member_gets_everybodys_bytes(trio):
    with ThreadPoolExecutor(3) as pool:
        said = pool.map(lambda group: group.gather_bytes(b"x" * group.rank), trio)
    assert list(said) == [[b"", b"x", b"xx"]] * 3


def test_an_abort_ends_the_waiting_of_all_members_but_no_listening_socket(trio):
    def wait(group):
        with pytest.raises(GroupAbortedError) as caught:
            group.all_reduce(torch.zeros(1000))
        return str(caught.value)

    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(wait, group) for group in trio[:2]]
        trio[2].abort("a test")
        assert all("generation 1" in each.result(30) for each in waiting)
    with pytest.raises(GroupAbortedError, match="a test"):
        trio[2].all_reduce(torch.zeros(1))


def test_a_connection_that_others_open_while_a_group_forms_survives_its_abort(monkeypatch):
    """A client, such as that of an object store, connects at the moment when gloo has connected."""
    service = socket.create_server(("127.0.0.1", 0))
    clients = []
    find = gloo_group._sockets

    def connect_and_find():
        clients.append(socket.create_connection(service.getsockname()))
        return find()

    monkeypatch.setattr(gloo_group, "_sockets", connect_and_find)
    store = GenerationStore("127.0.0.1")
    groups = [make_group(store, rank, 2) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(GenerationGroup.form, groups))
    served = [service.accept()[0] for _ in clients]
    assert all(group._sockets for group in groups), "gloo's own connections are known"
    for group in groups:
        group.close()
    for client in clients:
        client.sendall(b"x")
    assert [connection.recv(1) for connection in served] == [b"x"] * len(clients)
    for each in (service, *clients, *served):
        each.close()
    store.close()


def test_an_abort_ends_the_forming():
    store = GenerationStore("127.0.0.1")
    group = make_group(store, 0, 2, connect_timeout=1.0)
    with ThreadPoolExecutor(1) as pool:
        forming = pool.submit(group.form)
        group.abort("nobody comes")
        with pytest.raises(GroupAbortedError, match="nobody comes"):
            forming.result(30)
    store.close()
    for thread in threading.enumerate():
        if thread.name.startswith("gloo-form"):
            thread.join(30)


ENDS_WHILE_A_GROUP_IS_DROPPED = """
import threading, time
from tensorforge.train.group import gloo_group

class Slow:
    def __del__(self):
        dropping.set()
        time.sleep(0.5)
        print("dropped", flush=True)

dropping = threading.Event()
backend = [Slow()]
threading.Thread(target=gloo_group._drop, args=(backend, []), daemon=True).start()
del backend
dropping.wait()
"""


def test_the_interpreter_does_not_end_while_a_group_is_dropped():
    ended = subprocess.run(
        [sys.executable, "-c", ENDS_WHILE_A_GROUP_IS_DROPPED],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (ended.returncode, ended.stdout) == (0, "dropped\n"), ended.stderr
