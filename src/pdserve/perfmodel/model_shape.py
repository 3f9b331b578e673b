"""What the time and memory of a model depend on, of models that plans are made for without having them here."""

from dataclasses import dataclass

from pdserve.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    name: str
    hub_id: str
    num_layers: int
    hidden: int
    num_params: float
    expert_params: float
    """Of those, in routed experts; 0 for a dense model."""
    num_experts: int
    """In each layer that has them; 1 for a dense model."""
    experts_per_token: int
    param_bytes: int
    """Of each parameter as it is served: 1 for FP8, 2 for bfloat16."""
    num_kv_heads: int
    """1 for MLA, whose latent all ranks hold."""
    kv_token_bytes: int
    """Of all layers and heads, in bfloat16."""
    key_flops: float
    """Of a prefill token's attention to one key, in all layers and heads."""
    source: str

    @property
    def active_params(self) -> float:
        """That one token is multiplied with."""
        return self.dense_params + self.expert_params * self.experts_per_token / self.num_experts

    @property
    def dense_params(self) -> float:
        """That every token is multiplied with."""
        return self.num_params - self.expert_params

    def touched_expert_params(self, num_tokens: int) -> float:
        """In experts that at least one of these tokens is sent to, when each chooses its experts independently."""
        untouched = (1 - self.experts_per_token / self.num_experts) ** num_tokens
        return self.expert_params * (1 - untouched)

    def kv_rank_token_bytes(self, tensor_parallel_size: int) -> int:
        """Of the heads that one rank holds."""
        return self.kv_token_bytes // min(tensor_parallel_size, self.num_kv_heads)


def _gqa(
    *,
    name: str,
    hub_id: str,
    num_layers: int,
    hidden: int,
    num_heads: int,
    num_kv_heads: int,
    num_params: float,
    param_bytes: int,
    expert_params: float = 0.0,
    num_experts: int = 1,
    experts_per_token: int = 1,
) -> ModelShape:
    """With heads of 128 values each, as all models below have them."""
    head_dim = 128
    return ModelShape(
        name=name,
        hub_id=hub_id,
        num_layers=num_layers,
        hidden=hidden,
        num_params=num_params,
        expert_params=expert_params,
        num_experts=num_experts,
        experts_per_token=experts_per_token,
        param_bytes=param_bytes,
        num_kv_heads=num_kv_heads,
        kv_token_bytes=num_layers * num_kv_heads * head_dim * 2 * 2,
        # Two products, of the query with the key and of the weight with the value; two operations a multiplication.
        key_flops=num_layers * num_heads * head_dim * 2 * 2,
        source=f"config.json of {hub_id} on the Hugging Face hub; number of parameters from its model card",
    )


MODEL_SHAPES = {
    shape.name: shape
    for shape in (
        ModelShape(
            name="deepseek-r1",
            hub_id="deepseek-ai/DeepSeek-R1",
            num_layers=61,
            hidden=7168,
            num_params=671e9,
            # 58 layers of 256 experts, each with three matrices of 7168 by 2048.
            expert_params=58 * 256 * 3 * 7168 * 2048,
            num_experts=256,
            experts_per_token=8,
            param_bytes=1,
            num_kv_heads=1,
            # A latent of 512 values and a rotated key of 64.
            kv_token_bytes=61 * (512 + 64) * 2,
            # 128 heads, whose queries and keys have 192 values and whose values have 128.
            key_flops=61 * 128 * (192 + 128) * 2,
            source="config.json of deepseek-ai/DeepSeek-R1 on the Hugging Face hub; arXiv 2412.19437 for parameters",
        ),
        _gqa(
            name="qwen3-coder-480b",
            hub_id="Qwen/Qwen3-Coder-480B-A35B-Instruct",
            num_layers=62,
            hidden=6144,
            num_heads=96,
            num_kv_heads=8,
            num_params=480e9,
            param_bytes=1,
            # 62 layers of 160 experts, each with three matrices of 6144 by 2560.
            expert_params=62 * 160 * 3 * 6144 * 2560,
            num_experts=160,
            experts_per_token=8,
        ),
        _gqa(
            name="llama-3.1-70b",
            hub_id="meta-llama/Meta-Llama-3.1-70B",
            num_layers=80,
            hidden=8192,
            num_heads=64,
            num_kv_heads=8,
            num_params=70.6e9,
            param_bytes=2,
        ),
        _gqa(
            name="llama-3.1-8b",
            hub_id="meta-llama/Meta-Llama-3.1-8B",
            num_layers=32,
            hidden=4096,
            num_heads=32,
            num_kv_heads=8,
            num_params=8.03e9,
            param_bytes=2,
        ),
    )
}


def model_shape(name: str) -> ModelShape:
    """Raises: `ConfigError` that names the known ones."""
    if name not in MODEL_SHAPES:
        raise ConfigError(f"the model '{name}' is not known; known are {', '.join(sorted(MODEL_SHAPES))}")
    return MODEL_SHAPES[name]
