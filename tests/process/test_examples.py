"""The examples run as a reader would run them, and show what they say."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run(name: str) -> str:
    """What an example prints; warnings are errors."""
    process = subprocess.run(
        [sys.executable, "-W", "error", f"examples/{name}.py"],
        cwd=ROOT,
        env={"PYTHONPATH": "src"},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_example_of_two_workers_shows_overlap_and_the_same_answer() -> None:
    output = run("two_workers_one_process")
    landed = [int(count) for count in re.findall(r"posted, +(\d+) landed", output)]
    assert landed == sorted(landed)
    assert 0 < landed[3] < landed[-1]  # some had landed before the first pass ended
    answers = re.findall(r"(?:generates|answers) '(\w{8})'", output)
    assert len(answers) == 2
    assert answers[0] == answers[1]
    assert "sent 0 messages to say so; free pages: 16 of 16" in output
    assert "has ended; free pages: 16 of 16" in output
