import itertools

from hypothesis import given
from hypothesis import strategies as st

from tensorforge.launch.processes.output_lines import LineSplitter, clean


def lines_of(*parts: bytes, limit: int = 1000) -> list[str]:
    splitter = LineSplitter(limit)
    return [line for part in parts for line in splitter.feed(part)] + splitter.flush()


def test_a_line_that_comes_in_pieces_is_one_line():
    assert lines_of(b"he", b"llo\nwor", b"ld\n") == ["hello", "world"]


def test_the_last_line_needs_no_line_end():
    assert lines_of(b"a\nlast words") == ["a", "last words"]


def test_windows_line_ends_are_line_ends():
    assert lines_of(b"a\r", b"\nb\r\r\n") == ["a", "b"]


def test_of_a_progress_bar_only_the_last_state_is_shown():
    assert lines_of(b"10%\r20%\r", b"99%\r100%\ndone\n") == ["100%", "done"]
    assert lines_of(b"10%\r20%\r") == ["20%"]


def test_an_empty_line_is_a_line():
    assert lines_of(b"\n\na\n") == ["", "", "a"]


def test_a_huge_line_comes_in_parts_and_is_never_held_whole():
    splitter = LineSplitter(100)
    parts = [part for _ in range(1000) for part in splitter.feed(b"x" * 99)]
    assert all(len(part) == 100 for part in parts)
    assert len(splitter._buffer) <= 100
    assert sum(map(len, parts + splitter.flush())) == 99_000


def test_a_huge_line_is_not_cut_inside_a_character():
    text = "é" * 300
    assert "".join(lines_of(text.encode(), limit=101)) == text


def test_bytes_that_are_no_text_are_shown_as_numbers():
    assert lines_of(b"\xff\xfeok\n") == ["\\xff\\xfeok"]


@given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=8), st.integers(8, 40))
def test_how_the_bytes_were_cut_changes_nothing(data, cuts, limit):
    places = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    parts = [data[a:b] for a, b in itertools.pairwise(places)]
    assert lines_of(*parts, limit=limit) == lines_of(data, limit=limit)


@given(st.lists(st.text(alphabet=st.characters(blacklist_characters="\r\n", codec="utf-8"))))
def test_text_comes_back_as_it_was(lines):
    data = "".join(f"{line}\n" for line in lines).encode()
    assert lines_of(data, limit=10_000) == lines


def test_colours_stay_on_a_terminal_and_are_closed():
    assert clean("\x1b[31mred", colour=True) == "\x1b[31mred\x1b[0m"
    assert clean("\x1b[31mred\x1b[0m", colour=False) == "red"


def test_cursor_moves_titles_and_links_go():
    text = "\x1b[2J\x1b[3;4Ha\x1b]0;title\x07b\x1b]8;;http://x\x1b\\c\x1b(Bd"
    assert clean(text, colour=True) == "abcd"


def test_control_characters_are_shown_as_numbers():
    assert clean("a\x00b\x07c\td\x9b2Je", colour=True) == "a\\x00b\\x07c\td\\x9b2Je"


@given(st.text())
def test_a_clean_line_cannot_move_the_cursor(text):
    shown = clean(text, colour=False)
    assert not any(c != "\t" and (ord(c) < 0x20 or 0x7F <= ord(c) < 0xA0) for c in shown)
    assert clean(shown, colour=False) == shown
