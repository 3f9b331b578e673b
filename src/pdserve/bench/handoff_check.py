"""Shows that a handoff moves every byte: KV at the decode side against a local prefill, and tokens against two others.

The reference for the bytes is a prefill of the same tokens on a colocated worker. A handoff covers all tokens but the
last, so the colocated worker is given the prompt without it: the chunks are cut alike, and the arithmetic is the same
to the last bit. The references for the tokens are the colocated worker on the whole prompt, and `transformers`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import numpy as np

from pdserve.bench.api_client import Answer, ApiClient
from pdserve.errors import InternalError

NUM_TOKENS = 16
"""Generated for each prompt and compared."""

NATURAL_TEXT = Path(__file__).with_name("natural_text.txt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """What one deployment made of one prompt."""

    token_ids: tuple[int, ...]
    kv: bytes
    """Of the prompt without its last token; empty for a prompt of one token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    num_prompt_tokens: int
    kv_bytes: int
    num_mismatched_bytes: int
    equals_colocated: bool
    equals_transformers: bool | None
    """None: not compared."""

    @property
    def is_ok(self) -> bool:
        return self.num_mismatched_bytes == 0 and self.equals_colocated and self.equals_transformers is not False


def prompt_lengths(*, page_slots: int, chunk_tokens: int, num_long: int) -> tuple[int, ...]:
    """Lengths around each edge, ascending and without repetition."""
    edges = (1, page_slots - 1, page_slots, page_slots + 1, chunk_tokens - 1, chunk_tokens, chunk_tokens + 1, num_long)
    return tuple(sorted({length for length in edges if length > 0}))


class Prober:
    """Sends prompts to one deployment and fetches the KV that its decoding worker captured."""

    def __init__(self, client: ApiClient, session: aiohttp.ClientSession, *, secret: str | None) -> None:
        self._client = client
        self._session = session
        self._headers = {} if secret is None else {"Authorization": f"Bearer {secret}"}

    async def hand_over(self, prompt: Sequence[int]) -> Captured:
        """The prompt prefilled remotely. Raises: `InternalError` when it was not."""
        answer = await self._client.complete(list(prompt), max_tokens=NUM_TOKENS)
        kv = await self._kv(answer) if len(prompt) > 1 else b""
        return Captured(token_ids=tuple(answer.token_ids), kv=kv)

    async def compute_locally(self, prompt: Sequence[int]) -> Captured:
        """The prompt on a colocated worker: its tokens, and the KV of a prefill without the last prompt token."""
        answer = await self._client.complete(list(prompt), max_tokens=NUM_TOKENS)
        kv = b""
        if len(prompt) > 1:
            kv = await self._kv(await self._client.complete(list(prompt[:-1]), max_tokens=1))
        return Captured(token_ids=tuple(answer.token_ids), kv=kv)

    async def require_remote(self, *, num_local: int) -> None:
        """Raises: `InternalError` when the decode worker prefilled more than `num_local` prompts itself."""
        for worker in await self._client.workers():
            async with self._session.get(f"{worker['url']}/metrics", headers=self._headers) as response:
                text = await response.text()
            lines = [line for line in text.splitlines() if line.startswith("pdserve:prefill_local_total{")]
            found = sum(float(line.rsplit(" ", 1)[1]) for line in lines)
            if found > num_local:
                raise InternalError(f"{worker['worker_id']} prefilled {found:g} prompts locally: {lines}")

    async def _kv(self, answer: Answer) -> bytes:
        for worker in await self._client.workers():
            url = f"{worker['url']}/debug/kv/{answer.answer_id}"
            async with self._session.get(url, headers=self._headers) as response:
                if response.status == 200:
                    return await response.read()
        raise InternalError(f"no worker captured the KV of {answer.answer_id}")


def compare(
    num_prompt_tokens: int, handed_over: Captured, local: Captured, transformers_ids: tuple[int, ...] | None
) -> Comparison:
    """Byte by byte, token by token. A difference in length counts as that many mismatched bytes."""
    ours, reference = (np.frombuffer(captured.kv, dtype=np.uint8) for captured in (handed_over, local))
    common = min(len(ours), len(reference))
    num_mismatched = int(np.count_nonzero(ours[:common] != reference[:common])) + abs(len(ours) - len(reference))
    return Comparison(
        num_prompt_tokens=num_prompt_tokens,
        kv_bytes=len(ours),
        num_mismatched_bytes=num_mismatched,
        equals_colocated=handed_over.token_ids == local.token_ids,
        equals_transformers=None if transformers_ids is None else handed_over.token_ids == transformers_ids,
    )
