"""The decode role of one worker, with its scheduler, on a scripted fabric; passes sample the letters the test gives."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

import pytest
from tests.pure.decode_side import DECODE, LAYOUT, PREFILL, DecodeSide
from tests.pure.toy_tokenizer import EOS, LETTERS, letter_tokenizer

from pdserve.config.speculation import Drafter, Speculation
from pdserve.decode.limits import DecodeLimits
from pdserve.decode.role import DecodeRole
from pdserve.ids import Incarnation, RequestId, SequenceId, WorkerId
from pdserve.sampling import SamplingParams, TokenLogprobs
from pdserve.schedule.batch import Batch, BatchResult, Chunk, NewSequence
from pdserve.schedule.limits import ScheduleLimits
from pdserve.schedule.scheduler import Scheduler
from pdserve.text.tokenizer import Tokenizer
from pdserve.wire.cluster import (
    Delta,
    Failed,
    FailureKind,
    FinishReason,
    Generate,
    Generated,
    PrefillPlace,
    PrefillTarget,
    Told,
)
from pdserve.wire.peer import Grant

PREFILL_TARGET = PrefillTarget(worker_id=WorkerId("prefill-2"), incarnation=PREFILL, url="http://prefill")
ABSENT_TARGET = PrefillTarget(worker_id=WorkerId("prefill-9"), incarnation=Incarnation(9), url="http://absent")
SPECULATION = Speculation(drafter=Drafter.DRAFT_MODEL, model_dir="scripted")

AnswerOf = Callable[[SamplingParams], str]
"""What an engine would sample, letter by letter, for a sequence with these parameters; "." ends it."""


@dataclass(slots=True)
class DecodeRoleSide:
    """A decode role over a scripted receiver; passes sample the letters that the test gives."""

    side: DecodeSide = field(default_factory=DecodeSide)
    max_requests: int = 8
    max_sequences: int = 8
    max_batch_tokens: int = 32
    speculation: Speculation = SPECULATION
    keeps_tails: bool = False
    tokenizer: Tokenizer = field(default_factory=letter_tokenizer)
    now_ns: int = 0
    scheduler: Scheduler = field(init=False)
    role: DecodeRole = field(init=False)
    running: Batch | None = field(init=False, default=None)
    deltas: list[Delta] = field(default_factory=list[Delta])
    texts: dict[RequestId, str] = field(default_factory=dict[RequestId, str])
    """Of choice 0."""
    reported: dict[RequestId, list[int]] = field(default_factory=dict[RequestId, list[int]])
    """Tokens of choice 0 that came with logprobs."""
    finished: dict[RequestId, FinishReason] = field(default_factory=dict[RequestId, FinishReason])
    """Requests that ended, with the reason of choice 0, if that did not end elsewhere."""
    places: dict[RequestId, PrefillPlace] = field(default_factory=dict[RequestId, PrefillPlace])
    failed: list[Failed] = field(default_factory=list[Failed])
    announced: dict[int, NewSequence] = field(default_factory=dict[int, NewSequence])
    _open_choices: dict[RequestId, set[int]] = field(default_factory=dict[RequestId, set[int]])

    def __post_init__(self) -> None:
        pool = self.side.pool
        self.scheduler = Scheduler(
            pool=pool,
            page_slots=LAYOUT.page_slots,
            limits=ScheduleLimits(
                max_batch_tokens=self.max_batch_tokens,
                saturation_tokens=self.max_batch_tokens,
                max_running=4,
                max_waiting=2,
            ),
            speculation=self.speculation,
        )
        sequence_ids = count()
        self.role = DecodeRole(
            incarnation=DECODE,
            receiver=self.side.receiver,
            scheduler=self.scheduler,
            pool=pool,
            page_slots=LAYOUT.page_slots,
            tokenizer=self.tokenizer,
            new_sequence_id=lambda: SequenceId(next(sequence_ids)),
            limits=DecodeLimits(max_requests=self.max_requests, max_sequences=self.max_sequences, max_model_len=40),
            keeps_tails=self.keeps_tails,
        )

    def generate(
        self,
        name: str = "request",
        *,
        num_tokens: int = 8,
        prompt: str = "",
        num_choices: int = 1,
        prefill: PrefillTarget | None = PREFILL_TARGET,
        timeout_s: float = 30.0,
        sampling: SamplingParams | None = None,
        told: tuple[Told, ...] = (),
        num_prompt_logprobs_told: int = 0,
    ) -> RequestId:
        """The prompt is `prompt`, or else so many different tokens."""
        request = Generate(
            request_id=RequestId(name),
            receiver=DECODE,
            dp_rank=0,
            prompt_token_ids=tuple(map(token_of, prompt)) or tuple(range(num_tokens)),
            sampling=sampling or SamplingParams(max_tokens=4),
            num_choices=num_choices,
            told=told,
            num_prompt_logprobs_told=num_prompt_logprobs_told,
            prefill=prefill,
            timeout_s=timeout_s,
        )
        finished = {index for index, choice in enumerate(told) if choice.is_finished}
        self._open_choices[request.request_id] = set(range(num_choices)) - finished
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

    # Passes

    def start_pass(self) -> Batch:
        self.running = self.scheduler.next_batch(self.now_ns)
        assert self.running is not None
        self.announced |= {new.sequence_id: new for new in self.running.new_sequences}
        self.role.before_pass(self.running, now_ns=self.now_ns)
        return self.running

    def end_pass(self, token_id: int) -> None:
        """Every chunk that samples gets this token, with certainty."""
        self._end_pass(lambda _: (token_id,), lambda _: ())

    def end_pass_as_guessed(self) -> None:
        """Every draft is right, and after them comes an "a"."""
        self._end_pass(lambda chunk: (*drafts_of(chunk), token_of("a")), lambda _: ())

    def sample(self, letters: str) -> None:
        for letter in letters:
            self.start_pass()
            self.end_pass(token_of(letter))

    def run_pass(self, answer_of: AnswerOf, *, guess: str = "") -> None:
        """Every chunk that samples gets the next letters of its answer, as far as its drafts were right.

        The drafts of the next pass are `guess` for all; or, of each "+", what will turn out right.
        """
        self.start_pass()

        def answer_after(chunk: Chunk, num_tokens: int) -> tuple[int, ...]:
            new = self.announced[chunk.sequence_id]
            num_known = chunk.stop - chunk.num_drafts - len(new.prompt_token_ids)
            return tuple(map(token_of, answer_of(new.sampling)[num_known + num_tokens :]))

        def sampled(chunk: Chunk) -> tuple[int, ...]:
            answer = answer_after(chunk, 0)
            drafts = drafts_of(chunk)
            num_right = 0
            while num_right < len(drafts) and drafts[num_right] == answer[num_right] != EOS:
                num_right += 1
            return answer[: num_right + 1]

        def guessed(chunk: Chunk) -> tuple[int, ...]:
            following = answer_after(chunk, len(sampled(chunk)))
            return tuple(
                token if letter == "+" else token_of(letter) for letter, token in zip(guess, following, strict=False)
            )

        self._end_pass(sampled, guessed)

    def _end_pass(
        self, sampled_of: Callable[[Chunk], tuple[int, ...]], guessed_of: Callable[[Chunk], tuple[int, ...]]
    ) -> None:
        batch, self.running = self.running, None
        assert batch is not None
        sampling = [chunk for chunk in batch.chunks if chunk.samples]
        sampled = tuple((SequenceId(chunk.sequence_id), sampled_of(chunk)) for chunk in sampling)
        result = BatchResult(
            pass_index=batch.pass_index,
            sampled=sampled,
            logprobs=tuple(
                (sequence_id, tuple(map(certain, tokens)))
                for sequence_id, tokens in sampled
                if self.announced[sequence_id].sampling.num_top_logprobs is not None
            ),
            prompt_logprobs=tuple(
                (SequenceId(chunk.sequence_id), prompt_logprobs_of(chunk))
                for chunk in batch.chunks
                if chunk.num_prompt_logprobs is not None
            ),
            drafts=tuple((SequenceId(chunk.sequence_id), guessed_of(chunk)) for chunk in sampling),
            started_ns=0,
            ended_ns=0,
        )
        self.role.after_pass(self.scheduler.complete(result), now_ns=self.now_ns)
        self.listen()

    # What the gateway hears

    def listen(self) -> None:
        for message in self.role.take_messages():
            match message:
                case Generated():
                    for delta in message.deltas:
                        self._hear(delta)
                case Failed():
                    self.failed.append(message)
                case _:
                    pytest.fail(f"the gateway got {message}")

    def _hear(self, delta: Delta) -> None:
        request_id = delta.request_id
        assert delta.choice_index in self._open_choices[request_id]
        is_first = not any(heard.request_id == request_id for heard in self.deltas)
        assert (delta.prefill is not None) == is_first
        self.deltas.append(delta)
        if delta.prefill is not None:
            self.places[request_id] = delta.prefill
        if delta.finish_reason is not None:
            self._open_choices[request_id].remove(delta.choice_index)
        self.texts[request_id] = self.text(request_id)
        reported = [entry.logprobs.token_id for entry in delta.entries if delta.choice_index == 0]
        self.reported[request_id] = self.reported.get(request_id, []) + reported
        if not self._open_choices[request_id]:
            self.finished[request_id] = self.reasons(request_id).get(0, FinishReason.STOP)

    def text(self, request_id: RequestId, choice_index: int = 0) -> str:
        return "".join(delta.text for delta in self._deltas_of(request_id, choice_index))

    def reasons(self, request_id: RequestId) -> dict[int, FinishReason]:
        """Of the choices that finished."""
        reasons = {delta.choice_index: delta.finish_reason for delta in self.deltas if delta.request_id == request_id}
        return {index: reason for index, reason in reasons.items() if reason is not None}

    def tokens(self, request_id: RequestId, choice_index: int = 0) -> list[int]:
        return [token for delta in self._deltas_of(request_id, choice_index) for token in delta.token_ids]

    def _deltas_of(self, request_id: RequestId, choice_index: int) -> list[Delta]:
        mine = (request_id, choice_index)
        return [delta for delta in self.deltas if (delta.request_id, delta.choice_index) == mine]

    def failures(self) -> list[FailureKind]:
        return [failed.kind for failed in self.failed]

    def is_idle(self) -> bool:
        is_scheduled = self.scheduler.num_running + self.scheduler.num_waiting > 0
        return self.role.num_open == 0 and self.side.is_whole() and not is_scheduled


def token_of(letter: str) -> int:
    return EOS if letter == "." else LETTERS.index(letter)


def drafts_of(chunk: Chunk) -> tuple[int, ...]:
    return chunk.token_ids[len(chunk.token_ids) - chunk.num_drafts :]


def certain(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(token_id=token_id, logprob=0.0, top=((token_id, 0.0),))


def prompt_logprobs_of(chunk: Chunk) -> tuple[TokenLogprobs, ...]:
    """Of the tokens after each of the chunk's, as far as they are of the prompt."""
    following = chunk.token_ids[1:] + (() if chunk.next_token_id is None else (chunk.next_token_id,))
    return tuple(map(certain, following))
