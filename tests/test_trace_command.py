"""`headrace trace MODEL FILE -o T`: the routing of a text, against the oracle; budgets, generation, interruption."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import checkpoints
import numpy as np
import pytest
from test_cli import assert_one_line_error, assert_wrong_usage, headrace, parsed, start

from headrace.commands.model import open_model_and_text
from headrace.experts.traces import Block, open_trace
from headrace.models.blocks import INV_FREQ, inverse_frequencies
from headrace.models.families import build_graph
from headrace.reference import Reference, ReferenceSession

TEXT = "In the beginning was the word,\nand def main(): return 1\n" * 3


@pytest.fixture(scope="module")
def gguf(tmp_path_factory) -> Path:
    spec = checkpoints.QWEN3.but(num_hidden_layers=3)
    path = tmp_path_factory.mktemp("trace") / "model.gguf"
    return checkpoints.write_gguf(path, spec, checkpoints.random_weights(spec), dtype="F32", vocabulary=True)


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def record(*args: object) -> dict:
    done = headrace("trace", *args, "--json")
    assert done.returncode == 0 and done.stderr == "", done.stderr
    report = json.loads(done.stdout)
    assert 0 < report["peak_rss_bytes"] <= report["budget_bytes"]
    return report


def blocks_of(path: Path) -> list[Block]:
    return list(open_trace(path).blocks())


def joined(blocks: list[Block], name: str) -> np.ndarray:
    return np.concatenate([getattr(b, name) for b in blocks])


def test_every_layer_and_token_is_what_the_oracle_routes(gguf, text, tmp_path):
    report = record(gguf, text, "-o", tmp_path / "t.trace")
    checkpoint, words = open_model_and_text(str(gguf))
    ids = words.tokenizer.encode(TEXT)
    trace = open_trace(tmp_path / "t.trace", 8)
    blocks = list(trace.blocks())
    assert report["tokens"] == trace.num_tokens == len(ids) and report["sequences"] == 1
    assert report["trace_bytes"] == (tmp_path / "t.trace").stat().st_size
    assert (trace.num_layers, trace.num_experts, trace.top_k) == (3, 8, 2)
    assert trace.model.name == checkpoint.name and trace.model.architecture == "qwen3_moe"
    assert joined(blocks, "tokens").tolist() == ids

    routes, logits = [], {}

    def observe(node, outputs):
        logits[node.outputs[0].index] = outputs[0]
        if node.op == "route":
            routes.append([*outputs, np.take_along_axis(logits[node.inputs[0].index], outputs[0].astype(int), 1)])

    vectors = {INV_FREQ: inverse_frequencies(checkpoint.config)[None]}
    graph = build_graph(checkpoint)
    Reference(graph, checkpoint, vectors, observe=observe).run(ReferenceSession(graph), ids, list(range(len(ids))))
    expected = [np.stack(part, axis=1) for part in zip(*routes, strict=True)]
    assert np.array_equal(joined(blocks, "ids"), expected[0])
    np.testing.assert_allclose(joined(blocks, "weights"), expected[1], rtol=2e-3, atol=1e-3)
    np.testing.assert_allclose(joined(blocks, "scores"), expected[2], rtol=5e-3, atol=5e-3)


def test_the_same_file_at_every_budget_and_thread_count(text, tmp_path):
    plan = json.loads(headrace("inspect", "tiny", "-c", 200, "--json").stdout)["plan"]
    a = record("tiny", text, text, "-o", tmp_path / "a.trace")
    refused = headrace("trace", "tiny", text, text, "-o", tmp_path / "b.trace", "--memory", "20MiB")
    assert_one_line_error(refused, "too small", "--memory")
    smallest = refused.stderr.split("--memory ")[1].split()[0]
    b = record("tiny", text, text, "-o", tmp_path / "b.trace", "--memory", smallest, "-t", 1)
    assert b["residency"] < 1 == a["residency"] and b["budget_bytes"] < plan["resident_bytes"]
    assert (tmp_path / "a.trace").read_bytes() == (tmp_path / "b.trace").read_bytes()
    assert a["sequences"] == 2
    assert not list(tmp_path.glob("*.partial"))


def test_long_texts_are_cut_into_sequences(text, tmp_path):
    _, words = open_model_and_text("tiny")
    ids = words.tokenizer.encode(TEXT)
    report = record("tiny", text, "-o", tmp_path / "t.trace", "-c", 20)
    blocks = blocks_of(tmp_path / "t.trace")
    assert [b.sequence for b in blocks] == list(range(report["sequences"])) and report["sequences"] > 2
    assert joined(blocks, "tokens").tolist() == ids
    assert {len(b.ids) for b in blocks[:-1]} == {20}
    # Each begins anew: the second as if it were a text of its own.
    again = record("tiny", text, "-o", tmp_path / "whole.trace")
    whole = joined(blocks_of(tmp_path / "whole.trace"), "scores")
    assert again["sequences"] == 1
    assert np.array_equal(blocks[0].scores, whole[:20]) and not np.array_equal(blocks[1].scores, whole[20:40])


def test_a_text_beyond_what_is_tokenized_at_once(tmp_path):
    long = tmp_path / "long.txt"
    line = "In the beginning was the word, and so on and so forth.\n"
    long.write_text(line * 800)  # 44,000 characters
    report = record("tiny", long, "-o", tmp_path / "t.trace", "-c", 1024)
    _, words = open_model_and_text("tiny")
    assert report["tokens"] == len(words.tokenizer.encode(line * 800))
    assert report["sequences"] == -(-report["tokens"] // 1024)


def test_generated_tokens_are_those_of_run(text, tmp_path):
    sampling = ["--temp", 0.9, "--seed", 4]
    run = json.loads(headrace("run", "tiny", "-f", text, "-n", 25, *sampling, "--json").stdout)
    report = record("tiny", text, "-o", tmp_path / "t.trace", "-n", 25, *sampling)
    tokens = joined(blocks_of(tmp_path / "t.trace"), "tokens").tolist()
    assert tokens[run["prompt_tokens"] :] == run["token_ids"]
    assert report["generated_tokens"] == run["generated_tokens"]
    # What decoding chose is what the prefill recorded: the same as recording the text with its continuation.
    again = record("tiny", text, "-o", tmp_path / "again.trace", "-n", 25, *sampling, "-t", 1)
    assert again["tokens"] == report["tokens"]
    assert (tmp_path / "again.trace").read_bytes() == (tmp_path / "t.trace").read_bytes()


def test_standard_input(tmp_path, text):
    done = headrace("trace", "tiny", "-", "-o", tmp_path / "t.trace", input=TEXT)
    assert done.returncode == 0 and "1 sequence of tiny" in done.stdout and "recorded at" in done.stdout, done.stderr
    record("tiny", text, "-o", tmp_path / "file.trace")
    assert (tmp_path / "t.trace").read_bytes() == (tmp_path / "file.trace").read_bytes()


def test_what_cannot_be_recorded(text, tmp_path):
    out = tmp_path / "t.trace"
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    assert_one_line_error(headrace("trace", "tiny", tmp_path / "none", "-o", out), "none")
    assert_one_line_error(headrace("trace", "tiny", empty, "-o", out), "empty.txt", "empty")
    assert_one_line_error(headrace("trace", "tiny", text, "-o", tmp_path / "no" / "t"), "no such directory")
    assert_one_line_error(headrace("trace", "tiny", text, "-o", text), "text.txt", "exists already")
    assert_one_line_error(headrace("trace", "tiny", text, "-o", out, "-c", 10_000_000), "context")
    assert_one_line_error(headrace("trace", "tiny", text, "-o", out, "-n", 5, "-c", 20), "text.txt", "-n")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty.txt", "text.txt"]


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["tiny"],
        ["tiny", "x"],
        ["tiny", "x", "-o", "y", "--seed", "1"],
        ["tiny", "x", "-o", "y", "--raw"],
        ["tiny", "x", "-o", "y", "--plot", "z.png"],
        ["tiny", "x", "-o", "y", "--partial"],
        ["tiny", "x", "-o", "y", "-n", "3", "--top-p", "0"],
        ["tiny", "--report", "y"],
        ["--report", "y", "-o", "z"],
        ["--report", "y", "--memory", "1G"],
        ["--report", "y", "--raw"],
        ["tiny", "-", "-", "-o", "y"],
        ["tiny", "x", "-o", "y", "-n", "20", "-c", "20"],
        ["tiny", "x", "-o", "y", "-n", "20", "--temp", "inf"],
    ],
)
def test_wrong_usage_is_2(args):
    assert_wrong_usage(parsed("trace", *args))


def test_ctrl_c_leaves_a_part_that_says_so(tmp_path):
    long = tmp_path / "long.txt"
    long.write_text("".join(f"{i} words and more of them, until it is enough\n" for i in range(60_000)))
    partial = tmp_path / "t.trace.partial"
    with start(["trace", "tiny", long, "-o", tmp_path / "t.trace", "-t", 1]) as process:
        while process.poll() is None and (not partial.exists() or partial.stat().st_size < 60_000):
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        error = process.communicate(timeout=30)[1]
    assert process.returncode == 130 and b"Traceback" not in error
    assert sorted(p.name for p in tmp_path.iterdir()) == ["long.txt", "t.trace.partial"]
    num_tokens = sum(len(b.ids) for b in open_trace(partial, partial=True).blocks())
    assert num_tokens > 0 and error.decode() == f"{partial}: {num_tokens} tokens, interrupted\n"
    assert_one_line_error(headrace("trace", "tiny", long, "-o", tmp_path / "t.trace"), "t.trace.partial", "exists")


def test_a_trace_replays_on_its_model(text, tmp_path):
    record("tiny", text, "-o", tmp_path / "t.trace")
    args = ["bench", "tiny", "--prompt", 20, "--gen", 4, "--repeat", 1, "--json", "--replay", tmp_path / "t.trace"]
    args += ["--schedule", "after-routing"]  # early reads are no loads
    report = json.loads(headrace(*args).stdout)
    assert report["replay"] == {"trace": "t.trace", "tokens": 24}
    ids = joined(blocks_of(tmp_path / "t.trace"), "ids")[:24]
    # Prefill routes only the last row in the last layer.
    distinct = sum(len(np.unique(ids[:20, layer])) for layer in range(ids.shape[1] - 1)) + ids.shape[2]
    assert report["prefill"]["expert_loads"] == distinct


def test_replay_on_a_model_of_another_shape_is_refused(gguf, text, tmp_path):
    record("tiny", text, "-o", tmp_path / "t.trace")
    done = headrace("bench", gguf, "--prompt", 4, "--gen", 1, "--replay", tmp_path / "t.trace")
    assert_one_line_error(done, "t.trace", "8 layers", "4 of 32", "3 layers", "2 of 8")
