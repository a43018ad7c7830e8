"""Where the pages are served: alone, beside the registry's API, and without torch."""

from __future__ import annotations

import importlib.util
import stat
import subprocess
import sys

import pytest
from starlette.testclient import TestClient

from tensorforge.dashboard import dashboard_server
from tensorforge.dashboard.dashboard_server import (
    DashboardSettings,
    load_application,
    load_with_registry,
    make_tokens,
    require_packages,
    split_places,
)
from tensorforge.errors import InvalidInputError
from tensorforge.registry import ModelRegistry
from tensorforge.registry.service.http_server import ServerSettings
from tensorforge.registry.tokens import DatabaseTokens


def test_the_pages_start_without_torch():
    modules = "tensorforge.dashboard.dashboard_server, tensorforge.dashboard.dashboard_app"
    code = f"import sys, {modules}, tensorforge.cli.dashboard; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InvalidInputError, match=r"needs jinja2.*tensorforge\[serve\]"):
        require_packages()


def test_places_are_folders_or_addresses(tmp_path):
    assert split_places([str(tmp_path), "host:7000"]) == ((tmp_path,), ("host:7000",))
    with pytest.raises(InvalidInputError, match="neither a folder nor HOST:PORT"):
        split_places([str(tmp_path / "none")])


def test_the_tokens_are_kept_for_the_next_start_and_only_their_owner_reads_them(tmp_path):
    read, none = make_tokens(tmp_path, may_change=False)
    assert none is None
    assert [path.name for path in tmp_path.iterdir()] == [".dashboard-read-token"]
    assert make_tokens(tmp_path, may_change=True)[0] == read
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}


def test_a_restarted_server_accepts_the_sessions_of_the_one_before(tmp_path):
    read, _ = make_tokens(tmp_path, may_change=False)
    settings = DashboardSettings(folders=(tmp_path,), read_token=read)
    with TestClient(load_application(settings)) as before:
        before.post("/sign-in", data={"token": read})
        cookies = dict(before.cookies)
    with TestClient(load_application(settings), cookies=cookies) as after:
        assert after.get("/runs", follow_redirects=False).status_code == 200


def test_a_registry_is_served_with_its_pages_and_both_keep_their_own_access(tmp_path):
    database = str(tmp_path / "registry.db")
    with ModelRegistry(database) as registry:
        token = DatabaseTokens(registry.database).issue("me", ["registry:read"])
    app = load_with_registry("key", ServerSettings(database=database))
    with TestClient(app, base_url="http://localhost") as client:
        assert client.get("/healthz").status_code == 200
        assert client.get("/api/v1/models").status_code == 401
        signed_in = client.post("/ui/sign-in", data={"token": token}, follow_redirects=False)
        assert signed_in.headers["location"] == "/ui/"
        assert "Path=/ui" in signed_in.headers["set-cookie"]
        page = client.get("/ui")
        assert page.status_code == 200
        assert page.url.path == "/ui/models"
        assert 'href="/ui/static/dashboard.css"' in page.text
        assert client.get("/ui/static/dashboard.css").status_code == 200
        # The cookie of the pages opens no API: a form of another site cannot use it there.
        assert client.get("/api/v1/models").status_code == 401


def test_a_free_port_can_be_listened_on():
    assert 0 < dashboard_server.free_port() < 65536
