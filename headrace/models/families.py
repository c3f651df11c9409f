"""Finds a family by `model_type`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.errors import HeadraceError
from headrace.formats.checkpoint import Checkpoint
from headrace.graph import Graph
from headrace.models import olmoe, qwen3_moe

FAMILIES: dict[str, Callable[..., Graph]] = {"olmoe": olmoe.build, "qwen3_moe": qwen3_moe.build}


def build_graph(checkpoint: Checkpoint, **options: Any) -> Graph:
    """The graph of one pass. options: route_capacity (routes that the expert op processes at a time) and
    route_all_rows (the last layer's router sees every row, not only those whose logits are wanted)."""
    build = FAMILIES.get(checkpoint.config.model_type)
    if build is None:
        raise HeadraceError(
            f"{checkpoint.path}: model type {checkpoint.config.model_type!r} is not supported; "
            f"supported: {', '.join(sorted(FAMILIES))}"
        )
    return build(checkpoint, **options)
