"""Runs an engine in a process of its own, so that its peak memory is its own. Prints one JSON object.

    python engine_child.py '{"model": PATH, "budget": "minimum" | "resident" | fraction | bytes, ...}'

Keys: threads, tokens (ids), splits (lists of pass lengths; one session each), generate (greedy tokens after the
last split), prompts (lists of ids; each is prefilled and decoded greedily in turn), kv, direct_io, max_rows, policy,
arena_records (shrinks the arena to so many experts: a small model's experts fit any budget), grow_mib (what this
process grows by afterwards, 1 MiB a decode step), per_slot (the expert kernel of the splits).
For each split: the SHA-256 of all rows' logits.
"""

from __future__ import annotations

import hashlib
import json
import sys

import numpy as np

from headrace import machine
from headrace.commands.model import open_model
from headrace.engine import Engine, EngineOptions, make_plan
from headrace.formats.checkpoint import DType


def budget_bytes(request: dict, checkpoint, options: dict) -> int:
    """minimum, resident, or a fraction of the way between them; as the planner of this process sees it."""
    wanted = request["budget"]
    if isinstance(wanted, int):
        return wanted
    plan = make_plan(checkpoint, EngineOptions(**options))
    share = {"minimum": 0.0, "resident": 1.0}.get(wanted, wanted)
    return int(plan.minimum_bytes + share * max(0, plan.resident_bytes - plan.minimum_bytes))


def split_hash(engine: Engine, tokens: list[int], lengths: list[int], per_slot: bool) -> str:
    session = engine.session()
    session.per_slot = per_slot
    digest, at = hashlib.sha256(), 0
    for n in lengths:
        digest.update(np.ascontiguousarray(session.verify(tokens[at : at + n])).tobytes())
        at += n
    session.close()
    return digest.hexdigest()


def greedy(engine: Engine, prompt: list[int], n: int) -> list[int]:
    session = engine.session()
    token, out = int(session.prefill(prompt).argmax()), []
    for _ in range(n):
        out.append(token)
        token = int(session.step(token).argmax())
    session.close()
    return out


def drift(engine: Engine, grow_mib: int) -> None:
    """As a leak elsewhere in the process would."""
    session, held = engine.session(), []
    for i in range(grow_mib):
        held.append(bytes([1]) * (1 << 20))
        if session.length == engine.options.context:
            session.rollback(0)
        session.step(i)
    session.close()


def main() -> None:
    request = json.loads(sys.argv[1])
    checkpoint = open_model(request["model"])
    tokens = request.get("tokens", [])
    prompts = request.get("prompts", [])
    generate = request.get("generate", 0)
    longest = max([len(tokens), *(len(p) for p in prompts)])
    options = {
        "context": longest + generate + 1,
        "num_threads": request.get("threads", 2),
        "prompt_rows": longest,
        "kv_dtype": DType[request.get("kv", "F16")],
        "max_out_rows": longest if tokens else 1,
        "max_rows": request.get("max_rows"),
        "direct_io": request.get("direct_io", True),
        "policy": request.get("policy", "lru"),
    }
    options["memory_bytes"] = budget_bytes(request, checkpoint, options)
    with Engine(checkpoint, EngineOptions(**options)) as engine:
        if request.get("arena_records"):
            engine.limit_arena(request["arena_records"] * engine._smallest_arena)
        arena_at_start = engine.experts.arena_bytes
        hashes = [
            split_hash(engine, tokens, lengths, request.get("per_slot", False)) for lengths in request.get("splits", [])
        ]
        greedy_ids = [greedy(engine, p, generate) for p in prompts]
        drift(engine, request.get("grow_mib", 0))
        report = {
            "budget_bytes": options["memory_bytes"],
            "peak_rss_bytes": machine.peak_rss_bytes(),
            "minimum_bytes": engine.plan.minimum_bytes,
            "arena_bytes": arena_at_start,
            "arena_bytes_at_end": engine.experts.arena_bytes,
            "expert_bytes": engine._source.total_bytes(),
            "largest_record_bytes": engine._smallest_arena,
            "max_rows": engine.max_rows,
            "scratch_bytes_at_end": engine._executor.scratch_bytes,
            "counters": engine.counters(),
            "hashes": hashes,
            "greedy_ids": greedy_ids,
        }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
