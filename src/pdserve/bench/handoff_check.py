"""Shows that a handoff moves every byte: KV at the decode side against a local prefill, and tokens against two others.

The reference for the bytes is a prefill of the same tokens on a colocated worker with as many ranks as the prefill
worker: the arithmetic is the same to the last bit, on kernels whose sums depend on the cut too. Every rank of the
decode side is compared, replicas as well. A handoff covers all tokens but the last, so the colocated worker is given
the prompt without it. The references for the tokens are the colocated worker on the whole prompt, and `transformers`.

With speculation the guesses are compared too. A drafter whose KV or hidden state came over stale or shifted changes no
token, but it guesses worse: so both sides must have tried as many guesses, and found as many of them right.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec
import numpy as np

from pdserve.bench.api_client import Answer, ApiClient
from pdserve.bench.exposition import metric_total
from pdserve.config.deployment import WorkerPlace
from pdserve.errors import InternalError
from pdserve.kv.snapshot import KvSnapshot
from pdserve.wire.bearer import bearer_headers

NUM_TOKENS = 16
"""Generated for each prompt and compared."""

NATURAL_TEXT = Path(__file__).with_name("natural_text.txt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """What one deployment made of one prompt."""

    token_ids: tuple[int, ...]
    kv: KvSnapshot | None
    """Of the prompt without its last token; None for a prompt of one token."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Guesses:
    """Of one deployment, over all its answers."""

    num_tried: int
    num_accepted: int

    def since(self, before: "Guesses") -> "Guesses":
        return Guesses(
            num_tried=self.num_tried - before.num_tried, num_accepted=self.num_accepted - before.num_accepted
        )

    def __str__(self) -> str:
        share = f" ({100 * self.num_accepted / self.num_tried:.1f}%)" if self.num_tried else ""
        return f"{self.num_accepted} of {self.num_tried} accepted{share}"


def prompt_lengths(*, page_slots: int, num_long: int, chunk_tokens: int | None) -> tuple[int, ...]:
    """Lengths around each edge of a page, and of a chunk where `chunk_tokens` is given; ascending, no repetition."""
    edges = [1, page_slots - 1, page_slots, page_slots + 1, num_long]
    if chunk_tokens is not None:
        edges += [chunk_tokens - 1, chunk_tokens, chunk_tokens + 1]
    return tuple(sorted({length for length in edges if length > 0}))


class Prober:
    """Sends prompts to one deployment and fetches the KV that its decoding worker captured."""

    def __init__(self, client: ApiClient, session: aiohttp.ClientSession, *, secret: str | None) -> None:
        self._client = client
        self._session = session
        self._headers = bearer_headers(secret)

    async def hand_over(self, prompt: Sequence[int]) -> Captured:
        """The prompt prefilled remotely, which `require_remote` makes sure of."""
        answer = await self._client.complete(list(prompt), max_tokens=NUM_TOKENS)
        kv = await self._kv(answer) if len(prompt) > 1 else None
        return Captured(token_ids=tuple(answer.token_ids), kv=kv)

    async def compute_locally(self, prompt: Sequence[int]) -> Captured:
        """The prompt on a colocated worker: its tokens, and the KV of a prefill without the last prompt token."""
        answer = await self._client.complete(list(prompt), max_tokens=NUM_TOKENS)
        kv = None
        if len(prompt) > 1:
            kv = await self._kv(await self._client.complete(list(prompt[:-1]), max_tokens=1))
        return Captured(token_ids=tuple(answer.token_ids), kv=kv)

    async def require_remote(self, *, num_local: int) -> None:
        """Raises: `InternalError` when more than `num_local` prompts were prefilled where they are decoded."""
        found = await self._total("pdserve:prefill_local_total")
        if found > num_local:
            raise InternalError(f"the decode worker prefilled {found:g} prompts locally, not {num_local}")

    async def guesses(self) -> Guesses:
        """Of all workers, until now."""
        return Guesses(
            num_tried=int(await self._total("pdserve:draft_tokens_total")),
            num_accepted=int(await self._total("pdserve:draft_tokens_accepted_total")),
        )

    async def require_shape(self, places: Sequence[WorkerPlace], captured: Sequence[Captured]) -> None:
        """Raises: `InternalError` when a worker has not the ranks that it should, or one of them decoded nothing."""
        workers = {worker["worker_id"]: worker for worker in await self._client.workers()}
        for place in places:
            found = (workers[place.name]["tensor_parallel_size"], len(workers[place.name]["ranks"]))
            if found != (place.tensor_parallel_size, place.data_parallel_size):
                raise InternalError(f"{place.name} has tensor and data parallel sizes {found}, not those of {place}")
        num_dp_ranks = max(place.data_parallel_size for place in places)
        used = {each.kv.dp_rank for each in captured if each.kv is not None}
        if len(used) != num_dp_ranks:
            raise InternalError(f"only the data parallel ranks {sorted(used)} of {num_dp_ranks} decoded a prompt")

    async def _total(self, metric: str) -> float:
        """Over all workers and labels."""
        total = 0.0
        for worker in await self._client.workers():
            async with self._session.get(f"{worker['url']}/metrics", headers=self._headers) as response:
                total += metric_total(await response.text(), metric)
        return total

    async def _kv(self, answer: Answer) -> KvSnapshot:
        for worker in await self._client.workers():
            url = f"{worker['url']}/debug/kv/{answer.answer_id}"
            async with self._session.get(url, headers=self._headers) as response:
                if response.status == 200:
                    return msgspec.msgpack.decode(await response.read(), type=KvSnapshot)
        raise InternalError(f"no worker captured the KV of {answer.answer_id}")


def compare(
    num_prompt_tokens: int, handed_over: Captured, local: Captured, transformers_ids: tuple[int, ...] | None
) -> Comparison:
    """Byte by byte on every rank, token by token."""
    num_bytes, num_mismatched = _compare_kv(handed_over.kv, local.kv)
    return Comparison(
        num_prompt_tokens=num_prompt_tokens,
        kv_bytes=num_bytes,
        num_mismatched_bytes=num_mismatched,
        equals_colocated=handed_over.token_ids == local.token_ids,
        equals_transformers=None if transformers_ids is None else handed_over.token_ids == transformers_ids,
    )


def _compare_kv(handed_over: KvSnapshot | None, local: KvSnapshot | None) -> tuple[int, int]:
    """Bytes compared, and how many of them differ. A difference in shape counts as that of every byte."""
    if handed_over is None or local is None:
        return 0, 0
    reference, sharding = local.whole(), handed_over.sharding
    num_bytes = num_mismatched = 0
    for rank in range(sharding.num_ranks):
        ours, heads = handed_over.of_rank(rank), sharding.heads_of(rank)
        expected = reference[:, heads.start : heads.stop]
        num_bytes += ours.size
        num_mismatched += ours.size if ours.shape != expected.shape else int(np.count_nonzero(ours != expected))
    return num_bytes, num_mismatched
