"""Invariants 1, 2 and 3 of the engine as a whole, each engine in a process of its own.

On `tiny`, on small random checkpoints of both families, and on a generated checkpoint of about 500 MB.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import checkpoints
import numpy as np
import pytest
import synth

from headrace import _core
from headrace.commands.model import resolve_model
from headrace.formats import open_checkpoint
from headrace.formats.pack import pack_store
from headrace.models.blocks import INV_FREQ, inverse_frequencies
from headrace.models.families import build_graph
from headrace.reference import Reference, ReferenceSession

HERE = Path(__file__).parent
CHILD = [sys.executable, str(HERE / "engine_child.py")]
MEMCAP = [sys.executable, str(HERE.parent / "benchmarks" / "memcap.py")]
NO_CGROUP = 3
ISAS = [isa for isa in ("portable", "avx2", "avx512", "neon") if isa in _core.kernels.isas()]


def child(request: dict, *, isa: str | None = None, prefix: list[str] | None = None) -> dict:
    env = dict(os.environ)
    env.pop("HEADRACE_ISA", None)
    if isa:
        env["HEADRACE_ISA"] = isa
    done = subprocess.run(
        [*(prefix or []), *CHILD, json.dumps(request)],
        capture_output=True,
        text=True,
        env=env,
        timeout=600,
        check=False,
    )
    if prefix and done.returncode == NO_CGROUP:
        pytest.skip("no memory cgroup can be made here")
    assert done.returncode == 0, f"exit {done.returncode}: {done.stderr[-2000:]}"
    report = json.loads(done.stdout)
    # Invariant 1 holds in every one of these runs, whatever else it is for.
    assert report["peak_rss_bytes"] <= report["budget_bytes"]
    return report


def random_tokens(n: int, vocab: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab, n).tolist()


def splits(n: int) -> list[list[int]]:
    return [[n], [1] * n, [7, n - 7]]


# ---- the same bits


@pytest.mark.parametrize("spec", ["OLMOE", "QWEN3"])
@pytest.mark.parametrize("dtype", ["Q4_0", "Q8_0", "F32", "F16", "BF16"])
def test_same_bits_small(tmp_path, spec, dtype):
    """Every budget, policy, expert kernel, thread count, instruction set and split; in place and packed."""
    spec = getattr(checkpoints, spec)
    gguf = tmp_path / "model.gguf"
    checkpoints.write_gguf(gguf, spec, checkpoints.random_weights(spec), dtype=dtype)
    store = tmp_path / "store"
    pack_store(open_checkpoint(gguf), store, lambda done, total: None)
    tokens = random_tokens(19, spec.vocab_size)
    request = {"tokens": tokens, "splits": splits(19)}
    runs = [
        child({**request, "model": str(model), "budget": "minimum", **variant}, isa=isa)
        for model, isa, variant in (
            (gguf, ISAS[0], {"threads": 1}),
            (gguf, ISAS[-1], {"threads": 2, "arena_records": 1}),
            (store, ISAS[-1], {"threads": 2, "arena_records": 5, "policy": "markov"}),
            (store, ISAS[0], {"threads": 1, "arena_records": 1, "policy": "lfu"}),
            (gguf, ISAS[-1], {"threads": 3, "arena_records": 3, "direct_io": False, "policy": "lfru"}),
            (gguf, ISAS[-1], {"threads": 2, "arena_records": 6, "policy": "prefill-hot"}),
            (store, ISAS[-1], {"threads": 2, "arena_records": 2, "per_slot": True}),
            (gguf, ISAS[0], {"threads": 3, "arena_records": 5, "per_slot": True}),
        )
    ]
    assert len({h for run in runs for h in run["hashes"]}) == 1
    assert all(run["counters"]["loads"] > runs[0]["counters"]["loads"] for run in runs[1:])


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> dict[str, Path]:
    """About 500 MB in Q4_0, as a GGUF and as a store."""
    directory = tmp_path_factory.mktemp("large")
    gguf = directory / "large.gguf"
    synth.write_synthetic(gguf, synth.SHAPES["small"])
    store = directory / "store"
    pack_store(open_checkpoint(gguf), store, lambda done, total: None)
    assert 450e6 < gguf.stat().st_size < 600e6
    return {"gguf": gguf, "store": store}


def test_same_bits_large(large):
    tokens = random_tokens(24, 8192)
    request = {"tokens": tokens, "splits": splits(24)}
    runs = []
    for source in ("gguf", "store"):
        for budget, threads in (("minimum", 1), (0.1, 2), (0.6, 1), ("resident", 2)):
            model = str(large[source])
            runs.append(child({**request, "model": model, "budget": budget, "threads": threads}))
    # The portable twin is slow: one short comparison with everything else different too.
    few = {"tokens": tokens[:5], "splits": [[5], [2, 3]], "budget": 0.2}
    runs_few = [child({**few, "model": str(large["gguf"]), "threads": 2}, isa=isa) for isa in ISAS]
    assert len({h for run in runs for h in run["hashes"]}) == 1
    assert len({h for run in runs_few for h in run["hashes"]}) == 1
    assert runs[0]["arena_bytes"] < 0.1 * runs[0]["expert_bytes"]
    assert runs[3]["arena_bytes"] == runs[3]["expert_bytes"]


def test_same_bits_tiny():
    tokens = random_tokens(40, open_checkpoint(resolve_model("tiny")).config.vocab_size)
    request = {"model": "tiny", "tokens": tokens, "splits": splits(40)}
    runs = [
        child({**request, "budget": b, "threads": t}, isa=isa)
        for isa in ISAS
        for b, t in (("minimum", 1), (0.4, 2), ("resident", 2))
    ]
    assert len({h for run in runs for h in run["hashes"]}) == 1


# ---- the budget is a ceiling (child() checks the peak of every run)


def test_named_minimum_works_and_less_is_refused(large):
    request = {"model": str(large["store"]), "tokens": [1, 2, 3], "splits": [[3]]}
    minimum = child({**request, "budget": "minimum"})["budget_bytes"]
    child({**request, "budget": minimum})
    done = subprocess.run(
        [*CHILD, json.dumps({**request, "budget": minimum - (12 << 20)})],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert "too small" in last and "--memory" in last


@pytest.mark.parametrize("budget", ["minimum", 0.5])
def test_budget_holds_over_2000_tokens_and_two_prompts(budget):
    """Prompts of different text, so that the experts in use change."""
    vocab = open_checkpoint(resolve_model("tiny")).config.vocab_size
    prompts = [random_tokens(64, vocab // 8, 1), random_tokens(300, vocab, 2)]
    run = child({"model": "tiny", "budget": budget, "prompts": prompts, "generate": 1000})
    assert [len(ids) for ids in run["greedy_ids"]] == [1000, 1000]
    assert run["arena_bytes_at_end"] >= 0.9 * run["arena_bytes"] - (1 << 20)


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> Path:
    """Some 77 MB of experts. Passes of 8,192 rows take 26 MB, and reading ahead 26 MB of the arena."""
    spec = checkpoints.QWEN3.but(
        hidden_size=256,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        num_experts=96,
        moe_intermediate_size=512,
        max_position_embeddings=16384,
    )
    gguf = tmp_path_factory.mktemp("wide") / "model.gguf"
    checkpoints.write_gguf(gguf, spec, checkpoints.random_weights(spec), dtype="Q8_0")
    return gguf


@pytest.mark.parametrize(
    ("rows", "budget", "max_rows"), [(4096, 0.5, 4096), (8192, 0.6, 8192), (9000, 0.5, 4500), (8192, "resident", 8192)]
)
def test_budget_holds_in_passes_of_thousands_of_rows(wide, rows, budget, max_rows):
    """Also in a cgroup of it. What only they need is the arena's afterwards, whatever comes in turn."""
    prompts = [random_tokens(rows, 64, 1), random_tokens(600, 64, 2), random_tokens(rows // 2, 64, 3)]
    run = child({"model": str(wide), "budget": budget, "prompts": prompts, "generate": 20})
    assert run["max_rows"] == max_rows
    assert run["scratch_bytes_at_end"] < 1 << 20
    if budget == "resident":
        assert run["arena_bytes"] == run["arena_bytes_at_end"] == run["expert_bytes"]
    else:
        assert run["arena_bytes_at_end"] > run["arena_bytes"] + max_rows * 2048
    if budget == 0.6:
        limit = run["budget_bytes"]
        request = {"model": str(wide), "budget": limit, "prompts": prompts, "generate": 20}
        assert child(request, prefix=[*MEMCAP, str(limit)])["greedy_ids"] == run["greedy_ids"]


@pytest.mark.parametrize("threads", [1, 200])
def test_smallest_budget_counts_what_each_thread_takes(tmp_path, threads):
    """Wide heads, so that attention's buffers of a thread are larger than its stack."""
    spec = checkpoints.QWEN3.but(num_attention_heads=8, num_key_value_heads=8, head_dim=256)
    gguf = tmp_path / "model.gguf"
    checkpoints.write_gguf(gguf, spec, checkpoints.random_weights(spec), dtype="Q8_0")
    tokens = random_tokens(200, spec.vocab_size)
    request = {"model": str(gguf), "tokens": tokens, "splits": [[200]], "prompts": [tokens], "generate": 2}
    child({**request, "budget": "minimum", "threads": threads})


def test_slots_are_given_back_when_the_process_grows(large):
    request = {"model": str(large["store"]), "budget": 0.3, "prompts": [[1, 2, 3]], "generate": 2}
    run = child({**request, "grow_mib": 40})
    assert run["arena_bytes_at_end"] < run["arena_bytes"] - (25 << 20)


@pytest.mark.parametrize("source", ["gguf", "store"])
@pytest.mark.parametrize("budget", ["minimum", 0.3, "resident"])
def test_alone_in_a_cgroup_of_its_budget_it_is_not_killed(large, source, budget):
    request = {"model": str(large[source]), "tokens": random_tokens(48, 8192)}
    request |= {"splits": [[48], [1] * 48], "prompts": [[5, 6, 7]], "generate": 60}
    limit = child({**request, "budget": budget, "splits": [[1]]})["budget_bytes"]
    capped = child({**request, "budget": limit}, prefix=[*MEMCAP, str(limit)])
    assert len(capped["greedy_ids"][0]) == 60


# ---- nothing twice


@pytest.mark.parametrize("arena_records", [1, 7, 1000])
def test_each_expert_is_read_at_most_once_a_pass(tmp_path, arena_records):
    """Loads of a prefill pass equal the distinct experts that the oracle routes to, and bytes follow from them."""
    spec = checkpoints.OLMOE.but(num_hidden_layers=3, num_experts=32, moe_intermediate_size=64)
    gguf = tmp_path / "model.gguf"
    checkpoints.write_gguf(gguf, spec, checkpoints.random_weights(spec), dtype="F32")
    store = tmp_path / "store"
    pack_store(open_checkpoint(gguf), store, lambda done, total: None)
    tokens = random_tokens(24, spec.vocab_size)

    checkpoint = open_checkpoint(gguf)
    graph = build_graph(checkpoint)
    distinct = []

    def observe(node, outputs):
        if node.op == "route":
            distinct.append(len(np.unique(outputs[0])))

    vectors = {INV_FREQ: inverse_frequencies(checkpoint.config)[None]}
    oracle = Reference(graph, checkpoint, vectors, observe=observe)
    oracle.run(ReferenceSession(graph), tokens, list(range(24)))

    request = {"model": str(store), "tokens": tokens, "budget": "resident", "arena_records": arena_records}
    run = child({**request, "splits": [[24]]})
    c = run["counters"]
    assert c["hits"] == c["late_hits"] == 0
    assert c["loads"] == sum(distinct)
    assert c["bytes_read"] == c["loads"] * run["largest_record_bytes"]
    assert c["bytes_unused"] == 0

    # A second pass over the same tokens: with everything resident it reads nothing.
    c = child({**request, "splits": [[24], [24]]})["counters"]
    assert c["hits"] + c["late_hits"] + c["loads"] == 2 * sum(distinct)
    if arena_records == 1000:
        assert c["loads"] == sum(distinct)
