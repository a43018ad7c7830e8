"""Tests that use the fixture `device_process` run in a process in which the simulated accelerator is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.accelerator.device_process import DeviceProcess
from tests.accelerator.extension import SECONDS, compiler, library

FOLDER = Path(__file__).parent


@pytest.fixture(scope="session")
def device_library() -> Path:
    """The simulated accelerator's compiled extension."""
    if compiler() is None:
        pytest.skip("NOT TESTED, accelerators: this machine has no C++ compiler to simulate one")
    return library()


@pytest.fixture(scope="session")
def device_process(device_library: Path) -> Iterator[DeviceProcess]:
    """Run the test's function in a process that has the simulated accelerator."""
    process = DeviceProcess()
    yield process
    process.end()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give the first test of this folder the time to compile the extension."""
    for item in items:
        if item.path.is_relative_to(FOLDER):
            item.add_marker(pytest.mark.timeout(SECONDS + 60))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    process = pyfuncitem.funcargs.get("device_process")
    if process is None:
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    arguments.pop("device_process", None)
    module = f"tests.accelerator.{pyfuncitem.path.stem}"
    failure = process.run(module, pyfuncitem.originalname, arguments)
    if failure is not None:
        pytest.fail(failure, pytrace=False)
    return True
