"""The gateway of a fleet: the product's registry and dispatcher, with a tally in place of clients."""

from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from typing import assert_never

from pdserve.cluster.registry import Refused, Registry
from pdserve.errors import ConfigError
from pdserve.gateway.dispatcher import Action, Deliver, Dispatcher, Fail, Send, Work
from pdserve.gateway.failures import RequestFailed
from pdserve.ids import RequestId, WorkerId
from pdserve.sampling import SamplingParams
from pdserve.simulate.agenda import Agenda
from pdserve.simulate.fleet.plan import FleetPlan
from pdserve.simulate.fleet.silence import TOKEN_ID
from pdserve.simulate.fleet.tally import Tally
from pdserve.simulate.fleet.worker import MODEL_NAME, FleetWorker
from pdserve.units import seconds_to_ns
from pdserve.wire.cluster import Abort, Failed, Generate, Generated
from pdserve.wire.peer import Message
from pdserve.workload.request import WorkloadRequest

NUM_KEPT = 256
"""Prompts and sampling parameters of as many lengths: requests of one length share them."""


class FleetGateway:
    def __init__(self, plan: FleetPlan, agenda: Agenda, tally: Tally) -> None:
        self._plan = plan
        self._agenda = agenda
        self._tally = tally
        self._registry = Registry(model_name=MODEL_NAME, max_workers=plan.num_workers)
        self._dispatcher = Dispatcher(self._registry, max_pending=plan.max_pending)
        self._workers: dict[WorkerId, FleetWorker] = {}

    def add(self, worker: FleetWorker) -> None:
        joined = self._registry.join(worker.join(), self._agenda.now_ns)
        if isinstance(joined, Refused):
            raise ConfigError(f"worker {worker.worker_id} can't join: {joined.message}")
        self._workers[worker.worker_id] = worker

    def submit(self, request: WorkloadRequest) -> None:
        now_ns = self._agenda.now_ns
        index = self._tally.arrive(request, now_ns=now_ns)
        work = Work(
            request_id=RequestId(str(index)),
            prompt_token_ids=_prompt(request.num_prompt_tokens),
            sampling=_sampling(request.num_output_tokens),
            deadline_ns=now_ns + seconds_to_ns(self._plan.request_timeout_s),
        )
        try:
            actions = self._dispatcher.submit(work, now_ns)
        except RequestFailed as failed:
            self._tally.fail(index, failed.failure.status)
        else:
            self._perform(actions)

    def hear(self, worker_id: WorkerId, message: Message) -> None:
        """A worker says something; it arrives a message's time later."""
        self._agenda.after(self._plan.message_ns, partial(self._on_message, worker_id, message))

    def expose(self, request_id: RequestId, duration_ns: int) -> None:
        self._tally.expose(index_of(request_id), duration_ns)

    def on_heartbeat(self, worker: FleetWorker) -> None:
        self._registry.heartbeat(worker.worker_id, worker.heartbeat(), self._agenda.now_ns)

    def on_time(self) -> None:
        """Deadlines of requests pass."""
        self._perform(self._dispatcher.expire(self._agenda.now_ns))

    def _on_message(self, worker_id: WorkerId, message: Message) -> None:
        match message:
            case Generated():
                self._perform(self._dispatcher.generated(worker_id, message))
            case Failed():
                self._perform(self._dispatcher.failed(worker_id, message, self._agenda.now_ns))
            case _:
                pass

    def _perform(self, actions: Iterable[Action]) -> None:
        now_ns = self._agenda.now_ns
        for action in actions:
            match action:
                case Deliver(request_id, delta):
                    self._tally.deliver(
                        int(request_id),
                        len(delta.token_ids),
                        is_last=delta.finish_reason is not None,
                        now_ns=now_ns,
                    )
                case Send(worker_id, message):
                    self._agenda.after(self._plan.message_ns, self._delivery(self._workers[worker_id], message))
                case Fail(request_id, failure):
                    self._tally.fail(int(request_id), failure.status)
                case _:
                    assert_never(action)

    def _delivery(self, worker: FleetWorker, message: Generate | Abort) -> Callable[[], None]:
        match message:
            case Generate():
                return partial(worker.on_generate, message)
            case Abort():
                return partial(worker.on_abort, message)
            case _:
                assert_never(message)


def index_of(attempt_id: RequestId) -> int:
    """The request that an attempt belongs to."""
    return int(attempt_id.partition(".")[0])


@lru_cache(maxsize=NUM_KEPT)
def _prompt(num_tokens: int) -> tuple[int, ...]:
    return (TOKEN_ID,) * num_tokens


@lru_cache(maxsize=NUM_KEPT)
def _sampling(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
