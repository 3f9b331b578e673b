"""The profile's file: what is written is read back, and anything else is refused with a line that says what to do."""

import msgspec
import pytest

from pdserve.errors import ConfigError
from pdserve.perfmodel.fit import Accuracy
from pdserve.perfmodel.fitted import affine_model
from pdserve.perfmodel.profile import Profile, Source, decode_profile, encode_profile
from pdserve.perfmodel.sample import PassKind, PassSample, PushSample, chunk_shape, decode_shape, mixed_shape

PROFILE = Profile(
    subject="a test",
    sources={"here": Source(made_by="a test", date="2026-01-01T00:00:00Z", machine="none", commit="abc")},
    passes=(PassSample(shape=chunk_shape(start=0, stop=64), seconds=0.2, source="here"),),
    pushes=(PushSample(num_bytes=4096, seconds=1e-4, source="here"),),
    model=affine_model(provenance="a test", pass_s=0.1, token_s=0.001),
    accuracy=Accuracy(prefill_mape=0.01, decode_mape=None, mixed_mape=None, push_mape=0.02),
)


def test_profile_survives_its_encoding() -> None:
    assert decode_profile(encode_profile(PROFILE), name="a file") == PROFILE


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (b"", "is no profile"),
        (b"{}", "version"),
        (b'{"version": 1}', "is no profile"),
        (b'{"version": 2}', "format version 2"),
        (encode_profile(PROFILE).replace(b'"here": {', b'"there": {'), "names the source 'here'"),
        (encode_profile(PROFILE).replace(b'"seconds": 0.2', b'"seconds": 0.0'), "positive and finite"),
        (encode_profile(PROFILE).replace(b'"subject"', b'"topic"'), "topic"),
    ],
)
def test_document_that_is_no_profile_is_refused(document: bytes, message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        decode_profile(document, name="a file")

    assert message in refusal.value.message
    assert refusal.value.message.startswith("a file")


def test_profile_with_a_falling_curve_is_refused() -> None:
    document = msgspec.json.decode(encode_profile(PROFILE))
    document["model"]["tokens_s"]["seconds"] = [2.0, 1.0]

    with pytest.raises(ConfigError):
        decode_profile(msgspec.json.encode(document), name="a file")


def test_profile_with_a_pass_that_took_no_time_is_refused() -> None:
    document = msgspec.json.decode(encode_profile(PROFILE))
    document["model"]["deviations"] = [1.0, 0.0]

    with pytest.raises(ConfigError, match="positive and finite"):
        decode_profile(msgspec.json.encode(document), name="a file")


def test_chunk_attends_to_all_before_each_of_its_tokens() -> None:
    keys = sum(position + 1 for position in range(10, 25))

    assert chunk_shape(start=10, stop=25).num_prefill_keys == keys
    assert chunk_shape(start=0, stop=1).num_prefill_keys == 1


def test_decode_attends_to_its_context_and_itself() -> None:
    assert decode_shape(num_sequences=3, context=7).num_decode_keys == 24


def test_sample_kind_follows_its_shape() -> None:
    prefill, decode = chunk_shape(start=0, stop=4), decode_shape(num_sequences=2, context=8)
    kinds = [
        PassSample(shape=shape, seconds=1.0, source="here").kind
        for shape in (prefill, decode, mixed_shape(prefill, decode))
    ]

    assert kinds == [PassKind.PREFILL, PassKind.DECODE, PassKind.MIXED]
