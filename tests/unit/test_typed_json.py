"""JSON decoded into types, from several threads at once."""

import subprocess
import sys

import msgspec
import pytest

from tensorforge.typed_json import convert_typed, decode_typed


class Point(msgspec.Struct, forbid_unknown_fields=True):
    x: int
    y: int = 0


def test_json_becomes_the_type():
    assert decode_typed(b'{"x": 1, "y": 2}', Point) == Point(1, 2)
    assert convert_typed({"x": "1"}, Point) == Point(1)


@pytest.mark.parametrize("data", [b"", b"{}", b'{"x": "1"}', b'{"x": 1, "z": 2}'])
def test_anything_else_is_refused(data):
    with pytest.raises(msgspec.DecodeError):
        decode_typed(data, Point)


def test_threads_may_be_the_first_to_decode_a_type_together():
    code = """
import msgspec, sys, threading
from tensorforge.typed_json import decode_typed
sys.setswitchinterval(1e-6)
for _ in range(200):
    fields = [(f"f{i}", list[dict[str, int]] | None, None) for i in range(40)]
    kind = msgspec.defstruct("Wide", fields)
    threads = [threading.Thread(target=decode_typed, args=(b'{"f1": [{"a": 1}]}', kind)) for _ in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
