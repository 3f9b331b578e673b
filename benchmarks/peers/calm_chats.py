#!/usr/bin/env python3
"""Four chats and now and then a long prompt, on pdserve and vLLM, each colocated and with prefill and decode apart.

Every arm has the same two cores, a process or worker with one thread on each, and the same prompts. `setup` comes
before. The file is written after every arm, and --resume goes on with it.
"""

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from chat_arms import DEFAULT_ARMS, STARTS_S, Arm, started
from chat_book import ArmRun, Book, NotRun, figures, table
from chat_load import ChatLoad, Load, warm_up
from vllm_server import FOLDER, require_installed

from pdserve.bench.experiment.cpu_time import cpu_times, shares
from pdserve.bench.provenance import this_commit, this_instant, this_machine
from pdserve.cli.out_file import require_folder_of, write_json
from pdserve.errors import ConfigError, PdserveError
from pdserve.model.source import ModelSource, resolve_model

OUT = FOLDER.parents[1] / "docs" / "results" / "calm_chats.json"
NUM_WARM_UPS = 2
WARM_UP_SEED = 1_000_000
DRAIN_S = 10.0
"""About what the last answers take, after the load's duration."""


def main() -> int:
    arguments = parsed()
    try:
        arms = arms_named(arguments.arms)
        load = checked_load(arguments)
        measure(arguments, arms, load)
    except ConfigError as error:
        print(f"calm_chats: {error.message}", file=sys.stderr)
        return 2
    except PdserveError as error:
        print(f"calm_chats: {type(error).__name__}: {error.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def parsed() -> argparse.Namespace:
    defaults = Load()
    names = ",".join(arm.value for arm in DEFAULT_ARMS)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--arms", default=names, help=f"of {', '.join(arm.value for arm in Arm)} (default: %(default)s)"
    )
    parser.add_argument("--repetitions", type=int, default=2, help="of every arm, in turn (default: %(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=defaults.seconds, help="of load in a run (default: %(default)g)"
    )
    parser.add_argument(
        "--long-every", type=float, default=defaults.long_every_s, help="seconds (default: %(default)g)"
    )
    parser.add_argument(
        "--long-tokens", default="1500-2000", metavar="LEAST-MOST", help="of a long prompt (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, default=OUT, metavar="FILE", help="default: %(default)s")
    parser.add_argument("--resume", action="store_true", help="go on with the file, and try again what did not run")
    parser.add_argument("--table", action="store_true", help="print the table of the file, run nothing")
    return parser.parse_args()


def arms_named(names: str) -> list[Arm]:
    """Raises: `ConfigError`."""
    known = {arm.value: arm for arm in Arm}
    unknown = [name for name in names.split(",") if name not in known]
    if unknown:
        raise ConfigError(f"--arms {unknown[0]!r} is unknown: choose of {', '.join(known)}")
    return [known[name] for name in names.split(",")]


def checked_load(arguments: argparse.Namespace) -> Load:
    """Raises: `ConfigError`."""
    least, _, most = arguments.long_tokens.partition("-")
    if not (least.isdecimal() and most.isdecimal() and 1 <= int(least) <= int(most) <= 2000):
        raise ConfigError(f"--long-tokens must be LEAST-MOST within 1 to 2000, not {arguments.long_tokens!r}")
    if arguments.repetitions < 1 or arguments.seconds <= 0 or arguments.long_every <= 0:
        raise ConfigError("--repetitions must be 1 or more, --seconds and --long-every over 0")
    return Load(
        seconds=arguments.seconds, long_every_s=arguments.long_every, long_prompt_tokens=(int(least), int(most))
    )


def measure(arguments: argparse.Namespace, arms: Sequence[Arm], load: Load) -> None:
    """Prints the table of what is there, also when something stops it. Raises: `ConfigError`."""
    if arguments.table:
        print(table(read(arguments.out)))
        return
    if any(arm.value.startswith("vllm") for arm in arms):
        require_installed()
    require_folder_of("--out", arguments.out)
    if arguments.out.exists() and not arguments.resume:
        raise ConfigError(f"{arguments.out} is there already: go on with --resume, or choose another --out")
    source = resolve_model(None)
    book = Book(
        machine=this_machine(),
        cpus=two_cores(),
        model=source.name,
        configuration={
            "dtype": "float32",
            "threads": "1 a core",
            "peers": " ".join(
                (FOLDER / name).read_text().replace("\n", " ") for name in ("requirements.txt", "requirements-nixl.txt")
            ).strip(),
        },
        load=load,
    )
    if arguments.resume and arguments.out.exists():
        book = resumed(read(arguments.out), book)
    try:
        asyncio.run(carry_out(book, arms, source, num_repetitions=arguments.repetitions, out=arguments.out))
    finally:
        if arguments.out.exists():
            print(table(read(arguments.out)))


def read(path: Path) -> Book:
    """Raises: `ConfigError`."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Book)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"can't read {path}: {error}; choose another --out") from error


def resumed(there: Book, fresh: Book) -> Book:
    """Raises: `ConfigError` when the file is of another machine or load."""
    if (there.machine, there.cpus, there.load) != (fresh.machine, fresh.cpus, fresh.load):
        raise ConfigError("the file is of another machine or load: choose another --out")
    return msgspec.structs.replace(there, not_run=())


def two_cores() -> tuple[int, int]:
    """Raises: `ConfigError`."""
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        raise ConfigError("this needs two cores, and this process may use one: see taskset")
    return cpus[0], cpus[1]


async def carry_out(book: Book, arms: Sequence[Arm], source: ModelSource, *, num_repetitions: int, out: Path) -> None:
    """The arms in turn, so often; what is in the book already is not done again."""
    done = {(run.arm, run.repetition) for run in book.runs}
    planned = [(arm, repetition) for repetition in range(1, num_repetitions + 1) for arm in arms]
    missing = [pair for pair in planned if pair not in done]
    for index, (arm, repetition) in enumerate(missing):
        left_s = sum(STARTS_S[later] + book.load.seconds + DRAIN_S for later, _ in missing[index:])
        say(
            f"{index + 1} of {len(missing)}: {arm.value}, repetition {repetition}; about {left_s / 60:.0f} minutes left"
        )
        try:
            run = await run_arm(arm, repetition, source, book)
            book = msgspec.structs.replace(book, runs=(*book.runs, run))
            say(outcome(run))
        except (PdserveError, TimeoutError) as error:
            reason = error.message if isinstance(error, PdserveError) else "warming up took too long"
            book = msgspec.structs.replace(
                book, not_run=(*book.not_run, NotRun(arm=arm, repetition=repetition, reason=reason))
            )
            say(f"not run: {reason}")
        write_json(out, book)


async def run_arm(arm: Arm, repetition: int, source: ModelSource, book: Book) -> ArmRun:
    """Raises: `PdserveError`, `TimeoutError` when the arm does not start or answer."""
    began = this_instant()
    async with started(arm, source, book.cpus) as route:
        say("servers are ready, warming up")
        await warm_up(route, book.load, seed=WARM_UP_SEED, num_rounds=NUM_WARM_UPS)
        say(f"load of {book.load.seconds:g} s")
        chats = ChatLoad(book.load, route, seed=repetition)
        before, client_before_s = cpu_times(), time.process_time()
        await chats.run()
        used = shares(before, cpu_times(), num_cpus=book.machine.num_cpus)
        client_cpu_s = time.process_time() - client_before_s
    return ArmRun(
        arm=arm,
        repetition=repetition,
        started=began,
        commit=this_commit(),
        figures=figures(chats.exchanges, seconds=book.load.seconds),
        own_share=used.own,
        foreign_share=used.foreign,
        steal_share=used.steal,
        client_cpu_s=client_cpu_s,
    )


def outcome(run: ArmRun) -> str:
    found = run.figures
    itl, ttft = found.itl, found.chat_ttft
    return (
        f"{run.arm.value}: ITL p50 {itl.p50 if itl else 0:.3f} s, p99 {itl.p99 if itl else 0:.3f} s; chat TTFT p50 "
        f"{ttft.p50 if ttft else 0:.2f} s, p99 {ttft.p99 if ttft else 0:.2f} s; {found.tokens_per_s:.1f} tokens/s; "
        f"{found.num_chats} chats, {found.num_longs} long, {found.num_failed} failed"
    )


def say(line: str) -> None:
    print(f"calm_chats: {time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
