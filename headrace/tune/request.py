"""A prompt as the pipeline model sees it: the groups of all its passes and layers, with what each takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headrace import _core
from headrace.tune.service_times import ServiceTimes

SEED = 0  # of the routes that are drawn
MAX_GROUP_BYTES = 64 << 20  # of groups of more than one expert: beyond, reads gain nothing and banks grow


@dataclass(frozen=True)
class ModelShape:
    """Of each layer: experts, and the bytes of one."""

    num_experts: tuple[int, ...]
    record_bytes: tuple[int, ...]

    @property
    def largest_record_bytes(self) -> int:
        return max(self.record_bytes)

    @property
    def expert_bytes(self) -> int:
        return sum(n * size for n, size in zip(self.num_experts, self.record_bytes, strict=True))

    def group_sizes(self) -> list[int]:
        """Candidates for G, ascending powers of two."""
        sizes = [1]
        while 2 * sizes[-1] <= max(self.num_experts) and 2 * sizes[-1] * self.largest_record_bytes <= MAX_GROUP_BYTES:
            sizes.append(2 * sizes[-1])
        return sizes

    def num_groups(self, group_size: int) -> int:
        """Of one pass."""
        return sum(-(-n // group_size) for n in self.num_experts)


@dataclass(frozen=True)
class PromptPass:
    """Rows from position `first` on. wanted: those whose logits are asked for; the last layer's experts see those."""

    rows: int
    first: int
    wanted: int


def prompt_passes(num_tokens: int, max_rows: int) -> list[PromptPass]:
    """How Session.prefill cuts a prompt."""
    passes = []
    for first in range(0, num_tokens, max_rows):
        rows = min(max_rows, num_tokens - first)
        passes.append(PromptPass(rows, first, int(first + rows == num_tokens)))
    return passes


class Request:
    """The routes of a prompt, drawn once from how often each expert was used, so that all group sizes meet the same."""

    def __init__(self, shape: ModelShape, times: ServiceTimes, passes: Sequence[PromptPass]):
        self.shape, self.times, self.passes = shape, times, passes
        rng = np.random.default_rng(SEED)
        last = len(shape.num_experts) - 1
        # [pass][layer]: routes of each expert.
        self.routes = [
            [
                rng.binomial(p.wanted if layer == last else p.rows, np.minimum(1, times.shares[layer]))
                for layer in range(last + 1)
            ]
            for p in passes
        ]

    def model(self, group_size: int, depth_factor: float = 1.0) -> _core.PipelineModel:
        """depth_factor: how much longer a read takes than at the profile's queue depth."""
        read, compute, non_expert = self.times.read, self.times.compute, self.times.non_expert
        before, begins, early, counts, groups = [], [], [], [], []
        last = len(self.shape.num_experts) - 1
        for i, p in enumerate(self.passes):
            for layer, routes in enumerate(self.routes[i]):
                first = np.arange(0, self.shape.num_experts[layer], group_size)
                sizes = np.minimum(group_size, self.shape.num_experts[layer] - first)
                used = np.add.reduceat(routes > 0, first)
                byte_s = read.byte_s * self.shape.record_bytes[layer]
                whole_s, used_s = (depth_factor * (read.read_s + byte_s * n) for n in (sizes, used))
                compute_s = self.times.layer_factors[layer] * (
                    compute.group_s + compute.expert_s * used + compute.route_s * np.add.reduceat(routes, first)
                )
                groups.append(
                    np.stack([whole_s, np.where(used > 0, used_s, 0), np.where(used > 0, compute_s, 0)], axis=1)
                )
                begins.append(i > 0 and layer == 0)
                early.append(self._reads_early(layer, p.wanted if layer == last else p.rows))
                counts.append(len(first))
                before.append(non_expert.of_layer(p.rows, p.first))
                if layer == 0:
                    before[-1] += non_expert.of_pass(p.rows)
        return _core.PipelineModel(before, begins, early, counts, np.concatenate(groups), non_expert.after_s)

    def _reads_early(self, layer: int, rows: int) -> bool:
        """As the executor decides (layers_to_read_early): if three quarters of the experts are expected to be used."""
        used = float(self.times.shares[layer].sum()) / self.shape.num_experts[layer]
        return (1 - used) ** rows <= 0.25
