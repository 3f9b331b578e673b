"""The body of `POST /v1/completions`."""

from typing import Annotated

from msgspec import Meta

from pdserve.errors import InvalidField, UnsupportedField
from pdserve.gateway.fields import NoOps, convert, parse_object, without_no_ops
from pdserve.gateway.sampling_fields import SHARED_NO_OPS, SamplingFields

DEFAULT_MAX_TOKENS = 16
"""OpenAI's, for this API; a chat's default is all that the context leaves."""

MAX_LOGPROBS = 5
"""OpenAI's, for this API; a chat may ask for more."""

COMPLETION_NO_OPS: NoOps = SHARED_NO_OPS


class CompletionRequest(SamplingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    prompt: str | list[int | str | list[int]]
    """Text, token ids, or a list with one of either."""
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def num_top_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def single_prompt(self) -> str | list[int]:
        """Raises: `InvalidField` when there is none, `UnsupportedField` when there are several."""
        if isinstance(self.prompt, str):
            return _not_empty(self.prompt)
        token_ids = [element for element in self.prompt if isinstance(element, int)]
        prompts = [element for element in self.prompt if not isinstance(element, int)]
        if not prompts:
            return _not_empty(token_ids)
        if token_ids:
            raise InvalidField("'prompt' mixes token ids with prompts", param="prompt")
        if len(prompts) > 1:
            raise UnsupportedField(f"'prompt' has {len(prompts)} prompts; send one a request", param="prompt")
        return _not_empty(prompts[0])


def parse_completion_request(body: bytes) -> CompletionRequest:
    """Raises: `InvalidField`, `UnsupportedField`."""
    request = convert(without_no_ops(parse_object(body), COMPLETION_NO_OPS), CompletionRequest)
    request.require_consistent()
    return request


def _not_empty(prompt: str | list[int]) -> str | list[int]:
    if not prompt:
        raise InvalidField("'prompt' is empty", param="prompt")
    return prompt
