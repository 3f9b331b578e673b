"""Runs many cases on a few fleets at a time: most of a case is waiting, for a lease to end or a process to start."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import aiohttp

from pdserve.bench.faults.case_run import CaseRun, Question, undisturbed
from pdserve.bench.faults.cases import Case
from pdserve.bench.faults.fleet import FleetSettings, running_fleet
from pdserve.bench.faults.links import Links
from pdserve.bench.faults.verdict import Result
from pdserve.errors import PdserveError

SUBJECT_TOKENS = (150, 8)
"""Of its prompt, which is several chunks, and of its answer."""

BYSTANDER_TOKENS = ((32, 28), (40, 28))
PROMPT_STRIDE = 50
"""Prompts begin so far apart in the text, so that no two are alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is asked in every case."""

    subject: Question
    bystanders: tuple[Question, ...]

    @classmethod
    def of(cls, text_ids: tuple[int, ...]) -> "Load":
        """From the tokens of a natural text, over which a small model is sure of its choices."""
        subject, *bystanders = [
            Question(prompt=text_ids[PROMPT_STRIDE * index :][:length], max_tokens=max_tokens)
            for index, (length, max_tokens) in enumerate((SUBJECT_TOKENS, *BYSTANDER_TOKENS))
        ]
        return cls(subject=subject, bystanders=tuple(bystanders))


async def run_cases(
    settings: FleetSettings,
    cases: Iterable[Case],
    load: Load,
    *,
    lease_s: float,
    num_fleets: int,
    links: Links | None = None,
    on_result: Callable[[Result], None],
    on_progress: Callable[[str], None] = lambda _: None,
) -> None:
    """Each case once, on whichever fleet is free; `links` are those of a single one.

    Raises: `ConfigError` when a fleet does not start.
    """
    waiting = deque(cases)

    async def work() -> None:
        async with running_fleet(settings, on_progress=on_progress) as fleet, aiohttp.ClientSession() as session:
            subject, *bystanders = [
                await undisturbed(fleet, session, question) for question in (load.subject, *load.bystanders)
            ]
            while waiting:
                case = waiting.popleft()
                run = CaseRun(
                    case, fleet, session, subject=subject, bystanders=bystanders, lease_s=lease_s, links=links
                )
                on_result(await run.run())

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(num_fleets, len(waiting))):
                group.create_task(work())
    except* PdserveError as failures:
        raise failures.exceptions[0] from failures
