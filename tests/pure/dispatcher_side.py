"""What the tests of the dispatcher say to it: requests, workers, and what workers answer."""

from pdserve.cluster.registry import Refused, Registry
from pdserve.config.role import Role
from pdserve.gateway.dispatcher import Action, Dispatcher, Send, Work
from pdserve.ids import Incarnation, RequestId, WorkerId
from pdserve.sampling import SamplingParams
from pdserve.units import NS_PER_S
from pdserve.wire.cluster import Delta, Failed, FailureKind, FinishReason, Generate, Generated, Join, Load
from pdserve.wire.peer import PROTOCOL_VERSION

MAX_PENDING = 4


def work_of(
    request_id: str,
    *,
    num_choices: int = 1,
    num_prompt_logprobs: int | None = None,
    num_top_logprobs: int | None = None,
    max_tokens: int = 8,
    deadline_ns: int = NS_PER_S,
) -> Work:
    return Work(
        request_id=RequestId(request_id),
        prompt_token_ids=(1, 2, 3),
        sampling=SamplingParams(
            max_tokens=max_tokens, num_prompt_logprobs=num_prompt_logprobs, num_top_logprobs=num_top_logprobs
        ),
        deadline_ns=deadline_ns,
        num_choices=num_choices,
    )


def join_of(worker_id: str, incarnation: int, *, num_ranks: int = 1, role: Role = Role.DECODE) -> Join:
    return Join(
        protocol_version=PROTOCOL_VERSION,
        worker_id=WorkerId(worker_id),
        incarnation=Incarnation(incarnation),
        role=role,
        url="http://w",
        model_name="m",
        model_fingerprint="f",
        max_model_len=64,
        lease_s=10.0,
        tensor_parallel_size=1,
        loads=(Load(),) * num_ranks,
    )


def cluster_of(*worker_ids: str, num_ranks: int = 1) -> tuple[Registry, Dispatcher]:
    registry = Registry(model_name="m", max_workers=8)
    for worker_id in worker_ids:
        assert not isinstance(registry.join(join_of(worker_id, 1, num_ranks=num_ranks), 0), Refused)
    return registry, Dispatcher(registry, max_pending=MAX_PENDING)


def sent(actions: list[Action]) -> tuple[WorkerId, Generate]:
    (action,) = actions
    assert isinstance(action, Send) and isinstance(action.message, Generate)
    return action.worker_id, action.message


def delta_of(
    generate: Generate,
    *,
    text: str = "t",
    token_ids: tuple[int, ...] = (1,),
    finishes: bool = False,
    choice_index: int = 0,
) -> Generated:
    delta = Delta(
        request_id=generate.request_id,
        choice_index=choice_index,
        token_ids=token_ids,
        text=text,
        finish_reason=FinishReason.STOP if finishes else None,
    )
    return Generated(sender=generate.receiver, deltas=(delta,))


def failed_of(generate: Generate, kind: FailureKind) -> Failed:
    return Failed(sender=generate.receiver, request_id=generate.request_id, kind=kind, message="no")
