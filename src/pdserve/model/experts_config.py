"""What `config.json` says of a mixture of experts: DeepSeek-V2, DeepSeek-V3, Qwen3-MoE. Torch-free."""

from dataclasses import dataclass
from enum import Enum

from pdserve.model.json_fields import JsonFields


class Scoring(Enum):
    """How the router's products become scores."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


class GroupScore(Enum):
    """What a group of experts is chosen by."""

    BEST = "best"
    BEST_TWO = "best_two"
    """The sum of the two best scores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    layers: tuple[int, ...]
    """Which layers have experts; the others are dense."""
    num_experts: int
    num_chosen: int
    """Experts that each token goes through."""
    ffn_dim: int
    """Of one expert."""
    shared_ffn_dim: int
    """Of the experts that all tokens go through, together; 0: there are none."""
    scoring: Scoring
    has_correction: bool
    """A bias of each expert counts in the choice, and not in the weight."""
    num_groups: int
    num_chosen_groups: int
    """Experts are chosen out of the best groups only."""
    group_score: GroupScore
    has_unit_sum: bool
    """The chosen experts' weights are divided by their sum."""
    weight_scale: float

    @property
    def group_experts(self) -> int:
        return self.num_experts // self.num_groups


def read_qwen3_experts(fields: JsonFields, *, num_layers: int) -> ExpertsConfig:
    sparse_step = fields.count("decoder_sparse_step", default=1)
    if sparse_step == 0:
        raise fields.refusal("decoder_sparse_step must be a positive integer, not 0")
    dense_layers = fields.integers("mlp_only_layers")
    return _checked(
        fields,
        ExpertsConfig(
            layers=tuple(i for i in range(num_layers) if i not in dense_layers and (i + 1) % sparse_step == 0),
            num_experts=fields.integer("num_experts"),
            num_chosen=fields.integer("num_experts_per_tok"),
            ffn_dim=fields.integer("moe_intermediate_size"),
            shared_ffn_dim=0,
            scoring=Scoring.SOFTMAX,
            has_correction=False,
            num_groups=1,
            num_chosen_groups=1,
            group_score=GroupScore.BEST,
            has_unit_sum=fields.flag("norm_topk_prob"),
            weight_scale=1.0,
        ),
    )


def read_deepseek_v2_experts(fields: JsonFields, *, num_layers: int) -> ExpertsConfig:
    fields.choice("scoring_func", known=("softmax",), default="softmax")
    method = fields.choice("topk_method", known=("greedy", "group_limited_greedy"), default="greedy")
    has_groups = method == "group_limited_greedy"
    has_unit_sum = fields.flag("norm_topk_prob")
    weight_scale = fields.number("routed_scaling_factor", default=1.0)
    if has_unit_sum and weight_scale != 1.0:
        # Implementations differ here: some scale weights that were divided by their sum, some do not.
        raise fields.refusal("norm_topk_prob with a routed_scaling_factor is not supported for DeepseekV2ForCausalLM")
    return _deepseek_experts(
        fields,
        num_layers=num_layers,
        scoring=Scoring.SOFTMAX,
        has_correction=False,
        has_groups=has_groups,
        group_score=GroupScore.BEST,
        has_unit_sum=has_unit_sum,
        weight_scale=weight_scale,
    )


def read_deepseek_v3_experts(fields: JsonFields, *, num_layers: int) -> ExpertsConfig:
    fields.choice("scoring_func", known=("sigmoid",), default="sigmoid")
    fields.choice("topk_method", known=("noaux_tc",), default="noaux_tc")
    return _deepseek_experts(
        fields,
        num_layers=num_layers,
        scoring=Scoring.SIGMOID,
        has_correction=True,
        has_groups=True,
        group_score=GroupScore.BEST_TWO,
        has_unit_sum=fields.flag("norm_topk_prob", default=True),
        weight_scale=fields.number("routed_scaling_factor", default=1.0),
    )


def _deepseek_experts(
    fields: JsonFields,
    *,
    num_layers: int,
    scoring: Scoring,
    has_correction: bool,
    has_groups: bool,
    group_score: GroupScore,
    has_unit_sum: bool,
    weight_scale: float,
) -> ExpertsConfig:
    """What both generations name alike; `has_groups`: experts are chosen within the best groups."""
    return _checked(
        fields,
        ExpertsConfig(
            layers=_deepseek_layers(fields, num_layers=num_layers),
            num_experts=fields.integer("n_routed_experts"),
            num_chosen=fields.integer("num_experts_per_tok"),
            ffn_dim=fields.integer("moe_intermediate_size"),
            shared_ffn_dim=fields.count("n_shared_experts", default=0) * fields.integer("moe_intermediate_size"),
            scoring=scoring,
            has_correction=has_correction,
            num_groups=fields.integer("n_group") if has_groups else 1,
            num_chosen_groups=fields.integer("topk_group") if has_groups else 1,
            group_score=group_score,
            has_unit_sum=has_unit_sum,
            weight_scale=weight_scale,
        ),
    )


def _deepseek_layers(fields: JsonFields, *, num_layers: int) -> tuple[int, ...]:
    first = fields.count("first_k_dense_replace", default=0)
    frequency = fields.optional_integer("moe_layer_freq") or 1
    return tuple(i for i in range(num_layers) if i >= first and i % frequency == 0)


def _checked(fields: JsonFields, experts: ExpertsConfig) -> ExpertsConfig:
    """Raises: `ConfigError` when so many experts can't be chosen."""
    if experts.num_experts % experts.num_groups:
        raise fields.refusal(f"n_group {experts.num_groups} does not divide the {experts.num_experts} experts")
    if experts.num_chosen_groups > experts.num_groups:
        raise fields.refusal(f"topk_group {experts.num_chosen_groups} is more than n_group {experts.num_groups}")
    num_eligible = experts.num_chosen_groups * experts.group_experts
    if experts.num_chosen > num_eligible:
        raise fields.refusal(
            f"num_experts_per_tok {experts.num_chosen} is more than the {num_eligible} experts that can be chosen"
        )
    if experts.group_score is GroupScore.BEST_TWO and experts.group_experts < 2:
        raise fields.refusal(f"n_group {experts.num_groups} leaves less than two experts in a group")
    return experts
