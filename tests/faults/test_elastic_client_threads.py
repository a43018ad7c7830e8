"""The first views of a cluster may be decoded by two threads at once."""

import subprocess
import sys

CODE = """
import sys, threading
sys.setswitchinterval(1e-6)
from tensorforge.elastic.client import _view
from tensorforge.errors import EncodingError

gate = threading.Barrier(4)

def decode():
    gate.wait()
    try:
        _view(b'{"run_id": "x", "workers": [{"id": "a"}]}')
    except EncodingError:
        pass

threads = [threading.Thread(target=decode) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""


def test_two_threads_that_are_first_to_decode_a_view_do_not_crash():
    for _ in range(4):
        subprocess.run([sys.executable, "-c", CODE], check=True)
