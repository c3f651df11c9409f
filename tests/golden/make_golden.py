"""Writes tests/golden/<family>.npz: Transformers' logits (float32, eager) for the tiny random checkpoints.

    PYTHONPATH=tests python -m golden.make_golden        needs PyTorch and Transformers

`logits` [60, vocab]: the 40-token prompt's rows, then one row per single step. `versions` says what made them.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np

from golden import tiny_random
from golden.transformers_model import load_model, versions


def transformers_logits(directory: Path) -> np.ndarray:
    """Prompt in one pass, then single steps through the cache."""
    import torch

    model = load_model(directory)
    ids, n = tiny_random.prompt(), tiny_random.PROMPT_TOKENS
    rows = []
    with torch.no_grad():
        out = model(torch.tensor([ids[:n]]), use_cache=True)
        rows.append(out.logits[0])
        for token in ids[n:]:
            out = model(torch.tensor([[token]]), past_key_values=out.past_key_values, use_cache=True)
            rows.append(out.logits[0])
    return torch.cat(rows).numpy().astype(np.float32)


def main() -> None:
    for family in tiny_random.CONFIGS:
        with tempfile.TemporaryDirectory() as directory:
            logits = transformers_logits(tiny_random.write(family, Path(directory)))
        np.savez_compressed(Path(__file__).parent / f"{family}.npz", logits=logits, versions=np.array(versions()))
        print(family, logits.shape, f"std {logits.std():.4f}", versions())


if __name__ == "__main__":
    sys.exit(main())
