import json

import pytest

from tensorforge.cli import main as cli
from tensorforge.cli.memory import parse_size, show_size
from tensorforge.errors import InvalidInputError
from tensorforge.memory import AllocationTrace
from tensorforge.memory.traces.trace import Event


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "small.json"
    AllocationTrace(
        [Event(0, 0, 4096, "a"), Event(1, 1, 512, "b"), Event(2, 0, -4096), Event(3, 2, 8192, "c")],
        name="small",
    ).save(path)
    return str(path)


def run(capsys, *words):
    with pytest.raises(SystemExit) as caught:
        cli.main(["memory", *words])
    captured = capsys.readouterr()
    return caught.value.code, captured.out, captured.err


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("7", 7), ("512k", 524288), ("1.5 GiB", 1610612736), ("2MB", 2 << 20), ("1t", 1 << 40)],
)
def test_sizes_are_read_as_people_write_them(text, nbytes):
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "-1", "lots", "1.5.2", "3q"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(InvalidInputError, match="not a size"):
        parse_size(text)


def test_sizes_are_shown_as_people_read_them():
    assert [show_size(n) for n in (5, 2048, 3 << 20, 5 << 30, 2 << 40)] == [
        "5 bytes",
        "2.0 KiB",
        "3.0 MiB",
        "5.0 GiB",
        "2048.0 GiB",
    ]


def test_replay_compares_policies(capsys, trace):
    code, out, _ = run(capsys, "replay", trace, "--policy", "best-fit", "--policy", "offline")
    assert code == 0
    assert "small: 3 allocations, at most 8.5 KiB in use" in out
    assert "best-fit" in out
    assert "offline" in out
    assert "tlsf" not in out


def test_replay_in_a_bounded_pool_fails_with_the_reason(capsys, trace):
    code, out, _ = run(capsys, "replay", trace, "--policy", "best-fit", "--capacity", "8k")
    assert code == 1
    assert "does not fit: event 3: out of memory for 'c'" in out
    code, out, _ = run(
        capsys, "replay", trace, "--policy", "best-fit", "--capacity", "8704", "--compact", "--json"
    )
    facts = json.loads(out)
    assert code == 0
    assert (facts["bounded"]["fits"], facts["bounded"]["moved_bytes"]) == (True, 512)


@pytest.mark.may_leak("descriptors", "matplotlib keeps its fonts open")
def test_replay_draws_and_exports(capsys, trace, tmp_path):
    plot, snapshot = tmp_path / "p.html", tmp_path / "s.json"
    code, _, _ = run(capsys, "replay", trace, "--plot", str(plot), "--snapshot", str(snapshot))
    assert code == 0
    assert plot.read_text().startswith("<!doctype html>")
    assert json.loads(snapshot.read_text())["segments"]
    code, out, _ = run(capsys, "advise", str(snapshot), "--plot", str(plot))
    assert code == 0
    assert "recommended pool" in out


def test_advise_says_what_is_too_small(capsys, trace):
    code, out, _ = run(capsys, "advise", trace, "--capacity", "8k")
    assert code == 1
    assert "too small" in out
    assert "first failure: out of memory for 'c'" in out
    code, out, _ = run(capsys, "advise", trace, "--json")
    assert code == 0
    assert json.loads(out)["smallest_pool"] == 4096 + 512 + 8192


@pytest.mark.may_leak("descriptors", "matplotlib keeps its fonts open")
@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["replay", "nothing"], "neither a file nor one of the bundled traces"),
        (["advise", "nothing"], "neither a file nor one of the bundled traces"),
        (["record", "nothing.py"], "no program nothing.py"),
        (["replay", "TRACE", "--policy", "magic"], "no policy is named 'magic'"),
        (["replay", "TRACE", "--compact"], "--compact needs --capacity"),
        (["replay", "TRACE", "--capacity", "much"], "not a size"),
        (["replay", "TRACE", "--plot", "/no/such/folder/p.png"], "no folder /no/such/folder"),
        (["replay", "TRACE", "--plot", "p.gif"], ".png, .svg or .html"),
        (["advise", "TRACE", "--headroom", "0.5"], "headroom_factor"),
    ],
)
def test_a_users_mistake_is_a_message(capsys, trace, words, complaint):
    code, _, err = run(capsys, *(trace if word == "TRACE" else word for word in words))
    assert code == 1
    assert complaint in err
    assert "Traceback" not in err
