"""What the progress line says."""

from pdserve.bench.load.progress import BAR_WIDTH, progress_line
from pdserve.bench.load.sender import Counts


def test_progress_before_any_answer_knows_only_when_the_last_is_due() -> None:
    counts = Counts(num_sent=3, num_in_flight=3, num_failed=0)
    line = progress_line(counts, num_requests=40, elapsed_s=10.0, last_due_s=85.0, mean_answer_s=None)
    assert line == f"[{'-' * BAR_WIDTH}] 0/40 ended, 3 in flight, ETA 1:15"
    late = progress_line(counts, num_requests=40, elapsed_s=90.0, last_due_s=85.0, mean_answer_s=None)
    assert late.endswith("ETA ?")


def test_progress_with_answers_adds_what_one_takes_to_the_last_arrival() -> None:
    counts = Counts(num_sent=24, num_in_flight=4, num_failed=2)
    line = progress_line(counts, num_requests=40, elapsed_s=10.0, last_due_s=20.0, mean_answer_s=2.5)
    half = BAR_WIDTH // 2
    assert line == f"[{'#' * half}{'-' * half}] 20/40 ended, 4 in flight, 2 failed, ETA 0:12"


def test_progress_at_the_end_has_a_full_bar() -> None:
    counts = Counts(num_sent=40, num_in_flight=0, num_failed=0)
    line = progress_line(counts, num_requests=40, elapsed_s=30.0, last_due_s=20.0, mean_answer_s=2.5)
    assert line == f"[{'#' * BAR_WIDTH}] 40/40 ended, 0 in flight, ETA 0:00"
