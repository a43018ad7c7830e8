import pytest

from tensorforge.errors import (
    InvalidInputError,
)
from tensorforge.storage.blobs import validate_key


def test_ordinary_keys_are_allowed():
    for key in ("a", "a/b-1_2.json", "...", "a/..b", "größe/ж", "a b"):
        assert validate_key(key) == key


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("", "empty"),
        ("/etc/passwd", "absolute"),
        ("a/../b", "'.' or '..'"),
        ("./a", "'.' or '..'"),
        ("a//b", "empty part"),
        ("a\nb", "control character"),
        (".staging/x", "reserved for the store"),
        ("x" * 256, "longer than 255 bytes"),
        ("a/" * 600 + "a", "longer than 1024 bytes"),
        ("\ud800", "lone surrogate"),
    ],
)
def test_a_key_that_is_not_allowed_is_refused_with_the_reason(key, reason):
    with pytest.raises(InvalidInputError, match=reason):
        validate_key(key)
