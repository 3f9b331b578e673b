"""Logprobs in the bodies of the two completion APIs."""

from collections.abc import Callable, Sequence

from pdserve.wire.cluster import TokenEntry

JsonObject = dict[str, object]
TokenBytes = Callable[[int], bytes]

LEAST_LOGPROB = -9999.0
"""OpenAI's way to say impossible; JSON has no infinity."""


def chat_logprobs(entries: Sequence[TokenEntry], token_bytes: TokenBytes) -> JsonObject:
    content: list[JsonObject] = []
    for entry in entries:
        logprobs = entry.logprobs
        top = [_chat_token(token_bytes(token_id), logprob) for token_id, logprob in logprobs.top]
        content.append({**_chat_token(token_bytes(logprobs.token_id), logprobs.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def completion_logprobs(entries: Sequence[TokenEntry], token_bytes: TokenBytes) -> JsonObject:
    """OpenAI's legacy form: the likeliest are a map by text, which has the sampled token too."""
    top_logprobs: list[dict[str, float]] = []
    for entry in entries:
        by_name: dict[str, float] = {}
        for token_id, logprob in (*entry.logprobs.top, (entry.logprobs.token_id, entry.logprobs.logprob)):
            by_name.setdefault(_name(token_bytes(token_id)), max(logprob, LEAST_LOGPROB))
        top_logprobs.append(by_name)
    return {
        "tokens": [_name(token_bytes(entry.logprobs.token_id)) for entry in entries],
        "token_logprobs": [max(entry.logprobs.logprob, LEAST_LOGPROB) for entry in entries],
        "top_logprobs": top_logprobs,
        "text_offset": [entry.text_offset for entry in entries],
    }


def _chat_token(token: bytes, logprob: float) -> JsonObject:
    return {"token": _name(token), "logprob": max(logprob, LEAST_LOGPROB), "bytes": list(token)}


def _name(token: bytes) -> str:
    """The token as text; one that is a part of a character by its bytes, so that no two are named alike."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)
