"""Writes tests/golden/score.npz: what PyTorch gives a held-out text, with the weights that `tiny` decodes to.

    PYTHONPATH=tests python -m golden.make_score       (needs pip install '.[parity]')

`log_probs` float64 [tokens - 1]: of each token of ecclesiastes_3.txt but the first, by Transformers in float32.
The text is from the King James Bible (public domain), a chapter that `tiny` was not trained on (training/README.md).
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import checkpoints
import numpy as np

from golden.transformers_model import load_model, versions
from headrace.commands.model import open_model
from headrace.formats.checkpoint import Checkpoint
from headrace.reference import read_embedding_row, read_expert, read_tensor
from headrace.text.tokenizer import load_tokenizer

GOLDEN = Path(__file__).parent
TEXT = GOLDEN / "ecclesiastes_3.txt"


def token_ids(checkpoint: Checkpoint) -> list[int]:
    tokenizer = load_tokenizer(checkpoint.tokenizer, checkpoint.config)
    assert tokenizer is not None
    return tokenizer.encode(TEXT.read_text())


def float_weights(checkpoint: Checkpoint) -> checkpoints.Weights:
    """Every weight under GGUF's name, as the float32 it stands for."""
    c = checkpoint.config
    weights = {name: read_tensor(checkpoint, name).reshape(tensor.shape) for name, tensor in checkpoint.tensors.items()}
    weights["token_embd.weight"] = np.stack([read_embedding_row(checkpoint, i) for i in range(c.vocab_size)])
    for layer in range(c.num_hidden_layers):
        experts = [read_expert(checkpoint, layer, e) for e in range(c.num_experts)]
        for i, part in enumerate(("gate", "up", "down")):
            weights[f"blk.{layer}.ffn_{part}_exps.weight"] = np.stack([e[i] for e in experts])
    return weights


def spec_of(checkpoint: Checkpoint) -> checkpoints.Spec:
    c = checkpoint.config
    names = (
        "num_hidden_layers hidden_size num_attention_heads num_key_value_heads head_dim num_experts "
        "num_experts_per_tok moe_intermediate_size vocab_size rms_norm_eps rope_theta norm_topk_prob "
        "max_position_embeddings"
    )
    values = {name: getattr(c, name) for name in names.split()}
    return checkpoints.Spec("olmoe", tie_word_embeddings="output.weight" not in checkpoint.tensors, **values)


def transformers_log_probs(checkpoint: Checkpoint) -> np.ndarray:
    import torch

    ids = torch.tensor([token_ids(checkpoint)])
    with tempfile.TemporaryDirectory() as directory:
        path = checkpoints.write_hf(Path(directory), spec_of(checkpoint), float_weights(checkpoint))
        model = load_model(path)
        with torch.no_grad():
            logits = model(ids).logits[0, :-1].double()
    return torch.log_softmax(logits, dim=1).gather(1, ids[0, 1:, None])[:, 0].numpy()


def main() -> None:
    log_probs = transformers_log_probs(open_model("tiny"))
    np.savez_compressed(GOLDEN / "score.npz", log_probs=log_probs, versions=np.array(versions()))
    print(f"{len(log_probs)} tokens, perplexity {np.exp(-log_probs.mean()):.4f}", versions())


if __name__ == "__main__":
    main()
