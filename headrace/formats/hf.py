"""A Hugging Face directory, in place: config.json and safetensors, single or sharded."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from headrace.errors import HeadraceError
from headrace.formats.checkpoint import Checkpoint, TokenizerSource
from headrace.formats.header import read_small
from headrace.formats.placing import FileTensor, no_place, place
from headrace.formats.safetensors import read_json, read_safetensors
from headrace.models.config import ModelConfig
from headrace.models.fields import Fields, shown

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
MAX_TEMPLATE_BYTES = 4 << 20

# Hugging Face name -> GGUF's canonical name. OLMoE and Qwen3-MoE use the same.
_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER = re.compile(r"model\.layers\.(0|[1-9]\d{0,5})\.(.+)")
_IN_LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    # Transformers' fused experts carry no ".weight".
    "mlp.experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "mlp.experts.down_proj": "ffn_down_exps.weight",
}
_EXPERT = re.compile(r"mlp\.experts\.(0|[1-9]\d{0,5})\.(gate|up|down)_proj\.weight")
# Recomputed from rope_theta; old checkpoints store it.
_HARMLESS = ".self_attn.rotary_emb.inv_freq"


def read_hf(path: Path) -> Checkpoint:
    """The checkpoint in a Hugging Face directory.

    Raises HeadraceError for files that are missing, truncated or malformed, for a model_type or a
    setting that is not supported, and where config and tensors disagree.
    """
    config_path = path / "config.json"
    raw_config = read_json(config_path)
    # Before the tensors: another architecture deserves to be told so, not that a tensor is unknown.
    ModelConfig.from_hf(raw_config, {}, False, str(config_path))
    generation_path = path / "generation_config.json"
    generation = read_json(generation_path) if generation_path.exists() else {}

    files, own = _tensors(path)
    tensors = {}
    for name, tensor in own.items():
        if not name.endswith(_HARMLESS):
            tensors[_canonical(name, tensor)] = tensor
    has_lm_head = "output.weight" in tensors
    config = ModelConfig.from_hf(raw_config, generation, has_lm_head, str(config_path))
    placed = place(config, tensors, str(path))
    return Checkpoint(
        path=path,
        kind="hf",
        name=_name(path, raw_config),
        config=config,
        files=files,
        tensors=placed.tensors,
        embedding=placed.embedding,
        experts=placed.experts,
        tokenizer=_tokenizer(path),
    )


def _canonical(name: str, tensor: FileTensor) -> str:
    """GGUF's name for a tensor."""
    if name in _TOP:
        return _TOP[name]
    layer = _LAYER.fullmatch(name)
    if layer:
        expert = _EXPERT.fullmatch(layer[2])
        if expert:
            return f"blk.{layer[1]}.ffn_{expert[2]}.{expert[1]}.weight"
        if layer[2] in _IN_LAYER:
            return f"blk.{layer[1]}.{_IN_LAYER[layer[2]]}"
    raise no_place(tensor)


def _tensors(path: Path) -> tuple[tuple[Path, ...], dict[str, FileTensor]]:
    single, index = path / _SINGLE, path / _INDEX
    if single.exists():
        return (single,), read_safetensors(single, 0)
    if not index.exists():
        if any(path.glob("pytorch_model*.bin")):
            raise HeadraceError(f"{path}: PyTorch .bin weights are not supported; save the checkpoint as safetensors")
        raise HeadraceError(f"{path}: expected {_SINGLE} or {_INDEX} beside config.json, found neither")
    weight_map = Fields(read_json(index), str(index)).fields("weight_map")
    names = sorted({weight_map.text(tensor) for tensor in weight_map.values})
    for name in names:
        # A shard lies beside its index; anything else would let the index read other files.
        if name in ("", ".", "..") or "/" in name or "\0" in name:
            raise HeadraceError(f"{index}: expected a shard's file name, found {shown(name)}")
        if not (path / name).exists():
            raise HeadraceError(f"{path / name}: missing; {_INDEX} names it")
    files = tuple(path / name for name in names)
    tensors: dict[str, FileTensor] = {}
    for i, file in enumerate(files):
        for name, tensor in read_safetensors(file, i).items():
            if name in tensors:
                raise HeadraceError(f"{tensor.title}: the name occurs in another shard too")
            if weight_map.values.get(name) != file.name:
                raise HeadraceError(f"{tensor.title}: {_INDEX} places it in {shown(weight_map.values.get(name))}")
            tensors[name] = tensor
    for name, file_name in weight_map.values.items():
        if name not in tensors:
            raise HeadraceError(f"{path / file_name}: tensor {shown(name)} is missing; {_INDEX} places it there")
    return files, tensors


def _name(path: Path, config: dict[str, Any]) -> str:
    name = config.get("_name_or_path")
    if isinstance(name, str) and name.strip("./ "):
        return name.rstrip("/").rsplit("/", 1)[-1]
    return path.resolve().name


def _tokenizer(path: Path) -> TokenizerSource:
    tokenizer = path / "tokenizer.json"
    if not tokenizer.exists():
        return TokenizerSource()
    return TokenizerSource(tokenizer_json=tokenizer, chat_template=_chat_template(path))


def _chat_template(path: Path) -> str | None:
    file = path / "chat_template.jinja"
    if file.exists():
        try:
            return read_small(file, MAX_TEMPLATE_BYTES).decode()
        except UnicodeDecodeError as e:
            raise HeadraceError(f"{file}: not valid UTF-8 at byte {e.start}") from None
    settings = path / "tokenizer_config.json"
    if not settings.exists():
        return None
    fields = Fields(read_json(settings), str(settings))
    template = fields.values.get("chat_template")
    if isinstance(template, list):  # several named templates; "default" is the one for chat
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    if template is not None and type(template) is not str:
        raise fields.wrong("chat_template", "a string or a list of named templates")
    return template
