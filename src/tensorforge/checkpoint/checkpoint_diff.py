"""The comparison of two checkpoints, tensor by tensor."""

from __future__ import annotations

from typing import Any

from tensorforge.checkpoint.format.boxes import Box
from tensorforge.checkpoint.format.manifest import CheckpointManifest, TensorMetadata
from tensorforge.checkpoint.options import Progress
from tensorforge.storage.blobs import BlobStore


def compare_tensors(
    store: BlobStore,
    old: CheckpointManifest,
    new: CheckpointManifest,
    progress: Progress | None = None,
) -> dict[str, list[str]]:
    """The names of the tensors that differ between two checkpoints, by what differs.

    Only tensors that are stored in different chunks are read, and only that needs torch.
    """
    both = sorted(set(old.tensors) & set(new.tensors))
    reshaped = [name for name in both if _kind(old.tensors[name]) != _kind(new.tensors[name])]
    rest = [name for name in both if name not in set(reshaped)]
    # With equal chunk boxes the checksums in the manifests suffice; otherwise the bytes must be read.
    alike = [name for name in rest if _boxes(old.tensors[name]) == _boxes(new.tensors[name])]
    changed = [n for n in alike if _contents(old.tensors[n]) != _contents(new.tensors[n])]
    unlike = [name for name in rest if name not in set(alike)]
    if unlike:
        from tensorforge.checkpoint.full_state import read_full_tensors

        ours = read_full_tensors(store, old, unlike, progress)
        theirs = read_full_tensors(store, new, unlike, progress)
        changed += [name for name in unlike if _bits(ours[name]) != _bits(theirs[name])]
    return {
        "only_in_first": sorted(set(old.tensors) - set(new.tensors)),
        "only_in_second": sorted(set(new.tensors) - set(old.tensors)),
        "other_type_or_shape": reshaped,
        "other_content": sorted(changed),
    }


def _bits(tensor: Any) -> bytes:
    """The bytes of a tensor, so that NaN equals itself."""
    from tensorforge.checkpoint.tensors import byte_view

    return byte_view(tensor).tobytes()


def _kind(tensor: TensorMetadata) -> tuple[str, tuple[int, ...]]:
    return tensor.dtype, tensor.shape


def _boxes(tensor: TensorMetadata) -> list[Box]:
    return [chunk.box for chunk in tensor.chunks]


def _contents(tensor: TensorMetadata) -> list[str]:
    return [chunk.data.content for chunk in tensor.chunks]
