"""The body of `POST /v1/completions`."""

from typing import Annotated

from msgspec import Meta

from pdserve.errors import InvalidField, UnsupportedField
from pdserve.gateway.fields import NoOps, convert, parse_object, without_no_ops
from pdserve.gateway.sampling_fields import SHARED_NO_OPS, SamplingFields
from pdserve.wire.cluster import MAX_CHOICES

DEFAULT_MAX_TOKENS = 16
"""OpenAI's, for this API; a chat's default is all that the context leaves."""

MAX_LOGPROBS = 5
"""OpenAI's, for this API; a chat may ask for more."""

MAX_PROMPTS = 64
"""Each is a request of its own to the workers."""

COMPLETION_NO_OPS: NoOps = SHARED_NO_OPS


class CompletionRequest(SamplingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    prompt: str | list[int | str | list[int]]
    """Text, token ids, or a list of either."""
    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    """0 with `echo`: the prompt alone, as it is scored by its logprobs."""
    best_of: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    """Answers to each prompt that are generated; the client gets the `n` of the highest mean logprob of a token."""
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    """The answer begins with the prompt."""

    @property
    def echoes_only(self) -> bool:
        return bool(self.echo) and self.max_tokens == 0

    @property
    def num_generated(self) -> int:
        return self.num_choices if self.best_of is None else self.best_of

    @property
    def token_limit(self) -> int | None:
        """Where nothing is to be generated one token is, which nobody sees: a worker ends an answer by its tokens."""
        return 1 if self.echoes_only else self.max_tokens

    @property
    def num_top_logprobs(self) -> int | None:
        return 0 if self.logprobs is None and self.num_generated > self.num_choices else self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        echoed = self.logprobs if self.echo else None
        return max((num for num in (self.prompt_logprobs, echoed) if num is not None), default=None)

    @property
    def prompts(self) -> list[str | list[int]]:
        """Raises: `InvalidField` when there is none, when one is empty or when there are too many."""
        if isinstance(self.prompt, str):
            return [_not_empty(self.prompt)]
        token_ids = [element for element in self.prompt if isinstance(element, int)]
        texts = [element for element in self.prompt if isinstance(element, str)]
        lists = [element for element in self.prompt if isinstance(element, list)]
        if sum(map(bool, (token_ids, texts, lists))) > 1:
            raise InvalidField("'prompt' mixes texts, token ids and lists of them; send one kind", param="prompt")
        num_prompts = len(texts) + len(lists)
        if num_prompts > MAX_PROMPTS or num_prompts * self.num_generated > MAX_CHOICES:
            raise InvalidField(
                f"'prompt' has {num_prompts} prompts with {self.num_generated} answers each; "
                f"send at most {MAX_PROMPTS} prompts and ask for {MAX_CHOICES} answers in all",
                param="prompt",
            )
        return [_not_empty(prompt) for prompt in texts or lists or [token_ids]]

    def require_consistent(self) -> None:
        super().require_consistent()
        if self.max_tokens == 0 and not self.echo:
            raise InvalidField("'max_tokens' is 0, which needs 'echo' to be true", param="max_tokens")
        if self.echoes_only and self.min_tokens:
            raise InvalidField(f"'min_tokens' is {self.min_tokens}, and 'max_tokens' is 0", param="min_tokens")
        if self.num_generated < self.num_choices:
            raise InvalidField(f"'best_of' is {self.best_of}, fewer than the {self.n} of 'n'", param="best_of")
        if self.stream and self.num_generated > self.num_choices:
            raise UnsupportedField("'best_of' over 'n' is not supported with 'stream'", param="best_of")


def parse_completion_request(body: bytes) -> CompletionRequest:
    """Raises: `InvalidField`, `UnsupportedField`."""
    request = convert(without_no_ops(parse_object(body), COMPLETION_NO_OPS), CompletionRequest)
    request.require_consistent()
    return request


def _not_empty(prompt: str | list[int]) -> str | list[int]:
    if not prompt:
        raise InvalidField("'prompt' is empty", param="prompt")
    return prompt
