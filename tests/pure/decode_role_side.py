"""The decode role of one worker, with its scheduler, on a scripted fabric; passes sample the letters the test gives."""

from dataclasses import dataclass, field
from itertools import count

import pytest
from tests.pure.decode_side import DECODE, LAYOUT, PREFILL, DecodeSide
from tests.pure.toy_tokenizer import EOS, LETTERS, letter_tokenizer

from pdserve.decode.role import DecodeLimits, DecodeRole
from pdserve.ids import Incarnation, RequestId, SequenceId, WorkerId
from pdserve.sampling import SamplingParams, TokenLogprobs
from pdserve.schedule.batch import Batch, BatchResult
from pdserve.schedule.limits import ScheduleLimits
from pdserve.schedule.scheduler import Scheduler
from pdserve.wire.cluster import Failed, FailureKind, FinishReason, Generate, Generated, PrefillPlace, PrefillTarget
from pdserve.wire.peer import Grant

PREFILL_TARGET = PrefillTarget(worker_id=WorkerId("prefill-2"), incarnation=PREFILL, url="http://prefill")
ABSENT_TARGET = PrefillTarget(worker_id=WorkerId("prefill-9"), incarnation=Incarnation(9), url="http://absent")


@dataclass(slots=True)
class DecodeRoleSide:
    """A decode role over a scripted receiver; passes sample the letters that the test gives."""

    side: DecodeSide = field(default_factory=DecodeSide)
    max_requests: int = 8
    now_ns: int = 0
    scheduler: Scheduler = field(init=False)
    role: DecodeRole = field(init=False)
    running: Batch | None = field(init=False, default=None)
    texts: dict[RequestId, str] = field(default_factory=dict[RequestId, str])
    reported: dict[RequestId, list[int]] = field(default_factory=dict[RequestId, list[int]])
    """Tokens that came with logprobs."""
    finished: dict[RequestId, FinishReason] = field(default_factory=dict[RequestId, FinishReason])
    places: dict[RequestId, PrefillPlace] = field(default_factory=dict[RequestId, PrefillPlace])
    failed: list[Failed] = field(default_factory=list[Failed])

    def __post_init__(self) -> None:
        pool = self.side.pool
        self.scheduler = Scheduler(
            pool=pool,
            page_slots=LAYOUT.page_slots,
            limits=ScheduleLimits(max_batch_tokens=32, saturation_tokens=32, max_running=4, max_waiting=2),
        )
        sequence_ids = count()
        self.role = DecodeRole(
            incarnation=DECODE,
            receiver=self.side.receiver,
            scheduler=self.scheduler,
            pool=pool,
            page_slots=LAYOUT.page_slots,
            tokenizer=letter_tokenizer(),
            new_sequence_id=lambda: SequenceId(next(sequence_ids)),
            limits=DecodeLimits(max_requests=self.max_requests, max_model_len=40),
        )

    def generate(
        self,
        name: str = "request",
        *,
        num_tokens: int = 8,
        prefill: PrefillTarget | None = PREFILL_TARGET,
        timeout_s: float = 30.0,
        sampling: SamplingParams | None = None,
    ) -> RequestId:
        request = Generate(
            request_id=RequestId(name),
            receiver=DECODE,
            dp_rank=0,
            prompt_token_ids=tuple(range(num_tokens)),
            sampling=sampling or SamplingParams(max_tokens=4),
            prefill=prefill,
            timeout_s=timeout_s,
        )
        self.role.on_generate(request, now_ns=self.now_ns)
        self.listen()
        return request.request_id

    def grants(self) -> list[Grant]:
        return [message for _, message in self.side.sent if isinstance(message, Grant)]

    def advance(self) -> None:
        self.role.advance(now_ns=self.now_ns)
        self.listen()

    def land(self, grant: Grant) -> None:
        self.side.all_land(grant)
        self.advance()

    def start_pass(self) -> None:
        self.running = self.scheduler.next_batch(self.now_ns)
        assert self.running is not None
        self.role.before_pass(self.running, now_ns=self.now_ns)

    def end_pass(self, token_id: int) -> None:
        """Every chunk that samples gets this token, with certainty."""
        batch, self.running = self.running, None
        assert batch is not None
        sampled = tuple((chunk.sequence_id, token_id) for chunk in batch.chunks if chunk.samples)
        certain = TokenLogprobs(token_id=token_id, logprob=0.0, top=((token_id, 0.0),))
        logprobs = tuple((sequence_id, certain) for sequence_id, _ in sampled)
        result = BatchResult(pass_index=batch.pass_index, sampled=sampled, logprobs=logprobs, started_ns=0, ended_ns=0)
        self.role.after_pass(self.scheduler.complete(result), now_ns=self.now_ns)
        self.listen()

    def sample(self, letters: str) -> None:
        for letter in letters:
            self.start_pass()
            self.end_pass(EOS if letter == "." else LETTERS.index(letter))

    def listen(self) -> None:
        for message in self.role.take_messages():
            match message:
                case Generated():
                    for delta in message.deltas:
                        assert delta.request_id not in self.finished
                        self.texts[delta.request_id] = self.texts.get(delta.request_id, "") + delta.text
                        reported = [entry.logprobs.token_id for entry in delta.entries]
                        self.reported[delta.request_id] = self.reported.get(delta.request_id, []) + reported
                        if delta.prefill is not None:
                            self.places[delta.request_id] = delta.prefill
                        if delta.finish_reason is not None:
                            self.finished[delta.request_id] = delta.finish_reason
                case Failed():
                    self.failed.append(message)
                case _:
                    pytest.fail(f"the gateway got {message}")

    def failures(self) -> list[FailureKind]:
        return [failed.kind for failed in self.failed]

    def is_idle(self) -> bool:
        is_scheduled = self.scheduler.num_running + self.scheduler.num_waiting > 0
        return self.role.num_open == 0 and self.side.is_whole() and not is_scheduled
