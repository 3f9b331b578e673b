"""Closed-loop clients that send the mix, and the count of what came of it."""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from random import Random

from pdserve.bench.semantics.case import Case, Outcome, problem_of
from pdserve.bench.soak.client import Client
from pdserve.bench.soak.judgement import Ending, Judgement, judge, outcome_of
from pdserve.bench.soak.mix import LoadKind, Manner, cases_of, draw
from pdserve.bench.waiting import is_set_within
from pdserve.errors import InternalError

HUNG_AFTER_S = 120.0
"""Ten times what the slowest request takes among the others: a request without an end by then has none."""

MOST_LEAVE_S = 4.0
"""Clients that leave do so at some moment up to here: queued, during prefill, amid the stream."""

BACK_OFF_S = 1.0
"""Of a client that was told to come back: what `Retry-After` says at least."""

MAX_PROBLEMS = 20
"""Wrong answers that are told in full; the others are counted."""


class Tally:
    """What all requests came to."""

    def __init__(self) -> None:
        self.endings: Counter[tuple[str, Ending]] = Counter()
        """By kind of load."""
        self.codes: Counter[str] = Counter()
        """Of requests that failed."""
        self.problems: list[str] = []

    @property
    def num_requests(self) -> int:
        return self.endings.total()

    def count(self, ending: Ending) -> int:
        return sum(number for (_, each), number in self.endings.items() if each is ending)

    def endings_of(self, kind: LoadKind) -> dict[str, int]:
        """By the ending's name; only those that came."""
        return {ending.value: number for (name, ending), number in self.endings.items() if name == kind.name}

    def add(self, kind: LoadKind, case: Case, judgement: Judgement) -> None:
        self.endings[kind.name, judgement.ending] += 1
        if judgement.ending is Ending.FAILED and judgement.code is not None:
            self.codes[judgement.code] += 1
        if judgement.ending in (Ending.WRONG, Ending.HUNG) and len(self.problems) < MAX_PROBLEMS:
            self.problems.append(f"{kind.name}, {case.name}: {judgement.problem or judgement.ending.value}")


async def record(client: Client, mix: Sequence[LoadKind], *, until: asyncio.Event) -> dict[str, Outcome]:
    """What each case comes to when it is alone and nothing happens, by its name; fewer when the event comes before.

    Raises: `InternalError` when one is not what it must be.
    """
    recorded: dict[str, Outcome] = {}
    for case in cases_of(mix):
        if until.is_set():
            break
        received = await client.send(case, manner=Manner.READS, leave_after_s=0.0, deadline_s=HUNG_AFTER_S)
        try:
            recorded[case.name] = outcome_of(received)
        except ValueError as error:
            raise InternalError(f"{case.name}, undisturbed: {error}") from error
        if (problem := problem_of(case, recorded[case.name])) is not None:
            raise InternalError(f"{case.name}, undisturbed: {problem}")
    return recorded


async def run_clients(
    client: Client,
    mix: Sequence[LoadKind],
    recorded: Mapping[str, Outcome],
    tally: Tally,
    *,
    num_clients: int,
    random: Random,
    until: asyncio.Event,
) -> None:
    """Each client sends one request after another; the last ones are awaited."""

    async def send_on(own: Random) -> None:
        while not until.is_set():
            kind, case = draw(mix, own)
            leave_after_s = own.uniform(0, MOST_LEAVE_S)
            received = await client.send(case, manner=kind.manner, leave_after_s=leave_after_s, deadline_s=HUNG_AFTER_S)
            judgement = judge(case, recorded[case.name], received)
            tally.add(kind, case, judgement)
            if judgement.ending is Ending.FAILED:
                await is_set_within(until, BACK_OFF_S)

    async with asyncio.TaskGroup() as group:
        for _ in range(num_clients):
            group.create_task(send_on(Random(random.getrandbits(64))))
