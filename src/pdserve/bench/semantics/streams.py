"""A streamed answer put together again, in the form of the whole one."""

from collections.abc import Iterable, Sequence
from typing import Any, cast

from pdserve.bench.semantics.case import Json


def merge_completion(chunks: Sequence[Json]) -> Json:
    """Of `/v1/completions` or `/v1/chat/completions`. Choices in the order of their indices."""
    choices: dict[int, Json] = {}
    usage: Json | None = None
    for chunk in chunks:
        if "error" in chunk:
            return chunk
        usage = chunk.get("usage") or usage
        for piece in chunk["choices"]:
            _add_piece(choices.setdefault(piece["index"], {"index": piece["index"]}), piece)
    kept = {key: value for key, value in chunks[0].items() if key not in ("choices", "usage", "object")}
    return {**kept, "choices": [choices[index] for index in sorted(choices)], "usage": usage}


def _add_piece(choice: Json, piece: Json) -> None:
    if "finish_reason" in choice and choice["finish_reason"] is not None:
        choice["pieces_after_end"] = choice.get("pieces_after_end", 0) + 1
    if "text" in piece:
        choice["text"] = choice.get("text", "") + piece["text"]
    if "delta" in piece:
        _add_delta(choice.setdefault("message", {}), piece["delta"])
    if piece.get("token_ids") is not None:
        choice["token_ids"] = choice.get("token_ids", []) + piece["token_ids"]
    if piece.get("logprobs") is not None:
        choice["logprobs"] = _joined(choice.get("logprobs"), piece["logprobs"])
    choice["finish_reason"] = piece["finish_reason"]


def _add_delta(message: Json, delta: Json) -> None:
    for key, value in delta.items():
        if key == "tool_calls":
            for call in value:
                _add_call(message.setdefault("tool_calls", []), call)
        elif isinstance(value, str) and key != "role":
            message[key] = (message.get(key) or "") + value
        elif value is not None or key not in message:
            message[key] = value


def _add_call(calls: list[Json], piece: Json) -> None:
    index = piece["index"]
    if index == len(calls):
        calls.append({"type": piece["type"], "function": {"name": piece["function"]["name"], "arguments": ""}})
    calls[index]["function"]["arguments"] += piece["function"].get("arguments") or ""


def _joined(before: Json | None, more: Json) -> Json:
    """Lists by key, one after another; what is no list stays as it is."""
    if before is None:
        return more
    return {key: before[key] + value if isinstance(value, list) else value for key, value in more.items()}


def whole_form(answer: Json) -> Json:
    """A whole or merged answer without what only one of the two has: the object's name, absent and null fields."""
    choices = [_without_nulls(choice) for choice in answer["choices"]]
    return {"choices": choices, "usage": answer.get("usage")}


def _without_nulls(value: Any) -> Any:
    """Also without empty texts and lists: a stream never says them."""
    if isinstance(value, dict):
        inner = {key: _without_nulls(each) for key, each in cast(Json, value).items()}
        return {key: each for key, each in inner.items() if each not in (None, "", [], {})}
    if isinstance(value, list):
        return [_without_nulls(each) for each in cast(list[Any], value)]
    return value


def merge_response(events: Sequence[Json]) -> Json:
    """Of `/v1/responses`: the last event's response, the text that came in deltas, and the order of event types."""
    texts: dict[str, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            texts[event["type"]] = texts.get(event["type"], "") + event["delta"]
    last = events[-1]
    return {
        "response": last.get("response", last),
        "texts": texts,
        "order": list(_runs(each["type"] for each in events)),
    }


def _runs(names: Iterable[str]) -> Iterable[str]:
    """The names without immediate repetitions."""
    previous = None
    for name in names:
        if name != previous:
            yield name
        previous = name
