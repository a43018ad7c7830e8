"""Random streams that belong to the work, not to the worker. Pure."""

from __future__ import annotations

import hashlib
import struct


def stream_seed(seed: int, *place: int, purpose: str = "") -> int:
    """A 63-bit seed for one place of the run, such as (epoch, step, shard).

    It is a hash with a fixed definition: the same on every machine, in every process and every version of
    Python. Different purposes at one place get unrelated streams.
    """
    numbers = (seed, *place)
    packed = struct.pack(f"<{len(numbers)}q", *numbers)
    digest = hashlib.blake2b(packed, digest_size=8, person=purpose.encode()[:16]).digest()
    return int.from_bytes(digest, "little") >> 1
