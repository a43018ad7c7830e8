"""The file in a run's folder that says where its checkpoints are, and what the commands make of it."""

import stat

import pytest

from tensorforge.catalog.checkpoint_location import LOCATION_FILE, CheckpointLocation
from tensorforge.cli._checkpoint_places import Place, find_place
from tensorforge.errors import EncodingError, InvalidInputError, NotFoundError


def test_a_location_is_read_as_it_was_written(tmp_path):
    written = CheckpointLocation.of("saved", "postgresql://u:secret@db/x", "run 1")
    written.write(tmp_path)
    assert CheckpointLocation.read(tmp_path) == written
    assert written.store.startswith("/")
    assert stat.S_IMODE((tmp_path / LOCATION_FILE).stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == [LOCATION_FILE]


def test_the_catalog_of_a_folder_is_in_it_and_an_object_store_has_none(tmp_path):
    assert CheckpointLocation.of(tmp_path, None, "r").catalog == str(tmp_path / "catalog.db")
    assert CheckpointLocation.of("s3://bucket/x", None, "r").catalog is None


def test_a_folder_without_a_location_and_a_damaged_one_are_errors(tmp_path):
    with pytest.raises(NotFoundError, match="a run saves checkpoints if it has a CheckpointPlan"):
        CheckpointLocation.read(tmp_path)
    (tmp_path / LOCATION_FILE).write_text("{")
    with pytest.raises(EncodingError, match="is not JSON"):
        CheckpointLocation.read(tmp_path)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def add_run(here, name):
    folder = here / "runs" / name
    folder.mkdir(parents=True)
    CheckpointLocation.of(here / f"ck-{name}", None, name).write(folder)
    return Place(str(here / f"ck-{name}"), str(here / f"ck-{name}" / "catalog.db"), name)


def test_the_only_run_is_found_and_several_must_be_named(here):
    assert find_place(None, None, None) == Place("./checkpoints", "./checkpoints.db")
    first = add_run(here, "a")
    assert find_place(None, None, None) == first
    second = add_run(here, "b")
    with pytest.raises(InvalidInputError, match=r"name the run with --run-dir.*runs/a, runs/b"):
        find_place(None, None, None)
    assert find_place(None, None, here / "runs" / "b") == second


def test_a_named_store_is_preferred_to_a_run_and_brings_its_catalog(here):
    add_run(here, "a")
    assert find_place("other", None, None) == Place("other", "./checkpoints.db")
    (here / "other").mkdir()
    (here / "other" / "catalog.db").touch()
    assert find_place("other", None, None) == Place("other", "other/catalog.db")
    assert find_place("other", "c.db", None) == Place("other", "c.db")
