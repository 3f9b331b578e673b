"""All rank processes of one engine: asked together, and ended together when one of them fails. Torch-free.

A rank that dies makes the others fail too, in the middle of a gather. The error names the one that is the cause: the
first that ended otherwise than by the loss of another.
"""

import asyncio
from collections.abc import Sequence

from pdserve.engine.port import EngineSpec
from pdserve.engine.rank_process import RankEnd, RankProcess
from pdserve.engine.rank_protocol import RankReply, StartRefused
from pdserve.engine.rank_regions import RegionsToMap
from pdserve.engine.shape import cuda_device_of
from pdserve.errors import ConfigError, InternalError, PdserveError

_CAUSE_TIMEOUT_S = 2.0
"""A dead rank's socket closes at once; its exit status may come later than the complaints of the others."""


class RankGroup:
    """Once it has failed, every later request does, with the same error."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.ranks: tuple[RankProcess, ...] = ()
        self._failure: asyncio.Future[PdserveError] = loop.create_future()
        self._replies: dict[int, RankReply] = {}
        self._all_replied: asyncio.Future[None] | None = None
        """None while nothing is asked."""
        self._watching: asyncio.Task[None] | None = None

    @classmethod
    async def spawn(
        cls, spec: EngineSpec, *, kv_bytes: int, draft_kv_bytes: int | None, rendezvous_fd: int | None
    ) -> "RankGroup":
        """`kv_bytes` are those of the KV region of each rank, `draft_kv_bytes` those of the drafter's on rank 0."""
        group = cls()
        try:
            for rank in range(spec.tensor_parallel_size):
                regions_to_map = RegionsToMap(
                    cuda_device=cuda_device_of(spec, rank=rank),
                    kv_bytes=kv_bytes,
                    is_lead=rank == 0,
                    draft_kv_bytes=draft_kv_bytes,
                )
                process = await RankProcess.spawn(
                    rank,
                    num_threads=spec.num_threads,
                    inherited_fds=() if rendezvous_fd is None else (rendezvous_fd,),
                    regions_to_map=regions_to_map,
                    on_reply=group._take_reply,
                )
                group.ranks += (process,)
        except BaseException:
            await group.close()
            raise
        group._watching = asyncio.create_task(group._watch())
        return group

    async def ask(self, frames: Sequence[bytes], *, what: str, timeout_s: float) -> list[RankReply]:
        """The answers to one request to each rank. Requires: no other is being asked.

        Raises: `InternalError` that names the rank which died or failed; `ConfigError` when one refused to start.
        """
        if self._failure.done():
            raise self._failure.result()
        self._replies.clear()
        self._all_replied = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s):
                for rank, frame in zip(self.ranks, frames, strict=True):
                    await rank.send(frame)
                await self._all_replied
            return [self._replies[rank.rank] for rank in self.ranks]
        except TimeoutError:
            raise self._fail(InternalError(f"{what} did not end in {timeout_s:.0f} s")) from None
        except asyncio.CancelledError:
            # The conversation is in an unknown state.
            self._fail(InternalError(f"{what} was abandoned"))
            raise
        finally:
            self._all_replied = None

    def _take_reply(self, rank: int, reply: RankReply) -> None:
        if self._all_replied is None or rank in self._replies:
            raise InternalError(f"rank {rank} said {type(reply).__name__} without being asked")
        self._replies[rank] = reply
        if len(self._replies) == len(self.ranks) and not self._all_replied.done():
            self._all_replied.set_result(None)

    async def wait_failed(self) -> PdserveError:
        """What became of the group, once it has failed or is closed."""
        return await asyncio.shield(self._failure)

    async def close(self) -> None:
        """Ends all ranks. Requires: no views of the regions are left."""
        if self._watching is not None:
            self._watching.cancel()
        self._fail(InternalError("the engine is closed"))
        await asyncio.gather(*(rank.close() for rank in self.ranks))

    def _fail(self, error: PdserveError) -> PdserveError:
        """Ends all ranks. Returns the first failure, which is the one that counts."""
        if not self._failure.done():
            self._failure.set_result(error)
        failure = self._failure.result()
        if self._all_replied is not None and not self._all_replied.done():
            self._all_replied.set_exception(failure)
        for rank in self.ranks:
            rank.kill()
        return failure

    async def _watch(self) -> None:
        self._fail(_error_of(await self._first_cause()))

    async def _first_cause(self) -> RankEnd:
        """The end of the rank that made the others fail, or of one of them when none such comes to light."""
        ends = {rank.end for rank in self.ranks}
        done, pending = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        deadline = asyncio.get_running_loop().time() + _CAUSE_TIMEOUT_S
        while True:
            causes = [end.result() for end in done if not end.result().lost_peer]
            remaining_s = deadline - asyncio.get_running_loop().time()
            if causes or not pending or remaining_s <= 0:
                break
            newly_done, pending = await asyncio.wait(pending, timeout=remaining_s, return_when=asyncio.FIRST_COMPLETED)
            done |= newly_done
        return min(causes or [end.result() for end in done], key=lambda end: end.rank)


def _error_of(end: RankEnd) -> PdserveError:
    if isinstance(end.last_words, StartRefused):
        return ConfigError(end.last_words.message)
    return InternalError(str(end))
