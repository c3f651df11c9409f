"""`headrace trace`: records the routing of a text, in two passes as SeqMoE, section 5.1: token ids first (given, or
generated), then one prefill that dumps what every layer's router chose for every token.

By invariant 2 that is what decoding the same tokens chooses.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headrace import _core
from headrace.commands.model import Text, open_model_and_text
from headrace.commands.run import prefill_progress, session_report
from headrace.commands.words import count_of, significant
from headrace.engine import Engine, EngineOptions, Routing
from headrace.errors import HeadraceError
from headrace.experts.trace_file import TraceWriter, check_destination, identify
from headrace.formats.checkpoint import Checkpoint
from headrace.generate import Generation
from headrace.sizes import format_size
from headrace.text.files import read_text
from headrace.text.sampling import Sampler, sampler_from_defaults
from headrace.text.stop import stop_token_ids


@dataclass(frozen=True)
class TraceOptions:
    """max_tokens: to generate after each file's text; None records the text alone."""

    model: str
    files: list[Path]
    output: Path
    max_tokens: int | None
    memory_bytes: int | None
    num_threads: int | None
    context: int | None
    temperature: float | None
    top_p: float | None
    seed: int | None
    raw: bool
    json: bool


def record(options: TraceOptions) -> None:
    _core.exit_on_interrupt(True)  # nothing has been written
    check_destination(options.output)
    checkpoint, text = open_model_and_text(options.model)
    if text is None:
        raise HeadraceError(
            f"{checkpoint.path}: holds no vocabulary, so text cannot be tokenized; give a model that has one"
        )
    identity = identify(checkpoint)
    sampler = sampler_from_defaults(
        checkpoint.config.generation, temperature=options.temperature, top_p=options.top_p, seed=options.seed
    )
    room = options.max_tokens or 0
    sequences = _sequences(options, checkpoint, text)
    longest = max(len(ids) for ids in sequences)
    engine_options = EngineOptions(
        context=options.context or longest + room,
        memory_bytes=options.memory_bytes,
        num_threads=options.num_threads,
        prompt_rows=longest + room,
        record_routing=True,
    )
    config, show = checkpoint.config, sys.stderr.isatty() and not options.json
    with Engine(checkpoint, engine_options) as engine:
        _core.exit_on_interrupt(False)  # from here on a pass notices it
        num_generated = 0
        if options.max_tokens:
            stop_ids = stop_token_ids(config, text.tokenizer)
            for i, ids in enumerate(sequences):
                sequences[i] = _generated(engine, ids, options.max_tokens, sampler, stop_ids)
                num_generated += len(sequences[i]) - len(ids)
        writer = TraceWriter(
            options.output, identity, len(checkpoint.experts), config.num_experts, config.num_experts_per_tok
        )
        report: dict[str, Any] = {
            "trace": str(options.output),
            "sequences": len(sequences),
            "generated_tokens": num_generated,
        }
        try:
            with writer:
                report |= _dump(engine, sequences, writer, show)
        except KeyboardInterrupt:
            if writer.num_tokens and not options.json:
                print(f"{writer.partial}: {count_of(writer.num_tokens, 'token')}, interrupted", file=sys.stderr)
            raise
        report |= engine.report()
    report["trace_bytes"] = options.output.stat().st_size
    if options.json:
        print(json.dumps(report))
        return
    print(
        f"{options.output}: {count_of(report['tokens'], 'token')} in {count_of(len(sequences), 'sequence')} of "
        f"{report['model']}, {count_of(len(checkpoint.experts), 'layer')}, {config.num_experts_per_tok} of "
        f"{config.num_experts} experts, {format_size(report['trace_bytes'])}; "
        f"recorded at {significant(report['prefill_tps'])} tokens/s, "
        f"peak memory {format_size(report['peak_rss_bytes'])} of {format_size(report['budget_bytes'])}"
    )


def _sequences(options: TraceOptions, checkpoint: Checkpoint, text: Text) -> list[np.ndarray]:
    """int32 token ids of the files. A text longer than the context is cut into sequences; a prompt must fit."""
    limit = checkpoint.config.max_position_embeddings
    context = min(options.context or limit, limit)
    room = context - (options.max_tokens or 0)
    sequences: list[np.ndarray] = []
    for file in options.files:
        content = read_text(file)
        if options.max_tokens and text.chat_template and not options.raw:
            ids = np.array(text.encode_chat(content), np.int32)
        else:
            ids = text.tokenizer.encode_long(content)
        if not len(ids):
            raise HeadraceError(f"{file}: is empty; give some text")
        if len(ids) <= room:
            sequences.append(ids)
        elif options.max_tokens:
            raise HeadraceError(
                f"{file}: {count_of(len(ids), 'token')} and {options.max_tokens} to generate, the context holds "
                f"{context} (the model's limit is {limit}); shorten the text or give a smaller -n"
            )
        else:
            sequences += _cut(ids, context, np.array(text.tokenizer.encode(""), np.int32))
    return sequences


def _cut(ids: np.ndarray, context: int, prefix: np.ndarray) -> list[np.ndarray]:
    """Pieces of at most `context` tokens, each with what stands before every text (a BOS, or nothing)."""
    step = context - len(prefix)
    if step < 1:
        raise HeadraceError(f"context {context} leaves no room for text; give a larger -c")
    ids = ids[len(prefix) :]
    return [np.concatenate([prefix, ids[i : i + step]]) for i in range(0, len(ids), step)]


def _generated(
    engine: Engine, prompt: np.ndarray, max_tokens: int, sampler: Sampler, stop_ids: frozenset[int]
) -> np.ndarray:
    session = engine.session()
    generation = Generation(session, session.prefill(prompt.tolist()), sampler, max_tokens, stop_ids)
    for _ in generation:
        pass
    session.close()
    return np.concatenate([prompt, np.array(generation.token_ids, np.int32)])


def _dump(engine: Engine, sequences: list[np.ndarray], writer: TraceWriter, show: bool) -> dict[str, Any]:
    """Prefills every sequence into the writer."""
    total, done = sum(map(len, sequences)), 0

    def observe(routing: Routing) -> None:
        writer.add(routing.tokens, routing.ids, routing.weights, routing.scores)

    def progress(rows: int, _: int) -> None:
        if show:
            prefill_progress(done + rows, total)

    session = engine.session(observe=observe)
    for ids in sequences:
        session.rollback(0)
        session.prefill(ids.tolist(), progress)
        writer.end_sequence()
        done += len(ids)
    figures = session_report(session)
    return {"tokens": total, "prefill_tps": figures["prefill_tps"], "prefill": figures["prefill"]}
