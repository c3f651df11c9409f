"""ModelConfig: what a checkpoint says about itself, in Hugging Face's words, whatever file it came
from."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from headrace.errors import HeadraceError
from headrace.models.fields import Fields, shown

# GGUF architecture -> Hugging Face model_type.
ARCHITECTURES = {"olmoe": "olmoe", "qwen3moe": "qwen3_moe"}
MODEL_TYPES = tuple(ARCHITECTURES.values())

# What Hugging Face assumes where config.json says nothing.
_RMS_NORM_EPS = {"olmoe": 1e-5, "qwen3_moe": 1e-6}
_MAX_POSITION_EMBEDDINGS = {"olmoe": 4096, "qwen3_moe": 32768}
_ROPE_THETA = 1e4

# Tokens that end a turn in these families; a GGUF names only one of them as eos.
_END_TOKENS = ("<|endoftext|>", "<|im_end|>")
_CONTROL_TOKEN = 3


@dataclass(frozen=True)
class ModelConfig:
    """The numbers a model family needs to build its graph. Readers fill it; models/ only reads
    it."""

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
    # The checkpoint's own sampling defaults (generation_config.json): temperature, top_p, top_k,
    # do_sample.
    generation: dict[str, float] = field(default_factory=dict)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], where: str) -> ModelConfig:
        """From GGUF metadata and the shapes of the file's tensors, from which missing keys are
        derived.

        `where` names the file in errors. Raises HeadraceError for an unsupported architecture, and
        for a key that changes results in a way that is not supported.
        """
        general = Fields(metadata, where)
        arch = general.text("general.architecture")
        if arch not in ARCHITECTURES:
            supported = ", ".join(ARCHITECTURES)
            raise HeadraceError(f"{where}: architecture {shown(arch)} is not supported; supported: {supported}")
        prefix = arch + "."
        own = {k[len(prefix) :]: v for k, v in metadata.items() if k.startswith(prefix)}
        keys = Fields(own, f"{where}: {arch}")

        hidden = keys.integer("embedding_length")
        heads = keys.integer("attention.head_count")
        head_dim = keys.integer("attention.key_length", None) or hidden // heads
        down = shapes.get("blk.0.ffn_down_exps.weight", ())
        moe_intermediate = keys.integer("expert_feed_forward_length", None)
        if moe_intermediate is None and arch == "olmoe":
            moe_intermediate = keys.integer("feed_forward_length", None)
        if moe_intermediate is None and len(down) == 3:
            moe_intermediate = down[2]
        embedding = shapes.get("token_embd.weight", ())
        vocab = keys.integer("vocab_size", None)
        if vocab is None:
            vocab = embedding[0] if len(embedding) == 2 else 0

        keys.neutral("attention.value_length", [head_dim])
        keys.neutral("rope.dimension_count", [head_dim])
        keys.neutral("rope.scaling.type", ["none"])
        keys.neutral("rope.scaling.factor", [1.0, 0.0])
        keys.neutral("rope.scale_linear", [1.0, 0.0])
        keys.neutral("attention.sliding_window", [0])
        keys.neutral("attention.clamp_kqv", [0.0])
        keys.neutral("attention.causal", [True])
        keys.neutral("attention.scale", [0.0])
        keys.neutral("expert_gating_func", [1])
        keys.neutral("expert_weights_scale", [1.0, 0.0])
        keys.neutral("expert_shared_count", [0])
        keys.neutral("expert_group_count", [0, 1])
        keys.neutral("leading_dense_block_count", [0])
        keys.neutral("nextn_predict_layers", [0])

        eos = [
            general.integer(f"tokenizer.ggml.{key}_token_id", None, low=0, high=2**32 - 1)
            for key in ("eos", "eot", "eom")
        ]
        tokens = metadata.get("tokenizer.ggml.tokens")
        types = metadata.get("tokenizer.ggml.token_type")
        if isinstance(tokens, list) and isinstance(types, np.ndarray) and len(types) == len(tokens):
            eos += [i for i, token in enumerate(tokens) if token in _END_TOKENS and types[i] == _CONTROL_TOKEN]
        generation = {}
        sampling = (("temp", "temperature"), ("top_p", "top_p"), ("top_k", "top_k"))
        for key, name in sampling:
            value = general.number(f"general.sampling.{key}", None)
            if value is not None:
                generation[name] = value
        if "temperature" in generation:
            generation["do_sample"] = 1.0

        return cls(
            model_type=ARCHITECTURES[arch],
            num_hidden_layers=keys.integer("block_count"),
            hidden_size=hidden,
            num_attention_heads=heads,
            num_key_value_heads=keys.integer("attention.head_count_kv", heads),
            head_dim=head_dim,
            num_experts=keys.integer("expert_count"),
            num_experts_per_tok=keys.integer("expert_used_count"),
            moe_intermediate_size=moe_intermediate or 0,
            vocab_size=vocab,
            rms_norm_eps=keys.positive("attention.layer_norm_rms_epsilon", _RMS_NORM_EPS[ARCHITECTURES[arch]]),
            rope_theta=keys.positive("rope.freq_base", _ROPE_THETA),
            norm_topk_prob=keys.boolean("expert_weights_norm", arch == "qwen3moe"),
            tie_word_embeddings="output.weight" not in shapes,
            max_position_embeddings=keys.integer("context_length"),
            eos_token_ids=_in_vocabulary(eos, vocab),
            bos_token_id=_bos(general.integer("tokenizer.ggml.bos_token_id", None, 0, 2**32 - 1), vocab),
            generation=generation,
        )._checked(where)

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], generation: Mapping[str, Any], has_lm_head: bool, where: str
    ) -> ModelConfig:
        """From config.json and generation_config.json (empty if there is none). Errors as
        from_gguf."""
        keys = Fields(config, where)
        model_type = keys.text("model_type")
        if model_type not in MODEL_TYPES:
            supported = ", ".join(MODEL_TYPES)
            raise HeadraceError(f"{where}: model_type {shown(model_type)} is not supported; supported: {supported}")
        if "quantization_config" in keys:
            method = shown(keys.fields("quantization_config").values.get("quant_method"))
            raise HeadraceError(
                f"{where}: quantization_config (quant_method {method}) is not supported; use the checkpoint in F32, "
                "F16 or BF16"
            )
        keys.neutral("hidden_act", ["silu"])
        keys.neutral("attention_bias", [False])
        keys.neutral("clip_qkv", [])
        keys.neutral("use_sliding_window", [False])
        keys.neutral("mlp_only_layers", [[]])
        keys.neutral("decoder_sparse_step", [1])
        keys.neutral("partial_rotary_factor", [1.0, 1])
        for kind in keys.items("layer_types", []):
            if kind != "full_attention":
                raise keys.wrong("layer_types", "only 'full_attention'")

        rope = Fields({}, where)
        for key in ("rope_scaling", "rope_parameters"):
            if key in keys:
                rope = keys.fields(key)
                rope.neutral("rope_type", ["default"])
                rope.neutral("type", ["default"])
                rope.neutral("factor", [1.0, 1])
                rope.neutral("partial_rotary_factor", [1.0, 1])
                for name, value in rope.values.items():
                    if isinstance(value, dict):
                        raise rope.wrong(name, "one set of parameters for all layers")
        rope_theta = rope.positive("rope_theta", None) or keys.positive("rope_theta", _ROPE_THETA)

        olmoe = model_type == "olmoe"
        hidden = keys.integer("hidden_size")
        heads = keys.integer("num_attention_heads")
        vocab = keys.integer("vocab_size")
        defaults = Fields(generation, where.replace("config.json", "generation_config.json"))
        sampling = {}
        for name in ("temperature", "top_p", "top_k"):
            value = defaults.number(name, None)
            if value is not None:
                sampling[name] = value
        if "do_sample" in defaults:
            sampling["do_sample"] = float(defaults.boolean("do_sample"))

        return cls(
            model_type=model_type,
            num_hidden_layers=keys.integer("num_hidden_layers"),
            hidden_size=hidden,
            num_attention_heads=heads,
            num_key_value_heads=keys.integer("num_key_value_heads", heads),
            head_dim=keys.integer("head_dim", None) or hidden // heads,
            num_experts=keys.integer("num_experts"),
            num_experts_per_tok=keys.integer("num_experts_per_tok"),
            moe_intermediate_size=keys.integer("intermediate_size" if olmoe else "moe_intermediate_size"),
            vocab_size=vocab,
            rms_norm_eps=keys.positive("rms_norm_eps", _RMS_NORM_EPS[model_type]),
            rope_theta=rope_theta,
            norm_topk_prob=keys.boolean("norm_topk_prob", False),
            tie_word_embeddings=keys.boolean("tie_word_embeddings", False) and not has_lm_head,
            max_position_embeddings=keys.integer("max_position_embeddings", _MAX_POSITION_EMBEDDINGS[model_type]),
            eos_token_ids=_in_vocabulary(
                [*_token_ids(keys, "eos_token_id"), *_token_ids(defaults, "eos_token_id")], vocab
            ),
            bos_token_id=_bos(keys.integer("bos_token_id", None, 0), vocab),
            generation=sampling,
        )._checked(where)

    @classmethod
    def from_json(cls, values: Mapping[str, Any], where: str) -> ModelConfig:
        """The inverse of to_json(), every value checked."""
        keys = Fields(values, where)
        model_type = keys.text("model_type")
        if model_type not in MODEL_TYPES:
            raise keys.wrong("model_type", " or ".join(MODEL_TYPES))
        counts = (
            "num_hidden_layers hidden_size num_attention_heads num_key_value_heads head_dim num_experts "
            "num_experts_per_tok moe_intermediate_size vocab_size max_position_embeddings"
        )
        vocab = keys.integer("vocab_size")
        generation = keys.fields("generation")
        return cls(
            model_type=model_type,
            **{name: keys.integer(name) for name in counts.split()},
            rms_norm_eps=keys.positive("rms_norm_eps"),
            rope_theta=keys.positive("rope_theta"),
            norm_topk_prob=keys.boolean("norm_topk_prob"),
            tie_word_embeddings=keys.boolean("tie_word_embeddings"),
            eos_token_ids=_in_vocabulary(_token_ids(keys, "eos_token_ids"), vocab),
            bos_token_id=_bos(keys.integer("bos_token_id", None, 0), vocab),
            generation={name: generation.number(name) for name in generation.values},
        )._checked(where)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {**asdict(self), "eos_token_ids": list(self.eos_token_ids)}

    def _checked(self, where: str) -> ModelConfig:
        """Refuses numbers that contradict each other; rounds eps and theta to the float32 that
        kernels use, so that every source of a checkpoint gives the same bits."""

        def require(holds: bool, expected: str, found: str) -> None:
            if not holds:
                raise HeadraceError(f"{where}: expected {expected}, found {found}")

        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        require(heads % kv_heads == 0, f"query heads a multiple of {kv_heads} kv heads", str(heads))
        require(self.head_dim > 0 and self.head_dim % 2 == 0, "an even head_dim", str(self.head_dim))
        used = self.num_experts_per_tok
        require(self.num_experts <= 65536, "at most 65536 experts", str(self.num_experts))
        require(used <= self.num_experts, f"experts used at most {self.num_experts}", str(used))
        require(self.moe_intermediate_size > 0, "an expert feed-forward length", "none")
        require(self.vocab_size > 0, "a vocabulary size or token_embd.weight", "neither")
        for name in ("rms_norm_eps", "rope_theta"):
            value = struct.unpack("<f", struct.pack("<f", getattr(self, name)))[0]
            object.__setattr__(self, name, value)
        # Below 1 the frequencies would grow without bound instead of falling.
        require(self.rope_theta >= 1, "a rope_theta of at least 1", str(self.rope_theta))
        for name, holds, expected in _SAMPLING:
            value = self.generation.get(name)
            require(value is None or holds(value), f"a sampling default {name} {expected}", str(value))
        return self


_SAMPLING: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    ("temperature", lambda t: t >= 0, "of at least 0"),
    ("top_p", lambda p: 0 < p <= 1, "above 0 and at most 1"),
    ("top_k", lambda k: k >= 0 and k == int(k), "that is a whole number"),
)


def _token_ids(fields: Fields, key: str) -> list[int]:
    value = fields.values.get(key)
    if value is None:
        return []
    ids = value if type(value) is list else [value]
    if not all(type(i) is int and 0 <= i < 2**31 for i in ids):
        raise fields.wrong(key, "a token id or a list of them")
    return ids


def _in_vocabulary(ids: Sequence[int | None], vocab_size: int) -> tuple[int, ...]:
    """Without repeats, absences and ids that can never be produced (random checkpoints keep class
    defaults)."""
    return tuple(dict.fromkeys(i for i in ids if i is not None and i < vocab_size))


def _bos(token_id: int | None, vocab_size: int) -> int | None:
    return token_id if token_id is not None and token_id < vocab_size else None
