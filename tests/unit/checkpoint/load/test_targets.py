import pytest
import torch
from tests.unit.checkpoint.models import build, same, trained
from torch import nn

from tensorforge.checkpoint import CheckpointError, CheckpointErrorType, LoadOptions, SaveOptions

pytestmark = pytest.mark.may_leak("files", "torch.optim makes the cache folder of torch's compiler")


def test_every_disagreement_is_reported_by_name(checkpoint):
    checkpoint.save(build())
    other = nn.Sequential(
        nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 5), nn.Linear(5, 5)
    ).double()
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(other)
    text = str(caught.value)
    assert caught.value.type is CheckpointErrorType.LOAD_FAILED
    assert "missing in the checkpoint: model/4.weight" in text
    assert "model/3.weight is [3, 64], not [5, 64]" in text
    assert "model/0.weight is F32, not F64" in text
    smaller = nn.Sequential(nn.Linear(8, 64))
    with pytest.raises(CheckpointError, match=r"not in the model: model/1\.bias"):
        checkpoint.load(smaller)


def test_without_strictness_what_fits_is_loaded_and_the_rest_reported(checkpoint):
    model, optimizer = trained()
    checkpoint.save(model, optimizer)
    other = nn.Sequential(
        nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 5), nn.Linear(5, 5)
    ).double()
    before = other[3].weight.clone()
    fresh = torch.optim.AdamW(other.parameters())
    result = checkpoint.load(other, fresh, LoadOptions(strict_mode=False))
    assert torch.equal(other[0].weight, model[0].weight.double())
    assert torch.equal(other[3].weight, before)
    assert "model/4.bias" in result.mismatch.missing
    assert any("model/3.bias" in text for text in result.mismatch.shapes)
    assert any("model/1.weight" in text for text in result.mismatch.dtypes)
    assert same(
        optimizer.state[model[0].weight]["exp_avg"].double(),
        fresh.state[other[0].weight]["exp_avg"],
    )


def test_a_module_with_loading_code_of_its_own_gets_to_run_it(checkpoint):
    class Extra(nn.Linear):
        seen = None

        def get_extra_state(self):
            return {"version": 3}

        def set_extra_state(self, state):
            self.seen = state

    class Hooked(Extra):
        def _load_from_state_dict(self, state_dict, prefix, *rest):
            self.loaded_from = sorted(state_dict)
            super()._load_from_state_dict(state_dict, prefix, *rest)

    for kind in (Extra, Hooked):
        saved = kind(2, 2)
        checkpoint.save(saved, options=SaveOptions(checkpoint_prefix=kind.__name__))
        loaded = kind(2, 2)
        checkpoint.load(loaded, options=LoadOptions(checkpoint_prefix=kind.__name__))
        assert loaded.seen == {"version": 3}
        assert torch.equal(saved.weight, loaded.weight)
