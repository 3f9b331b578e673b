"""What a client must get of a request, and a worker that generates it from wherever another one was lost."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from pdserve.ids import RequestId, WorkerId
from pdserve.sampling import TokenLogprobs
from pdserve.wire.cluster import Delta, FinishReason, Generate, Generated, TokenEntry, Told


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Of one choice, a function of how many tokens there are. Text and entries lag behind the tokens."""

    choice_index: int
    num_tokens: int
    lag: int
    """Text goes out when there is that of so many tokens more."""
    has_entries: bool

    def token_ids(self, num_tokens: int) -> tuple[int, ...]:
        return tuple(100 * self.choice_index + position for position in range(num_tokens))

    def text(self, num_tokens: int) -> str:
        """Some tokens have no text, some a character of several bytes."""
        words = ("", "a", "\u00e9b")
        return "".join(words[token_id % len(words)] for token_id in self.token_ids(self._num_certain(num_tokens)))

    def entries(self, num_tokens: int) -> tuple[TokenEntry, ...]:
        if not self.has_entries:
            return ()
        return tuple(
            TokenEntry(
                text_offset=len(self.text(position)),
                logprobs=TokenLogprobs(token_id=token_id, logprob=-1.0, top=()),
            )
            for position, token_id in enumerate(self.token_ids(self._num_certain(num_tokens)))
        )

    def delta(self, request_id: RequestId, *, start: int, stop: int) -> Delta:
        return Delta(
            request_id=request_id,
            choice_index=self.choice_index,
            token_ids=self.token_ids(stop)[start:],
            text=self.text(stop)[len(self.text(start)) :],
            entries=self.entries(stop)[len(self.entries(start)) :],
            finish_reason=FinishReason.LENGTH if stop == self.num_tokens else None,
        )

    def told(self, num_tokens: int) -> Told:
        if num_tokens == self.num_tokens:
            return Told(is_finished=True)
        return Told(
            token_ids=self.token_ids(num_tokens),
            num_text_chars=len(self.text(num_tokens)),
            num_entries=len(self.entries(num_tokens)),
        )

    def _num_certain(self, num_tokens: int) -> int:
        return num_tokens if num_tokens == self.num_tokens else num_tokens - num_tokens % self.lag


@dataclass(slots=True)
class Received:
    """What a client put together of one choice."""

    token_ids: tuple[int, ...] = ()
    text: str = ""
    entries: tuple[TokenEntry, ...] = ()
    finish_reason: FinishReason | None = None

    def add(self, delta: Delta) -> None:
        assert self.finish_reason is None
        self.token_ids += delta.token_ids
        self.text += delta.text
        self.entries += delta.entries
        self.finish_reason = delta.finish_reason

    def is_of(self, answer: Answer) -> bool:
        """A beginning of it, and all of it once it has finished."""
        num_tokens = len(self.token_ids)
        expected = (answer.token_ids(num_tokens), answer.text(num_tokens), answer.entries(num_tokens))
        is_whole = num_tokens == answer.num_tokens
        return (self.token_ids, self.text, self.entries) == expected and is_whole == (self.finish_reason is not None)


@dataclass(slots=True)
class Attempt:
    """A worker at a request, with what it said and the gateway has not read."""

    worker_id: WorkerId
    generate: Generate
    answers: Sequence[Answer]
    num_prompt_logprobs: int
    """Those that are left to tell."""
    num_tokens: list[int] = field(default_factory=list[int])
    """Generated, by choice."""
    unread: deque[Generated] = field(default_factory=deque[Generated])

    def __post_init__(self) -> None:
        told = self.generate.told or (Told(),) * len(self.answers)
        self.num_tokens = [
            answer.num_tokens if choice.is_finished else len(choice.token_ids)
            for answer, choice in zip(self.answers, told, strict=True)
        ]
        expected = [answer.told(num_tokens) for answer, num_tokens in zip(self.answers, self.num_tokens, strict=True)]
        assert list(told) == expected

    def step(self, choice_index: int, num_tokens: int) -> None:
        """A logprob of the prompt while there are any; then tokens, if the choice goes on."""
        if self.num_prompt_logprobs > 0:
            self.num_prompt_logprobs -= 1
            logprobs = TokenLogprobs(token_id=self.num_prompt_logprobs, logprob=-1.0, top=())
            self._say(Delta(request_id=self.generate.request_id, token_ids=(), text="", prompt_logprobs=(logprobs,)))
            return
        answer, start = self.answers[choice_index], self.num_tokens[choice_index]
        stop = min(start + num_tokens, answer.num_tokens)
        if start < stop:
            self.num_tokens[choice_index] = stop
            self._say(answer.delta(self.generate.request_id, start=start, stop=stop))

    def _say(self, delta: Delta) -> None:
        self.unread.append(Generated(sender=self.generate.receiver, deltas=(delta,)))
