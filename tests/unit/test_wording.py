"""Messages to people."""

from tensorforge.wording import counted


def test_one_is_not_many():
    assert [counted(count, "worker") for count in (0, 1, 2)] == [
        "0 workers",
        "1 worker",
        "2 workers",
    ]
