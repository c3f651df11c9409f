"""OLMoE: q and k are normed over the full projected vector; routing weights are not renormalised."""

from __future__ import annotations

from typing import Any

from headrace.formats.checkpoint import Checkpoint
from headrace.graph import Graph
from headrace.models.blocks import DecoderBuilder, decoder_graph


def build(checkpoint: Checkpoint, **options: Any) -> Graph:
    return decoder_graph(DecoderBuilder(checkpoint, **options), qk_norm="full")
