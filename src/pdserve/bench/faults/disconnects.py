"""Clients that hang up at random while others stay: the ones that stay are answered rightly, and nothing is left."""

import asyncio
import random
import time
from collections.abc import Sequence

import aiohttp

from pdserve.bench.faults.asking import Asking, Ending
from pdserve.bench.faults.case_run import ANSWER_TIMEOUT_S, Expected
from pdserve.bench.faults.cases import Promise
from pdserve.bench.faults.fleet import Fleet
from pdserve.bench.faults.verdict import Flaw, Result

NAME = "disconnects"
NUM_DISCONNECTS = 200
NUM_CLIENTS = 8
SEED = 1
LEAVING_SHARE = 0.8
MAX_STAY_S = 1.5
"""Of who leaves by the clock: about as long as a prompt is queued, granted, pushed and begun to be answered."""

TIMEOUT_S = 600.0
"""For all of them. In a quiet minute 8 clients hang up about 4 times a second."""


class Disconnects:
    """Many clients at a time, each with one request after the other, most of which it does not wait for."""

    def __init__(self, fleet: Fleet, session: aiohttp.ClientSession, expected: Sequence[Expected]) -> None:
        self._fleet = fleet
        self._session = session
        self._expected = expected
        self._random = random.Random(SEED)
        self._num_left = 0
        self._num_stayed = 0
        self._result = Result(name=NAME)

    async def run(self) -> Result:
        started_s = time.monotonic()
        try:
            async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as group:
                for _ in range(NUM_CLIENTS):
                    group.create_task(self._be_a_client())
        except TimeoutError:
            self._result.add(Flaw.HUNG, f"{self._num_left} of {NUM_DISCONNECTS} hung up within {TIMEOUT_S:g} s")
        if self._num_stayed == 0:
            self._result.add(Flaw.UNFORCED, "nobody stayed to the end")
        for what in await self._fleet.until_idle():
            self._result.add(Flaw.LEAKED, what)
        self._result.elapsed_s = time.monotonic() - started_s
        return self._result

    async def _be_a_client(self) -> None:
        while self._num_left < NUM_DISCONNECTS:
            expected = self._random.choice(self._expected)
            question = expected.question
            asking = Asking(self._session, self._fleet.url, question.prompt, max_tokens=question.max_tokens)
            if self._random.random() < LEAVING_SHARE:
                await self._stay_a_while(asking, question.max_tokens)
                await asking.leave()
            answer = await asking.answer(timeout_s=ANSWER_TIMEOUT_S)
            self._num_left += answer.ending is Ending.LEFT
            self._num_stayed += answer.ending is Ending.FINISHED
            self._result.judge("an answer", answer, expected.token_ids, Promise.SAME)

    async def _stay_a_while(self, asking: Asking, max_tokens: int) -> None:
        """By the clock, which falls into any state, or by tokens, which falls into the stream."""
        if self._random.random() < 0.5:
            await asyncio.sleep(self._random.uniform(0.0, MAX_STAY_S))
        else:
            await asking.until_tokens(self._random.randrange(1, max_tokens), timeout_s=ANSWER_TIMEOUT_S)
