import json

import pytest
import typer

import tensorforge
from tensorforge.cli import main as cli
from tensorforge.errors import NotFoundError


@pytest.fixture
def failing(monkeypatch):
    app = typer.Typer()

    @app.command()
    def explode(as_json: bool = typer.Option(False, "--json")) -> None:
        raise NotFoundError("no run is called x")

    monkeypatch.setattr(cli, "app", app)


def run(*words):
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    return caught.value.code


def test_the_version_is_printed(capsys):
    assert run("--version") == 0
    assert capsys.readouterr().out == f"tensorforge {tensorforge.__version__}\n"


def test_no_arguments_explain_what_there_is(capsys):
    run()
    assert "Usage" in "".join(capsys.readouterr())


def test_an_unknown_command_is_a_usage_error(capsys):
    assert run("no-such-command") == 2
    assert "no-such-command" in capsys.readouterr().err


def test_a_users_mistake_is_a_message_not_a_traceback(failing, capsys):
    assert run() == 1
    assert capsys.readouterr().err == "error: no run is called x\n"


def test_with_json_the_error_is_json_too(failing, capsys):
    assert run("--json") == 1
    message = {"error": "NotFoundError", "message": "no run is called x"}
    assert json.loads(capsys.readouterr().out) == message


def test_every_command_can_be_imported_and_explains_itself(capsys):
    for name in cli.command_modules():
        assert run(name, "--help") == 0
        assert "Usage" in capsys.readouterr().out
