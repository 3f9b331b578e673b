"""What the drafter of a spec comes to: worked out alike by the main process and by rank 0. Torch-free."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import assert_never, cast

from pdserve.config.speculation import Drafter, Speculation
from pdserve.engine.port import EngineSpec
from pdserve.errors import ConfigError
from pdserve.kv.layout import KvLayout
from pdserve.model.checkpoint import fingerprint
from pdserve.model.config import ModelConfig, read_config
from pdserve.model.draft_head_config import eagle_config, mtp_config


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftShape:
    """Of a drafter that is a model."""

    kind: Drafter
    weights_dir: Path
    config: ModelConfig
    """Of the drafter's own layers."""
    layout: KvLayout
    """Of its cache, whole."""
    max_model_len: int
    """The smaller one of the model's and the drafter's: beyond it nothing is guessed."""
    num_draft_tokens: int

    @property
    def fingerprint(self) -> str:
        """As of a model. How many tokens are guessed is no part of it: the KV is the same.

        Cost: reads a sample of the weights.
        """
        return f"{self.kind.value} {fingerprint(self.weights_dir, self.config)}"


def draft_shape_of(config: ModelConfig, spec: EngineSpec) -> DraftShape | None:
    """None where the engine has no drafter. `config` is the model's.

    Raises: `ConfigError` when the drafter does not go with the model.
    """
    speculation = spec.speculation
    if speculation is None or not speculation.needs_engine:
        return None
    draft_config = _draft_config(config, speculation, target_dir=Path(spec.model_dir))
    return DraftShape(
        kind=speculation.drafter,
        weights_dir=Path(speculation.model_dir or spec.model_dir),
        config=draft_config,
        layout=draft_config.kv_layout(page_slots=spec.page_slots, dtype=spec.dtype),
        max_model_len=min(config.max_model_len, draft_config.max_model_len),
        num_draft_tokens=speculation.num_draft_tokens,
    )


def _draft_config(config: ModelConfig, speculation: Speculation, *, target_dir: Path) -> ModelConfig:
    draft_dir = Path(speculation.model_dir or target_dir)
    match speculation.drafter:
        case Drafter.DRAFT_MODEL:
            return _draft_model_config(config, draft_dir, target_dir)
        case Drafter.MTP:
            return mtp_config(draft_dir)
        case Drafter.EAGLE:
            return eagle_config(draft_dir, config)
        case Drafter.NGRAM:
            raise ConfigError("speculation by n-grams has no model")
        case _:
            assert_never(speculation.drafter)


def _draft_model_config(config: ModelConfig, draft_dir: Path, target_dir: Path) -> ModelConfig:
    draft_config = read_config(draft_dir)
    if draft_config.vocab_size != config.vocab_size:
        raise ConfigError(
            f"the draft model {draft_dir} has a vocabulary of {draft_config.vocab_size} tokens, the model one of "
            f"{config.vocab_size}: name a smaller model of the same family"
        )
    differing = _differing_token(_token_ids(draft_dir), _token_ids(target_dir))
    if differing is not None:
        raise ConfigError(
            f"the tokenizer of the draft model {draft_dir} is not the model's: they differ in {differing!r}. Name a "
            "smaller model of the same family"
        )
    return draft_config


def _differing_token(ours: Mapping[str, int] | None, theirs: Mapping[str, int] | None) -> str | None:
    """A token that has not the same id in both. None: there is none, or nothing to compare."""
    if ours is None or theirs is None:
        return None
    return min((token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token)), default=None)


def _token_ids(model_dir: Path) -> Mapping[str, int] | None:
    """Of each token in `tokenizer.json`, added ones too; None when there is no such file.

    Raises: `ConfigError` when it is broken.
    """
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        fields = json.loads(path.read_text())
        vocab: object = fields["model"]["vocab"]
        added = {entry["content"]: entry["id"] for entry in fields["added_tokens"]}
        if isinstance(vocab, dict):
            return cast(dict[str, int], vocab) | added
        # The unigram model lists its tokens with their scores.
        return {token: token_id for token_id, (token, _) in enumerate(cast(list[tuple[str, float]], vocab))} | added
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{path} is not a tokenizer of the tokenizers library: {error!r}") from error
