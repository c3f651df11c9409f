"""ModelConfig: what a checkpoint says about itself, in Hugging Face's words, whatever file it came from."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ModelConfig:
    """The numbers a model family needs to build its graph. Readers fill it; models/ only reads it."""

    model_type: str  # "olmoe", "qwen3_moe"
    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    norm_topk_prob: bool
    tie_word_embeddings: bool
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    # The checkpoint's own sampling defaults (generation_config.json): temperature, top_p, top_k, do_sample.
    generation: dict[str, float] = field(default_factory=dict)
