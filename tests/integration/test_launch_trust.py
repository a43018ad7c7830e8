"""Another user of the same machine, and a run on loopback: that user cannot look, join or steer."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import psutil
import pytest

from tensorforge.launch.run_directory import read_record

TOY = os.path.join(os.path.dirname(__file__), "toy_train.py")  # noqa: PTH118, PTH120

STRANGER = """
import json, os, sys
from tensorforge.cluster.elastic_config import ElasticTrainingConfig
from tensorforge.cluster.workers import WorkerId
from tensorforge.elastic import CoordinatorClient, ElasticWorker

os.setgroups([])
os.setgid(65534)
os.setuid(65534)
address, folder = sys.argv[1:]
found = {}

def attempt(name, action):
    try:
        action()
        found[name] = "done"
    except Exception as error:
        found[name] = type(error).__name__

client = CoordinatorClient(address)
worker = ElasticWorker(WorkerId("stranger", "127.0.0.1", 0), ElasticTrainingConfig())
attempt("look", client.status)
attempt("watch", lambda: next(client.watch()))
attempt("scale", lambda: client.scale(9))
attempt("remove", lambda: client.remove("worker-0"))
attempt("stop", lambda: client.stop("because"))
attempt("join", lambda: worker.connect_to_cluster(address))
for name in ("token", "journal.db"):
    attempt(name, lambda: open(os.path.join(folder, name)))
client.close()
print(json.dumps(found))
"""


@pytest.fixture
def run(tmp_path):
    """A run that trains until it is stopped; its folder and its launcher's process."""
    folder = tmp_path / "run"
    until = tmp_path / "enough"
    for parent in (tmp_path, *tmp_path.parents[:3]):
        if "pytest" in parent.name:
            parent.chmod(0o755)  # so that only the run's own permissions protect it
    command = [sys.executable, "-m", "tensorforge", "run", "-n", "2", "--json", "--spares", "0"]
    command += ["--run-dir", str(folder), TOY, "--until", str(until)]
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    for line in launcher.stdout:
        if json.loads(line).get("event") == "generation_formed":
            break
    yield folder, launcher
    until.touch()
    launcher.communicate(timeout=90)


@pytest.mark.skipif(os.getuid() != 0, reason="NOT TESTED, a second user: only root can become one")
def test_another_user_can_neither_look_nor_join_nor_steer(run):
    folder, launcher = run
    address = read_record(folder).coordinator_address
    command = [sys.executable, "-c", STRANGER, address, str(folder)]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=90)
    tries = ("look", "watch", "scale", "remove", "stop", "join")
    refused = dict.fromkeys(tries, "AuthenticationError")
    files = dict.fromkeys(("token", "journal.db"), "PermissionError")
    assert json.loads(answer.stdout) == {**refused, **files}
    assert launcher.poll() is None


def test_the_runs_own_user_needs_no_option_and_no_process_shows_the_token(run):
    folder, launcher = run
    token = (folder / "token").read_text().strip()
    command = [sys.executable, "-m", "tensorforge", "scale", "3", "--run-dir", str(folder)]
    subprocess.run(command, check=True, capture_output=True, timeout=90)
    processes = [psutil.Process(launcher.pid), *psutil.Process(launcher.pid).children(True)]
    assert len(processes) >= 4
    assert not [p for p in processes if any(token in word for word in p.cmdline())]
    for path in folder.rglob("*"):
        if path.name == "token" or path.name.startswith("journal.db"):
            assert path.stat().st_mode & 0o077 == 0, path


@pytest.mark.may_leak("descriptors", "torch's first store makes a pipe for the whole process")
def test_the_rendezvous_store_listens_at_the_named_address_only():
    from tensorforge.train.group.gloo_group import GenerationStore

    store = GenerationStore("127.0.0.1")
    port = int(store.address.rpartition(":")[2])
    try:
        with socket.create_connection(("127.0.0.1", port)):
            pass
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port))
    finally:
        store.close()
