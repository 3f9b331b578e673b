"""Logprobs in the bodies of the two completion APIs."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pdserve.sampling import TokenLogprobs
from pdserve.wire.cluster import TokenEntry

JsonObject = dict[str, object]
TokenBytes = Callable[[int], bytes]

LEAST_LOGPROB = -9999.0
"""OpenAI's way to say impossible; JSON has no infinity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDetails:
    """What the client asked to be told of tokens beside their text, and what it takes to tell it."""

    num_logprobs: int | None = None
    """None: no logprobs. Else those of each token of the answer, and of so many of the likeliest in its place."""
    num_prompt_logprobs: int | None = None
    """The same of each prompt token but the first."""
    has_token_ids: bool = False
    token_bytes: TokenBytes


def chat_logprobs(entries: Sequence[TokenEntry], token_bytes: TokenBytes) -> JsonObject:
    return {"content": listed_logprobs(entries, token_bytes), "refusal": None}


def listed_logprobs(
    entries: Sequence[TokenEntry], token_bytes: TokenBytes, *, has_bytes: bool = True
) -> list[JsonObject]:
    """As they are in a choice of a chat and in a text part of a response; without bytes, in events of a response."""

    def spelled(token_id: int, logprob: float) -> JsonObject:
        token = token_bytes(token_id)
        body: JsonObject = {"token": _name(token), "logprob": max(logprob, LEAST_LOGPROB)}
        return {**body, "bytes": list(token)} if has_bytes else body

    return [
        {
            **spelled(entry.logprobs.token_id, entry.logprobs.logprob),
            "top_logprobs": [spelled(token_id, logprob) for token_id, logprob in entry.logprobs.top],
        }
        for entry in entries
    ]


class CompletionLogprobs:
    """OpenAI's legacy form, token by token: the likeliest are a map by text, which has the token itself too."""

    def __init__(self, details: TokenDetails) -> None:
        self._token_bytes = details.token_bytes
        self._num_top = details.num_logprobs or 0
        self._tokens: list[str] = []
        self._token_logprobs: list[float | None] = []
        self._top_logprobs: list[dict[str, float] | None] = []
        self._text_offset: list[int] = []

    @property
    def body(self) -> JsonObject:
        return {
            "tokens": self._tokens,
            "token_logprobs": self._token_logprobs,
            "top_logprobs": self._top_logprobs,
            "text_offset": self._text_offset,
        }

    def add_prompt(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], text_offsets: Sequence[int]
    ) -> None:
        """All tokens of the prompt, which is what the text begins with; nothing is known of the first."""
        self._tokens.append(_name(self._token_bytes(token_ids[0])))
        self._token_logprobs.append(None)
        self._top_logprobs.append(None)
        self._text_offset.append(text_offsets[0])
        for token_logprobs, text_offset in zip(logprobs, text_offsets[1:], strict=True):
            self._add(token_logprobs, text_offset)

    def add(self, entries: Iterable[TokenEntry], *, num_characters_before: int) -> None:
        """Tokens of the answer, which begins after so many characters of the text."""
        for entry in entries:
            self._add(entry.logprobs, num_characters_before + entry.text_offset)

    def _add(self, logprobs: TokenLogprobs, text_offset: int) -> None:
        by_name: dict[str, float] = {}
        for token_id, logprob in (*logprobs.top[: self._num_top], (logprobs.token_id, logprobs.logprob)):
            by_name.setdefault(_name(self._token_bytes(token_id)), max(logprob, LEAST_LOGPROB))
        self._tokens.append(_name(self._token_bytes(logprobs.token_id)))
        self._token_logprobs.append(max(logprobs.logprob, LEAST_LOGPROB))
        self._top_logprobs.append(by_name)
        self._text_offset.append(text_offset)


def prompt_logprobs(logprobs: Sequence[TokenLogprobs], details: TokenDetails) -> list[dict[str, JsonObject] | None]:
    """vLLM's form: a map by token id for each token of the prompt, its own first; nothing of the prompt's first."""
    return [None, *(_by_token_id(token_logprobs, details) for token_logprobs in logprobs)]


def _by_token_id(logprobs: TokenLogprobs, details: TokenDetails) -> dict[str, JsonObject]:
    """Ranks are known of the likeliest tokens only."""
    top = logprobs.top[: details.num_prompt_logprobs or 0]
    ranks = {token_id: index + 1 for index, (token_id, _) in enumerate(logprobs.top)}
    return {
        str(token_id): {
            "logprob": max(logprob, LEAST_LOGPROB),
            "rank": ranks.get(token_id),
            "decoded_token": details.token_bytes(token_id).decode(errors="replace"),
        }
        for token_id, logprob in ((logprobs.token_id, logprobs.logprob), *top)
    }


def _name(token: bytes) -> str:
    """The token as text; one that is a part of a character by its bytes, so that no two are named alike."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)
