"""How much one scheduler may take on."""

from dataclasses import dataclass

from pdserve.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleLimits:
    """Raises: `ConfigError` when the limits contradict each other."""

    max_batch_tokens: int = 256
    """Most tokens in a pass. Bounds how long a decode step or a short prompt waits for a running pass (about 0.8 s at
    the 3.2 ms a token of the default model on one core); smaller passes pay the fixed cost of a pass more often."""
    saturation_tokens: int = 64
    """Tokens from which a pass takes time in proportion to its tokens. Below it, tokens of several prompts share a pass
    almost for free, and so do guesses of tokens; above it, they only delay each other."""
    max_running: int = 64
    """Most sequences that hold pages in the scheduler. Below `max_batch_tokens`, so that a pass has room for a token of
    each and for a part of a prompt."""
    max_waiting: int = 512
    """Most sequences that wait to be scheduled for the first time; more are refused."""
    ageing_tokens_per_s: int = 100
    """A prompt that has waited t seconds counts as this times t tokens shorter. 100: a 2,000-token prompt can be
    overtaken by prompts that arrive in the 20 s after it, not by later ones. 0: pure shortest remaining first, which
    can starve."""

    def __post_init__(self) -> None:
        if not 1 <= self.saturation_tokens <= self.max_batch_tokens:
            raise ConfigError(
                f"saturation_tokens is {self.saturation_tokens}; set it between 1 and max_batch_tokens, "
                f"which is {self.max_batch_tokens}"
            )
        if not 1 <= self.max_running < self.max_batch_tokens:
            raise ConfigError(
                f"max_running is {self.max_running}; set it between 1 and {self.max_batch_tokens - 1}, "
                "one below max_batch_tokens, or no prompt gets into a full batch"
            )
        if self.max_waiting < 1:
            raise ConfigError(f"max_waiting is {self.max_waiting}; set it to 1 or more")
        if self.ageing_tokens_per_s < 0:
            raise ConfigError(f"ageing_tokens_per_s is {self.ageing_tokens_per_s}; set it to 0 or more")
