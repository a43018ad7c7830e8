"""Storage from options."""

from __future__ import annotations

from tensorforge.checkpoint.options import StorageOptions
from tensorforge.errors import ConfigurationError
from tensorforge.storage.blobs import BlobStore
from tensorforge.storage.opening import OPENERS, open_store


def create_storage(options: StorageOptions) -> BlobStore:
    """Open the store that the options describe."""
    settings = dict(options.connection_settings)
    if options.provider == "local":
        address = settings.pop("base_path", "./checkpoints")
    elif options.provider == "memory":
        settings.pop("base_path", None)
        address = f"memory://{settings.pop('name', '')}"
    elif options.provider in OPENERS:
        bucket = settings.pop("bucket", "")
        if not bucket:
            raise ConfigurationError("bucket", bucket, f"{options.provider} needs one")
        address = f"{options.provider}://{bucket}/{settings.pop('path', '')}".rstrip("/")
    else:
        known = ", ".join(sorted({"local", *OPENERS} - {"file"}))
        raise ConfigurationError("provider", options.provider, f"must be one of {known}")
    if settings:
        raise ConfigurationError(
            "connection_settings", sorted(settings), f"{options.provider} has no such settings"
        )
    return open_store(address)
