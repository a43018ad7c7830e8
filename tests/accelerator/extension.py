"""Compile the simulated accelerator's C++ extension, once for each state of its sources.

    python -m tests.accelerator.extension     # compile now and print where the library is

The result is kept under `build/` of this repository. Processes that need it at the same time wait for the one
that compiles; the lock belongs to the file system, so a killed process leaves none behind.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch

SOURCES = sorted((Path(__file__).parent / "csrc").iterdir())
BUILDS = Path(__file__).resolve().parents[2] / "build" / "accelerator"
FLAGS = ["-O1", "-Wall", "-Wno-interference-size"]
SECONDS = 540


def compiler() -> str | None:
    """The path of the C++ compiler, if this machine has one."""
    return shutil.which(os.environ.get("CXX", "c++"))


def library() -> Path:
    """The compiled extension; compile it first where these sources were never compiled."""
    found = BUILDS / _fingerprint() / "sim.so"
    if not found.exists():
        BUILDS.mkdir(parents=True, exist_ok=True)
        with (BUILDS / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not found.exists():
                _compile(found.parent)
    return found


def _fingerprint() -> str:
    """A name for everything that the library depends on."""
    digest = hashlib.sha256(f"{torch.__version__} {sys.version} {FLAGS}".encode())
    for source in SOURCES:
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:16]


def _compile(folder: Path) -> None:
    """Compile in a process of its own, since torch's tool also loads what it has built."""
    unfinished = folder.with_suffix(".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
    done = subprocess.run(
        [sys.executable, str(Path(__file__).resolve()), str(unfinished)],
        env=os.environ | {"PATH": path, "MAX_JOBS": "2"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
    )
    if done.returncode != 0:
        raise RuntimeError(f"the simulated accelerator does not compile:\n{done.stdout}")
    unfinished.rename(folder)
    for other in BUILDS.iterdir():
        if other.is_dir() and other != folder:
            shutil.rmtree(other, ignore_errors=True)


def _compile_here(folder: str) -> None:
    from torch.utils import cpp_extension

    cpp_extension.load(
        "sim",
        [str(source) for source in SOURCES if source.suffix == ".cpp"],
        extra_cflags=FLAGS,
        build_directory=folder,
        is_python_module=False,
        verbose=True,
    )


if __name__ == "__main__":
    if len(sys.argv) == 2:
        _compile_here(sys.argv[1])
    else:
        print(library())
