"""Runs many cases on a few fleets at a time: most of a case is waiting, for a lease to end or a process to start."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import aiohttp

from pdserve.bench.faults.case_run import CaseRun, Expected, Question, undisturbed
from pdserve.bench.faults.cases import Case
from pdserve.bench.faults.disconnects import Disconnects
from pdserve.bench.faults.fleet import Fleet, FleetSettings, running_fleet
from pdserve.bench.faults.links import Links, opened_links
from pdserve.bench.faults.verdict import Result
from pdserve.errors import PdserveError

SUBJECT_TOKENS = (136, 6)
"""Of its prompt, which is several chunks, and of its answer."""

BYSTANDER_TOKENS = ((24, 16), (32, 16))
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What the cases are run with."""

    settings: FleetSettings
    load: Load
    lease_s: float
    """That the settings give the workers."""
    on_result: Callable[[Result], None]
    on_progress: Callable[[str], None] = lambda _: None

    async def run_cases(self, cases: Iterable[Case], *, num_fleets: int) -> None:
        """Each case once, on whichever fleet is free. Raises: `ConfigError` when a fleet does not start."""
        waiting = deque(cases)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(num_fleets, len(waiting))):
                    group.create_task(self._run_waiting(waiting, self.settings))
        except* PdserveError as failures:
            raise failures.exceptions[0] from failures

    async def run_link_cases(self, cases: Iterable[Case]) -> None:
        """On a fleet whose workers are behind links that can be cut.

        Raises: `NoLinks` when this machine allows none, before anything is started.
        """
        with opened_links([place.name for place in self.settings.places]) as links:
            await self._run_waiting(deque(cases), replace(self.settings, sites=links.sites), links)

    async def run_disconnects(self) -> None:
        async with self._fleet(self.settings) as (fleet, session):
            expected = await self._expected(fleet, session)
            self.on_result(await Disconnects(fleet, session, expected).run())

    async def _run_waiting(self, waiting: deque[Case], settings: FleetSettings, links: Links | None = None) -> None:
        async with self._fleet(settings) as (fleet, session):
            subject, *bystanders = await self._expected(fleet, session)
            while waiting:
                run = CaseRun(
                    waiting.popleft(),
                    fleet,
                    session,
                    subject=subject,
                    bystanders=bystanders,
                    lease_s=self.lease_s,
                    links=links,
                )
                self.on_result(await run.run())

    @asynccontextmanager
    async def _fleet(self, settings: FleetSettings) -> AsyncGenerator[tuple[Fleet, aiohttp.ClientSession]]:
        async with running_fleet(settings, on_progress=self.on_progress) as fleet, aiohttp.ClientSession() as session:
            yield fleet, session

    async def _expected(self, fleet: Fleet, session: aiohttp.ClientSession) -> list[Expected]:
        """Of the subject, then of the bystanders."""
        questions = (self.load.subject, *self.load.bystanders)
        return [await undisturbed(fleet, session, question) for question in questions]
