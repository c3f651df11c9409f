"""Held-out perplexity by domain, and what the routers do there.

    python training/evaluate.py --corpus BUILD --checkpoint RUN/checkpoint.pt \
        --gguf headrace/data/tiny.gguf [--hf DIR]

Writes training/results.json: figures of the float weights and of those the GGUF decodes to.
"""

import argparse
import json
import math
from pathlib import Path

import torch
from data import DOMAINS, held_out_windows
from export_gguf import gguf_name, gguf_tensors, load_model
from gguf import GGUFReader
from gguf.quants import dequantize
from model import Olmoe
from torch import Tensor


def routing_figures(topk_ids: Tensor, num_experts: int) -> dict:
    """Shares and reuse from topk_ids (layers, windows, length, topk).

    share: an expert's part of a layer's routes over the mean part. rho2: the part of a token's
    experts that the token before it had too (same window), per layer.
    """
    layers, _, _, topk = topk_ids.shape
    shares = torch.stack([torch.bincount(ids.flatten(), minlength=num_experts).float() for ids in topk_ids])
    shares = shares / shares.mean(dim=1, keepdim=True)
    before, after = topk_ids[:, :, :-1, :, None], topk_ids[:, :, 1:, None, :]
    reuse = (before == after).any(dim=-1).float().sum(dim=-1) / topk
    rho2 = reuse.reshape(layers, -1).mean(dim=1)
    return {
        "share_min": shares.min(dim=1).values.tolist(),
        "share_max": shares.max(dim=1).values.tolist(),
        "rho2": rho2.tolist(),
        "rho2_mean": rho2.mean().item(),
    }


@torch.no_grad()
def evaluate(
    model: Olmoe,
    corpus: Path,
    length: int = 512,
    limit: int | None = None,
    batch_size: int = 8,
    compute_dtype: torch.dtype = torch.float32,
) -> dict:
    """Figures over the held-out windows of every domain (at most `limit` windows of each)."""
    domains, all_ids = {}, []
    for domain in DOMAINS:
        windows = held_out_windows(corpus, domain, length, limit)
        nll = 0.0
        for batch in windows.split(batch_size):
            hidden, _, topk_ids = model(batch[:, :-1], compute_dtype)
            nll += model.loss(hidden, batch[:, 1:]).item() * len(batch) * length
            all_ids.append(topk_ids.view(len(topk_ids), len(batch), length, -1))
        tokens = len(windows) * length
        domains[domain] = {"tokens": tokens, "perplexity": math.exp(nll / tokens)}
    routing = routing_figures(torch.cat(all_ids, dim=1), model.config.num_experts)
    return {"length": length, "domains": domains, "routing": routing}


@torch.no_grad()
def longer_windows(model: Olmoe, corpus: Path, tokens: int = 12288) -> dict:
    """Perplexity over the first `tokens` held-out tokens of each domain, by window length."""
    figures = {}
    for length in (512, 1024, 2048, 4096):
        figures[length] = {}
        for domain in DOMAINS:
            windows = held_out_windows(corpus, domain, length, None)[: tokens // length]
            losses = [model.loss(model(w[None, :-1])[0], w[None, 1:]).item() for w in windows]
            figures[length][domain] = math.exp(sum(losses) / len(losses))
    return {"tokens": tokens, "perplexity": figures}


def dequantized(model: Olmoe, gguf: Path) -> Olmoe:
    """A copy of the model with the weights that a GGUF file of it decodes to."""
    reader = GGUFReader(gguf)
    values = {t.name: dequantize(t.data, t.tensor_type) for t in reader.tensors}
    copy = Olmoe(model.config)
    state = copy.state_dict()
    parts = {}
    for name, array, _ in gguf_tensors(model):
        parts[name] = torch.tensor(values[name].reshape(array.shape))
    for name, tensor in state.items():
        if name.endswith("gate_up_proj"):
            block = f"blk.{name.split('.')[1]}."
            gate, up = (parts[f"{block}ffn_{part}_exps.weight"] for part in ("gate", "up"))
            tensor.copy_(torch.cat((gate, up), dim=1))
        else:
            tensor.copy_(parts[gguf_name(name)])
    return copy


def transformers_difference(model: Olmoe, hf: Path, tokens: Tensor) -> dict:
    """Loss on tokens (windows, length+1) here and in Transformers, from the same weights."""
    from transformers import AutoTokenizer, OlmoeForCausalLM

    reference = OlmoeForCausalLM.from_pretrained(hf, dtype=torch.float32, attn_implementation="eager")
    AutoTokenizer.from_pretrained(hf)
    with torch.no_grad():
        hidden, _, _ = model(tokens[:, :-1])
        ours = model.lm_head(hidden)
        theirs = reference(tokens[:, :-1]).logits
    return {
        "loss": model.loss(hidden, tokens[:, 1:]).item(),
        "loss_transformers": torch.nn.functional.cross_entropy(theirs.flatten(0, 1), tokens[:, 1:].flatten()).item(),
        "max_logit_difference": (ours - theirs).abs().max().item(),
        "logit_std": theirs.std().item(),
    }


def print_table(results: dict) -> None:
    print(f"{'held-out perplexity':24}" + "".join(f"{d:>10}" for d in DOMAINS))
    for label in ("float32", "gguf"):
        figures = results[label]["domains"]
        print(f"{label:24}" + "".join(f"{figures[d]['perplexity']:10.2f}" for d in DOMAINS))
    routing = results["gguf"]["routing"]
    print(f"{'layer':>5}{'share min':>12}{'share max':>12}{'rho(2)':>10}")
    rows = zip(routing["share_min"], routing["share_max"], routing["rho2"], strict=True)
    for layer, (low, high, rho2) in enumerate(rows):
        print(f"{layer:5}{low:12.2f}{high:12.2f}{rho2:10.3f}")
    low, high = min(routing["share_min"]), max(routing["share_max"])
    print(f"{'all':>5}{low:12.2f}{high:12.2f}{routing['rho2_mean']:10.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--gguf", type=Path, required=True, help="export_gguf.py's file of it")
    parser.add_argument("--hf", type=Path, help="its directory: compare with Transformers")
    parser.add_argument("--length", type=int, default=512, help="tokens in a window")
    parser.add_argument("--results", type=Path, default=Path(__file__).with_name("results.json"))
    args = parser.parse_args()
    state = torch.load(args.checkpoint, map_location="cpu", weights_only=True)
    model = load_model(args.checkpoint)
    corpus = json.loads((args.corpus / "corpus.json").read_text())
    results = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "gguf_bytes": args.gguf.stat().st_size,
        "steps": state["step"],
        "decay_from_step": state["decay_step"],
        "training_tokens": state["tokens"],
        "corpus": corpus["domains"],
        "float32": evaluate(model, args.corpus, args.length),
    }
    copy = dequantized(model, args.gguf)
    results["gguf"] = evaluate(copy, args.corpus, args.length)
    results["longer"] = longer_windows(copy, args.corpus)
    if args.hf:
        tokens = held_out_windows(args.corpus, "prose", args.length, 4)
        results["transformers"] = transformers_difference(model, args.hf, tokens)
    args.results.write_text(json.dumps(results, indent=2) + "\n")
    print_table(results)
    if args.hf:
        print(results["transformers"])


if __name__ == "__main__":
    main()
