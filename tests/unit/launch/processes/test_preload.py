import pytest

from tensorforge.launch.processes.preload import find_script, preloads

TRAINING = ("torch", "torch._dynamo", "tensorforge.train.loop.run")


def test_a_training_script_has_its_heavy_imports_done_ahead():
    source = """
import os, sys
import torch
from torch.utils.data import TensorDataset
import my_own_module
from tensorforge.train import Run
print(os.environ.get("HOME"), os.environ["PATH"], "X" in os.environ)
"""
    assert preloads(source) == (*TRAINING, "torch.utils.data", "tensorforge.train")


def test_only_what_the_script_imports_is_imported():
    assert preloads("import json\nimport numpy as np") == ("numpy",)
    assert preloads("import json") == ()
    assert preloads("if later:\n    import torch") == ()
    assert preloads("from . import torch") == ()


@pytest.mark.parametrize(
    "line",
    [
        "os.environ['OMP_NUM_THREADS'] = '1'",
        "os.environ.setdefault('OMP_NUM_THREADS', '1')",
        "os.environ.update(A='1')",
        "os.putenv('A', '1')",
        "del os.environ['A']",
        "settings = os.environ",
        "from os import environ\nenviron['A'] = '1'",
    ],
)
def test_a_script_that_writes_to_its_environment_is_left_alone(line):
    assert preloads(f"import os\n{line}\nimport torch\nfrom tensorforge.train import Run") == ()


@pytest.mark.parametrize("source", ["def (", "\0"])
def test_what_cannot_be_read_is_left_alone(source):
    assert preloads(source) == ()


def test_a_module_is_found_without_importing_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text("raise SystemExit('imported')")
    (tmp_path / "package" / "__main__.py").write_text("raise SystemExit('imported')")
    assert find_script("package.train", as_module=True).name == "train.py"
    assert find_script("package", as_module=True).name == "__main__.py"
    assert find_script("elsewhere.train", as_module=True) is None
    assert find_script("train.py", as_module=False).name == "train.py"
