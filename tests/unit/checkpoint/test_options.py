import pytest

from tensorforge.checkpoint import (
    CheckpointOptions,
    DistributedCheckpoint,
    LoadOptions,
    SaveOptions,
    SingleProcess,
    StorageOptions,
)
from tensorforge.errors import ConfigurationError


def test_bad_options_are_refused_when_they_are_made():
    with pytest.raises(ConfigurationError, match="resharding_strategy"):
        LoadOptions(resharding_strategy="magic")
    with pytest.raises(ConfigurationError, match="timeout"):
        SaveOptions(timeout=0)
    with pytest.raises(ConfigurationError, match="format"):
        SaveOptions(format="zip")
    with pytest.raises(ConfigurationError, match="provider"):
        DistributedCheckpoint.create(
            SingleProcess(), CheckpointOptions(storage=StorageOptions(provider="floppy"))
        )
