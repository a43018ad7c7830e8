import pytest

from tensorforge.errors import (
    InvalidInputError,
)
from tensorforge.storage.opening import open_store


def test_a_store_is_opened_by_path_or_url(tmp_path):
    for address in (tmp_path / "x y", str(tmp_path / "x y"), (tmp_path / "x y").as_uri()):
        store = open_store(address)
        assert store.url == (tmp_path / "x y").as_uri()
        store.close()
    assert open_store("memory://one") is open_store("memory://one")
    assert open_store("memory://one") is not open_store("memory://two")
    with pytest.raises(InvalidInputError, match="no store has the scheme 'ftp'"):
        open_store("ftp://host/x")
    with pytest.raises(InvalidInputError, match="absolute/path"):
        open_store("file://host/x")
