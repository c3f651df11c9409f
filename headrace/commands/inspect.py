"""`headrace inspect`: what a model is, what fits, what would be read, before anything is loaded."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import suppress

from headrace.commands.model import open_model_and_text
from headrace.commands.words import count_of, percent
from headrace.engine import EngineOptions, make_plan
from headrace.errors import HeadraceError
from headrace.sizes import format_size
from headrace.text.sampling import sampler_from_defaults

DEFAULT_CONTEXT = 512
DISK_BYTES_PER_S = 2e9  # an NVMe disk's, for a sense of scale


def inspect(
    model: str,
    memory_bytes: int | None,
    num_threads: int | None,
    context: int | None,
    as_json: bool,
) -> None:
    checkpoint, text = open_model_and_text(model)
    config = checkpoint.config
    # What `run` holds beside the model counts too: its smallest budget is the one to name.
    sampler_from_defaults(config.generation)
    if text is not None and text.chat_template:
        with suppress(HeadraceError):  # a template may refuse this message
            text.encode_chat("")
    context = context or min(DEFAULT_CONTEXT, config.max_position_embeddings)
    plan = make_plan(
        checkpoint,
        EngineOptions(context=context, memory_bytes=memory_bytes, num_threads=num_threads, prompt_rows=context),
    )
    expert_bytes = plan.expert_bytes
    residency = min(1.0, plan.step_arena_bytes / expert_bytes)
    prompt_residency = min(1.0, plan.arena_bytes / expert_bytes)
    # Distinct experts of one token, all layers: what a step reads if none of them is resident.
    token_bytes = expert_bytes * config.num_experts_per_tok // config.num_experts
    read_bytes = int(token_bytes * (1 - residency))
    types = Counter(t.dtype.name for t in checkpoint.tensors.values())
    expert_types = Counter(p[0].name for e in checkpoint.experts for p in e.parts)
    report = {
        "model": checkpoint.name,
        "path": str(checkpoint.path),
        "kind": checkpoint.kind,
        "model_type": config.model_type,
        "num_hidden_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.num_experts_per_tok,
        "moe_intermediate_size": config.moe_intermediate_size,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "trunk_dtypes": dict(types),
        "expert_dtypes": dict(expert_types),
        "expert_bytes": expert_bytes,
        "token_expert_bytes": token_bytes,
        "residency": residency,
        "prompt_residency": prompt_residency,
        "prompt_passes": -(-context // plan.max_rows),
        "uniform_read_bytes_per_token": read_bytes,
        "plan": plan.as_dict(),
    }
    if as_json:
        print(json.dumps(report))
        return
    rows = [
        ("model", f"{checkpoint.name} ({config.model_type}, {checkpoint.kind})"),
        (
            "shape",
            f"{config.num_hidden_layers} layers of {config.num_experts} experts, "
            f"{config.num_experts_per_tok} a token; hidden {config.hidden_size}, "
            f"expert width {config.moe_intermediate_size}, vocabulary {config.vocab_size}",
        ),
        ("weights", f"trunk {_types(types)}; experts {_types(expert_types)}"),
        ("experts", f"{format_size(expert_bytes)} in all, {format_size(token_bytes)} a token"),
        ("trunk", f"{format_size(plan.trunk_bytes)}, always resident"),
        (
            "budget",
            f"{format_size(plan.budget_bytes)}; smallest {format_size(plan.minimum_bytes)}, "
            f"everything resident {format_size(plan.resident_bytes)} (context {plan.context})",
        ),
        (
            "arena",
            f"{format_size(plan.step_arena_bytes)}: {percent(residency)} of the experts resident"
            + (f"; {percent(prompt_residency)} while a prompt runs" if prompt_residency < residency else ""),
        ),
        (
            "reads",
            f"about {format_size(read_bytes)} a token if routing were uniform, {read_bytes / DISK_BYTES_PER_S:.2g} s "
            "from a disk of 2 GB/s; real routing repeats experts and reads less",
        ),
        (
            "passes",
            f"a prompt of {count_of(context, 'token')} takes {-(-context // plan.max_rows)} of up to "
            f"{count_of(plan.max_rows, 'row')}",
        ),
    ]
    for name, line in rows:
        print(f"{name:8} {line}")


def _types(counts: Counter[str]) -> str:
    return ", ".join(f"{name} x{n}" for name, n in counts.most_common())
