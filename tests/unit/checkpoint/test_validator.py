import pytest
from tests.unit.checkpoint.models import build

from tensorforge.checkpoint import (
    CheckpointError,
    CheckpointErrorType,
    CheckpointOptions,
    CompressionLevel,
    DistributedCheckpoint,
    Finding,
    LoadOptions,
    SaveOptions,
    Severity,
    SingleProcess,
    StorageOptions,
)

pytestmark = pytest.mark.may_leak("files", "torch.optim makes the cache folder of torch's compiler")


def test_checkers_of_ones_own_are_asked(tmp_path):
    class OnlyFast:
        def check(self, manifest):
            if manifest.compression != "fast":
                yield Finding(Severity.ERROR, "not compressed")
            yield Finding(Severity.WARNING, "looked at")

    options = CheckpointOptions(
        storage=StorageOptions(connection_settings={"base_path": str(tmp_path)}),
        compatibility_checkers=(OnlyFast(),),
    )
    with DistributedCheckpoint.create(SingleProcess(), options) as checkpoint:
        model = build()
        prefix = checkpoint.save(model)
        with pytest.raises(CheckpointError, match="not compressed") as caught:
            checkpoint.load(model, options=LoadOptions(checkpoint_prefix=prefix))
        assert caught.value.type is CheckpointErrorType.VALIDATION_FAILED
        skip = LoadOptions(checkpoint_prefix=prefix, skip_validation=True)
        checkpoint.load(model, options=skip)
        model[0].bias.data.add_(1)
        checkpoint.save(model, options=SaveOptions(compression_level=CompressionLevel.FAST))
        with pytest.warns(UserWarning, match="looked at"):
            checkpoint.load(model)
