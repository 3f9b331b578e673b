"""The traces of Mooncake: a JSON object a line, with the prefix that each prompt shares as a list of hashed blocks.

Source: github.com/kvcache-ai/Mooncake, FAST25-release/traces. `hash_ids` names every 512 tokens of the prompt, the last
one for what is left of it; `timestamp` is in milliseconds, in steps of 3 s but for the synthetic trace.
"""

import itertools
import random
from collections.abc import Iterable, Sequence

import msgspec

from pdserve.errors import ConfigError
from pdserve.units import div_ceil
from pdserve.workload.request import WorkloadRequest

BLOCK_TOKENS = 512
QUANTUM_MS = 3000


class _Row(msgspec.Struct, frozen=True, kw_only=True):
    timestamp: int | float
    input_length: int
    output_length: int
    hash_ids: list[int]


def read_mooncake(lines: Iterable[str], *, seed: int) -> list[WorkloadRequest]:
    """Each request at a random instant between its timestamp and the next one, so that none come in volleys.

    Raises: `ConfigError` with the number of the first malformed line.
    """
    source = random.Random(seed)
    rows = [_row(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    grains_ms = _grains_ms([row.timestamp for row in rows])
    return [_request(row, arrival_ms=row.timestamp + source.uniform(0, grains_ms[row.timestamp])) for row in rows]


def _grains_ms(timestamps: Sequence[float]) -> dict[float, float]:
    """For each timestamp, the time that it stands for: until the next one, 3 s at most."""
    distinct = sorted(set(timestamps))
    grains = {earlier: min(later - earlier, QUANTUM_MS) for earlier, later in itertools.pairwise(distinct)}
    return {**grains, **dict.fromkeys(distinct[-1:], QUANTUM_MS)}


def _row(number: int, line: str) -> _Row:
    try:
        row = msgspec.json.decode(line, type=_Row)
    except msgspec.DecodeError as error:
        raise ConfigError(f"line {number} of the mooncake trace: {error}") from error
    if row.timestamp < 0 or row.input_length < 1 or row.output_length < 1:
        raise ConfigError(
            f"line {number} of the mooncake trace: a timestamp of {row.timestamp} ms, an input of {row.input_length} "
            f"and an output of {row.output_length} tokens are not those of a request"
        )
    num_blocks = div_ceil(row.input_length, BLOCK_TOKENS)
    if len(row.hash_ids) != num_blocks:
        raise ConfigError(
            f"line {number} of the mooncake trace: {len(row.hash_ids)} hash_ids for {row.input_length} tokens, which "
            f"are {num_blocks} blocks of {BLOCK_TOKENS}"
        )
    return row


def _request(row: _Row, *, arrival_ms: float) -> WorkloadRequest:
    """The last block has a name of its own unless it is full, so it is no prefix of a longer prompt."""
    whole_blocks = row.hash_ids[: row.input_length // BLOCK_TOKENS]
    return WorkloadRequest(
        arrival_s=arrival_ms / 1e3,
        num_prompt_tokens=row.input_length,
        num_output_tokens=row.output_length,
        prefix_blocks=tuple(whole_blocks),
        block_tokens=BLOCK_TOKENS if whole_blocks else 0,
    )
