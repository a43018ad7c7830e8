"""What tests ask about the files in a store."""

from tensorforge.checkpoint.store_index import manifest_blobs, read_manifest
from tensorforge.errors import CheckpointError


def orphans(store):
    """Keys that belong to no checkpoint and to no save or deletion that is running."""
    own = set()
    for prefix, _ in manifest_blobs(store):
        try:
            manifest = read_manifest(store, prefix)
        except CheckpointError:
            continue
        own.update((manifest.key, *manifest.own_keys()))
    return [blob.key for blob in store.list() if blob.key not in own]
