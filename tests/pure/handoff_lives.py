"""Lives of a world: events drawn by weight from a seed, every rule checked after each, everything idle at the end."""

from collections.abc import Callable, Sequence
from functools import partial

import pytest
from tests.pure.handoff_rules import RuleBroken
from tests.pure.handoff_story import PATIENT_S
from tests.pure.handoff_world import Shape, World
from tests.pure.toy_drafter import DRAFT
from tests.pure.toy_model import GQA, MLA, VOCABULARY

from pdserve.errors import PdserveError
from pdserve.fabric.memory import MemoryFaults
from pdserve.units import NS_PER_MS, NS_PER_S
from pdserve.wire.cluster import FinishReason, PrefillPlace

NUM_SEEDS = 42
NUM_SEEDS_OF_BUGS = 2 * NUM_SEEDS
"""The search for a planted bug ends with the first seed that finds it."""
NUM_EVENTS = 250

SHAPES = [
    Shape(),
    Shape(prefill_ranks=2, decode_ranks=1, draft_layout=DRAFT),
    Shape(prefill_ranks=1, decode_ranks=2, num_dp_ranks=2, draft_layout=DRAFT),
    Shape(prefill_ranks=4, decode_ranks=2),
    Shape(prefill_ranks=2, decode_ranks=4, num_dp_ranks=2),
    Shape(layout=MLA, prefill_ranks=2, decode_ranks=2, draft_layout=DRAFT),
    Shape(prefill_ranks=4, decode_ranks=4, num_dp_ranks=2),
]
"""Over 2 KV heads, or the one of MLA: with replica sets on either side, and on both; some with a drafter. Seven, so
that each meets all faults and numbers of workers, which go by the seed modulo 2, 3 and 4."""

WEIGHTS = {
    "pass": 30,
    "poll": 15,
    "time": 12,
    "decode": 10,
    "prefill": 10,
    "submit": 8,
    "abort": 3,
    "break": 0.5,
    "restart": 0.3,
    "stall": 0.5,
    "jump": 0.5,
    "stale": 1,
    "short": 1,
    "connect": 2,
}


def faults_of(seed: int) -> MemoryFaults:
    return MemoryFaults(
        min_delay_ns=0,
        max_delay_ns=(0, 2 * NS_PER_MS, 10 * NS_PER_MS)[seed % 3],
        reorder=seed % 2 == 1,
        write_failure_probability=(0.0, 0.0, 0.003, 0.03)[seed % 4],
    )


def happen(world: World) -> None:
    """One event, drawn by weight."""
    draw = world.draw
    worker = draw.choice(world.workers)
    match draw.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]:
        case "pass" if not worker.is_stalled:
            worker.step_pass(draw.randrange(len(worker.engines)))
        case "poll" if not worker.is_stalled:
            worker.poll()
        case "time":
            world.pass_time(draw.randint(0, 2 * NS_PER_MS))
        case "decode" if world.links:
            world.deliver_to_decode(draw.choice(world.links))
        case "prefill" if world.links:
            world.deliver_to_prefill(draw.choice(world.links))
        case "submit":
            timeout_s = draw.choice([0.002, 0.05, PATIENT_S, PATIENT_S, PATIENT_S])
            server = draw.choice(world.decode)
            world.submit(
                server,
                random_prompt(world),
                max_tokens=draw.randint(1, 6),
                timeout_s=timeout_s,
                is_remote=draw.random() < 0.9,
            )
        case "abort" if world.open_stories():
            world.abort(draw.choice(world.open_stories()))
        case "break" if world.links:
            world.break_link(draw.choice(world.links))
        case "restart":
            world.restart(worker)
        case "stall":
            worker.is_stalled = not worker.is_stalled
        case "jump":
            world.pass_time(draw.randint(1, 12) * NS_PER_S)
        case "short":
            worker.fabric.num_armable = draw.randint(0, 4)
        case "stale" if world.links:
            world.send_stale(draw.choice(world.links))
        case _:
            world.connect_all()


def random_prompt(world: World) -> tuple[int, ...]:
    """Lengths at the edges of pages are as likely as all others together."""
    edges = [1, 2, *(GQA.page_slots * pages + more for pages in (1, 2, 5) for more in (-1, 0, 1, 2))]
    num_tokens = world.draw.choice([world.draw.choice(edges), world.draw.randint(1, 36)])
    return tuple(world.draw.randrange(VOCABULARY) for _ in range(num_tokens))


def live(seed: int) -> World:
    """A life from a seed to its idle end."""
    world = World(
        seed,
        SHAPES[seed % len(SHAPES)],
        faults=faults_of(seed),
        num_decode=1 + seed % 2,
        num_prefill=1 + seed // 2 % 2,
    )
    try:
        for _ in range(NUM_EVENTS):
            happen(world)
            world.listen()
            world.referee.check(world.workers)
        world.settle()
        for worker in world.workers:
            world.referee.check_idle(worker)
        assert not world.open_stories(), "H7: requests without an ending"
    finally:
        world.close()
    return world


def calm(shape: Shape, num_tokens: int) -> None:
    """One prompt, and no faults but writes out of order: it is handed over and answered, and all is given back."""
    world = World(num_tokens, shape, faults=MemoryFaults(max_delay_ns=NS_PER_MS, reorder=True))
    try:
        world.submit(world.decode[0], tuple(range(num_tokens)), max_tokens=5, timeout_s=PATIENT_S, is_remote=True)
        world.settle()
        (story,) = world.stories.values()
        if (story.endings, story.place) != ([FinishReason.LENGTH.value], PrefillPlace.REMOTE):
            raise RuleBroken(f"H7: without a fault the request ended {story.endings}, prefilled {story.place}")
        for worker in world.workers:
            world.referee.check_idle(worker)
    finally:
        world.close()


def require_found(*findings: str) -> None:
    """Some life breaks a rule, and in one of these ways; or the workers stumble over their own books (`KeyError`)."""
    require_broken([partial(live, seed) for seed in range(NUM_SEEDS_OF_BUGS)], findings)


def require_found_when_calm(*findings: str) -> None:
    require_broken([partial(calm, shape, num_tokens) for shape in SHAPES for num_tokens in (9, 16)], findings)


def require_broken(lives: Sequence[Callable[[], object]], findings: tuple[str, ...]) -> None:
    for index, life in enumerate(lives):
        try:
            life()
        except (RuleBroken, PdserveError, KeyError) as error:
            assert f"{type(error).__name__}: {error}".startswith(findings), f"life {index}: {error!r}"
            return
    pytest.fail(f"no rule was broken in {len(lives)} lives")
