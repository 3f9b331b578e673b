"""The KV of the last prompts, copied when it is whole, before anything is decoded: what `verify-handoff` compares."""

from collections import OrderedDict
from collections.abc import Sequence

from pdserve.decode.request import Request
from pdserve.engine.port import Engine
from pdserve.ids import PageIndex, RequestId
from pdserve.kv.snapshot import KvSnapshot
from pdserve.shared_region import host_buffer

MAX_CAPTURES = 16


class Captures:
    """Bounded: the oldest capture goes when there are more than `MAX_CAPTURES`."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        """`engines` by data parallel rank."""
        self._engines = tuple(engines)
        self._captures: OrderedDict[RequestId, KvSnapshot] = OrderedDict()

    def capture(self, dp_rank: int, request: Request, page_indices: tuple[PageIndex, ...]) -> None:
        """Copy the KV of the prompt without its last token, for a handed over prompt, or whole, for a local one."""
        engine, is_local = self._engines[dp_rank], request.local_reason is not None
        self._captures[request.request_id] = KvSnapshot.take(
            [host_buffer(region) for region in engine.kv_regions],
            engine.info.sharding,
            dp_rank=dp_rank,
            num_pages=engine.info.num_pages,
            page_indices=page_indices,
            num_tokens=len(request.generate.prompt_token_ids) - (not is_local),
        )
        if len(self._captures) > MAX_CAPTURES:
            self._captures.popitem(last=False)

    def get(self, request_id: RequestId) -> KvSnapshot | None:
        return self._captures.get(request_id)
