"""Signatures of versions, by Ed25519.

A signature covers the version's name, checksum and metadata. A key is written as the base64 of its 32 bytes.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Collection

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from tensorforge.errors import IntegrityError, InvalidInputError
from tensorforge.registry.domain.models import ModelMetadata


def new_private_key() -> str:
    """A new private key."""
    key = Ed25519PrivateKey.generate()
    raw = key.private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption())
    return base64.b64encode(raw).decode("ascii")


def public_key_of(private_key: str) -> str:
    """The public key that belongs to a private key."""
    raw = _private(private_key).public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
    return base64.b64encode(raw).decode("ascii")


def statement_of(metadata: ModelMetadata) -> bytes:
    """What a signature covers: which version of which model this is, its files and its shapes."""
    stated = {
        "checksum": metadata.checksum,
        "framework": metadata.framework,
        "input_shape": list(metadata.input_shape),
        "model_id": metadata.model_id,
        "output_shape": list(metadata.output_shape),
        "size_bytes": metadata.size_bytes,
        "source": metadata.source,
        "version": str(metadata.version),
    }
    return b"tensorforge.version.1\n" + json.dumps(stated, sort_keys=True).encode()


def sign_version(metadata: ModelMetadata, private_key: str) -> str:
    """The signature of a version; `InvalidInputError` if it has no checksum, so that no file is covered."""
    if not metadata.checksum:
        raise InvalidInputError(
            f"{metadata.model_id} {metadata.version} has no checksum: its signature would cover no file"
        )
    return base64.b64encode(_private(private_key).sign(statement_of(metadata))).decode("ascii")


def check_signature(metadata: ModelMetadata, signature: str, public_key: str) -> None:
    """`IntegrityError` unless the signature of the version was made with the key."""
    key = Ed25519PublicKey.from_public_bytes(_raw(public_key, "public key"))
    try:
        key.verify(_raw(signature, "signature", length=64), statement_of(metadata))
    except InvalidSignature as error:
        raise IntegrityError(
            f"the signature of {metadata.model_id} {metadata.version} does not fit what is stored"
        ) from error


def check_public_key(public_key: str) -> str:
    """The key; `InvalidInputError` unless it is a public key."""
    _raw(public_key, "public key")
    return public_key


def signature_problem(metadata: ModelMetadata, trusted: Collection[str]) -> str | None:
    """Why a version is not signed by one of these keys, or `None` if it is."""
    if not metadata.signature:
        return "the version is not signed"
    if metadata.signed_by not in trusted:
        return "the version is signed by a key that the SLA does not name"
    try:
        check_signature(metadata, metadata.signature, metadata.signed_by)
    except IntegrityError as error:
        return str(error)
    return None


def _private(text: str) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(_raw(text, "private key"))


def _raw(text: str, what: str, length: int = 32) -> bytes:
    try:
        raw = base64.b64decode(text.strip(), validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidInputError(f"the {what} is not base64: {error}") from error
    if len(raw) != length:
        raise InvalidInputError(f"the {what} has {len(raw)} bytes, not {length}")
    return raw
