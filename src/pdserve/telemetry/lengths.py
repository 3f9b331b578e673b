"""Histograms of how many tokens a request has."""

from prometheus_client import CollectorRegistry, Histogram

LENGTH_BUCKETS = (
    *(1, 2, 3, 4, 5, 7),
    *(tenths * 10**power for power in range(5) for tenths in (10, 15, 20, 30, 40, 50, 70)),
    1_000_000,
)
"""To the longest context there is. No bucket over 10 tokens is wider than half its lower bound, so that the spread of
lengths can be told; those of vLLM (1, 2, 5, 10, ...) are among the bounds."""


class LengthHistograms:
    """Of prompts and of answers."""

    def __init__(self, registry: CollectorRegistry, *, model_name: str) -> None:
        self._prompts, self._answers = (
            Histogram(
                name, documentation, labelnames=("model_name",), registry=registry, buckets=LENGTH_BUCKETS
            ).labels(model_name=model_name)
            for name, documentation in (
                ("vllm:request_prompt_tokens", "Prompt tokens of one request."),
                ("vllm:request_generation_tokens", "Generated tokens of one request."),
            )
        )

    def observe(self, *, num_prompt_tokens: int, num_generated_tokens: int) -> None:
        self._prompts.observe(num_prompt_tokens)
        self._answers.observe(num_generated_tokens)
