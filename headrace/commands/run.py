"""`headrace run`: one prompt in, text out."""

from __future__ import annotations

import json
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from headrace import _core
from headrace.commands.model import open_model_and_text, warn
from headrace.commands.words import count_of, percent, significant
from headrace.engine import Engine, EngineOptions, Figures, Session
from headrace.errors import HeadraceError
from headrace.experts.recorded_run import Recorder
from headrace.experts.trace_file import check_destination, identify
from headrace.formats.checkpoint import DType
from headrace.generate import Generation
from headrace.sizes import format_size
from headrace.text.sampling import sampler_from_defaults
from headrace.text.stop import stop_token_ids
from headrace.text.stream import TextStream
from headrace.text.tokenizer import Tokenizer

PIECE_CHARS = 32 << 10  # tokenized at a time, which takes some 200 bytes of memory a byte


@dataclass(frozen=True)
class RunOptions:
    model: str
    prompt: str
    max_tokens: int
    memory_bytes: int | None
    num_threads: int | None
    context: int | None
    temperature: float | None
    top_p: float | None
    seed: int | None
    raw: bool
    kv: str
    policy: str
    record: Path | None
    json: bool


def run(options: RunOptions) -> None:
    _core.exit_on_interrupt(True)  # loading writes nothing and cannot be polled
    if options.record:
        check_destination(options.record)
    checkpoint, text = open_model_and_text(options.model)
    if text is None:
        raise HeadraceError(
            f"{checkpoint.path}: holds no vocabulary, so text cannot be tokenized; "
            "use `headrace bench`, which feeds token ids"
        )
    tokenizer = text.tokenizer
    sampler = sampler_from_defaults(
        checkpoint.config.generation,
        temperature=options.temperature,
        top_p=options.top_p,
        seed=options.seed,
    )
    limit = checkpoint.config.max_position_embeddings
    _refuse_far_too_long(tokenizer, options.prompt, limit)
    if text.chat_template and not options.raw:
        prompt_ids = text.encode_chat(options.prompt)
    else:
        prompt_ids = tokenizer.encode(options.prompt)
    if not prompt_ids:
        raise HeadraceError("the prompt is empty; give some text")
    context = options.context or min(len(prompt_ids) + options.max_tokens, limit)
    if len(prompt_ids) > context:
        raise HeadraceError(
            f"the prompt has {count_of(len(prompt_ids), 'token')}, the context holds {context}"
            f" (the model's limit is {limit}); shorten the prompt" + (" or raise -c" if context < limit else "")
        )
    engine_options = EngineOptions(
        context=context,
        memory_bytes=options.memory_bytes,
        num_threads=options.num_threads,
        prompt_rows=len(prompt_ids),
        kv_dtype=DType.F32 if options.kv == "f32" else DType.F16,
        policy=options.policy,
        warn=warn,
        record_routing=options.record is not None,
    )
    identity = identify(checkpoint) if options.record else None
    with Engine(checkpoint, engine_options) as engine, ExitStack() as recording:
        _core.exit_on_interrupt(False)  # from here on a pass notices it
        recorder = None
        if options.record and identity:
            recorder = recording.enter_context(Recorder(options.record, engine, identity))
        session = engine.session(observe=recorder.observe if recorder else None)
        start = time.perf_counter()
        logits = session.prefill(prompt_ids, prefill_progress if sys.stderr.isatty() and not options.json else None)
        generation = Generation(
            session,
            logits,
            sampler,
            options.max_tokens,
            stop_token_ids(checkpoint.config, tokenizer),
        )
        stream, ttft_s = TextStream(tokenizer), 0.0
        pieces: list[str] = []

        def report() -> dict[str, Any]:
            return {
                **engine.report(),
                **session_report(session),
                "prompt_tokens": len(prompt_ids),
                "generated_tokens": len(generation.token_ids),
                "ttft_s": ttft_s,
                "finish_reason": generation.finish_reason,
                "seed": sampler.seed,
                "text": "".join(pieces),
                "token_ids": generation.token_ids,
                **({"record": str(options.record)} if options.record else {}),
            }

        try:
            for token in generation:
                ttft_s = ttft_s or time.perf_counter() - start
                pieces.append(stream.push(token))
                if not options.json:
                    sys.stdout.write(pieces[-1])
                    sys.stdout.flush()
        except KeyboardInterrupt:
            if not options.json:
                print(f"\n{figures_line(report(), session)}, interrupted", file=sys.stderr)
                if recorder and recorder.writer.num_tokens:
                    print(
                        f"{recorder.writer.partial}: the first {count_of(recorder.writer.num_tokens, 'token')}",
                        file=sys.stderr,
                    )
            raise
        pieces.append(stream.finish())
        recording.close()  # the trace is whole before the run is said to be done
        if options.json:
            print(json.dumps(report()))
        else:
            sys.stdout.write(pieces[-1] + "\n")
            sys.stdout.flush()
            print(_last_line(report(), session, sampler.temperature > 0), file=sys.stderr)


def _last_line(report: dict, session: Session, is_sampled: bool) -> str:
    seed = f", seed {report['seed']}" if is_sampled else ""
    stopped = (
        f", stopped at the end of the context ({report['context']})" if report["finish_reason"] == "context" else ""
    )
    return figures_line(report, session) + seed + stopped


def prefill_progress(done: int, total: int) -> None:
    """One line on a terminal, rewritten, and removed at the end."""
    if done < total:
        print(f"\rprefill {done}/{total} tokens", end="", file=sys.stderr, flush=True)
    elif total > 1:
        print("\r\033[K", end="", file=sys.stderr, flush=True)


def _refuse_far_too_long(tokenizer: Tokenizer, prompt: str, limit: int) -> None:
    """Tokenizing the whole could take more than the budget, so this is told from pieces first.

    Cutting a text adds a few tokens where it cuts; it never doubles them.
    """
    num_tokens = 0
    for begin in range(0, len(prompt), PIECE_CHARS):
        num_tokens += len(tokenizer.encode(prompt[begin : begin + PIECE_CHARS], add_special_tokens=False))
        if num_tokens > 2 * limit + PIECE_CHARS:
            raise HeadraceError(
                f"the prompt has more than {num_tokens // 2} tokens, the model's limit is {limit}; shorten the prompt"
            )


class Phases(Protocol):
    """A Session, or a Scorer."""

    prefill_figures: Figures
    decode_figures: Figures


def session_report(session: Phases) -> dict[str, Any]:
    prefill, decode = session.prefill_figures, session.decode_figures
    return {
        "prefill_tps": prefill.tps,
        "decode_tps": decode.tps,
        "prefill": {**prefill.as_dict(), "bubble_rate": prefill.bubble_rate},
        "decode": decode.as_dict(),
    }


def hit_rate(figures: Figures) -> float | None:
    """Share of expert uses that needed no demand read; None if there were none."""
    c = figures.counters
    uses = sum(c.get(k, 0) for k in ("hits", "late_hits", "loads"))
    return (uses - c.get("loads", 0)) / uses if uses else None


def figures_line(report: dict, session: Phases) -> str:
    read = sum(report[p]["expert_bytes_read"] for p in ("prefill", "decode"))
    hits = hit_rate(session.decode_figures)
    decode = (
        f"decode {significant(report['decode_tps'])} tokens/s, decode hit rate {hits:.1%}, " if hits is not None else ""
    )
    return (
        f"prefill {significant(report['prefill_tps'])} tokens/s, {decode}read {format_size(read)}, "
        f"peak memory {format_size(report['peak_rss_bytes'])} of {format_size(report['budget_bytes'])}, "
        f"experts resident {percent(report['residency'])}"
    )
