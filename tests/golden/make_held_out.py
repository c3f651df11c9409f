"""Writes tests/golden/held_out.npz: what the oracle in int8 mode gives the texts of held_out.jsonl.

    PYTHONPATH=tests python -m golden.make_held_out       (NumPy alone; minutes)

`log_likelihoods` float64 [texts]: of all tokens of a text but its first, keys and values in float16. `num_tokens`.
The texts are the chapters of the King James Bible (public domain) that `tiny` was not trained on (training/README.md).
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from oracle import experts_read_once, int8_oracle

from headrace.commands.model import open_model
from headrace.formats.checkpoint import Checkpoint
from headrace.reference import Reference, ReferenceSession
from headrace.text.tokenizer import load_tokenizer

GOLDEN = Path(__file__).parent
TEXTS = GOLDEN / "held_out.jsonl"


def token_ids(checkpoint: Checkpoint) -> list[list[int]]:
    tokenizer = load_tokenizer(checkpoint.tokenizer, checkpoint.config)
    assert tokenizer is not None
    return [tokenizer.encode(json.loads(line)["text"]) for line in TEXTS.read_text().splitlines()]


def log_likelihood(oracle: Reference, ids: list[int]) -> float:
    rows = len(ids) - 1
    log_probs = oracle.run(ReferenceSession(oracle.graph, np.float16), ids[:-1], list(range(rows)), targets=ids[1:])
    return float(log_probs.sum(dtype=np.float64))


def main() -> None:
    checkpoint = open_model("tiny")
    oracle, texts, values = int8_oracle(checkpoint), token_ids(checkpoint), []
    with experts_read_once(checkpoint):
        for ids in texts:
            values.append(log_likelihood(oracle, ids))
            print(f"{len(values)} of {len(texts)}: {len(ids)} tokens, {values[-1]:.4f}", flush=True)
    num_tokens = np.array([len(ids) for ids in texts])
    np.savez(GOLDEN / "held_out.npz", log_likelihoods=np.array(values), num_tokens=num_tokens)
    print(f"perplexity {np.exp(-sum(values) / (num_tokens - 1).sum()):.6f} over {(num_tokens - 1).sum()} tokens")


if __name__ == "__main__":
    main()
