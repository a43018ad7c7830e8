"""From a trained model to production: export, register, validate, make transitions, by command and by call."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.unit.registry.sample_values import v

from tensorforge.checkpoint import (
    CheckpointFormat,
    CompressionLevel,
    DistributedCheckpoint,
    SaveOptions,
    SingleProcess,
)
from tensorforge.cli import main as cli
from tensorforge.errors import (
    AlreadyExistsError,
    CheckpointError,
    ConflictError,
    IntegrityError,
    InvalidInputError,
    NotFoundError,
)
from tensorforge.registry import CanaryVerdict, Lineage, ModelRegistry, Sla, TensorSpec
from tensorforge.registry.export import Registration, register_checkpoint, register_weights
from tensorforge.registry.model_validation import ValidationPlan, load_callable, run_validation
from tensorforge.registry.weights import describe_weights
from tensorforge.storage.opening import open_store

pytestmark = pytest.mark.may_leak("files", "torch makes the folder of its compiler's cache once")

LOADERS = """
import torch

def linear(tensors):
    model = torch.nn.Linear(4, 3)
    model.load_state_dict(tensors)
    return model

def exported(tensors):
    rows = torch.export.Dim("rows", min=1, max=1024)
    return torch.export.export(
        linear(tensors).eval(), (torch.zeros(2, 4),), dynamic_shapes=({0: rows},)
    )

def broken(tensors):
    raise RuntimeError("no such layer")

def crashing(tensors):
    def model(x):
        raise ValueError("cannot do that")
    return model

def poisoned(tensors):
    return lambda x: torch.full((len(x), 3), float("nan"))

def nothing(tensors):
    return 5

def tidy(tensors):
    return lambda x: {"logits": linear(tensors)(x)}

def closeness(outputs, targets):
    return 1.0 - float((outputs - targets).abs().mean())
"""


@pytest.fixture
def model():
    torch.manual_seed(0)
    return torch.nn.Linear(4, 3)


@pytest.fixture
def place(tmp_path, model):
    """A folder with weights, loaders and data on which the model is always right."""
    (tmp_path / "loaders.py").write_text(LOADERS)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    inputs = torch.randn(500, 4)
    targets = model(inputs).argmax(-1)
    save_file({"inputs": inputs, "targets": targets}, tmp_path / "data.safetensors")
    return tmp_path


@pytest.fixture
def registry():
    with ModelRegistry() as opened:
        yield opened


def register(registry, place, **changes):
    weights = describe_weights(place / "model.safetensors")
    wanted = Registration(model_id="ranker", input_shape=(4,), output_shape=(3,), **changes)
    return register_weights(registry, wanted, weights)


def plan(place, loader="linear", **changes):
    values = {
        "weights": place / "model.safetensors",
        "loader": f"{place / 'loaders.py'}:{loader}",
        "data": place / "data.safetensors",
        "repeats": 20,
        "warm_up": 2,
    }
    return ValidationPlan(**{**values, **changes})


def test_weights_are_registered_by_what_their_header_says(registry, place):
    kept, due = register(registry, place)
    assert (str(kept.version), due.bump.value) == ("1.0.0", "patch")
    assert registry.tensors("ranker", v("1.0.0")) == {
        "weight": TensorSpec("F32", (3, 4)),
        "bias": TensorSpec("F32", (3,)),
    }
    again, due = register(registry, place)
    assert str(again.version) == "1.0.1"
    save_file(torch.nn.Linear(4, 5).state_dict(), place / "model.safetensors")
    with pytest.raises(ConflictError, match="needs a new major version"):
        register(registry, place, version=v("1.0.2"))
    wider, due = register(registry, place)
    assert str(wider.version) == "2.0.0"
    assert "the tensor bias changed from [3] to [5]" in due.reasons


@pytest.mark.parametrize("loader", ["linear", "exported", "tidy"])
def test_a_validation_measures_the_registered_weights(registry, place, loader):
    kept, _ = register(registry, place)
    result = run_validation(kept, plan(place, loader), Sla(max_latency_ms=60_000, min_accuracy=0.9))
    assert result.passed
    assert result.accuracy_score == 1.0
    assert result.samples == 500
    assert 0 < result.latency_p50_ms <= result.latency_p99_ms


def test_latency_is_the_percentile_of_timed_requests_after_the_warm_up(registry, place):
    kept, _ = register(registry, place)
    ticks = iter(range(10_000))
    result = run_validation(kept, plan(place, repeats=10), clock=lambda: next(ticks) / 1000)
    assert result.latency_p50_ms == pytest.approx(1.0)
    assert result.latency_p99_ms == pytest.approx(1.0)


def test_a_model_that_misses_the_sla_does_not_pass(registry, place):
    kept, _ = register(registry, place)
    assert not run_validation(kept, plan(place), Sla(max_latency_ms=1e-9, min_accuracy=0)).passed
    assert not run_validation(kept, plan(place), Sla(max_latency_ms=1e9, min_accuracy=1.1)).passed


@pytest.mark.parametrize(
    ("loader", "error"),
    [
        ("broken", "RuntimeError: no such layer"),
        ("crashing", "ValueError: cannot do that"),
        ("poisoned", "ArithmeticError: the model's output is not finite"),
    ],
)
def test_a_model_that_fails_is_a_result_with_its_error(registry, place, loader, error):
    kept, _ = register(registry, place)
    result = run_validation(kept, plan(place, loader))
    assert not result.passed
    assert result.errors == (error,)
    registry.record_validation(result)
    assert registry.canary_decision("ranker", kept.version).verdict is CanaryVerdict.FAIL


def test_weights_that_were_changed_are_not_validated(registry, place):
    kept, _ = register(registry, place)
    save_file(torch.nn.Linear(4, 3).state_dict(), place / "model.safetensors")
    with pytest.raises(IntegrityError, match="other weights than those that were registered"):
        run_validation(kept, plan(place))


def test_a_metric_of_the_users_own(registry, place, model):
    kept, _ = register(registry, place)
    inputs = torch.randn(10, 4)
    save_file({"inputs": inputs, "targets": model(inputs).detach()}, place / "r.safetensors")
    with pytest.raises(InvalidInputError, match="name a metric"):
        run_validation(kept, plan(place, data=place / "r.safetensors"))
    metric = f"{place / 'loaders.py'}:closeness"
    result = run_validation(kept, plan(place, data=place / "r.safetensors", metric=metric))
    assert result.accuracy_score == pytest.approx(1.0)


def test_mistakes_of_the_caller_are_named(registry, place):
    kept, _ = register(registry, place)
    with pytest.raises(InvalidInputError, match="it must return a module"):
        run_validation(kept, plan(place, "nothing"))
    for loader in ("", "x", "nowhere", ":f", "m:", "a:b:c d"):
        with pytest.raises((InvalidInputError, NotFoundError)):
            load_callable(loader)
    with pytest.raises(NotFoundError, match="cannot be imported"):
        load_callable("no.such.module:f")
    with pytest.raises(NotFoundError, match="no file"):
        load_callable("/no/such/file.py:f")
    with pytest.raises(NotFoundError, match="has no function"):
        load_callable("json:nothing")
    with pytest.raises(NotFoundError, match="no data file"):
        run_validation(kept, plan(place, data=place / "none.npz"))
    (place / "junk.safetensors").write_bytes(b"junk")
    with pytest.raises(InvalidInputError, match="cannot be read"):
        run_validation(kept, plan(place, data=place / "junk.safetensors"))
    save_file({"inputs": torch.zeros(2)}, place / "half.safetensors")
    with pytest.raises(InvalidInputError, match="must have inputs and targets"):
        run_validation(kept, plan(place, data=place / "half.safetensors"))
    with pytest.raises(InvalidInputError, match="repeats"):
        plan(place, repeats=0)


@pytest.mark.parametrize("layout", list(CheckpointFormat))
def test_a_checkpoint_becomes_a_version_with_its_lineage(registry, tmp_path, model, layout):
    options = SaveOptions(
        checkpoint_prefix="run-7/step-40",
        format=layout,
        compression_level=CompressionLevel.NONE,
        custom_metadata={"run_id": "run-7", "step": 40},
    )
    with DistributedCheckpoint(SingleProcess(), open_store(tmp_path / "checkpoints")) as checkpoint:
        checkpoint.save(model, torch.optim.AdamW(model.parameters()), options)
    store = open_store(tmp_path / "checkpoints")
    target = tmp_path / "out" / "model.safetensors"
    wanted = Registration(model_id="ranker")
    kept, _ = register_checkpoint(registry, wanted, store, target)
    assert kept.lineage == Lineage(run_id="run-7", step=40, checkpoint_id="run-7/step-40")
    assert kept.source == str(target)
    assert kept.checksum == describe_weights(target).checksum
    loaded = load_file(target)
    assert set(loaded) == {"weight", "bias"}
    assert all(torch.equal(loaded[k], t) for k, t in model.state_dict().items())
    with pytest.raises(AlreadyExistsError, match="never replaced"):
        register_checkpoint(registry, wanted, store, target)
    assert registry.version_count() == 1


def test_a_damaged_checkpoint_is_never_registered(registry, tmp_path, model):
    with DistributedCheckpoint(SingleProcess(), open_store(tmp_path / "checkpoints")) as checkpoint:
        checkpoint.save(model, None, SaveOptions(checkpoint_prefix="c", include_rng_state=False))
    store = open_store(tmp_path / "checkpoints")
    (file,) = (tmp_path / "checkpoints").rglob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.chmod(0o644)
    file.write_bytes(content)
    target = tmp_path / "model.safetensors"
    with pytest.raises(CheckpointError):
        register_checkpoint(registry, Registration(model_id="m"), store, target)
    assert not target.exists()
    assert registry.version_count() == 0
    with pytest.raises(NotFoundError, match="no checkpoint"):
        register_checkpoint(
            registry, Registration(model_id="m"), open_store(tmp_path / "none"), target
        )


def run(capsys, *words, code=0):
    with pytest.raises(SystemExit) as caught:
        cli.main(["registry", *map(str, words)])
    captured = capsys.readouterr()
    assert caught.value.code == code, captured.out + captured.err
    return captured.out + captured.err


def test_the_whole_way_by_command(place, capsys, monkeypatch):
    monkeypatch.setenv("TENSORFORGE_REGISTRY", str(place / "registry.db"))
    shapes = ("--input-shape", "4", "--output-shape", "3")
    weights = place / "model.safetensors"
    done = run(capsys, "register", "ranker", "--weights", weights, *shapes, "--tag", "team=x")
    assert "Registered ranker 1.0.0" in done
    run(capsys, "sla", "ranker", "--max-latency-ms", "60000", "--min-accuracy", "0.9")
    loader = f"{place / 'loaders.py'}:linear"
    check = (
        "validate",
        "ranker",
        "1.0.0",
        "--loader",
        loader,
        "--data",
        place / "data.safetensors",
    )
    early = run(capsys, "promote", "ranker", "latest", "--to", "staging", code=1)
    assert "cannot go from registered to staging; allowed: validating" in early
    run(capsys, "promote", "ranker", "1.0.0", "--to", "validating")
    refused = run(capsys, "promote", "ranker", "1.0.0", "--to", "staging", code=1)
    assert "no validation was recorded since" in refused
    assert "passed" in run(capsys, *check, "--repeats", "10")
    assert "validating → staging" in run(capsys, "promote", "ranker", "1.0.0", "--to", "staging")
    run(capsys, "promote", "ranker", "1.0.0", "--to", "canary")
    answer = json.loads(run(capsys, *check, "--json"))
    assert answer["decision"]["verdict"] == "pass"
    run(capsys, "promote", "ranker", "1.0.0", "--to", "production", "--reason", "ready")
    assert "1.0.0" in run(capsys, "ls")
    assert "production" in run(capsys, "ls", "ranker")
    assert json.loads(run(capsys, "ls", "--where", "tags.team = 'x'", "--json"))[0]["number"] == 1
    assert json.loads(run(capsys, "show", "ranker", "production", "--json"))["sla"] is not None
    checksum = json.loads(run(capsys, "show", "ranker", "--json"))["version"]["checksum"]
    assert checksum in run(capsys, "show", "ranker"), "a checksum must stay one word"
    run(capsys, "register", "ranker", "--weights", weights, *shapes)
    forced = ("--force", "--reason", "drill")
    for state in ("validating", "staging", "canary", "production"):
        run(capsys, "promote", "ranker", "1.0.1", "--to", state, *forced)
    assert "1.0.1 → 1.0.0" in run(capsys, "rollback", "ranker", "--reason", "drill")
    assert "nothing to go back to" in run(capsys, "rollback", "ranker", code=1)
    rows = json.loads(run(capsys, "history", "ranker", "--json"))
    assert rows[-1]["action"] == "rollback"
    assert "rollback" in run(capsys, "history", "ranker")
    assert "Due: patch" in run(capsys, "diff", "ranker", "1.0.0", "1.0.1")
    assert "The audit is intact" in run(capsys, "audit")
    failing = (*check[:4], f"{place / 'loaders.py'}:broken", *check[5:])
    assert "no such layer" in run(capsys, *failing, code=1)


def test_a_checkpoint_by_command_and_tokens(place, capsys, model):
    database = ("--database", place / "registry.db")
    with DistributedCheckpoint(SingleProcess(), open_store(place / "ck")) as checkpoint:
        checkpoint.save(model, None, SaveOptions(checkpoint_prefix="c1"))
    options = ("--checkpoint", place / "ck", "--export-to", place / "out.safetensors")
    answer = json.loads(run(capsys, "register", "m", *options, "--run", "r", "--json", *database))
    assert answer["version"]["lineage"]["checkpoint_id"] == "c1"
    assert answer["version"]["lineage"]["run_id"] == "r"
    assert "either" in run(capsys, "register", "m", *database, code=1)
    token = run(capsys, "token", "create", "ci", "--scope", "registry:read", *database).strip()
    assert token.startswith("tf_")
    listed = run(capsys, "token", "ls", "--json", *database)
    assert token.split("_")[2] not in listed
    run(capsys, "token", "revoke", token.split("_")[1], *database)
    assert "no model is called" in run(capsys, "show", "nobody", *database, code=1)


def test_who_only_looks_makes_no_registry_by_mistake(tmp_path, capsys):
    missing = tmp_path / "typo.db"
    assert "there is no registry at" in run(capsys, "ls", "--database", missing, code=1)
    assert not missing.exists()


def test_the_history_shows_old_and_new_values_line_by_line(place, capsys):
    with ModelRegistry(place / "registry.db") as registry:
        registry.create_model("ranker", tags={"team": "ads"})
        registry.set_tags("ranker", put={"team": "search"}, drop=["absent"])
        registry.describe_model("ranker", "ranks things")
    lines = run(capsys, "history", "ranker", "--database", place / "registry.db").splitlines()
    assert [line.strip() for line in lines if line.startswith("       ")] == [
        "tag team: ads → search",
        "- → ranks things",
    ]
