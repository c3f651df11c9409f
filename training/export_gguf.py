"""Write a checkpoint of train_tiny.py as GGUF and, if asked, as a Hugging Face directory.

    python training/export_gguf.py --tokenizer BUILD/tokenizer.json \
        [--checkpoint RUN/checkpoint.pt] [--hf DIR] headrace/data/tiny.gguf

Experts become Q4_0, other matrices Q8_0; norms and routers stay F32. Without --checkpoint the
weights are the random ones that training starts from.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import quantize
from model import Config, Olmoe

ARCH = "olmoe"
GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.down_proj": "ffn_down_exps",
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
}


def load_model(checkpoint: Path | None, seed: int = 0) -> Olmoe:
    """The model of a checkpoint, or a freshly initialised one."""
    if checkpoint is None:
        torch.manual_seed(seed)
        return Olmoe(Config())
    state = torch.load(checkpoint, map_location="cpu", weights_only=True)
    model = Olmoe(Config(**state["config"]))
    model.load_state_dict(state["model"])
    return model


def gguf_name(name: str) -> str:
    """GGUF's name of a parameter (gate_up_proj has none: GGUF keeps its halves apart)."""
    name = name.removesuffix(".weight")
    if not name.startswith("layers."):
        return f"{GGUF_NAMES[name]}.weight"
    _, layer, name = name.split(".", 2)
    return f"blk.{layer}.{GGUF_NAMES[name]}.weight"


def gguf_tensors(model: Olmoe) -> Iterator[tuple[str, np.ndarray, GGMLQuantizationType]]:
    """GGUF name, float32 values in Hugging Face's order of dimensions, type to store as."""
    q4_0, q8_0, f32 = (getattr(GGMLQuantizationType, t) for t in ("Q4_0", "Q8_0", "F32"))
    inter = model.config.intermediate_size
    for name, parameter in model.state_dict().items():
        array = parameter.numpy()
        if name.endswith("mlp.gate_up_proj"):  # (experts, gate rows then up rows, hidden)
            block = f"blk.{name.split('.')[1]}."
            yield f"{block}ffn_gate_exps.weight", array[:, :inter], q4_0
            yield f"{block}ffn_up_exps.weight", array[:, inter:], q4_0
        elif name.endswith("mlp.down_proj"):
            yield gguf_name(name), array, q4_0
        else:
            is_f32 = array.ndim == 1 or name.endswith("mlp.gate.weight")
            yield gguf_name(name), array, f32 if is_f32 else q8_0


def write_gguf(model: Olmoe, tokenizer_path: Path, path: Path) -> None:
    config = model.config
    writer = GGUFWriter(path, ARCH)
    writer.add_type("model")
    writer.add_name("tiny")
    writer.add_description(
        "A small mixture-of-experts model trained for Headrace, on the King James Bible, "
        "Python's standard library and manual pages"
    )
    writer.add_license("apache-2.0")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(2)  # mostly Q4_0
    writer.add_quantization_version(2)

    bpe = json.loads(tokenizer_path.read_text())["model"]
    tokens = sorted(bpe["vocab"], key=bpe["vocab"].get)
    assert [bpe["vocab"][t] for t in tokens] == list(range(config.vocab_size))
    types = [TokenType.NORMAL] * len(tokens)
    types[config.eos_token_id] = TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("olmo")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in bpe["merges"]])
    writer.add_eos_token_id(config.eos_token_id)
    writer.add_add_bos_token(False)

    for name, array, kind in gguf_tensors(model):
        data = quantize(np.ascontiguousarray(array), kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def hf_tensors(model: Olmoe) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors under the names that Hugging Face checkpoints of OLMoE have."""
    for name, tensor in model.state_dict().items():
        if name.endswith("mlp.gate_up_proj"):
            prefix = f"model.{name.removesuffix('gate_up_proj')}experts"
            for expert, both in enumerate(tensor):
                for part, matrix in zip(("gate", "up"), both.chunk(2), strict=True):
                    yield f"{prefix}.{expert}.{part}_proj.weight", matrix.clone()
        elif name.endswith("mlp.down_proj"):
            prefix = f"model.{name.removesuffix('down_proj')}experts"
            for expert, matrix in enumerate(tensor):
                yield f"{prefix}.{expert}.down_proj.weight", matrix.clone()
        else:
            yield name if name.startswith("lm_head") else f"model.{name}", tensor


def write_hf(model: Olmoe, tokenizer_path: Path, directory: Path) -> None:
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    save_file(dict(hf_tensors(model)), directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(model.config.hf_config(), indent=2) + "\n")
    (directory / "tokenizer.json").write_text(tokenizer_path.read_text())
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|endoftext|>",
        "model_max_length": model.config.max_position_embeddings,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gguf", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--hf", type=Path, help="also write a Hugging Face directory here")
    args = parser.parse_args()
    model = load_model(args.checkpoint)
    temporary = args.gguf.with_suffix(".part")
    write_gguf(model, args.tokenizer, temporary)
    temporary.replace(args.gguf)
    print(f"{args.gguf}: {args.gguf.stat().st_size} bytes")
    if args.hf:
        write_hf(model, args.tokenizer, args.hf)


if __name__ == "__main__":
    main()
