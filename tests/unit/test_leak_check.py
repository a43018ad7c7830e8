"""The check that guards every other test really finds each kind of leak."""

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

LEAKS = {
    "threads": """
        import threading
        gate = threading.Event()
        def test_leak():
            threading.Thread(target=gate.wait, daemon=True).start()
    """,
    "processes": """
        import subprocess
        def test_leak():
            global child
            child = subprocess.Popen(["sleep", "60"])
        def teardown_module():
            child.kill(); child.wait()
    """,
    "descriptors": """
        import os
        def test_leak():
            os.open(__file__, os.O_RDONLY)
    """,
    "files": """
        import tempfile
        def test_leak():
            tempfile.mkstemp()
    """,
}


@pytest.fixture
def guarded(pytester, monkeypatch):
    conftest = Path(__file__).parents[1] / "conftest.py"
    text = conftest.read_text().replace("GRACE_SECONDS = 5.0", "GRACE_SECONDS = 0.1")
    pytester.makeconftest(text)
    pytester.makeini("[pytest]\nmarkers = may_leak(kind, reason): x\n")
    return pytester


@pytest.mark.parametrize("kind", LEAKS)
def test_a_leak_fails_its_test(guarded, kind):
    guarded.makepyfile(LEAKS[kind])
    result = guarded.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines([f"*{kind}: *"])


def test_an_allowed_leak_is_allowed(guarded):
    guarded.makepyfile(
        """
        import os, pytest
        @pytest.mark.may_leak("descriptors", "on purpose")
        def test_leak():
            os.open(__file__, os.O_RDONLY)
        """
    )
    guarded.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(passed=1)
