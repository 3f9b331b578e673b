"""Brings about one case on a running fleet, and looks at everything afterwards.

Two bystanders stream from the start, one on each decode worker; then the subject is asked, whose handoff the moment is
of. What they answer is compared with what the same prompts were answered before the first fault.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from pdserve.bench.faults.asking import Asking, Ending
from pdserve.bench.faults.cases import Case, Fault, Moment, Promise, Provocation, Victim
from pdserve.bench.faults.fleet import GATEWAY, Fleet
from pdserve.bench.faults.links import Links
from pdserve.bench.faults.verdict import Flaw, Result
from pdserve.bench.waiting import until
from pdserve.config.role import Role
from pdserve.errors import ConfigError, InternalError

MOMENT_TIMEOUT_S = 30.0
"""For the subject to come to its moment; a prompt is pushed within a few seconds."""

ANSWER_TIMEOUT_S = 60.0
"""From the fault to the end of each answer: a lease, a prefill and the rest of the tokens are seconds."""

PAUSE_SHARE = 0.3
"""Of the lease: long enough for several heartbeats to be missed."""

HANG_SHARE = 1.4
"""Of the lease, for a gateway, whose workers tell nobody when they give it up."""

NUM_STREAMED = 3
"""Tokens of the subject that have come when it counts as streaming."""

ROLE_OF = {Victim.PREFILL: Role.PREFILL, Victim.DECODE: Role.DECODE}


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A prompt, and how many tokens are wanted."""

    prompt: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    question: Question
    token_ids: tuple[int, ...]
    """Of the undisturbed answer."""


async def undisturbed(fleet: Fleet, session: aiohttp.ClientSession, question: Question) -> Expected:
    """Raises: `InternalError` when there is no whole answer even without a fault."""
    asking = Asking(session, fleet.url, question.prompt, max_tokens=question.max_tokens)
    answer = await asking.answer(timeout_s=ANSWER_TIMEOUT_S)
    if answer.ending is not Ending.FINISHED:
        raise InternalError(f"without any fault an answer {answer}")
    return Expected(question=question, token_ids=answer.token_ids)


class _Unforced(Exception):
    """The moment did not come."""


class CaseRun:
    """One case, once. Lifetime: `run`."""

    def __init__(
        self,
        case: Case,
        fleet: Fleet,
        session: aiohttp.ClientSession,
        *,
        subject: Expected,
        bystanders: Sequence[Expected],
        lease_s: float,
        links: Links | None = None,
    ) -> None:
        self._case = case
        self._fleet = fleet
        self._session = session
        self._expected = (subject, *bystanders)
        self._lease_s = lease_s
        self._links = links
        self._asked: list[Asking] = []
        """The bystanders, then the subject."""
        self._decode = ""
        """The worker that has the subject."""
        self._result = Result(name=case.name)

    async def run(self) -> Result:
        """Leaves the fleet whole and idle, or says what is not."""
        started_s = time.monotonic()
        try:
            await self._come_to_the_moment()
        except (_Unforced, TimeoutError, ConfigError, aiohttp.ClientError) as error:
            self._result.add(Flaw.UNFORCED, f"the moment did not come: {error!r}")
        await self._judge_answers()
        await self._restore()
        self._result.elapsed_s = time.monotonic() - started_s
        return self._result

    # Up to the fault

    async def _come_to_the_moment(self) -> None:
        moment = self._case.moment
        if self._case.is_last:
            await self._lose_the_other()
        for expected in self._expected[1:]:
            await self._ask(expected.question).until_tokens(1, timeout_s=MOMENT_TIMEOUT_S)
        await until(self._num_pushing, lambda count: count == 0, timeout_s=MOMENT_TIMEOUT_S)
        if moment.stops is not None:
            await self._on_each(moment.stops, lambda name: self._fleet.stop_at(name, moment.state))
        subject = self._ask(self._expected[0].question)
        self._decode = await until(self._subject_worker, bool, timeout_s=MOMENT_TIMEOUT_S)
        await self._provoke(moment.provocation, subject)
        stopped = await self._until_moment(moment, subject)
        victim = await self._victim(stopped)
        await self._strike(victim, stopped)

    def _ask(self, question: Question) -> Asking:
        asking = Asking(self._session, self._fleet.url, question.prompt, max_tokens=question.max_tokens)
        self._asked.append(asking)
        return asking

    async def _lose_the_other(self) -> None:
        role = ROLE_OF[self._case.victim]
        other = self._fleet.workers(role)[-1]
        await self._fleet.kill(other)
        await until(self._fleet.listed_workers, lambda listed: other not in listed, timeout_s=MOMENT_TIMEOUT_S)

    async def _num_pushing(self) -> int:
        """Handoffs that prefill workers have."""
        return sum([len(await self._phases(name)) for name in self._running(Role.PREFILL)])

    async def _phases(self, name: str) -> list[str]:
        return [owner["phase"] for rank in (await self._fleet.ledger(name))["ranks"] for owner in rank["owners"]]

    async def _subject_worker(self) -> str:
        """The decode worker that has the newest request; empty as long as the gateway does not know of it."""
        known = {asking.answer_id for asking in self._asked[:-1]}
        for request in (await self._fleet.ledger(GATEWAY))["requests"]:
            workers = [work["worker_id"] for work in request["works"] if "worker_id" in work]
            if request["request_id"] not in known and workers:
                return workers[0]
        return ""

    async def _provoke(self, provocation: Provocation, subject: Asking) -> None:
        if provocation is Provocation.NOTHING:
            return
        pushing = await until(self._pushing_worker, bool, timeout_s=MOMENT_TIMEOUT_S)
        match provocation:
            case Provocation.LEAVE:
                await subject.leave()
            case Provocation.LOSE_DECODE:
                await self._fleet.kill(self._decode)
            case Provocation.LOSE_PREFILL:
                await self._fleet.kill(pushing)

    async def _pushing_worker(self) -> str:
        """A prefill worker that pushes; empty when there is none."""
        for name in self._running(Role.PREFILL):
            if "pushing" in await self._phases(name):
                return name
        return ""

    async def _until_moment(self, moment: Moment, subject: Asking) -> str:
        """Who stopped itself; empty when nobody needs to. All others are told not to any more."""
        if moment.stops is None:
            if not await subject.until_tokens(NUM_STREAMED, timeout_s=MOMENT_TIMEOUT_S):
                raise _Unforced("the answer ended before")
            return ""
        role = moment.stops

        async def frozen() -> list[str]:
            return [name for name in self._fleet.workers(role) if self._fleet.is_frozen(name)]

        stopped = await until(frozen, bool, timeout_s=MOMENT_TIMEOUT_S)
        await self._on_each(role, self._fleet.never_stop)
        return stopped[0]

    async def _victim(self, stopped: str) -> str:
        """The process that has to do with the subject."""
        match self._case.victim:
            case Victim.GATEWAY:
                return GATEWAY
            case Victim.DECODE:
                return self._decode
            case Victim.PREFILL:
                if stopped in self._fleet.workers(Role.PREFILL):
                    return stopped
                dead = [name for name in self._fleet.workers(Role.PREFILL) if not self._fleet.is_running(name)]
                if dead and not self._case.is_last:
                    return dead[0]
                busy = [name for name in self._running(Role.PREFILL) if await self._phases(name)]
                return (busy or self._running(Role.PREFILL))[0]

    # The fault

    async def _strike(self, victim: str, stopped: str) -> None:
        """Do it, and let who stopped itself go on as soon as it is done."""
        match self._case.fault:
            case Fault.KILL:
                await self._fleet.kill(victim)
                self._thaw(stopped)
            case Fault.RESTART:
                await self._fleet.kill(victim)
                self._thaw(stopped)
                await self._fleet.start(victim)
            case Fault.PAUSE:
                self._freeze(victim, stopped)
                await asyncio.sleep(PAUSE_SHARE * self._lease_s)
                self._fleet.thaw(victim)
            case Fault.HANG:
                self._freeze(victim, stopped)
                await self._until_given_up(victim)
                self._fleet.thaw(victim)
            case Fault.CUT:
                await self._cut(victim, stopped)
                await self._until_given_up(victim)
                await asyncio.to_thread(self._require_links().mend, victim)
            case Fault.BLINK:
                await self._cut(victim, stopped)
                await asyncio.sleep(PAUSE_SHARE * self._lease_s)
                await asyncio.to_thread(self._require_links().mend, victim)

    async def _cut(self, victim: str, stopped: str) -> None:
        await asyncio.to_thread(self._require_links().cut, victim)
        self._thaw(stopped)

    def _require_links(self) -> Links:
        if self._links is None:
            raise InternalError(f"{self._case.name} is for a fleet whose links can be cut")
        return self._links

    def _freeze(self, victim: str, stopped: str) -> None:
        self._fleet.freeze(victim)
        if stopped != victim:
            self._thaw(stopped)

    def _thaw(self, stopped: str) -> None:
        if stopped:
            self._fleet.thaw(stopped)

    async def _until_given_up(self, victim: str) -> None:
        if victim == GATEWAY:
            await asyncio.sleep(HANG_SHARE * self._lease_s)
        else:
            await until(self._fleet.listed_workers, lambda listed: victim not in listed, timeout_s=MOMENT_TIMEOUT_S)

    # Afterwards

    async def _judge_answers(self) -> None:
        """The bystanders were asked first, so they come first; the subject is last, if it came to that."""
        subject, *bystanders = self._expected
        names = (*(f"bystander {index}" for index in range(len(bystanders))), "subject")
        for name, expected, asking in zip(names, (*bystanders, subject), self._asked, strict=False):
            answer = await asking.answer(timeout_s=ANSWER_TIMEOUT_S)
            self._result.judge(name, answer, expected.token_ids, self._case.promise)

    async def _restore(self) -> None:
        """Everybody runs again, answers rightly, and has nothing left."""
        fleet, bystander = self._fleet, self._expected[1]
        for what in fleet.ended_by_themselves:
            self._result.add(Flaw.WRONG, what)
        try:
            if self._links is not None:
                await asyncio.to_thread(self._links.mend_all)
            await fleet.start_missing()
            await fleet.until_connected()
        except (ConfigError, TimeoutError) as error:
            missing = "; ".join(fleet.ended_by_themselves) or "though all run"
            self._result.add(Flaw.HUNG, f"not all are back and connected: {error!r}, {missing}")
            return
        after = Asking(self._session, fleet.url, bystander.question.prompt, max_tokens=1)
        answer = await after.answer(timeout_s=ANSWER_TIMEOUT_S)
        self._result.judge("afterwards", answer, bystander.token_ids[:1], Promise.SAME)
        for what in await fleet.until_idle():
            self._result.add(Flaw.LEAKED, what)

    # Who is there

    def _running(self, role: Role) -> list[str]:
        """Those that can be asked."""
        fleet = self._fleet
        return [name for name in fleet.workers(role) if fleet.is_running(name) and not fleet.is_frozen(name)]

    async def _on_each(self, role: Role, act: Callable[[str], Any]) -> None:
        await asyncio.gather(*(act(name) for name in self._running(role)))
