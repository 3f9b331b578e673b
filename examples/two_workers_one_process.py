"""One request's way through a prefill worker and a decode worker, in one process, step by step.

    python examples/two_workers_one_process.py

The workers are those that serve (`pdserve.worker.core`). Three things are toys: the model adds up letters, the fabric
copies bytes inside the process with delays of its own and out of order, and the clock moves when we say so.
"""

from collections.abc import Iterator, Sequence
from typing import cast

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from pdserve.clock import VirtualClock
from pdserve.config.role import Role
from pdserve.config.worker import WorkerSettings
from pdserve.engine.port import EngineInfo
from pdserve.fabric.memory import MemoryFaults, MemoryNetwork
from pdserve.ids import Incarnation, RequestId, WorkerId
from pdserve.kv.layout import KvLayout
from pdserve.kv.shard import KvSharding
from pdserve.layer_counter import REGION_BYTES
from pdserve.sampling import SamplingParams
from pdserve.schedule.batch import Batch, BatchResult
from pdserve.shared_region import SharedRegion
from pdserve.text.tokenizer import Tokenizer, TokenizerCore
from pdserve.transfer.identity import Identity
from pdserve.wire.cluster import Generate, Generated, PrefillTarget
from pdserve.wire.peer import Grant, Message
from pdserve.worker.core import WorkerCore
from pdserve.worker.handshake import hello
from pdserve.worker.surroundings import EngineRegions, Surroundings

LAYOUT = KvLayout(num_layers=4, num_kv_heads=1, head_dim=1, page_slots=4, dtype="float32")
SHARDING = KvSharding(layout=LAYOUT, num_ranks=1)
NUM_PAGES, NUM_TAIL_SLOTS, TAIL_BYTES = 16, 4, 64
STEP_NS = 300_000


def letter_tokenizer() -> Tokenizer:
    """Token 0 is an a."""
    vocabulary = {letter: token_id for token_id, letter in enumerate("abcdefghijklmnopqrstuvwxyz")}
    core = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    core.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    core.decoder = decoders.Fuse()
    return Tokenizer(cast(TokenizerCore, core))


class Engine:
    """A model of sums: K and V of a token are the sum of all tokens up to it, and so is the next letter."""

    def __init__(self) -> None:
        self.kv_region = SharedRegion.create(name="kv", num_bytes=LAYOUT.region_bytes(NUM_PAGES))
        self.tail_region = SharedRegion.create(name="tail", num_bytes=NUM_TAIL_SLOTS * TAIL_BYTES + 8)
        self.counter_region = SharedRegion.create(name="counter", num_bytes=REGION_BYTES)
        shape = (LAYOUT.num_layers, NUM_PAGES, 2, LAYOUT.page_slots)  # one head of one number
        values = np.frombuffer(self.kv_region.buffer, dtype=np.float32, count=LAYOUT.region_bytes(NUM_PAGES) // 4)
        self._kv_LPVS = values.reshape(shape)
        self._ticks = np.frombuffer(self.counter_region.buffer, dtype=np.uint64, count=1)

    def compute(self, batch: Batch) -> Iterator[int]:
        """One layer after the other. The tick after each lets the fabric send it."""
        for layer_index in range(LAYOUT.num_layers):
            for chunk in batch.chunks:
                for position, token_id in enumerate(chunk.token_ids, start=chunk.start):
                    page_index = chunk.page_indices[position // LAYOUT.page_slots]
                    total = token_id + self._sum(chunk.page_indices, position - 1, layer_index)
                    self._kv_LPVS[layer_index, page_index, :, position % LAYOUT.page_slots] = total
            self._ticks += 1
            yield layer_index
        self._ticks += 1  # the end of the pass: the tail may go

    def result(self, batch: Batch) -> BatchResult:
        sampled = tuple(
            (chunk.sequence_id, (self._sum(chunk.page_indices, chunk.stop - 1, LAYOUT.num_layers - 1) % 26,))
            for chunk in batch.chunks
            if chunk.samples
        )
        return BatchResult(pass_index=batch.pass_index, sampled=sampled, started_ns=0, ended_ns=0)

    def _sum(self, page_indices: Sequence[int], position: int, layer_index: int) -> int:
        if position < 0:
            return 0
        page_index = page_indices[position // LAYOUT.page_slots]
        return int(self._kv_LPVS[layer_index, page_index, 0, position % LAYOUT.page_slots])


class Worker:
    """What a worker's process is around its core: engine, fabric and the way to its peers (here: a list)."""

    def __init__(self, role: Role, network: MemoryNetwork, tokenizer: Tokenizer) -> None:
        self.engine, self.fabric, self.sent = Engine(), network.open(), list[Message]()
        self.fabric.watch(self.engine.counter_region)
        self.settings = WorkerSettings(
            name=role.value, role=role, join_url="", model_dir="", model_name="sums", chunk_tokens=12,
            saturation_tokens=8, max_running=8,
        )  # fmt: skip
        info = EngineInfo(
            sharding=SHARDING, num_pages=NUM_PAGES, num_tail_slots=NUM_TAIL_SLOTS, tail_slot_bytes=TAIL_BYTES,
            max_model_len=64, vocab_size=26, model_fingerprint="sums", pids=(),
        )  # fmt: skip
        self.identity = Identity(
            worker_id=WorkerId(role.value), incarnation=Incarnation(len(network.fabrics)), model_fingerprint="sums",
            sharding=SHARDING, num_pages=NUM_PAGES, tail_slot_bytes=TAIL_BYTES,
        )  # fmt: skip
        kv, tail = (self.fabric.register(region) for region in (self.engine.kv_region, self.engine.tail_region))
        self.core = WorkerCore(
            Surroundings(
                settings=self.settings, identity=self.identity, engine=info, fabric=self.fabric,
                regions=(EngineRegions(kv=(kv,), tail=tail),), tokenizer=tokenizer, outbox=self, drop_peer=print,
            )
        )  # fmt: skip
        (self.rank,) = self.core.ranks

    def send(self, peer: Incarnation, message: Message) -> None:
        self.sent.append(message)


def meet(decode: Worker, prefill: Worker) -> None:
    """The handshake: the decode worker makes keys to its memory for this one peer and hands them over."""
    receiver, sender = decode.core.receiver, prefill.core.sender
    assert receiver is not None and sender is not None
    keys = receiver.expose()
    sender.peer_joined(hello(decode.identity, decode.settings, decode.fabric, regions=keys))
    receiver.peer_joined(
        worker_id=WorkerId("prefill"), incarnation=prefill.identity.incarnation, sharding=SHARDING, regions=keys
    )


def grant_pages(decode: Worker, generate: Generate) -> Grant:
    """The decode worker takes the request on, and asks the prefill worker for its KV."""
    decode.core.on_generate(generate, now_ns=0)
    (grant,) = decode.sent
    assert isinstance(grant, Grant)
    return grant


def prefill_and_push(prefill: Worker, decode: Worker, clock: VirtualClock) -> None:
    """Passes over the prompt: the pages of each layer leave while the next one is computed."""
    while (batch := prefill.rank.next_batch(now_ns=clock.now_ns())) is not None:
        (chunk,) = batch.chunks
        print(f"   Pass {batch.pass_index}, tokens [{chunk.start}, {chunk.stop}): its writes are armed; now it runs.")
        for layer_index in prefill.engine.compute(batch):
            clock.advance_ns(STEP_NS)
            prefill.core.on_fabric_events(prefill.fabric.poll(), now_ns=clock.now_ns())
            num_posted = prefill.fabric.stats().num_writes_posted
            num_landed = decode.fabric.stats().num_immediates_received
            print(f"     layer {layer_index} computed; writes so far: {num_posted:2} posted, {num_landed:2} landed")
        prefill.rank.complete(batch, prefill.engine.result(batch), now_ns=clock.now_ns())


def generate_tokens(decode: Worker) -> list[int]:
    """Passes of the decode worker until the request has ended."""
    answer: list[int] = []
    while (batch := decode.rank.next_batch(now_ns=0)) is not None:
        for _ in decode.engine.compute(batch):
            pass
        decode.rank.complete(batch, decode.engine.result(batch), now_ns=0)
        for message in decode.core.take_messages():
            if isinstance(message, Generated):
                answer += [token_id for delta in message.deltas for token_id in delta.token_ids]
    return answer


def main() -> None:
    clock, tokenizer = VirtualClock(), letter_tokenizer()
    network = MemoryNetwork(1, clock, MemoryFaults(min_delay_ns=50_000, max_delay_ns=500_000, reorder=True))
    prefill, decode = (Worker(role, network, tokenizer) for role in (Role.PREFILL, Role.DECODE))
    meet(decode, prefill)
    print("1. The workers have met: the prefill worker has keys to the decode worker's memory.")

    prompt = tuple(tokenizer.encode("eachpageiswrittenonce"))
    target = PrefillTarget(worker_id=WorkerId("prefill"), incarnation=prefill.identity.incarnation, url="")
    generate = Generate(
        request_id=RequestId("r"), receiver=decode.identity.incarnation, dp_rank=0, prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=8), prefill=target, timeout_s=60.0,
    )  # fmt: skip
    grant = grant_pages(decode, generate)
    print(f"2. The decode worker owns the request. It grants pages {list(grant.page_indices)} and expects")
    print(f"   {len(grant.page_indices)} pages x {LAYOUT.num_layers} layers + 1 tail under one immediate.")

    print(f"3. The prefill worker computes {len(prompt) - 1} of {len(prompt)} tokens; the last is not its business.")
    assert prefill.core.prefill is not None
    prefill.core.prefill.on_grant(decode.identity.incarnation, grant, now_ns=clock.now_ns())
    prefill_and_push(prefill, decode, clock)

    ended_ns = clock.now_ns()
    while decode.rank.scheduler.num_waiting == 0:
        clock.advance_ns(STEP_NS // 6)
        for worker in (prefill, decode):
            worker.core.on_fabric_events(worker.fabric.poll(), now_ns=clock.now_ns())
    print(f"4. {(clock.now_ns() - ended_ns) // 1000} us after the last pass every write is counted. The prefill worker")
    print(f"   sent {len(prefill.sent)} messages to say so; free pages: {prefill.rank.pool.num_free} of {NUM_PAGES}.")

    answer = tokenizer.decode(generate_tokens(decode))
    print(f"5. The decode worker starts with the last prompt token and generates {answer!r}.")
    expected = tokenizer.decode([sum(prompt) * 2**step % 26 for step in range(8)])
    print(f"   Without any handoff the model answers {expected!r}.")
    print(f"6. The request has ended; free pages: {decode.rank.pool.num_free} of {NUM_PAGES}.")


if __name__ == "__main__":
    main()
