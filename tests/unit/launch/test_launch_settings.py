from pathlib import Path

import pytest

from tensorforge.elastic import ElasticTrainingConfig
from tensorforge.errors import ConfigurationError, NotFoundError
from tensorforge.launch.launch_settings import LaunchSettings
from tensorforge.launch.supervisor.supervision_policy import SupervisionPolicy


def test_settings_are_checked_before_anything_starts(tmp_path):
    with pytest.raises(NotFoundError, match=r"the script nowhere\.py does not exist"):
        LaunchSettings(script="nowhere.py", run_dir=tmp_path)
    with pytest.raises(ConfigurationError, match="is no address"):
        LaunchSettings(script=__file__, run_dir=tmp_path, host="0.0.0.0")
    with pytest.raises(ConfigurationError, match="min_workers"):
        LaunchSettings(
            script=__file__,
            run_dir=tmp_path,
            config=ElasticTrainingConfig(min_workers=2),
            policy=SupervisionPolicy(workers=3),
        )


def test_a_worker_finds_its_run_in_its_environment(tmp_path):
    settings = LaunchSettings(
        script=__file__, arguments=("-x",), run_dir=tmp_path, environment={"A": "b"}
    )
    found = settings.worker_variables("worker-1", "127.0.0.1:5", "tf_x")
    assert found["A"] == "b"
    assert found["TENSORFORGE_WORKER_ID"] == "worker-1"
    assert found["TENSORFORGE_COORDINATOR"] == "127.0.0.1:5"
    assert found["TENSORFORGE_TOKEN"] == "tf_x"
    assert "TENSORFORGE_CONFIG" not in found, "the coordinator sends it"
    assert settings.worker_words() == (str(Path(__file__)), "-x")
    by_module = LaunchSettings(script="job", as_module=True, run_dir=tmp_path)
    assert by_module.worker_words() == ("-m", "job")
