"""The report of a load run: whole, self-contained, and safe whatever the server answered."""

import re
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
from tests.pure.load_results import OBJECTIVE, drawn_requests, load_result, refused_request

from pdserve.bench.handoff_trace import HandoffTrace
from pdserve.bench.load.result import Disturbance
from pdserve.bench.load.summary import summarise
from pdserve.bench.report.charts import good_shares
from pdserve.bench.report.page import page, write_report
from pdserve.telemetry.trace import Span
from pdserve.workload.objective import Objective

MS = 1_000_000


def figures_of(text: str) -> list[ElementTree.Element]:
    """Every figure, parsed as XML: a browser forgives, this does not."""
    return [ElementTree.fromstring(figure) for figure in re.findall(r"<figure.*?</figure>", text, re.DOTALL)]


def handoff() -> HandoffTrace:
    prefill = [
        Span(track="passes", name="prefill 16", start_ns=10 * MS, end_ns=30 * MS, num_tokens=16),
        *(Span(track="compute", name=f"layer {at}", start_ns=at * MS, end_ns=at * MS) for at in (20, 30)),
        *(Span(track="pushes", name=f"layer {at}", start_ns=at * MS, end_ns=(at + 1) * MS) for at in (20, 30)),
    ]
    decode = [
        *(Span(track="landings", name="write", start_ns=at * MS, end_ns=at * MS) for at in (21, 31)),
        Span(track="queue", name="wait for a pass", start_ns=31 * MS, end_ns=32 * MS),
        Span(track="passes", name="decode", start_ns=32 * MS, end_ns=40 * MS),
    ]
    spans = {"prefill-0": tuple(prefill), "decode-0": tuple(decode)}
    return HandoffTrace(request_id="r", spans=spans, start_ns=0, first_token_ns=41 * MS)


def test_report_of_a_run_has_every_plot_and_loads_nothing(tmp_path: Path) -> None:
    requests = (*drawn_requests(60), refused_request(30.0))
    write_report(load_result(requests), tmp_path / "report.html", trace=handoff())
    text = (tmp_path / "report.html").read_text()
    assert len(figures_of(text)) == 7
    assert not re.search(r"(src|href|url)\s*[=(]\s*[\"']?http", text)
    assert "<script" not in text
    assert "0123456789ab" in text


def test_report_of_hostile_settings_and_errors_escapes_them() -> None:
    hostile = "</table><script>alert(1)</script>"
    requests = (*drawn_requests(3), refused_request(2.0, error=hostile))
    text = page(load_result(requests, configuration={hostile: hostile}))
    assert "<script" not in text
    assert "&lt;script&gt;" in text


@pytest.mark.parametrize("num_answered", [0, 1, 2])
def test_report_of_few_answers_is_still_a_page(num_answered: int) -> None:
    requests = (*drawn_requests(num_answered), refused_request(5.0))
    assert figures_of(page(load_result(requests)))


def test_report_of_a_run_that_was_cut_before_its_first_request_is_still_a_page() -> None:
    assert "Load report" in page(load_result(()))


def test_report_of_answers_whose_tokens_came_together_is_still_a_page() -> None:
    together = msgspec.structs.replace(drawn_requests(1)[0], token_s=(1.0, 1.0, 1.0))
    assert figures_of(page(load_result((together,), objective=Objective())))


def test_verdict_of_a_met_a_missed_and_no_objective_says_which() -> None:
    requests = drawn_requests(20)
    assert "Objective met" in page(load_result(requests, objective=Objective(ttft_s=10.0)))
    assert "Objective missed" in page(load_result(requests, objective=Objective(ttft_s=0.01)))
    assert "No objective" in page(load_result(requests, objective=Objective()))
    assert "every gap at most 0.4 s" in page(load_result(requests, objective=OBJECTIVE))


def test_warning_of_a_disturbed_run_is_there_and_of_a_quiet_one_is_not() -> None:
    requests = drawn_requests(3)
    disturbed = Disturbance(steal_share=0.07, psi_cpu_share=0.05)
    assert "Disturbed: 7% of CPU time stolen" in page(load_result(requests, disturbance=disturbed))
    unknown = Disturbance(steal_share=None, psi_cpu_share=None)
    assert "Disturbed" not in page(load_result(requests, disturbance=unknown))


def test_report_of_many_tokens_stays_small() -> None:
    assert len(page(load_result(drawn_requests(1000)))) < 150_000


def test_goodput_curve_has_the_attainment_of_each_objective_on_it() -> None:
    requests = (*drawn_requests(40), refused_request(20.0))
    for limit_ms, percent in good_shares(requests, ttft_limit_s=0.4, stop_s=0.1, objective=OBJECTIVE):
        objective = Objective(ttft_s=0.4, tpot_s=limit_ms / 1e3, stall_s=OBJECTIVE.stall_s)
        assert percent == pytest.approx(100 * (summarise(requests, objective).attainment or 0.0))
