"""What a gateway or a worker counts, as its `/metrics` tells it."""

from prometheus_client.parser import text_string_to_metric_families


def metric_total(exposition: str, metric: str, **labels: str) -> float:
    """The sum of a metric's samples that have these labels, in Prometheus's text format; 0 when there is none."""
    return sum(
        sample.value
        for family in text_string_to_metric_families(exposition)
        for sample in family.samples
        if sample.name == metric and labels.items() <= sample.labels.items()
    )
