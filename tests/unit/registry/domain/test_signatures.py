from dataclasses import replace

import pytest
from tests.unit.registry.sample_values import S, bring, metadata, result, v

from tensorforge.errors import ConflictError, IntegrityError, InvalidInputError
from tensorforge.registry import Sla
from tensorforge.registry.domain.signatures import (
    check_signature,
    new_private_key,
    public_key_of,
    sign_version,
)


def test_a_signature_fits_only_the_version_that_was_signed():
    key = new_private_key()
    public, signed = public_key_of(key), metadata()
    signature = sign_version(signed, key)
    check_signature(signed, signature, public)
    for other in (
        replace(signed, checksum="sha256:other"),
        replace(signed, source="s3://elsewhere"),
        replace(signed, model_id="other"),
        replace(signed, version=v("9.9.9")),
    ):
        with pytest.raises(IntegrityError, match="does not fit"):
            check_signature(other, signature, public)
    with pytest.raises(IntegrityError):
        check_signature(signed, signature, public_key_of(new_private_key()))
    with pytest.raises(InvalidInputError):
        check_signature(signed, "nonsense", public)


def test_an_sla_that_names_a_key_lets_only_signed_versions_through(registry):
    key = new_private_key()
    public = public_key_of(key)
    registry.register(metadata())
    registry.set_sla("ranker", Sla(max_latency_ms=1e6, min_accuracy=0.0, signed_by=(public,)))
    bring(registry, "1.0.0", S.VALIDATING)
    registry.record_validation(result("1.0.0"))
    with pytest.raises(ConflictError, match="is not signed"):
        registry.transition_state("ranker", v("1.0.0"), S.STAGING)
    stranger = new_private_key()
    stored = registry.require("ranker", v("1.0.0"))
    registry.sign_version(
        "ranker", v("1.0.0"), sign_version(stored, stranger), public_key_of(stranger)
    )
    with pytest.raises(ConflictError, match="a key that the SLA does not name"):
        registry.transition_state("ranker", v("1.0.0"), S.STAGING)
    registry.sign_version("ranker", v("1.0.0"), sign_version(stored, key), public)
    registry.transition_state("ranker", v("1.0.0"), S.STAGING)
    registry.verify_audit()
