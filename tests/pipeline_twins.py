"""Three ways to say how long a streamed prefill takes, in plain Python, for tests of csrc/experts/pipeline_model.h:
the recurrence, an event-by-event simulation of the same rule, and one of the engine's rule (a free pool of reads and
banks). Times are whole numbers, so that all are exact."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field

import numpy as np

from headrace import _core


@dataclass
class Group:
    read: int  # all absent experts; 0: none is absent
    routed_read: int  # those with routes
    compute: int  # 0: no routes


@dataclass
class Layer:
    non_expert: int
    groups: list[Group]
    begins_pass: bool = False
    reads_early: bool = True


@dataclass
class Request:
    layers: list[Layer]
    after: int = 0
    groups: list[tuple[int, Group]] = field(init=False)  # (layer, group), all in order

    def __post_init__(self):
        self.groups = [(i, group) for i, layer in enumerate(self.layers) for group in layer.groups]

    def model(self) -> _core.PipelineModel:
        rows = [(g.read, g.routed_read, g.compute) for _, g in self.groups]
        return _core.PipelineModel(
            [layer.non_expert for layer in self.layers],
            [layer.begins_pass for layer in self.layers],
            [layer.reads_early for layer in self.layers],
            [len(layer.groups) for layer in self.layers],
            np.array(rows, float).reshape(-1, 3),
            self.after,
        )


@dataclass
class Times:
    """[group], None where it does not happen; routed: [layer]."""

    read_begin: list
    read_end: list
    compute_begin: list
    compute_end: list
    routed: list
    total: int = 0

    @classmethod
    def nothing_yet(cls, request: Request) -> Times:
        return cls(*([None] * len(request.groups) for _ in range(4)), [None] * len(request.layers))

    def __eq__(self, other) -> bool:
        return vars(self) == vars(other)


def model_times(request: Request, depth: int, banks: int, schedule: str) -> Times:
    """What the C++ model says."""
    t = request.model().times(depth, banks, schedule)
    whole = [
        [None if math.isnan(x) else int(x) for x in t[name]]
        for name in ("read_begin_s", "read_end_s", "compute_begin_s", "compute_end_s", "routed_s")
    ]
    return Times(*whole, int(t["total_s"]))


def recurrence(request: Request, depth: int, banks: int, schedule: str) -> Times:
    """EStream, equation 5, with what a request of several layers adds (docs/prefill.md)."""
    out = Times.nothing_yet(request)
    d, free = [], []  # of groups that were read
    f = begun = turn = k = 0
    for i, layer in enumerate(request.layers):
        begun = f if layer.begins_pass else begun
        routed = out.routed[i] = f = f + layer.non_expert
        for group in layer.groups:
            if group.read:
                early = schedule == "early" and layer.reads_early
                earliest = begun if early else f if schedule == "on-demand" else routed
                j = len(d)
                a = max(
                    [earliest, turn, *d[j - depth : j - depth + 1][: j >= depth], *free[j - banks :][: j >= banks][:1]]
                )
                took = group.read if a < routed else group.routed_read
                if group.routed_read == 0:
                    turn = min(a, routed)
                if took:
                    end = a + took if group.compute else min(a + took, routed)
                    out.read_begin[k], out.read_end[k] = a, end
                    d.append(end)
                    free.append(routed)
            if group.compute:
                out.compute_begin[k] = max(f, out.read_end[k] or 0)
                f = out.compute_end[k] = out.compute_begin[k] + group.compute
                if out.read_begin[k] is not None:
                    free[-1] = f
            k += 1
    out.total = f + request.after
    return out


class _Simulation:
    """A clock, an executor, and reads that a subclass starts. Nothing looks at the past or knows an end in advance,
    except that the ordered rule is told which groups will have routes (see Ordered)."""

    def __init__(self, request: Request, depth: int, banks: int, schedule: str):
        self.request, self.depth, self.banks, self.schedule = request, depth, banks, schedule
        self.out = Times.nothing_yet(request)
        self.now = 0
        self.events: list[tuple[int, int, str]] = []  # (time, group or layer, what)
        self.layer, self.at = 0, 0  # of the executor: the layer that it is in, the group that comes next
        self.busy = False
        self.pass_of, passes = [], 0
        for layer in request.layers:
            passes += layer.begins_pass
            self.pass_of.append(passes)
        self.cancelled: set[int] = set()

    def run(self) -> Times:
        """The executor goes first at any time, so that a read that starts knows the routes that become known then."""
        self.begin_layer()
        while True:
            if self.events and self.events[0][0] == self.now:
                _, which, what = heapq.heappop(self.events)
                getattr(self, what)(which)
            elif not self.go_on_computing() and not self.start_reads():
                if not self.events:
                    break
                self.now = self.events[0][0]
        assert self.layer == len(self.request.layers), "stalled"
        self.out.total += self.request.after
        return self.out

    # ---- the executor

    def begin_layer(self) -> None:
        if self.layer < len(self.request.layers):
            self.busy = True
            heapq.heappush(
                self.events, (self.now + self.request.layers[self.layer].non_expert, self.layer, "layer_routed")
            )
        else:
            self.out.total = self.now

    def layer_routed(self, layer: int) -> None:
        self.out.routed[layer] = self.now
        self.busy = False
        for k, (i, group) in enumerate(self.request.groups):
            if i != layer or group.compute or self.out.read_begin[k] is None:
                continue
            if self.out.read_end[k] is None:  # broken off
                self.cancelled.add(k)
                self.out.read_end[k] = self.now
                self.lane_is_free(k)
            self.bank_is_free(k)

    def go_on_computing(self) -> bool:
        if self.busy or self.layer == len(self.request.layers):
            return False
        if self.at == len(self.request.groups) or self.request.groups[self.at][0] != self.layer:
            self.layer += 1
            self.begin_layer()
            return True
        group = self.request.groups[self.at][1]
        if not group.compute:
            self.at += 1
            return True
        begun, ended = self.out.read_begin[self.at], self.out.read_end[self.at]
        if (begun is None and group.routed_read > 0) or (begun is not None and ended is None):
            return False
        self.busy = True
        self.out.compute_begin[self.at] = self.now
        heapq.heappush(self.events, (self.now + group.compute, self.at, "computed"))
        return True

    def computed(self, k: int) -> None:
        self.busy = False
        self.out.compute_end[k] = self.now
        self.at += 1
        if self.out.read_begin[k] is not None:
            self.bank_is_free(k)

    # ---- reads

    def may_start(self, k: int) -> bool:
        i = self.request.groups[k][0]
        if self.out.routed[i] is not None:
            return self.schedule != "on-demand" or (self.at == k and not self.busy)
        if self.schedule != "early" or not self.request.layers[i].reads_early:
            return False
        return self.pass_of[i] == self.pass_of[min(self.layer, len(self.pass_of) - 1)]

    def start(self, k: int) -> None:
        i, group = self.request.groups[k]
        self.out.read_begin[k] = self.now
        took = group.read if self.out.routed[i] is None else group.routed_read
        heapq.heappush(self.events, (self.now + took, k, "read"))

    def is_skipped(self, k: int) -> bool:
        """It was not begun, and by now it is known that nothing of it need be read."""
        i, group = self.request.groups[k]
        return self.out.routed[i] is not None and group.routed_read == 0

    def read(self, k: int) -> None:
        if k not in self.cancelled:
            self.out.read_end[k] = self.now
            self.lane_is_free(k)


class Ordered(_Simulation):
    """Number j has lane j mod Q and bank j mod B, each used in the order of numbers. A group of which nothing will be
    read once its routes are known gets its number only when its read starts; those after it wait for that."""

    def __init__(self, *args):
        super().__init__(*args)
        self.number: dict[int, int] = {}
        self.waiting: list[int] = []
        self.next_group = 0
        self.lane_used = [0] * self.depth  # numbers of a lane, a bank, that are done with it
        self.bank_used = [0] * self.banks

    def is_free(self, j: int) -> bool:
        return self.lane_used[j % self.depth] == j // self.depth and self.bank_used[j % self.banks] == j // self.banks

    def start_reads(self) -> bool:
        groups = self.request.groups
        while self.next_group < len(groups):
            k, group = self.next_group, groups[self.next_group][1]
            if group.read == 0 or self.is_skipped(k):
                self.next_group += 1
                continue
            if group.routed_read == 0 and not (self.is_free(len(self.number)) and self.may_start(k)):
                break
            self.number[k] = len(self.number)
            self.waiting.append(k)
            self.next_group += 1
        ready = [k for k in self.waiting if self.is_free(self.number[k]) and self.may_start(k)]
        for k in ready:
            self.waiting.remove(k)
            self.start(k)
        return bool(ready)

    def lane_is_free(self, k: int) -> None:
        self.lane_used[self.number[k] % self.depth] += 1

    def bank_is_free(self, k: int) -> None:
        self.bank_used[self.number[k] % self.banks] += 1


class FreePool(_Simulation):
    """What the engine does: groups start in storage order, with any lane and any bank that is free."""

    def __init__(self, *args):
        super().__init__(*args)
        self.next_group = 0
        self.lanes, self.free_banks = self.depth, self.banks

    def start_reads(self) -> bool:
        groups = self.request.groups
        while self.next_group < len(groups):
            k = self.next_group
            if groups[k][1].read > 0 and not self.is_skipped(k):
                if not (self.lanes and self.free_banks and self.may_start(k)):
                    return False
                self.lanes -= 1
                self.free_banks -= 1
                self.start(k)
                self.next_group += 1
                return True
            self.next_group += 1
        return False

    def lane_is_free(self, k: int) -> None:
        self.lanes += 1

    def bank_is_free(self, k: int) -> None:
        self.free_banks += 1
