"""Scoring: the executor's log-probabilities against the oracle and PyTorch, the same bits however texts share passes,
windows and choices, and `headrace score` as a user meets it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import checkpoints
import numpy as np
import pytest
from checkpoints import OLMOE, QWEN3, random_weights, write_gguf
from golden import make_held_out, make_score
from oracle import run_int8
from test_cli import assert_one_line_error, headrace

from headrace import _core, reference
from headrace.commands.model import open_model
from headrace.commands.score import ScoreOptions, score
from headrace.engine import Engine, EngineOptions
from headrace.errors import HeadraceError
from headrace.formats import open_checkpoint
from headrace.formats.checkpoint import DType
from headrace.score import Item, Scorer, Sequence, choice_item, scoring_options, text_item
from headrace.text.tokenizer import load_tokenizer

SPEC = QWEN3.but(num_hidden_layers=2, vocab_size=330)


def tokens(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, SPEC.vocab_size, n).astype(np.int32)


@pytest.fixture(scope="module")
def gguf(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("score") / "model.gguf"
    return write_gguf(path, SPEC, random_weights(SPEC), dtype="Q4_0", vocabulary=True)


def load(gguf: Path, one_expert: bool = False, **options) -> Engine:
    engine = Engine(open_checkpoint(gguf), EngineOptions(**{"context": 512, "num_threads": 2, **options}))
    if one_expert:
        engine.limit_arena(engine._smallest_arena)
    return engine


@pytest.fixture(scope="module")
def alone(gguf):
    """Log-probabilities of tokens[1:] of a text, in a session of its own."""
    with load(gguf) as engine:

        def score(text: np.ndarray) -> np.ndarray:
            session = engine.session()
            try:
                return session.score(text.tolist())
            finally:
                session.close()

        yield score


def run(engine: Engine, items: list[Item]) -> list[list[np.ndarray]]:
    return list(Scorer(engine).run(items))


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and a.tobytes() == b.tobytes()


# ---- one text


def test_log_probs_are_those_of_the_logits(gguf, alone):
    text = tokens(150)
    with load(gguf, max_out_rows=150) as engine:
        logits = engine.session().verify(text.tolist())
    expected = reference.log_probs(logits[:-1], text[1:].tolist())[:, 0]
    np.testing.assert_allclose(alone(text), expected, rtol=1e-6, atol=1e-6)


def test_bits_do_not_depend_on_passes_threads_and_arena(gguf, alone):
    text = tokens(150)
    expected = alone(text)
    for options in (
        {"max_rows": 8, "num_threads": 1},
        {"max_rows": 149, "one_expert": True},
        {"max_rows": 100, "num_threads": 3, "policy": "markov"},
    ):
        with load(gguf, **options) as engine:
            assert same_bits(engine.session().score(text.tolist()), expected), options


def test_a_session_goes_on_with_the_last_token(gguf, alone):
    text = tokens(60).tolist()
    with load(gguf, max_rows=16) as engine:
        session = engine.session()
        parts = [session.score(text[:21]), session.score(text[20:22]), session.score(text[21:])]
        assert session.length == 59
        assert same_bits(np.concatenate(parts), alone(np.array(text, np.int32)))
        assert session.prefill_figures.tokens == 59
        with pytest.raises(HeadraceError, match="at least two"):
            session.score([5])
        with pytest.raises(HeadraceError, match="target 330 is outside the vocabulary"):
            session.score([*text[:40], 330])
        assert session.length == 59


def test_a_model_that_gives_nan_is_an_error(tmp_path):
    weights = random_weights(SPEC)
    weights["output.weight"][77, 3] = np.nan
    write_gguf(tmp_path / "nan.gguf", SPEC, weights)
    with load(tmp_path / "nan.gguf") as engine, pytest.raises(HeadraceError, match=r"nan\.gguf: a logit is NaN"):
        engine.session().score([1, 2, 3])


# ---- many texts


@pytest.mark.parametrize("max_rows", [7, 64, 512])
@pytest.mark.parametrize("positions", [96, 160, 4096])
def test_texts_share_passes_and_get_their_own_bits(gguf, alone, max_rows, positions):
    texts = [tokens(n, n) for n in (2, 90, 3, 17, 16, 18, 33, 64, 65, 66, 5, 5, 80)]
    items = [text_item(t, 512) for t in texts]
    with load(gguf, sessions=0, scoring_positions=positions, max_rows=max_rows) as engine:
        scorer = Scorer(engine)
        done: list[int] = []
        results = list(scorer.run(items, done.append))
        rows = sum(len(t) - 1 for t in texts)
        assert (scorer.prefill_figures.tokens, done[0], done[-1], len(done)) == (rows, 0, rows, scorer.num_passes + 1)
        if positions == 4096:
            assert scorer.num_passes == math.ceil(rows / max_rows)
    assert all(same_bits(r[0], alone(t)) for r, t in zip(results, texts, strict=True))


def test_a_pass_of_many_texts_reads_an_expert_at_most_once(gguf):
    items = [text_item(tokens(20, i), 512) for i in range(20)]
    with load(gguf, one_expert=True, sessions=0, scoring_positions=1024, max_rows=512) as engine:
        run(engine, items)
        counted = engine.counters()
        assert sum(counted[name] for name in ("hits", "late_hits", "loads")) == engine.experts.total_experts


# ---- windows


def test_windows_score_every_token_once(gguf, alone):
    for n, context, stride in ((100, 40, 7), (100, 40, 39), (41, 40, 20), (80, 40, 20), (81, 40, 20), (40, 40, 3)):
        text, expected, scored = tokens(n), [], 1
        for begin in range(0, n, stride):  # as in Hugging Face's guide to perplexity
            end = min(begin + context, n)
            expected.append(alone(text[begin:end])[scored - begin - 1 :])
            scored = end
            if end == n:
                break
        item = text_item(text, context, stride)
        assert sum(s.num_rows - s.skip for s in item) == n - 1
        assert max(len(s.tokens) for s in item) <= context
        with load(gguf, sessions=0, scoring_positions=96, max_rows=50) as engine:
            assert same_bits(np.concatenate(run(engine, [item])[0]), np.concatenate(expected))


def test_what_does_not_fit_is_refused(gguf):
    for text, context, stride, message in (
        (tokens(41), 40, None, "41 tokens does not fit the context of 40; give --stride"),
        (tokens(41), 40, 40, "stride of 40, expected 1 to 39"),
        (tokens(1), 40, None, "a text of 1 token: expected at least 2"),
        (tokens(0), 40, 3, "a text of 0 tokens"),
    ):
        with pytest.raises(HeadraceError, match=message):
            text_item(text, context, stride)
    with (
        load(gguf, sessions=0, scoring_positions=32) as engine,
        pytest.raises(HeadraceError, match="needs 48 positions, this engine has memory for 32"),
    ):
        run(engine, [text_item(tokens(40), 512)])
    with load(gguf) as engine, pytest.raises(HeadraceError, match="memory for 0; load it with scoring_options"):
        run(engine, [text_item(tokens(40), 512)])


# ---- choices


def question(prompt: int, choices: list[int], seed: int = 0) -> tuple[np.ndarray, list[np.ndarray]]:
    """A prompt of so many tokens, and it with choices of so many."""
    text = tokens(prompt, seed)
    return text, [np.concatenate([text, tokens(n, 50 + i)]) for i, n in enumerate(choices)]


@pytest.mark.parametrize("prompt", [1, 2, 17, 64, 65, 66, 130, 200])
def test_choices_get_the_bits_of_whole_texts(gguf, alone, prompt):
    text, wholes = question(prompt, [1, 20, 3, 1, 70])
    item = choice_item(text, wholes, 512)
    expected = [alone(w)[prompt - 1 :] for w in wholes]
    least = max(s.positions for s in item[:1]) + max(s.positions for s in item)
    for max_rows, positions in ((512, 2048), (30, 2048), (64, least), (7, least)):
        with load(gguf, sessions=0, scoring_positions=positions, max_rows=max_rows) as engine:
            scorer = Scorer(engine)
            # Other texts before and after, so that states lie anywhere in their memory.
            results = list(scorer.run([text_item(tokens(20), 512), item, text_item(tokens(30), 512)]))
            assert all(same_bits(a, b) for a, b in zip(results[1][-5:], expected, strict=True))
            assert same_bits(results[2][0], alone(tokens(30)))
            rows = 19 + 29 + (prompt - 1) + sum([1, 20, 3, 1, 70])
            assert scorer.prefill_figures.tokens == rows  # the prompt once
            if positions == 2048:
                assert scorer.num_passes == math.ceil(rows / max_rows)


def test_a_choice_begins_where_the_prompts_tokens_end():
    prompt = np.array([5, 6, 7], np.int32)
    wholes = [np.array(w, np.int32) for w in ([5, 6, 7, 8, 9], [5, 6, 70, 9], [5, 6, 7, 1])]  # the second merged
    base, *choices = choice_item(prompt, wholes, 10)
    assert base.tokens.tolist() == [5, 6] and base.skip == base.num_rows == 1
    assert [(c.tokens.tolist(), c.skip) for c in choices] == [([6, 7, 8, 9], 1), ([6, 70, 9], 0), ([6, 7, 1], 1)]
    for prompt_ids, whole, message in (
        ([5, 6], [5, 6], "choice 0 adds no token"),
        ([5], [50, 1], "no tokens of its own"),
        ([], [1, 2], "no tokens of its own"),
        ([5, 6], [5, 6, *range(9)], "choice 0 have 11 tokens, the context holds 10"),
    ):
        with pytest.raises(HeadraceError, match=message):
            choice_item(np.array(prompt_ids, np.int32), [np.array(whole, np.int32)], 10)


def test_choices_that_merged_get_the_bits_of_whole_texts(gguf, alone):
    prompt, wholes = question(70, [4, 5, 6])
    wholes[1][66:] = tokens(9, 3)  # four tokens of the prompt became others
    end = int(np.nonzero(wholes[1][:70] != prompt)[0][0])
    with load(gguf, sessions=0, scoring_positions=512) as engine:
        results = run(engine, [choice_item(prompt, wholes, 512)])[0]
    for got, whole, first in zip(results[1:], wholes, (70, end, 70), strict=True):
        assert same_bits(got, alone(whole)[first - 1 :])


def test_memory_for_scoring_is_planned(gguf):
    items = [text_item(tokens(100, i), 512) for i in range(30)]
    options = EngineOptions(context=100, num_threads=2)
    checkpoint = open_checkpoint(gguf)
    wide = scoring_options(checkpoint, items, options)
    assert wide.sessions == 0 and wide.scoring_positions % 16 == 0 and wide.scoring_positions >= 112
    assert scoring_options(checkpoint, items[:1], options).scoring_positions == 112
    many = [choice_item(*question(70, [5] * 100), 512)]
    assert scoring_options(checkpoint, many, options).scoring_positions >= 80 + 16
    with Engine(checkpoint, wide) as engine:
        assert len(run(engine, items)) == 30
        state_bytes = engine.plan.state_bytes
    assert state_bytes >= 112 * 2 * 2 * SPEC.num_key_value_heads * SPEC.head_dim * 2


# ---- against others


def perplexity(log_probs: np.ndarray) -> float:
    return math.exp(-log_probs.astype(np.float64).mean())


def test_perplexity_of_tiny_is_the_oracles(monkeypatch):
    """Held-out text in pieces of 4 tokens. Where float32 rounding decides which int8 code a value gets, engine and
    oracle are both right and differ by what one step of it does; where it does not, they agree."""
    checkpoint = open_model("tiny")
    ids = make_score.token_ids(checkpoint)[:240]
    pieces = [ids[i : i + 4] for i in range(0, len(ids), 4)]
    items = [text_item(np.array(piece, np.int32), 4) for piece in pieces]
    options = EngineOptions(context=4, kv_dtype=DType.F32)
    with Engine(checkpoint, scoring_options(checkpoint, items, options)) as engine:
        got = np.concatenate([r[0] for r in Scorer(engine).run(items)])
    expected, clear = run_int8(checkpoint, pieces, monkeypatch, scores=True)
    assert len(got) == len(expected) == 180 and clear.sum() >= 50
    assert np.abs(got - expected)[clear].max() < 2e-5
    assert perplexity(got[clear]) == pytest.approx(perplexity(expected[clear]), rel=1e-5)
    assert perplexity(got) == pytest.approx(perplexity(expected), rel=1e-3)


def test_perplexity_of_held_out_text_is_the_oracles():
    """60,000 tokens, as the command scores them: what float32 rounding does to int8 codes averages out."""
    golden = np.load(make_held_out.GOLDEN / "held_out.npz")
    report = json.loads(headrace("score", "tiny", make_held_out.TEXTS, "--json").stdout)
    assert [t["tokens"] for t in report["texts"]] == golden["num_tokens"].tolist()
    scored, expected = golden["num_tokens"] - 1, golden["log_likelihoods"]
    assert report["scored_tokens"] == scored.sum()
    assert report["perplexity"] == pytest.approx(math.exp(-expected.sum() / scored.sum()), rel=1e-4)
    got = np.array([t["log_likelihood"] for t in report["texts"]])
    assert np.abs((got - expected) / scored).max() < 2e-3


def test_perplexity_of_tiny_is_pytorchs():
    golden = np.load(make_score.GOLDEN / "score.npz")["log_probs"]
    report = json.loads(headrace("score", "tiny", make_score.TEXT, "--json", "--token-log-probs").stdout)
    got = np.array(report["texts"][0]["token_log_probs"][1:])
    assert report["perplexity"] == pytest.approx(perplexity(golden), rel=5e-3)
    assert np.abs(got - golden).mean() < 0.05


def test_golden_log_probs_are_what_transformers_gives_here():
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    golden = np.load(make_score.GOLDEN / "score.npz")["log_probs"]
    np.testing.assert_allclose(make_score.transformers_log_probs(open_model("tiny")), golden, atol=1e-3)


# ---- the command

REQUIRED = (
    "model budget_bytes peak_rss_bytes slots residency prompt_tokens generated_tokens ttft_s prefill_tps decode_tps"
)
COUNTERS = "expert_hits expert_late_hits expert_loads expert_prefetches expert_bytes_read expert_bytes_unused io_wait_s"


def score_json(*args: object, **kwargs) -> dict:
    done = headrace("score", "tiny", *args, "--json", **kwargs)
    assert done.returncode == 0 and done.stdout.count("\n") == 1, done.stderr
    report = json.loads(done.stdout)
    assert all(name in report for name in REQUIRED.split())
    assert all(name in report[phase] for phase in ("prefill", "decode") for name in COUNTERS.split())
    assert report["peak_rss_bytes"] <= report["budget_bytes"]
    return report


QUESTIONS = [
    {"prompt": "In the beginning God created the heaven and the", "choices": [" earth", " banana split"], "answer": 0},
    {"prompt": "And the LORD said unto", "choices": [" Python", " Moses"], "answer": " Moses"},
    {"prompt": "import", "choices": [" sys", "ant", " os"]},
]


def write_lines(path: Path, objects: list) -> Path:
    path.write_text("".join(json.dumps(o) + "\n" for o in objects))
    return path


def test_texts_of_a_file(tmp_path):
    texts = ["In the beginning God created the heaven and the earth.", "import os\nimport sys\n", "“été”\n\n"]
    file = write_lines(tmp_path / "texts.JSONL", [{"text": t, "other": 1} for t in texts])
    report = score_json(file)
    parts = report["texts"]
    assert [p["where"] for p in parts] == [f"{file}: line {i}" for i in (1, 2, 3)]
    assert report["prompt_tokens"] == sum(p["tokens"] for p in parts) and report["generated_tokens"] == 0
    assert report["passes"] == 1
    total, scored = sum(p["log_likelihood"] for p in parts), sum(p["scored_tokens"] for p in parts)
    assert report["perplexity"] == pytest.approx(math.exp(-total / scored)) and scored == report["prompt_tokens"] - 3
    (tmp_path / "text").write_text(texts[1])
    assert score_json(tmp_path / "text")["log_likelihood"] == parts[1]["log_likelihood"]
    assert score_json("-", input=texts[1])["log_likelihood"] == parts[1]["log_likelihood"]
    done = headrace("score", "tiny", file, "--token-log-probs")
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and len(lines) == 3 + scored + 1 and done.stderr.count("\n") == 1
    assert lines[-1].startswith(f"3 texts, {scored} tokens scored: ")


def test_choices_of_a_file(tmp_path):
    file = write_lines(tmp_path / "questions", QUESTIONS)
    report = score_json(file, "--choices", "--token-log-probs")
    assert report["passes"] == 1 and report["answered"] == 2
    assert report["accuracy"] == {"log_likelihood": 1.0, "per_token": 1.0, "per_byte": 1.0}
    assert [q["answer"] for q in report["questions"]] == [0, 1, None]
    wholes = [{"text": q["prompt"] + choice} for q in QUESTIONS for choice in q["choices"]]
    texts = iter(score_json(write_lines(tmp_path / "wholes.jsonl", wholes), "--token-log-probs")["texts"])
    for q, r in zip(QUESTIONS, report["questions"], strict=True):
        for choice, s in zip(q["choices"], r["choices"], strict=True):
            assert s["per_byte"] == pytest.approx(s["log_likelihood"] / len(choice))
            assert s["per_token"] == pytest.approx(s["log_likelihood"] / s["scored_tokens"])
            whole, n = next(texts), s["scored_tokens"]
            assert whole["token_ids"] == s["token_ids"] and whole["token_log_probs"][-n:] == s["token_log_probs"][-n:]
            assert set(s["token_log_probs"][:-n]) == {None}
    done = headrace("score", "tiny", file, "--choices")
    assert done.returncode == 0 and "accuracy over 2 answers: 100.0%" in done.stdout
    assert "line 3: choice " in done.stdout


def test_a_long_text_stays_within_the_smallest_budget(tmp_path):
    """Logits of a pass's rows would not fit: 2048 rows are 32 MiB of them."""
    file = tmp_path / "long"
    file.write_text(make_score.TEXT.read_text() * 6)
    done = headrace("score", "tiny", file, "--memory", "1MiB", "-c", 2048, "--stride", 1024, "-t", 2)
    assert_one_line_error(done, "the smallest that works is")
    least = done.stderr.split("the smallest that works is ")[1].split(";")[0]
    report = score_json(file, "--memory", least, "-c", 2048, "--stride", 1024, "-t", 2)
    assert report["scored_tokens"] == report["prompt_tokens"] - 1 > 4500
    assert report["residency"] < 1 and report["perplexity"] < 40
    assert_one_line_error(headrace("score", "tiny", file), f"{file}: ", "does not fit the context of 4096", "--stride")


@pytest.fixture
def refused():
    """What `headrace score` says against a file, in this process."""

    def say(file: Path, choices: bool = False) -> str:
        options = ScoreOptions("tiny", file, choices, None, None, None, 2, False, True)
        with pytest.raises(HeadraceError) as error:
            score(options)
        return str(error.value)

    yield say
    _core.exit_on_interrupt(False)


def test_texts_that_are_wrong_are_named(tmp_path, refused):
    file = tmp_path / "bad.jsonl"
    good = b'{"text": "And the earth"}\n'
    for lines, parts in (
        (good + b"\n{'text': 1}\n", ("line 3", "expected a JSON object", "column 2")),
        (good + b"[1, 2]\n", ("line 2", "expected a JSON object", "found [1, 2]")),
        (b'{"text": 5}\n', ("line 1", '"text": expected a string', "found 5")),
        (b'{"txt": "a"}\n', ("line 1", '"text": expected a string', "found nothing")),
        (good + b'{"text": "\xff"}\n', ("line 2", "byte 10 is not UTF-8")),
        (b'{"text": "\\ud800 and"}\n', ("line 1", "not valid Unicode")),
        (b'{"text": ""}\n', ("line 1", "a text of 0 tokens: expected at least 2")),
        (b"[" * 100000 + b"\n", ("line 1", "expected a JSON object")),
        (b"9" * 5000 + b"\n", ("line 1", "expected a JSON object")),
        (b'{"text": "' + b"a" * (8 << 20) + b'"}\n', ("line 1", "more than 8388608 bytes")),
        (b"\n\n", ("bad.jsonl", "holds no text")),
        (b'{"text": "' + b"and " * 6000 + b'"}\n', ("line 1", "does not fit the context of 4096")),
    ):
        file.write_bytes(lines)
        message = refused(file)
        assert all(part in message for part in (str(file), *parts)), message


def test_questions_that_are_wrong_are_named(tmp_path, refused):
    for question, *parts in (
        ({"prompt": "a", "choices": []}, '"choices": expected a list of one string or more', "found []"),
        ({"prompt": "a", "choices": "b"}, '"choices": expected a list of one string or more', "found 'b'"),
        ({"prompt": "a", "choices": ["b", 3]}, '"choices[1]": expected a string', "found 3"),
        ({"choices": ["b"]}, '"prompt": expected a string', "found nothing"),
        ({"prompt": "", "choices": ["b"]}, "the prompt has no tokens of its own"),
        ({"prompt": "a", "choices": [""]}, "choice 0 adds no token"),
        ({"prompt": "a", "choices": ["b", "c"], "answer": 2}, '"answer"', "0 to 1", "found 2"),
        ({"prompt": "a", "choices": ["b", "c"], "answer": True}, '"answer"', "found true"),
        ({"prompt": "a", "choices": ["b", "b"], "answer": "b"}, '"answer"', "found 'b'"),
    ):
        file = write_lines(tmp_path / "questions", [QUESTIONS[0], question])
        message = refused(file, choices=True)
        assert all(part in message for part in (f"{file}: line 2", *parts)), message


def test_errors_of_the_command_are_one_line(tmp_path):
    assert_one_line_error(headrace("score", "tiny", tmp_path / "none"), "none: No such file")
    assert_one_line_error(headrace("score", "tiny", tmp_path), "Is a directory")
    file = write_lines(tmp_path / "questions", [{"prompt": "a"}])
    assert_one_line_error(headrace("score", "tiny", file, "--choices"), "line 1", '"choices"')
    for usage in ((file, "--choices", "--stride", 4), (file, "-c", 8, "--stride", 8)):
        done = headrace("score", "tiny", *usage)
        assert done.returncode == 2 and "--stride" in done.stderr
    done = headrace("score", "tiny", file, "-c", 1)  # one position is a token without a probability
    assert done.returncode == 2 and "--context" in done.stderr


# ---- tokens of a long text


@pytest.mark.parametrize("around", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("spec", [OLMOE, QWEN3])
def test_pieces_of_a_long_text_are_the_whole_texts_tokens(tmp_path, spec, around):
    words = ["the", "and", "in", "\n\n", "thou", "  ", "12", "(x)", "été", ".\n", "an\tan"]
    text = " ".join(np.random.default_rng(1).choice(words, 30000))
    metadata = {"tokenizer.ggml.add_bos_token": around[0], "tokenizer.ggml.add_eos_token": around[1]}
    metadata |= {"tokenizer.ggml.bos_token_id": 266}
    path = tmp_path / "model.gguf"
    checkpoints.write_gguf(path, spec, random_weights(spec), vocabulary=True, metadata=metadata)
    checkpoint = open_checkpoint(path)
    tokenizer = load_tokenizer(checkpoint.tokenizer, checkpoint.config)
    assert len(text) > 3 * (32 << 10)
    assert tokenizer.encode_long(text).tolist() == tokenizer.encode(text)
    assert tokenizer.encode_long("").tolist() == tokenizer.encode("")
    assert tokenizer.encode_long("the").dtype == np.int32


def test_a_sequence_knows_its_place():
    base = Sequence(tokens(71), skip=70)
    assert (base.num_rows, base.positions) == (70, 80)
    rest = Sequence(tokens(5), 0, base)
    assert (rest.num_rows, rest.base_rows, rest.positions) == (4, 70, 16)  # six copied and four of its own
