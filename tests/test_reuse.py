"""Reuse, unions, shares and working sets: a trace small enough for paper and pencil, a plain reference, the edges."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from test_cli import assert_one_line_error, assert_wrong_usage, headrace
from test_trace_file import Recording
from test_traces import random_ids, write_jsonl

from headrace.errors import HeadraceError
from headrace.experts import reuse
from headrace.experts.reuse import measure_reuse
from headrace.experts.traces import Block, Trace, open_trace


class ListedTrace(Trace):
    """Sequences of ids [tokens, layers, top_k], cut into blocks of the given size."""

    def __init__(self, sequences: list[np.ndarray], num_experts: int | None = None, block_tokens: int = 10):
        self.path, self.sequences, self.block_tokens = Path("listed"), sequences, block_tokens
        self.num_experts = num_experts
        self.num_layers, self.top_k = sequences[0].shape[1:]

    def blocks(self, values: bool = True) -> Iterator[Block]:
        for s, ids in enumerate(self.sequences):
            for at in range(0, len(ids), self.block_tokens):
                yield Block(ids[at : at + self.block_tokens].astype(np.uint16), sequence=s, first=at)


def plain(sequences: list[np.ndarray], num_experts: int) -> dict:
    """The definitions, word for word, with sets."""
    num_layers, m = sequences[0].shape[1:]
    out: dict = {"rho": {}, "union": {}, "working": {}}
    for n in range(2, 10):
        for layer in range(num_layers):
            windows = [
                [set(t.tolist()) for t in ids[at : at + n, layer]]
                for ids in sequences
                for at in range(len(ids) - n + 1)
            ]
            hits = sum(len(w[-1] & set().union(*w[:-1])) for w in windows)
            out["rho"][n, layer] = hits / (m * len(windows)) if windows else None
            out["union"][n, layer] = np.mean([len(set().union(*w)) for w in windows]) if windows else None
    length = 1
    while length <= max(map(len, sequences)):
        sides = [ids[at : at + length] for ids in sequences for at in range(0, len(ids) // length * length, length)]
        means = [np.mean([len(np.unique(w[:, layer])) for w in sides]) for layer in range(num_layers)]
        out["working"][length] = (len(sides), means)
        length *= 2
    out["shares"] = [
        np.bincount(np.concatenate([ids[:, layer].reshape(-1) for ids in sequences]), minlength=num_experts)
        / sum(len(ids) * m for ids in sequences)
        for layer in range(num_layers)
    ]
    return out


def test_a_trace_by_hand(tmp_path):
    """One layer; tokens use {0 1}, {1 2}, {0 3}, {0 1}.

    n = 2: of 6 experts 1 was used the token before (1), then none, then 0: 2 of 6.
    n = 3: {0 3} after {0 1} {1 2} repeats 0; {0 1} after {1 2} {0 3} repeats both: 3 of 4.
    n = 4: {0 1} after all three: 2 of 2.
    Unions: 3, 4, 3 of two tokens; 4, 4 of three; 4 of four.
    """
    ids = np.array([[[0, 1]], [[1, 2]], [[0, 3]], [[0, 1]]])
    r = measure_reuse(open_trace(write_jsonl(tmp_path / "t.jsonl", ids)))
    assert (r.num_tokens, r.num_sequences, r.num_layers, r.num_experts, r.top_k) == (4, 1, 1, 4, 2)
    assert r.n.tolist() == [2, 3, 4]
    np.testing.assert_allclose(r.rho[:, 0], [2 / 6, 3 / 4, 1])
    np.testing.assert_allclose(r.union[:, 0], [10 / 3, 4, 4])
    np.testing.assert_allclose(r.share, [10 / 12, 4 / 6, 4 / 8])
    np.testing.assert_allclose(r.uniform, [1 / 2, 3 / 4, 7 / 8])
    np.testing.assert_allclose(r.shares[0], [3 / 8, 3 / 8, 1 / 8, 1 / 8])
    np.testing.assert_allclose(r.entropy_bits, [2 * 3 / 8 * math.log2(8 / 3) + 2 / 8 * 3])
    assert {k: (n, m.tolist()) for k, (n, m) in r.working_sets.items()} == {1: (4, [2]), 2: (2, [3]), 4: (1, [4])}
    assert np.isnan(r.mean_low).all() and np.isnan(r.rho_high).all()  # one piece cannot be resampled


@pytest.mark.parametrize("block_tokens", [1, 3, 16, 1000])
@pytest.mark.parametrize("lengths", [[60], [1], [8], [9], [5, 40, 1, 2, 33]])
def test_like_the_definitions(lengths, block_tokens, monkeypatch):
    monkeypatch.setattr(reuse, "MAX_USES", 7 * 3 * 12)  # blocks are looked at in parts
    sequences = [random_ids(n, 3, 12, 3, seed=n) for n in lengths]
    expected = plain(sequences, 12)
    r = measure_reuse(ListedTrace(sequences, 12, block_tokens))
    assert r.num_tokens == sum(lengths) and r.num_sequences == len(lengths)
    assert r.n.tolist() == [n for n in range(2, 10) if expected["rho"][n, 0] is not None]
    for i, n in enumerate(r.n):
        for layer in range(3):
            assert r.rho[i, layer] == pytest.approx(expected["rho"][n, layer])
            assert r.union[i, layer] == pytest.approx(expected["union"][n, layer])
    np.testing.assert_allclose(r.shares, expected["shares"])
    assert list(r.working_sets) == list(expected["working"])
    for length, (windows, means) in r.working_sets.items():
        assert windows == expected["working"][length][0]
        np.testing.assert_allclose(means, expected["working"][length][1])


def test_the_union_follows_from_reuse():
    """MoESpec (2): U(n) = m sum of 1 - rho(j), on a stationary process; here nearly, as windows at the ends differ."""
    r = measure_reuse(ListedTrace([random_ids(4000, 2, 16, 4)], 16, 256))
    np.testing.assert_allclose(r.union, 4 * (1 + np.cumsum(1 - r.rho, axis=0)), rtol=2e-3)
    np.testing.assert_allclose(r.mean, r.uniform, atol=0.01)
    assert (r.entropy_bits > 3.99).all()


def test_intervals_hold_the_truth_and_shrink():
    def width(tokens: int) -> float:
        r = measure_reuse(ListedTrace([random_ids(tokens, 2, 16, 4, seed=3)], 16, 256))
        assert (r.mean_low <= r.mean).all() and (r.mean <= r.mean_high).all()
        assert (r.rho_low <= r.rho).all() and (r.rho <= r.rho_high).all()
        return float((r.mean_high - r.mean_low)[0])

    assert width(8000) < 0.5 * width(500)
    # Of 40 independent traces about 38 hold the truth, 1/4, in their interval.
    held = 0
    for seed in range(40):
        r = measure_reuse(ListedTrace([random_ids(640, 1, 16, 4, seed=seed)], 16, 256))
        held += bool(r.mean_low[0] <= 0.25 <= r.mean_high[0])
    assert held >= 32


def test_few_pieces_give_no_interval(tmp_path):
    """4 pieces of 16 tokens say nothing, 5 do; of 20 sequences only 4 hold a window of 3 tokens."""
    r = measure_reuse(ListedTrace([random_ids(64, 2, 16, 4)], 16))
    assert np.isnan(r.mean_low).all() and np.isnan(r.rho_high).all()
    r = measure_reuse(ListedTrace([random_ids(80, 2, 16, 4)], 16))
    assert (r.mean_low <= r.mean).all() and (r.rho <= r.rho_high).all()
    r = measure_reuse(ListedTrace([random_ids(2 + (i < 4), 2, 16, 4, seed=i) for i in range(20)], 16))
    assert r.resampled == "20 x 1 sequences" and r.n.tolist() == [2, 3]
    assert np.isnan(r.rho_low).all(axis=1).tolist() == np.isnan(r.mean_high).tolist() == [False, True]
    path = write_jsonl(tmp_path / "t.jsonl", random_ids(64, 2, 16, 4))
    d = json.loads(headrace("trace", "--report", path, "--json").stdout)
    assert all(w["reuse_interval"] is None for w in d["windows"])
    assert d["windows"][0]["layers"][1]["reuse_interval"] is None
    text = headrace("trace", "--report", path).stdout
    assert "4 x 16 tokens, none from fewer than 5" in text
    assert next(line for line in text.splitlines() if line.split()[:1] == ["2"]).split()[2] == "-"


def test_many_sequences_are_what_is_resampled():
    """Documents that differ from each other: resampling pieces of them would pretend to know more."""
    same = np.tile(np.array([[[0, 1]]]), (40, 1, 1))
    other = np.arange(80).reshape(40, 1, 2) % 64
    documents = [same if i % 2 else other for i in range(24)]
    r = measure_reuse(ListedTrace(documents, 64))
    assert r.resampled == "24 x 1 sequences"
    assert r.rho[0, 0] == pytest.approx(0.5)
    spread = 0.5 / math.sqrt(24) * 1.96
    assert r.mean_low[0] == pytest.approx(0.5 - spread, abs=0.05)
    assert r.mean_high[0] == pytest.approx(0.5 + spread, abs=0.05)


def test_pieces_are_merged_and_nothing_is_lost(monkeypatch):
    sequences = [random_ids(n, 2, 12, 3, seed=n) for n in (500, 77, 301)]
    whole = measure_reuse(ListedTrace(sequences, 12))
    monkeypatch.setattr(reuse, "MAX_PIECES", 8)
    merged = measure_reuse(ListedTrace(sequences, 12))
    assert whole.resampled == "56 x 16 tokens" and merged.resampled == "7 x 128 tokens"
    assert np.array_equal(whole.rho, merged.rho)


def test_top_k_of_all_experts_and_one_expert():
    r = measure_reuse(ListedTrace([np.tile(np.arange(4), (30, 2, 1))], 4))
    assert (r.rho == 1).all() and (r.union == 4).all() and (r.uniform == 1).all()
    r = measure_reuse(ListedTrace([np.zeros((30, 1, 1), int)]))
    assert r.num_experts == 1 and (r.rho == 1).all() and (r.entropy_bits == 0).all()


def test_a_long_trace_takes_no_more_memory_than_a_short_one(monkeypatch):
    """Peak of Python's allocations, NumPy's included; both traces fill the pieces."""
    import tracemalloc

    monkeypatch.setattr(reuse, "MAX_PIECES", 256)

    def peak(tokens: int) -> int:
        class Endless(ListedTrace):
            def blocks(self, values: bool = True) -> Iterator[Block]:
                for at in range(0, tokens, 256):
                    yield Block(self.sequences[0], first=at)

        tracemalloc.start()
        measure_reuse(Endless([random_ids(256, 2, 16, 4)], 16))
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    assert peak(131_072) < 1.1 * peak(8192)


# ---- the command


def test_report_prints_one_object(tmp_path):
    path = Recording([300, 50], num_experts=16).write(tmp_path / "t.trace")
    done = headrace("trace", "--report", path, "--json")
    assert done.returncode == 0 and done.stderr == ""
    d = json.loads(done.stdout)
    assert (d["tokens"], d["sequences"], d["num_layers"], d["num_experts"], d["top_k"]) == (350, 2, 3, 16, 4)
    assert d["model"]["name"] == "model" and d["model"]["fingerprint"] == "0123456789abcdef"
    assert [w["n"] for w in d["windows"]] == list(range(2, 10))
    r = measure_reuse(open_trace(path))
    for i, w in enumerate(d["windows"]):
        assert w["reuse"] == r.mean[i] and w["share"] == r.share[i] and w["union"] == r.union[i].mean()
        assert w["reuse_interval"] == [r.mean_low[i], r.mean_high[i]]
        assert [x["reuse"] for x in w["layers"]] == r.rho[i].tolist()
        assert w["layers"][2]["reuse_interval"] == [r.rho_low[i, 2], r.rho_high[i, 2]]
    assert [e["shares"] for e in d["experts"]] == r.shares.tolist()
    assert [s["tokens"] for s in d["working_sets"]] == [1, 2, 4, 8, 16, 32, 64, 128, 256]


def test_report_as_text(tmp_path):
    ids = random_ids(40, 2, 8, 3)
    done = headrace("trace", "--report", write_jsonl(tmp_path / "t.jsonl", ids))
    assert done.returncode == 0 and done.stderr == ""
    r = measure_reuse(open_trace(tmp_path / "t.jsonl"))
    assert "40 tokens in 1 sequence, 2 layers, 3 of 8 experts (the highest id says)" in done.stdout
    for i, n in enumerate(r.n):
        line = next(line for line in done.stdout.splitlines() if line.split()[:1] == [str(n)])
        assert f"{r.mean[i]:.3f}" in line and f"{r.share[i]:.3f}" in line
    short = headrace("trace", "--report", write_jsonl(tmp_path / "one.jsonl", ids[:1]))
    assert short.returncode == 0 and "1 token in 1 sequence" in short.stdout
    assert "nothing about reuse" in short.stdout and "uniform" not in short.stdout


def test_report_plots(tmp_path):
    path = Recording([300], num_experts=16).write(tmp_path / "t.trace")
    for name, magic in (("out.png", b"\x89PNG"), ("out.svg", b"<?xml")):
        done = headrace("trace", "--report", path, "--plot", tmp_path / name)
        assert done.returncode == 0, done.stderr
        assert (tmp_path / name).read_bytes().startswith(magic)
    assert_wrong_usage(headrace("trace", "--report", path, "--plot", "out.txt"), "--plot", ".png", "'out.txt'")
    assert_one_line_error(headrace("trace", "--report", path, "--plot", tmp_path / "no" / "out.png"), "no such dir")
    one = Recording([1], num_experts=16).write(tmp_path / "one.trace")
    assert_one_line_error(
        headrace("trace", "--report", one, "--plot", tmp_path / "one.png"), "one.trace", "longer text"
    )
    few = Recording([20], num_experts=16).write(tmp_path / "few.trace")  # without intervals
    assert headrace("trace", "--report", few, "--plot", tmp_path / "few.png").returncode == 0
    names = ["few.png", "few.trace", "one.trace", "out.png", "out.svg", "t.trace"]
    assert sorted(p.name for p in tmp_path.iterdir()) == names


def test_report_on_unfinished_and_empty_traces(tmp_path):
    whole = Recording([600]).write(tmp_path / "t.trace").read_bytes()
    cut = tmp_path / "cut.trace"
    cut.write_bytes(whole[:-40])
    assert_one_line_error(headrace("trace", "--report", cut), "cut.trace", "has no end", "--partial")
    d = json.loads(headrace("trace", "--report", cut, "--partial", "--json").stdout)
    assert d["tokens"] == 512 and d["complete_tokens"] is None
    cut.write_bytes(whole[:200])
    assert_one_line_error(headrace("trace", "--report", cut, "--partial"), "cut.trace", "no tokens")
    assert_one_line_error(headrace("trace", "--report", tmp_path / "none"), "none", "no such file")


def test_a_trace_without_tokens_is_refused():
    with pytest.raises(HeadraceError, match="holds no tokens"):
        measure_reuse(ListedTrace([np.zeros((0, 2, 3), int)], 8))
