"""Arithmetic on counts and bytes, with the rounding in the name."""

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

NS_PER_US = 1_000
NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000


def div_ceil(dividend: int, divisor: int) -> int:
    """The least integer not below `dividend / divisor`. Requires: `divisor > 0`."""
    return -(-dividend // divisor)


def div_exact(dividend: int, divisor: int) -> int:
    """The quotient of a division without remainder. Raises: `ValueError` when there is one."""
    quotient, remainder = divmod(dividend, divisor)
    if remainder:
        raise ValueError(f"{dividend} is not a multiple of {divisor}")
    return quotient


def seconds_to_ns(duration_s: float) -> int:
    return round(duration_s * NS_PER_S)


def ns_to_seconds(duration_ns: int) -> float:
    return duration_ns / NS_PER_S
