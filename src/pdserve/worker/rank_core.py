"""One data parallel rank of a worker: the roles over one engine's scheduler and page pool. Sans-IO.

A worker is built from roles, never a role from a worker: a prefill worker has the prefill role; a decode worker and a
colocated one have the decode role, which prefills what nobody else does.
"""

from functools import partial
from itertools import count

from pdserve.config.role import Role
from pdserve.config.speculation import Drafter, Speculation
from pdserve.decode.limits import DecodeLimits
from pdserve.decode.role import DecodeRole
from pdserve.ids import SequenceId
from pdserve.kv.pages import PagePool
from pdserve.prefill.role import PrefillRole
from pdserve.schedule.batch import Batch, BatchResult
from pdserve.schedule.outcome import StepOutcome
from pdserve.schedule.scheduler import Scheduler
from pdserve.transfer.receiver import Receiver
from pdserve.transfer.sender import Sender
from pdserve.wire.cluster import Load
from pdserve.worker.surroundings import Surroundings


class RankCore:
    """Threads: one. Has the prefill role over `sender`, the decode role over `receiver`; None where it does not."""

    def __init__(
        self, around: Surroundings, *, dp_rank: int, pool: PagePool, sender: Sender | None, receiver: Receiver | None
    ) -> None:
        self.dp_rank = dp_rank
        self.pool = pool
        self.scheduler = Scheduler(
            pool=pool,
            page_slots=around.engine.sharding.layout.page_slots,
            limits=around.schedule_limits,
            speculation=around.settings.speculation if receiver is not None else None,
        )
        self._receiver = receiver
        self._sequence_ids = map(SequenceId, count())
        self.prefill = self._prefill_role(around, sender) if sender is not None else None
        self.decode = self._decode_role(around, receiver) if receiver is not None else None

    def _prefill_role(self, around: Surroundings, sender: Sender) -> PrefillRole:
        return PrefillRole(
            incarnation=around.identity.incarnation,
            sender=sender,
            scheduler=self.scheduler,
            pool=self.pool,
            num_tail_slots=around.engine.num_tail_slots,
            outbox=around.outbox,
            new_sequence_id=self._sequence_ids.__next__,
        )

    def _decode_role(self, around: Surroundings, receiver: Receiver) -> DecodeRole:
        on_prefilled = around.on_prefilled
        return DecodeRole(
            incarnation=around.identity.incarnation,
            dp_rank=self.dp_rank,
            receiver=receiver,
            scheduler=self.scheduler,
            pool=self.pool,
            page_slots=around.engine.sharding.layout.page_slots,
            tokenizer=around.tokenizer,
            new_sequence_id=self._sequence_ids.__next__,
            limits=DecodeLimits(max_model_len=around.engine.max_model_len),
            needs_prefill_worker=around.settings.role is Role.DECODE,
            keeps_tails=_reads_tails(around.settings.speculation),
            on_prefilled=partial(on_prefilled, self.dp_rank) if on_prefilled is not None else None,
        )

    def next_batch(self, *, now_ns: int) -> Batch | None:
        """The next pass, with its pushes armed; None when there is nothing to compute."""
        batch = self.scheduler.next_batch(now_ns)
        if batch is None:
            return None
        if self.prefill is not None:
            self.prefill.before_pass(batch, now_ns=now_ns)
        if self.decode is not None:
            self.decode.before_pass(batch, now_ns=now_ns)
        return batch

    def complete(self, batch: Batch, result: BatchResult, *, now_ns: int) -> StepOutcome:
        outcome = self.scheduler.complete(result)
        if self.prefill is not None:
            self.prefill.after_pass(batch, result, outcome, now_ns=now_ns)
        if self.decode is not None:
            self.decode.after_pass(outcome, now_ns=now_ns)
        return outcome

    def load(self) -> Load:
        num_pending = self.decode.num_pending if self.decode is not None else 0
        num_pending_tokens = self.decode.num_pending_tokens if self.decode is not None else 0
        receiver = self._receiver
        return Load(
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_waiting + num_pending,
            num_waiting_tokens=self.scheduler.num_waiting_tokens + num_pending_tokens,
            num_free_pages=self.pool.num_free,
            num_pages=self.pool.num_pages,
            num_quarantined_pages=receiver.num_quarantined_pages(self.dp_rank) if receiver is not None else 0,
        )


def _reads_tails(speculation: Speculation | None) -> bool:
    """A head begins with the hidden state of the last prefilled position; a draft model has all it needs in its KV."""
    return speculation is not None and speculation.drafter in (Drafter.MTP, Drafter.EAGLE)
