"""Each of the eleven options of a run's configuration can be set by `tensorforge run`."""

import dataclasses

import pytest
from typer.testing import CliRunner

from tensorforge.cli.run import app
from tensorforge.cluster.elastic_config import (
    AdaptationStrategy,
    ElasticTrainingConfig,
    RedistributionType,
)
from tensorforge.launch import launcher
from tensorforge.launch.supervisor.instructions import Outcome

OPTIONS = {
    "min_workers": (["--min-workers", "2", "-n", "3"], 2),
    "max_workers": (["--max-workers", "7"], 7),
    "rescale_timeout_ms": (["--rescale-timeout", "4.5"], 4_500),
    "max_consecutive_failures": (["--max-failures", "9"], 9),
    "lr_adaptation_strategy": (["--lr-adaptation", "linear"], AdaptationStrategy.LINEAR),
    "redistribution_type": (["--redistribution", "incremental"], RedistributionType.INCREMENTAL),
    "use_synchronous_rescaling": (["--no-synchronous-rescaling"], False),
    "stability_window_ms": (["--stability-window", "0.25"], 250),
    "worker_heartbeat_timeout_ms": (["--heartbeat-timeout", "2"], 2_000),
    "failure_tolerance_percentage": (["--failure-tolerance", "33"], 33),
    "use_parallel_data_transfer": (["--no-parallel-transfer"], False),
}


@pytest.fixture
def configured(tmp_path, monkeypatch):
    """Runs the command without launching anything; returns the configuration that it would launch with."""
    script = tmp_path / "train.py"
    script.write_text("")
    found = []

    class NoLauncher:
        def __init__(self, settings, _display):
            found.append(settings.config)

        def run(self):
            return Outcome(0, "not launched")

    monkeypatch.setattr(launcher, "Launcher", NoLauncher)

    def run(*options):
        words = [*options, "--run-dir", str(tmp_path / "run"), str(script)]
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
        return found[-1]

    return run


def test_every_option_of_the_configuration_is_in_the_table():
    assert set(OPTIONS) == {f.name for f in dataclasses.fields(ElasticTrainingConfig)}


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_reaches_the_configuration(configured, name):
    options, value = OPTIONS[name]
    assert getattr(configured(), name) != value
    assert getattr(configured(*options), name) == value


def test_the_default_keeps_the_weights_exact(configured):
    assert configured().lr_adaptation_strategy is AdaptationStrategy.NONE
