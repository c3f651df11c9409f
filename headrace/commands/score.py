"""`headrace score`: log-likelihood and perplexity of texts, or of choices after a prompt (headrace/score.py)."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headrace import _core
from headrace.commands.model import open_model_and_text, warn
from headrace.commands.run import figures_line, prefill_progress, session_report
from headrace.commands.words import count_of
from headrace.engine import Engine, EngineOptions
from headrace.errors import HeadraceError, UsageError
from headrace.models.fields import shown
from headrace.score import Item, Scorer, choice_item, scoring_options, text_item
from headrace.text.files import STDIN, read_text
from headrace.text.jsonl import read_jsonl
from headrace.text.tokenizer import Tokenizer

# How choices are compared: by their log-likelihood, over their tokens, over their bytes.
MEASURES = ("log_likelihood", "per_token", "per_byte")


@dataclass(frozen=True)
class ScoreOptions:
    """context: None: the longest text's, at most the model's limit. stride: None: a longer text is an error."""

    model: str
    file: Path
    choices: bool
    stride: int | None
    context: int | None
    memory_bytes: int | None
    num_threads: int | None
    token_log_probs: bool
    json: bool


@dataclass(frozen=True)
class _Text:
    """where: "FILE: line 3". tokens: int32."""

    where: str
    tokens: np.ndarray

    @property
    def longest(self) -> int:
        return len(self.tokens)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class _Question:
    """wholes: the tokens of prompt and choice together, of each choice. answer: the right choice, if it was said."""

    where: str
    prompt: np.ndarray
    wholes: list[np.ndarray]
    num_bytes: list[int]  # of the choices
    answer: int | None

    @property
    def longest(self) -> int:
        return max(map(len, self.wholes))

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.wholes))


def score(options: ScoreOptions) -> None:
    _core.exit_on_interrupt(True)  # nothing is written, and tokenizing cannot be polled
    checkpoint, text = open_model_and_text(options.model)
    if text is None:
        raise HeadraceError(
            f"{checkpoint.path}: holds no vocabulary, so text cannot be tokenized; give a model that has one"
        )
    records: list[Any] = list(_read(options, text.tokenizer))
    if not records:
        raise HeadraceError(f"{options.file}: holds no text; expected one at least")
    limit = checkpoint.config.max_position_embeddings
    context = options.context or min(max(r.longest for r in records), limit)
    if options.stride is not None and options.stride >= context and options.context is not None:
        raise UsageError("--stride", f"expected 1 to {context - 1} for a context of {context}, found {options.stride}")
    items = [_item(record, context, options.stride) for record in records]
    engine_options = EngineOptions(
        context=context, memory_bytes=options.memory_bytes, num_threads=options.num_threads, warn=warn
    )
    engine_options = scoring_options(checkpoint, items, engine_options)
    total = sum(s.num_rows for item in items for s in item)
    show = sys.stderr.isatty() and not options.json
    results: list[dict[str, Any]] = []
    start, ttft_s = time.perf_counter(), 0.0
    with Engine(checkpoint, engine_options) as engine:
        _core.exit_on_interrupt(False)  # from here on a pass notices it
        scorer = Scorer(engine)
        scores = scorer.run(items, (lambda done: prefill_progress(done, total)) if show else None)
        for record, item, log_probs in zip(records, items, scores, strict=True):
            ttft_s = ttft_s or time.perf_counter() - start
            result = _result(record, item, log_probs, options.token_log_probs)
            results.append(result)
            if not options.json:
                if show:
                    print("\r\033[K", end="", file=sys.stderr, flush=True)
                _print(result, text.tokenizer)
        report = {
            **engine.report(),
            **session_report(scorer),
            "prompt_tokens": sum(r.num_tokens for r in records),
            "generated_tokens": 0,
            "ttft_s": ttft_s,
            "passes": scorer.num_passes,
            "stride": options.stride,
            **(_accuracy(results) if options.choices else _overall(results)),
        }
        line = figures_line(report, scorer)
    if options.json:  # now that the arena is gone: results may be large
        print(json.dumps({**report, "questions" if options.choices else "texts": results}))
        return
    if options.choices:
        _print_accuracy(report)
    elif len(results) > 1:
        print(
            f"{count_of(len(results), 'text')}, {report['scored_tokens']} tokens scored: "
            f"log-likelihood {report['log_likelihood']:.4f}, perplexity {report['perplexity']:.4f}"
        )
    sys.stdout.flush()
    print(line, file=sys.stderr)


# ---- reading


def _read(options: ScoreOptions, tokenizer: Tokenizer) -> Iterator[_Text | _Question]:
    file = options.file
    if options.choices:
        for where, values in read_jsonl(file):
            yield _at(where, lambda where=where, values=values: _question(where, values, tokenizer))
    elif file.suffix.lower() == ".jsonl":
        for where, values in read_jsonl(file):
            text = _string(where, "text", values.get("text"))
            yield _at(where, lambda where=where, text=text: _Text(where, tokenizer.encode_long(text)))
    else:
        where = str(file) if file != STDIN else "standard input"
        yield _at(where, lambda: _Text(where, tokenizer.encode_long(read_text(file))))


def _at(where: str, make):
    """What make() gives; its errors say where."""
    try:
        return make()
    except HeadraceError as error:
        message = str(error)
        raise HeadraceError(message if message.startswith(where) else f"{where}: {message}") from None


def _string(where: str, name: str, value: object) -> str:
    if not isinstance(value, str):
        raise HeadraceError(f'{where}: "{name}": expected a string, found {_found(value)}')
    return value


def _found(value: object) -> str:
    return "nothing" if value is None else shown(value)


def _question(where: str, values: dict[str, Any], tokenizer: Tokenizer) -> _Question:
    prompt, choices, answer = (values.get(name) for name in ("prompt", "choices", "answer"))
    text = _string(where, "prompt", prompt)
    if not isinstance(choices, list) or not choices:
        raise HeadraceError(f'{where}: "choices": expected a list of one string or more, found {_found(choices)}')
    texts = [_string(where, f"choices[{i}]", choice) for i, choice in enumerate(choices)]
    if isinstance(answer, str) and texts.count(answer) == 1:
        answer = texts.index(answer)
    is_index = isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(texts)
    if answer is not None and not is_index:
        raise HeadraceError(
            f'{where}: "answer": expected one of the choices or a number from 0 to {len(texts) - 1}, '
            f"found {shown(answer)}"
        )
    return _Question(
        where,
        tokenizer.encode_long(text),
        [tokenizer.encode_long(text + choice) for choice in texts],
        [len(choice.encode("utf-8", "surrogatepass")) for choice in texts],
        answer,
    )


def _item(record: _Text | _Question, context: int, stride: int | None) -> Item:
    if isinstance(record, _Text):
        return _at(record.where, lambda: text_item(record.tokens, context, stride))
    return _at(record.where, lambda: choice_item(record.prompt, record.wholes, context))


# ---- results


def _result(record: _Text | _Question, item: Item, log_probs: list[np.ndarray], with_tokens: bool) -> dict[str, Any]:
    if isinstance(record, _Text):
        return {"where": record.where, **_likelihood(record.tokens, np.concatenate(log_probs), with_tokens)}
    scores = []
    first = len(item) - len(record.wholes)  # after the prompt's own
    for whole, num_bytes, values in zip(record.wholes, record.num_bytes, log_probs[first:], strict=True):
        s = _likelihood(whole, values, with_tokens)
        s["per_token"] = s["log_likelihood"] / s["scored_tokens"]
        s["per_byte"] = s["log_likelihood"] / max(1, num_bytes)
        scores.append(s)
    best = {m: max(range(len(scores)), key=lambda i: (scores[i][m], -i)) for m in MEASURES}
    return {"where": record.where, "choices": scores, "best": best, "answer": record.answer}


def _likelihood(tokens: np.ndarray, log_probs: np.ndarray, with_tokens: bool) -> dict[str, Any]:
    """Of the last len(log_probs) tokens."""
    total = float(log_probs.sum(dtype=np.float64))
    result: dict[str, Any] = {
        "tokens": len(tokens),
        "scored_tokens": len(log_probs),
        "log_likelihood": total,
        "perplexity": _perplexity(total, len(log_probs)),
    }
    if with_tokens:
        result["token_ids"] = tokens.tolist()
        result["token_log_probs"] = [None] * (len(tokens) - len(log_probs)) + log_probs.tolist()
    return result


def _perplexity(log_likelihood: float, num_tokens: int) -> float:
    return math.exp(min(-log_likelihood / num_tokens, 700.0))  # what a float holds


def _overall(results: list[dict[str, Any]]) -> dict[str, Any]:
    total, tokens = sum(r["log_likelihood"] for r in results), sum(r["scored_tokens"] for r in results)
    return {"scored_tokens": tokens, "log_likelihood": total, "perplexity": _perplexity(total, tokens)}


def _accuracy(results: list[dict[str, Any]]) -> dict[str, Any]:
    answered = [r for r in results if r["answer"] is not None]
    right = {m: sum(r["best"][m] == r["answer"] for r in answered) for m in MEASURES}
    return {
        "scored_tokens": sum(c["scored_tokens"] for r in results for c in r["choices"]),
        "answered": len(answered),
        "right": right,
        "accuracy": {m: n / len(answered) if answered else None for m, n in right.items()},
    }


def _print(result: dict[str, Any], tokenizer: Tokenizer) -> None:
    if "choices" not in result:
        print(
            f"{result['where']}: {result['tokens']} tokens, log-likelihood {result['log_likelihood']:.4f}, "
            f"perplexity {result['perplexity']:.4f}"
        )
        _print_tokens(result, tokenizer)
        return
    best, answer = result["best"], result["answer"]
    verdict = "" if answer is None else ", right" if best["log_likelihood"] == answer else f", the answer is {answer}"
    print(f"{result['where']}: choice {best['log_likelihood']}{verdict}")
    for i, c in enumerate(result["choices"]):
        print(
            f"  {i}: log-likelihood {c['log_likelihood']:.4f}, per token {c['per_token']:.4f}, "
            f"per byte {c['per_byte']:.4f}"
        )
        _print_tokens(c, tokenizer)


def _print_tokens(result: dict[str, Any], tokenizer: Tokenizer) -> None:
    for token, log_prob in zip(result.get("token_ids", ()), result.get("token_log_probs", ()), strict=True):
        if log_prob is not None:
            print(f"{log_prob:12.4f}  {token:6}  {tokenizer.token_text(token)!r}")


def _print_accuracy(report: dict[str, Any]) -> None:
    if not report["answered"]:
        return
    names = {"log_likelihood": "by log-likelihood", "per_token": "per token", "per_byte": "per byte"}
    shares = ", ".join(f"{report['accuracy'][m]:.1%} {names[m]}" for m in MEASURES)
    print(f"accuracy over {count_of(report['answered'], 'answer')}: {shares}")
