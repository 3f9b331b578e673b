"""Token ids that the model has no row for are refused by name where they come in, and nothing is taken for them."""

import msgspec
import pytest
from tests.pure.decode_side import PREFILL
from tests.pure.ledger_side import Granting
from tests.pure.worker_side import VOCAB_SIZE, WorkerSide, generate_of

from pdserve.errors import RemoteProtocolError
from pdserve.wire.cluster import Failed, FailureKind, Told

UNKNOWN = [-1, VOCAB_SIZE, 2**63 - 1, -(2**63)]


@pytest.mark.parametrize("token_id", UNKNOWN)
def test_generate_whose_prompt_has_an_unknown_token_is_refused_by_name(token_id: int) -> None:
    worker = WorkerSide()
    (refusal,) = worker.core.on_generate(generate_of((1, 2, token_id, 3)), now_ns=0)
    assert isinstance(refusal, Failed)
    assert refusal.kind is FailureKind.INVALID
    assert f"token id {token_id} in the prompt is outside the vocabulary [0, {VOCAB_SIZE})" in refusal.message
    assert worker.is_idle(0) and worker.sent == []


@pytest.mark.parametrize("token_id", UNKNOWN)
def test_generate_that_was_told_an_unknown_token_is_refused_by_name(token_id: int) -> None:
    worker = WorkerSide()
    told = (Told(token_ids=(1, token_id)),)
    (refusal,) = worker.core.on_generate(msgspec.structs.replace(generate_of((1, 2, 3)), told=told), now_ns=0)
    assert isinstance(refusal, Failed)
    assert f"token id {token_id} in an answer" in refusal.message
    assert worker.is_idle(0) and worker.sent == []


def test_generate_with_the_last_token_of_the_vocabulary_is_taken() -> None:
    worker = WorkerSide()
    assert worker.core.on_generate(generate_of((0, VOCAB_SIZE - 1) * 4), now_ns=0) == []
    assert len(worker.grants()) == 1


@pytest.mark.parametrize("token_id", UNKNOWN)
def test_grant_with_an_unknown_token_breaks_the_protocol_and_takes_nothing(token_id: int) -> None:
    side = Granting()
    core = side.worker.core
    grant = side.grant(num_tokens=8)
    with pytest.raises(RemoteProtocolError, match=rf"token id {token_id} in a grant is outside"):
        core.on_grant(PREFILL, msgspec.structs.replace(grant, token_ids=(*range(7), token_id)), now_ns=0)
    assert side.worker.is_idle(0)
    core.on_grant(PREFILL, grant, now_ns=0)
    assert core.num_open == 1
