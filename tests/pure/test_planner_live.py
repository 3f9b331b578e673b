"""The load that a gateway's metrics tell of, against requests whose number and lengths are known."""

import math
import random
import statistics
from dataclasses import dataclass, field

import pytest

from pdserve.cli.plan_live import seen_line
from pdserve.errors import ConfigError
from pdserve.planner.live import ANSWER_LENGTHS, PROMPT_LENGTHS, GatewayReading, SeenLoad, read_exposition, seen_load
from pdserve.telemetry.gateway_metrics import GatewayMetrics
from pdserve.telemetry.instants import Instant, RequestInstants
from pdserve.units import seconds_to_ns
from pdserve.workload.request import WorkloadRequest

TOKEN_S = 0.02
TTFT_S = 0.3


@dataclass
class Traffic:
    """Requests that a gateway counts, on a clock of its own."""

    metrics: GatewayMetrics = field(default_factory=lambda: GatewayMetrics(model_name="smol"))

    def answer(self, request: WorkloadRequest) -> None:
        received_ns, first_ns = 0, seconds_to_ns(TTFT_S)
        instants = RequestInstants().at(Instant.RECEIVED, received_ns).at(Instant.FIRST_TOKEN, first_ns)
        last_ns = first_ns + seconds_to_ns(TOKEN_S * request.num_output_tokens)
        self.metrics.observe_tokens(request.num_output_tokens, gap_ns=None)
        self.metrics.observe_finished(
            instants.at(Instant.FINISHED, last_ns),
            finish_reason="stop",
            num_prompt_tokens=request.num_prompt_tokens,
            num_generated_tokens=request.num_output_tokens,
            mean_gap_s=TOKEN_S,
        )

    def read(self, instant_s: float, *, num_pending: int = 0) -> GatewayReading:
        self.metrics.set_requests(num_pending=num_pending, num_retries=0)
        return read_exposition(self.metrics.exposition().decode(), instant_s=instant_s)


RATE_PER_S = 20.0


def traffic_of(*, prompt_cv: float, output_cv: float) -> list[WorkloadRequest]:
    """Log-normal lengths around 1,000 and 200 tokens, at an even rate."""
    source = random.Random(1)
    return [
        WorkloadRequest(
            arrival_s=index / RATE_PER_S,
            num_prompt_tokens=log_normal(source, 1000.0, prompt_cv),
            num_output_tokens=log_normal(source, 200.0, output_cv),
        )
        for index in range(2400)
    ]


def log_normal(source: random.Random, mean: float, cv: float) -> int:
    variance = math.log(1 + cv * cv)
    return max(1, round(mean * math.exp(source.gauss(-variance / 2, math.sqrt(variance)))))


def seen_of(requests: list[WorkloadRequest], *, window_s: float) -> SeenLoad:
    """Each is answered when it comes, after one that came before the window."""
    traffic, waiting = Traffic(), list(requests)
    traffic.answer(WorkloadRequest(arrival_s=0.0, num_prompt_tokens=9_999, num_output_tokens=9_999))
    readings = [traffic.read(0.0)]
    for instant_s in (window_s / 2, window_s):
        while waiting and waiting[0].arrival_s <= instant_s:
            traffic.answer(waiting.pop(0))
        readings.append(traffic.read(instant_s))
    return seen_load(readings)


@pytest.mark.parametrize(("prompt_cv", "output_cv"), [(0.0, 0.0), (0.3, 0.2), (0.5, 0.4), (1.0, 0.8)])
def test_seen_load_has_the_rate_means_and_spreads_that_were_sent(prompt_cv: float, output_cv: float) -> None:
    sent = traffic_of(prompt_cv=prompt_cv, output_cv=output_cv)
    prompts = [request.num_prompt_tokens for request in sent]
    answers = [request.num_output_tokens for request in sent]
    seen = seen_of(sent, window_s=120.0)

    assert seen.rate_per_s == pytest.approx(RATE_PER_S)
    assert seen.prompts.mean == pytest.approx(statistics.fmean(prompts))
    assert seen.answers.mean == pytest.approx(statistics.fmean(answers))
    assert seen.prompts.cv == pytest.approx(spread(prompts), rel=0.1, abs=1e-3)
    assert seen.answers.cv == pytest.approx(spread(answers), rel=0.1, abs=1e-3)


def spread(lengths: list[int]) -> float:
    return statistics.pstdev(lengths) / statistics.fmean(lengths)


def test_seen_load_counts_requests_that_came_and_are_not_answered_yet() -> None:
    traffic = Traffic()
    before = traffic.read(100.0, num_pending=2)
    for _ in range(4):
        traffic.answer(WorkloadRequest(arrival_s=0.0, num_prompt_tokens=10, num_output_tokens=5))
    traffic.metrics.observe_cancelled()
    traffic.metrics.observe_failed("too_long")
    seen = seen_load([before, traffic.read(110.0, num_pending=7)])

    assert seen.rate_per_s == pytest.approx((4 + 1 + 5) / 10.0)
    assert (seen.num_answered, seen.num_cancelled, seen.num_failed) == (4, 1, 1)
    assert seen.prompts.cv == 0.0
    line = seen_line(seen, "http://gateway")
    assert line.startswith("http://gateway in 10 s: 1 requests/s, 4 answered, prompts of 10 tokens")
    assert line.endswith("1 were cancelled; 1 more failed or were refused and are not planned for")


def test_seen_load_is_drawn_anew_with_its_rate_means_and_spreads() -> None:
    sent = traffic_of(prompt_cv=0.5, output_cv=0.4)
    drawn = seen_of(sent, window_s=120.0).requests(4000, seed=0)

    assert drawn[-1].arrival_s == pytest.approx(4000 / RATE_PER_S, rel=0.1)
    for attribute in ("num_prompt_tokens", "num_output_tokens"):
        before, after = ([getattr(request, attribute) for request in requests] for requests in (sent, drawn))
        assert statistics.fmean(after) == pytest.approx(statistics.fmean(before), rel=0.05)
        assert spread(after) == pytest.approx(spread(before), rel=0.15)


def test_seen_load_of_two_kinds_of_requests_is_drawn_with_both_and_nothing_between() -> None:
    chats = [WorkloadRequest(arrival_s=1.0, num_prompt_tokens=100, num_output_tokens=400)] * 90
    documents = [WorkloadRequest(arrival_s=1.0, num_prompt_tokens=20_000, num_output_tokens=10)] * 10
    drawn = seen_of(chats + documents, window_s=2.0).requests(4000, seed=0)

    prompts = [request.num_prompt_tokens for request in drawn]
    assert sum(length > 10_000 for length in prompts) / len(prompts) == pytest.approx(0.1, rel=0.1)
    assert not [length for length in prompts if 200 < length < 14_000]


def test_seen_load_of_a_gateway_without_requests_is_refused() -> None:
    traffic = Traffic()

    with pytest.raises(ConfigError, match="no request was answered in 60 s"):
        seen_load([traffic.read(0.0), traffic.read(60.0)])


def test_seen_load_of_a_gateway_that_began_anew_is_refused() -> None:
    traffic = Traffic()
    traffic.answer(WorkloadRequest(arrival_s=0.0, num_prompt_tokens=10, num_output_tokens=5))

    with pytest.raises(ConfigError, match="started anew"):
        seen_load([traffic.read(0.0), Traffic().read(60.0)])


@pytest.mark.parametrize("missing", [PROMPT_LENGTHS, ANSWER_LENGTHS])
def test_exposition_of_a_gateway_without_histograms_of_lengths_is_refused_with_what_to_do(missing: str) -> None:
    lines = GatewayMetrics(model_name="smol").exposition().decode().splitlines(keepends=True)
    text = "".join(line for line in lines if missing not in line)

    with pytest.raises(ConfigError) as refusal:
        read_exposition(text, instant_s=0.0)
    assert refusal.value.message == (
        f"its metrics lack {missing}, which tells how long requests are: update that gateway, or say how long they are "
        "with --workload and --rate"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "pdserve:requests_pending is missing"),
        ("vllm:prompt_tokens_total 3.0\n", "pdserve:requests_pending is missing"),
        ("<html>hello</html>", "no metrics in Prometheus's text format"),
        ("pdserve:requests_pending many\n", "no metrics in Prometheus's text format"),
        (f'{PROMPT_LENGTHS}_bucket{{le="0.5"}} 3.0\n', "has a bucket of up to 0.5 tokens"),
    ],
)
def test_exposition_of_something_else_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        read_exposition(text, instant_s=0.0)
    assert message in refusal.value.message
    assert "\n" not in refusal.value.message
