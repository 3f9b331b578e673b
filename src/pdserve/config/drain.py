"""How long a process that was told to stop lets finish what runs."""

DEFAULT_DRAIN_TIMEOUT_S = 30.0
"""An answer of 500 tokens at 20 tokens/s takes 25 s."""
