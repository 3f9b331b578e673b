"""How far the answers to one prompt have come: what of them was delivered, so that another worker can go on."""

from dataclasses import dataclass, field

from pdserve.wire.cluster import Delta, Told


@dataclass(slots=True)
class _Choice:
    token_ids: list[int] = field(default_factory=list[int])
    num_text_chars: int = 0
    num_entries: int = 0
    is_finished: bool = False

    def told(self) -> Told:
        if self.is_finished:
            return Told(is_finished=True)
        return Told(token_ids=tuple(self.token_ids), num_text_chars=self.num_text_chars, num_entries=self.num_entries)


class Progress:
    """Cost: the tokens of each choice are kept until it has finished."""

    def __init__(self, *, num_choices: int) -> None:
        self._choices = [_Choice() for _ in range(num_choices)]
        self.num_unfinished = num_choices
        self.num_prompt_logprobs = 0

    @property
    def is_finished(self) -> bool:
        return self.num_unfinished == 0

    @property
    def num_tokens(self) -> int:
        """Of the choices that have not finished."""
        return sum(len(choice.token_ids) for choice in self._choices)

    def accepts(self, delta: Delta) -> bool:
        """False when it is of a choice that has finished, or that nobody asked for."""
        return 0 <= delta.choice_index < len(self._choices) and not self._choices[delta.choice_index].is_finished

    def num_tokens_with(self, delta: Delta) -> int:
        """Of its choice, were it added. Requires: `accepts(delta)`."""
        return len(self._choices[delta.choice_index].token_ids) + len(delta.token_ids)

    def add(self, delta: Delta) -> None:
        """Requires: `accepts(delta)`."""
        self.num_prompt_logprobs += len(delta.prompt_logprobs)
        choice = self._choices[delta.choice_index]
        if delta.finish_reason is not None:
            choice.is_finished = True
            choice.token_ids.clear()
            self.num_unfinished -= 1
            return
        choice.token_ids += delta.token_ids
        choice.num_text_chars += len(delta.text)
        choice.num_entries += len(delta.entries)

    def told(self) -> tuple[Told, ...]:
        """By choice; empty while nothing of any was delivered."""
        told = tuple(choice.told() for choice in self._choices)
        return told if any(choice != Told() for choice in told) else ()
