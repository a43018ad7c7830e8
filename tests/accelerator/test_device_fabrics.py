"""The fabric of a device over gloo keeps the promises of every fabric."""

from __future__ import annotations

import pytest
import torch
from tests.conformance.fabric_conformance import CHECKS, ENDING_CHECKS, on_all

from tensorforge.train.group.gloo_fabric import GenerationStore, GlooFabric
from tensorforge.train.group.staged_fabric import StagedFabric

pytestmark = pytest.mark.usefixtures("device_process")


@pytest.mark.parametrize("schedule", ["on demand", "side streams first", "default stream first"])
@pytest.mark.parametrize("check", [*CHECKS, *ENDING_CHECKS], ids=lambda check: check.__name__)
def test_a_staged_fabric_keeps_its_promise(check, schedule):
    torch.get_device_module("sim").set_schedule(schedule)
    device, store = torch.device("sim", 1), GenerationStore("127.0.0.1")
    hosts = [
        GlooFabric(store=store.address, generation=1, rank=rank, world_size=3) for rank in range(3)
    ]
    on_all(hosts, lambda fabric: fabric.form())
    members = [StagedFabric(host, device) for host in hosts]
    check(members, device)
    for member in members:
        member.close()
    store.close()
