import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from tensorforge.checkpoint import DistributedCheckpoint, SaveOptions, SingleProcess
from tensorforge.cli import main as cli
from tensorforge.storage.local_store import LocalStore

pytestmark = pytest.mark.may_leak("files", "torch.optim makes the cache folder of torch's compiler")


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "store"
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    with DistributedCheckpoint(SingleProcess(), LocalStore(folder)) as checkpoint:
        options = SaveOptions(checkpoint_prefix="one", custom_metadata={"step": 1})
        checkpoint.save(model, optimizer, options)
        optimizer.step()
        checkpoint.save(model, optimizer, SaveOptions(checkpoint_prefix="two"))
    return folder


def run(capsys, folder, *words, code=0):
    try:
        cli.main(["checkpoint", *map(str, words), "--store", str(folder), "--json"])
    except SystemExit as ended:
        assert (ended.code or 0) == code
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_checkpoints_are_listed(capsys, folder):
    listed = run(capsys, folder, "ls")
    assert [row["prefix"] for row in listed["checkpoints"]] == ["one", "two"]
    assert listed["damaged"] == []
    (folder / "two.metadata.json").write_text("{}")
    listed = run(capsys, folder, "ls")
    assert [row["prefix"] for row in listed["checkpoints"]] == ["one"]
    assert listed["damaged"] == ["two"]


def test_a_checkpoint_is_shown(capsys, folder):
    shown = run(capsys, folder, "show", "one")
    assert shown["tensors"]["model/weight"] == {
        "dtype": "F32",
        "shape": [3, 4],
        "nbytes": 48,
        "chunks": 1,
    }
    assert shown["custom_metadata"] == {"step": 1}
    assert "no checkpoint 'x'" in run(capsys, folder, "show", "x", code=1)["message"]


def test_verifying_finds_a_flipped_bit_and_exits_with_one(capsys, folder):
    assert all(row["valid"] for row in run(capsys, folder, "verify")["checkpoints"])
    file = next((folder / "two").iterdir())
    content = bytearray(file.read_bytes())
    content[-3] ^= 4
    file.write_bytes(content)
    rows = {row["prefix"]: row for row in run(capsys, folder, "verify", code=1)["checkpoints"]}
    assert rows["one"]["valid"]
    assert not rows["two"]["valid"]
    assert "is damaged: tensor" in rows["two"]["findings"][0]


def test_two_checkpoints_are_compared(capsys, folder):
    assert run(capsys, folder, "diff", "one", "one")["equal"]
    different = run(capsys, folder, "diff", "one", "two", code=1)
    assert "model/weight" in different["other_content"]
    assert different["only_in_first"] == []


def test_people_get_tables_and_bars(capsys, folder):
    for words in (["ls"], ["show", "one"], ["verify", "one"], ["diff", "one", "one"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(["checkpoint", *words, "--store", str(folder)])
        assert not ended.value.code
        assert "one" in capsys.readouterr().out


def test_listing_and_verifying_need_no_torch(folder):
    code = (
        "import sys\n"
        "from tensorforge.checkpoint import store_index, CheckpointValidator, EveryByteIsIntact\n"
        "from tensorforge.storage.opening import open_store\n"
        "store = open_store(sys.argv[1])\n"
        "assert len(store_index.list_checkpoints(store)) == 2\n"
        "assert CheckpointValidator(store, [EveryByteIsIntact()]).validate('one').is_valid\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True)


@pytest.mark.parametrize("kind", ["torch", "safetensors", "huggingface", "dcp"])
def test_a_checkpoint_goes_to_another_format_and_comes_back(capsys, folder, tmp_path, kind):
    target = tmp_path / f"foreign-{kind}"
    target = target.with_suffix(".safetensors") if kind == "safetensors" else target
    exported = run(capsys, folder, "convert", "one", target, "--to", kind)
    assert exported["kind"] == kind
    if kind == "torch":
        assert torch.load(target, weights_only=True)["model"]["weight"].shape == (3, 4)
    if kind == "huggingface":
        assert set(load_file(target / "model.safetensors")) == {"weight", "bias"}
    trust = ["--trust-pickle"] if kind == "dcp" else []
    run(capsys, folder, "convert", target, "back", *trust)
    differences = run(capsys, folder, "diff", "one", "back", code=1)
    assert differences["other_content"] == []
    assert differences["other_type_or_shape"] == []
    lost = [name for name in differences["only_in_first"] if not name.startswith("rng/")]
    if kind in ("torch", "dcp"):
        assert lost == []
    else:
        assert all(name.startswith("optimizer/") for name in lost)


def test_a_pickle_is_not_read_without_being_told_to(capsys, folder, tmp_path):
    run(capsys, folder, "convert", "one", tmp_path / "dcp", "--to", "dcp")
    refused = run(capsys, folder, "convert", tmp_path / "dcp", "back", code=1)
    assert "--trust-pickle" in refused["message"]
    torch.save({"model": print}, tmp_path / "evil.pt")
    refused = run(capsys, folder, "convert", tmp_path / "evil.pt", "back", code=1)
    assert "tensors and plain values only" in refused["message"]


def test_mistakes_are_named(capsys, folder, tmp_path):
    assert "does not exist" in run(capsys, folder, "convert", "nowhere", "x", code=1)["message"]
    assert "--to" in run(capsys, folder, "convert", "one", tmp_path / "x", code=1)["message"]
    (tmp_path / "taken.pt").write_text("")
    taken = run(capsys, folder, "convert", "one", tmp_path / "taken.pt", code=1)
    assert "exists already" in taken["message"]
