"""Commands and flags are frozen: who changes one changes `cli_help.txt` in the same commit.

Frozen is what the help says, not how argparse lays it out, which differs between versions of Python.
"""

import argparse
import difflib
import os
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from pdserve.cli.main import COMMANDS, build_parser

FROZEN = Path(__file__).with_name("cli_help.txt")
UPDATE = "PDSERVE_TESTS_UPDATE"


def actions_of(parser: ArgumentParser) -> list[argparse.Action]:
    """What the help of a parser lists."""
    return [action for action in parser._actions if action.help is not argparse.SUPPRESS]  # pyright: ignore[reportPrivateUsage]


def commands_of(parser: ArgumentParser) -> Mapping[str, ArgumentParser]:
    """The parsers of a parser's subcommands."""
    for action in actions_of(parser):
        if isinstance(action.choices, Mapping):
            return action.choices  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return {}


def parsers_below(parser: ArgumentParser) -> Iterator[ArgumentParser]:
    yield parser
    for command in commands_of(parser).values():
        yield from parsers_below(command)


def line_of(action: argparse.Action) -> str:
    """One flag or argument: its names, what it takes, and its help."""
    names = ", ".join(action.option_strings) or "(argument)"
    takes = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else action.metavar or action.dest.upper()
    is_switch = action.nargs == 0
    is_needed = " (required)" if action.required and action.option_strings else ""
    text = (action.help or "") % {"default": action.default, "prog": "pdserve"}
    return f"    {names}{'' if is_switch else f' {takes}'}{is_needed}: {text}".rstrip(": ")


def spoken() -> str:
    """What `--help` says of every command."""
    lines: list[str] = []
    for parser in parsers_below(build_parser()):
        lines += [f"{parser.prog}: {parser.description or ''}".rstrip(": "), *map(line_of, actions_of(parser)), ""]
    return "\n".join(lines)


def test_help_of_every_command_equals_the_frozen_one() -> None:
    now = spoken()
    if os.environ.get(UPDATE):
        FROZEN.write_text(now)
    diff = difflib.unified_diff(FROZEN.read_text().splitlines(), now.splitlines(), "frozen", "now", lineterm="")
    changes = "\n".join(diff)
    if changes:
        command = f"{UPDATE}=1 .venv/bin/pytest tests/policy/{Path(__file__).name}"
        pytest.fail(f"{changes}\n\nIf this is meant, run: {command}", pytrace=False)


def test_help_names_every_command_of_the_table() -> None:
    assert list(commands_of(build_parser())) == list(COMMANDS)


def test_help_of_every_flag_says_something() -> None:
    silent = [
        f"{parser.prog}: {action.dest}"
        for parser in parsers_below(build_parser())
        for action in actions_of(parser)
        if not action.help and not isinstance(action.choices, Mapping)
    ]
    assert silent == []


def test_help_of_every_command_can_be_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A `%` in a help text that is no placeholder would end the command with a traceback."""
    monkeypatch.setenv("COLUMNS", "80")
    for parser in parsers_below(build_parser()):
        assert parser.format_help().startswith(f"usage: {parser.prog}")
