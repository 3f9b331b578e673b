"""`pdserve profile` on a tiny model: measured by real processes, written, and judged."""

import argparse
import os
from pathlib import Path

import pytest

from pdserve.bench.tiny_models import prepare_tiny
from pdserve.cli import profile as profile_command
from pdserve.errors import ConfigError
from pdserve.perfmodel.fit import MAX_MAPE
from pdserve.perfmodel.profile import decode_profile
from pdserve.perfmodel.sample import PassKind


def arguments_of(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    profile_command.add_parser(parser.add_subparsers())
    return parser.parse_args(["profile", *flags])


def test_profile_of_a_tiny_model_is_written_and_its_verdict_follows_its_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """How good the model is depends on the neighbours; what is written and said does not."""
    out = tmp_path / "profile.json"
    flags = ("--max-prompt", "64", "--max-batch", "4", "--repetitions", "1", "--out", str(out))
    exit_code = profile_command.run(arguments_of("--model-dir", str(prepare_tiny("tiny-deepseek")), *flags))

    profile = decode_profile(out.read_bytes(), name=str(out))
    is_good = profile.accuracy.worst() <= MAX_MAPE
    assert {sample.kind for sample in profile.passes} == set(PassKind)
    assert [sample.num_bytes for sample in profile.pushes] == [
        count * profile.pushes[0].num_bytes for count in (1, 2, 3, 4)
    ]
    assert all(source.machine and source.date for source in profile.sources.values())
    num_passes = len(profile.passes) * min(2, len(os.sched_getaffinity(0)))
    assert len(profile.model.deviations) == num_passes
    assert exit_code == (0 if is_good else 1)
    assert f"profile: {'ok' if is_good else 'failed'} prefill_mape=" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--repetitions", "0"), "--repetitions must be 1 or more"),
        (("--seed", "-1"), "--seed must be 0 or more"),
        (("--cpus", "4096"), "may not use: \\[4096\\]"),
        (("--max-prompt", "8"), "--max-prompt must be 64 or more"),
        (("--out", "/no/such/place/profile.json"), "is not a directory"),
    ],
)
def test_profile_with_flags_that_make_no_sense_is_refused_before_it_measures(
    flags: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        profile_command.run(arguments_of("--out", str(tmp_path / "profile.json"), *flags))
