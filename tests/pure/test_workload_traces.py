"""Public traces as their publishers ship them: rows of each format, with other numbers in them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import ConfigError
from pdserve.workload.request import WorkloadRequest
from pdserve.workload.trace import Trace, TraceFormat, read_trace

MOONCAKE = """\
{"timestamp": 0, "input_length": 1100, "output_length": 52, "hash_ids": [0, 1, 2]}
{"timestamp": 0, "input_length": 1024, "output_length": 5, "hash_ids": [0, 1]}
{"timestamp": 2999, "input_length": 200, "output_length": 7, "hash_ids": [3]}

{"timestamp": 9000, "input_length": 2000, "output_length": 70, "hash_ids": [0, 1, 4, 5]}
"""
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.5000000,374,44
2023-11-16 18:15:50.7500000,396,109
"""
AZURE_2024 = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.250000+00:00,2162,5
2024-05-10 00:00:00+00:00,2399,6
"""
BURSTGPT = """\
Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,GPT-4,1087,0,1087,API log
118.5,GPT-4,417,276,693,Conversation log
"""
BURSTGPT_SESSIONS = """\
Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
0,a-b,1.5,GPT-4,100,10,110,Conversation log
"""


def read(trace_format: TraceFormat, text: str, *, seed: int = 0) -> Trace:
    return read_trace(trace_format, text.splitlines(keepends=True), seed=seed)


def refusal(trace_format: TraceFormat, text: str) -> str:
    with pytest.raises(ConfigError) as refused:
        read(trace_format, text)
    return refused.value.message


def lengths(trace: Trace) -> list[tuple[int, int]]:
    return [(request.num_prompt_tokens, request.num_output_tokens) for request in trace.requests]


def test_mooncake_requests_keep_lengths_and_whole_blocks() -> None:
    by_length = {request.num_prompt_tokens: request for request in read(TraceFormat.MOONCAKE, MOONCAKE).requests}
    assert {length: request.prefix_blocks for length, request in by_length.items()} == {
        1100: (0, 1),
        1024: (0, 1),
        200: (),
        2000: (0, 1, 4),
    }
    assert {length: request.block_tokens for length, request in by_length.items()} == {
        1100: 512,
        1024: 512,
        200: 0,
        2000: 512,
    }
    assert by_length[1100].num_output_tokens == 52


@given(seed=st.integers(0, 2**32))
def test_mooncake_arrivals_lie_between_timestamps_and_repeat_with_the_seed(seed: int) -> None:
    trace = read(TraceFormat.MOONCAKE, MOONCAKE, seed=seed)
    assert trace == read(TraceFormat.MOONCAKE, MOONCAKE, seed=seed)
    assert trace.note is not None and f"seed {seed}" in trace.note
    arrivals = [request.arrival_s for request in trace.requests]
    assert arrivals[0] == 0.0 and arrivals == sorted(arrivals)
    first, second, third, fourth = arrivals
    assert 0 <= second - first < 2.999
    # The third stands for what is after 2.999 s, three seconds of it at most; the fourth for what is after 9 s.
    assert second < third < third + 9.0 - 5.999 < fourth


@given(seed=st.integers(0, 2**32))
def test_mooncake_requests_with_timestamps_close_together_keep_their_order(seed: int) -> None:
    rows = [
        f'{{"timestamp": {10 * number}, "input_length": {1 + number}, "output_length": 1, "hash_ids": [{number}]}}\n'
        for number in range(4)
    ]
    trace = read(TraceFormat.MOONCAKE, "".join(rows), seed=seed)
    assert lengths(trace) == [(1, 1), (2, 1), (3, 1), (4, 1)]
    assert trace.requests[2].arrival_s < 0.03


def test_azure_requests_keep_lengths_and_gaps() -> None:
    trace = read(TraceFormat.AZURE, AZURE)
    assert trace.note is None
    assert trace.requests == (
        WorkloadRequest(arrival_s=0.0, num_prompt_tokens=374, num_output_tokens=44),
        WorkloadRequest(arrival_s=4.25, num_prompt_tokens=396, num_output_tokens=109),
    )


def test_azure_trace_of_2024_with_offsets_and_out_of_order_is_sorted() -> None:
    trace = read(TraceFormat.AZURE, AZURE_2024)
    assert lengths(trace) == [(2399, 6), (2162, 5)]
    assert [request.arrival_s for request in trace.requests] == [0.0, 0.25]


def test_burstgpt_requests_that_failed_are_left_out_and_said() -> None:
    trace = read(TraceFormat.BURSTGPT, BURSTGPT)
    assert lengths(trace) == [(472, 18), (417, 276)]
    assert [request.arrival_s for request in trace.requests] == [0.0, 113.5]
    assert trace.note is not None and trace.note.startswith("1 requests without a response left out")


def test_burstgpt_release_with_more_columns_is_read_by_their_names() -> None:
    assert lengths(read(TraceFormat.BURSTGPT, BURSTGPT_SESSIONS)) == [(100, 10)]


def test_lines_with_carriage_returns_and_byte_order_mark_are_read() -> None:
    assert lengths(read(TraceFormat.AZURE, "\ufeff" + AZURE.replace("\n", "\r\n"))) == [(374, 44), (396, 109)]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("not json", "line 5 of the mooncake trace: "),
        ('{"timestamp": 1}', "line 5 of the mooncake trace: Object missing required field"),
        (
            '{"timestamp": "1", "input_length": 1, "output_length": 1, "hash_ids": [1]}',
            "Expected `int | float`, got `str` - at `$.timestamp`",
        ),
        ('{"timestamp": -1, "input_length": 1, "output_length": 1, "hash_ids": [1]}', "are not those of a request"),
        ('{"timestamp": 1, "input_length": 0, "output_length": 1, "hash_ids": []}', "are not those of a request"),
        ('{"timestamp": 1, "input_length": 513, "output_length": 1, "hash_ids": [1]}', "which are 2 blocks of 512"),
    ],
)
def test_malformed_mooncake_line_is_refused_with_its_number(line: str, said: str) -> None:
    lines = MOONCAKE.splitlines(keepends=True)
    message = refusal(TraceFormat.MOONCAKE, "".join([*lines[:4], line + "\n", *lines[4:]]))
    assert message.startswith("line 5 of the mooncake trace: ")
    assert said in message


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("2023-11-16 18:15:51,12", "line 4 of the azure trace: 2 cells under a header of 3"),
        ("yesterday,12,13", "line 4 of the azure trace: TIMESTAMP is 'yesterday'"),
        ("2023-11-16 18:15:51,0,13", "line 4 of the azure trace: ContextTokens is '0'"),
        ("2023-11-16 18:15:51,12,many", "line 4 of the azure trace: GeneratedTokens is 'many'"),
        ('2023-11-16 18:15:51,12,"13', "line 4 of the azure trace: "),
    ],
)
def test_malformed_azure_row_is_refused_with_its_number(row: str, said: str) -> None:
    assert refusal(TraceFormat.AZURE, AZURE + row).startswith(said)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("-1,GPT-4,1,2,3,API log", "line 5 of the burstgpt trace: Timestamp is '-1'"),
        ("nan,GPT-4,1,2,3,API log", "line 5 of the burstgpt trace: Timestamp is 'nan'"),
        ("1,GPT-4,1.5,2,3,API log", "line 5 of the burstgpt trace: Request tokens is '1.5'"),
    ],
)
def test_malformed_burstgpt_row_is_refused_with_its_number(row: str, said: str) -> None:
    assert refusal(TraceFormat.BURSTGPT, BURSTGPT + row).startswith(said)


def test_trace_of_another_format_is_refused_by_its_header() -> None:
    said = "line 1 of the azure trace: the header has no TIMESTAMP, ContextTokens, GeneratedTokens"
    assert refusal(TraceFormat.AZURE, BURSTGPT) == said


@pytest.mark.parametrize(
    ("trace_format", "text", "first"),
    [
        (TraceFormat.AZURE, AZURE + "broken", (374, 44)),
        (TraceFormat.BURSTGPT, BURSTGPT + "broken", (472, 18)),
        (TraceFormat.MOONCAKE, MOONCAKE.splitlines()[2], (200, 7)),
    ],
)
def test_trace_of_more_requests_than_wanted_is_read_no_further(
    trace_format: TraceFormat, text: str, first: tuple[int, int]
) -> None:
    trace = read_trace(trace_format, text.splitlines(keepends=True), seed=0, max_requests=1)
    assert lengths(trace) == [first]
    assert trace.requests[0].arrival_s == 0.0


@pytest.mark.parametrize("trace_format", list(TraceFormat))
def test_trace_without_requests_is_refused_as_such(trace_format: TraceFormat) -> None:
    header = {TraceFormat.AZURE: AZURE, TraceFormat.BURSTGPT: BURSTGPT}.get(trace_format, "").partition("\n")[0]
    assert refusal(trace_format, header) == f"the {trace_format.value} trace has no request"
