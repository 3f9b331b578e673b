"""`pdserve verify-faults` before it starts anything: names of cases, and what it refuses."""

import pytest

from pdserve.cli.main import main


def test_list_prints_the_name_of_every_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify-faults", "--list"]) == 0
    names = capsys.readouterr().out.splitlines()
    assert {"prefill-kill-pushing", "gateway-hang-landed", "decode-cut-streaming", "disconnects"} <= set(names)
    assert len(set(names)) == len(names)


def test_list_of_chosen_cases_prints_only_these(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify-faults", "--list", "--case", "disconnects", "--case", "decode-kill-granted"]) == 0
    assert capsys.readouterr().out.splitlines() == ["decode-kill-granted", "disconnects"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--case", "prefill-kill-nowhere"), "there is no case prefill-kill-nowhere; --list names them all"),
        (("--fleets", "0"), "--fleets must be 1 or more, not 0"),
    ],
)
def test_request_that_makes_no_sense_is_refused(
    flags: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify-faults", *flags]) == 2
    assert capsys.readouterr().err == f"pdserve verify-faults: {says}\n"
