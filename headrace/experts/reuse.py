"""What a trace says about reuse (MoESpec, section 2 and appendix D), computed block by block in bounded memory.

S(l, t) is the set of m = top_k experts of layer l and token t; a window is n consecutive tokens of one sequence.

    rho(n)   share of the last token's experts that an earlier token of its window also selected: the sum over all
             windows, over m times their number. rho(1) = 0
    U(n)     mean number of distinct experts in a window
    u(n)     layer mean of U(n), over n m: what a deduplicating kernel requests of a per-slot kernel's bytes, where all
             layers' experts are of one size

Intervals are 95 % percentile intervals of 2,000 bootstrap resamples: of sequences, where there are at least 20, as the
paper resamples documents; else of pieces of 16 or more consecutive windows, whose neighbours depend on each other.
Where fewer than 5 of these hold a window of n tokens, they do not tell how uncertain rho(n) is: it has no interval.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headrace.errors import HeadraceError
from headrace.experts.simulate import read_shape
from headrace.experts.traces import Trace

MAX_WINDOW = 9  # tokens; a verification pass of 8 drafts
RESAMPLES = 2000
MIN_SEQUENCES = 20
MIN_PIECES = 5
PIECE_TOKENS = 16
MAX_PIECES = 1024
MAX_USES = 1 << 24  # tokens * layers * experts that are looked at together
_SEED = 0


@dataclass(frozen=True)
class Reuse:
    """All arrays are float64. Windows longer than every sequence are left out.

    n: [k] window lengths from 2. rho, union: [k, layers]; rho_low, rho_high: [k, layers], NaN where there is too little
    to resample; mean_low, mean_high: [k], of the layer mean. resampled: what was. shares: [layers, experts], of a
    layer's routes. working_sets: {tokens: (windows, mean distinct experts [layers])} of windows side by side, of
    lengths that are powers of two.
    """

    num_tokens: int
    num_sequences: int
    num_layers: int
    num_experts: int
    top_k: int
    n: np.ndarray
    rho: np.ndarray
    rho_low: np.ndarray
    rho_high: np.ndarray
    mean_low: np.ndarray
    mean_high: np.ndarray
    union: np.ndarray
    shares: np.ndarray
    working_sets: dict[int, tuple[int, np.ndarray]]
    resampled: str

    @property
    def mean(self) -> np.ndarray:
        """rho's layer mean [k]."""
        return self.rho.mean(axis=1)

    @property
    def share(self) -> np.ndarray:
        """u(n) [k]."""
        return self.union.mean(axis=1) / (self.n * self.top_k)

    @property
    def uniform(self) -> np.ndarray:
        """rho(n) under independent uniform routing: 1 - (1 - m/N)^(n - 1)."""
        return 1 - (1 - self.top_k / self.num_experts) ** (self.n - 1)

    @property
    def entropy_bits(self) -> np.ndarray:
        """Of each layer's shares [layers]; log2(num_experts) where all experts are used alike."""
        logs = np.log2(self.shares, where=self.shares > 0, out=np.zeros_like(self.shares))
        return -(self.shares * logs).sum(axis=1)


def measure_reuse(trace: Trace, num_experts: int | None = None) -> Reuse:
    """Reads a whole trace. num_experts: for a trace that does not say; None: as read_shape() finds it."""
    num_experts = trace.num_experts or num_experts or read_shape(trace).num_experts[0]
    counter = _Counter(trace.num_layers, num_experts, trace.top_k)
    step = max(1, MAX_USES // (trace.num_layers * num_experts))
    for block in trace.blocks(values=False):
        for begin in range(0, len(block.ids), step):
            counter.add(block.sequence, block.ids[begin : begin + step].astype(np.int64))
    if not counter.num_tokens:
        raise HeadraceError(f"{trace.path}: holds no tokens; record it again")
    return counter.result()


class _Pieces:
    """Sums of consecutive pieces of a trace, at most MAX_PIECES: when they are full, neighbours are merged, and from
    then on a piece is twice as long."""

    def __init__(self, num_values: int):
        self._sums = np.zeros((MAX_PIECES, num_values), np.int64)
        self._last = np.zeros(num_values, np.int64)
        self._num, self._parts, self.parts_of_one = 0, 0, 1

    def add(self, sums: np.ndarray) -> None:
        self._last += sums
        self._parts += 1
        if self._parts < self.parts_of_one:
            return
        self._sums[self._num] = self._last
        self._last[:] = 0
        self._num, self._parts = self._num + 1, 0
        if self._num == MAX_PIECES:
            self._num //= 2
            self._sums[: self._num] = self._sums[::2] + self._sums[1::2]
            self.parts_of_one *= 2

    def all(self) -> np.ndarray:
        """[pieces, num_values]."""
        whole = self._sums[: self._num]
        return np.concatenate([whole, self._last[None]]) if self._parts else whole


class _WorkingSets:
    """Distinct experts of windows side by side, of 1, 2, 4, ... tokens, each from two of half its length."""

    def __init__(self) -> None:
        self._waiting: list[np.ndarray | None] = []  # per length, a window that has no neighbour yet
        self._sums: list[np.ndarray] = []
        self._windows: list[int] = []

    def add(self, used: np.ndarray) -> None:
        """used: bool [tokens, layers, experts]."""
        level = 0
        while len(used):
            if level == len(self._sums):
                self._waiting.append(None)
                self._sums.append(np.zeros(used.shape[1], np.int64))
                self._windows.append(0)
            self._sums[level] += used.sum(axis=(0, 2))
            self._windows[level] += len(used)
            before = self._waiting[level]
            if before is not None:
                used = np.concatenate([before[None], used])
            self._waiting[level] = used[-1] if len(used) % 2 else None
            even = len(used) // 2 * 2
            used, level = used[0:even:2] | used[1:even:2], level + 1

    def end_sequence(self) -> None:
        self._waiting = [None] * len(self._waiting)

    def result(self) -> dict[int, tuple[int, np.ndarray]]:
        return {1 << i: (n, sums / n) for i, (n, sums) in enumerate(zip(self._windows, self._sums, strict=True))}


class _Counter:
    def __init__(self, num_layers: int, num_experts: int, top_k: int):
        self.num_layers, self.num_experts, self.top_k = num_layers, num_experts, top_k
        self.num_tokens, self.num_sequences = 0, 0
        # Per piece: hits [window lengths, layers] and windows [window lengths].
        self._num_lengths = MAX_WINDOW - 1
        self._num_values = self._num_lengths * (num_layers + 1)
        self._pieces, self._sequences = _Pieces(self._num_values), _Pieces(self._num_values)
        self._piece, self._sequence = np.zeros(self._num_values, np.int64), np.zeros(self._num_values, np.int64)
        self._union = np.zeros((self._num_lengths, num_layers), np.int64)
        self._counts = np.zeros((num_layers, num_experts), np.int64)
        self._working_sets = _WorkingSets()
        self._tail = np.zeros((0, num_layers, num_experts), bool)  # the sequence's last tokens, MAX_WINDOW - 1 at most
        self._unions = np.zeros((self._num_lengths, num_layers), np.int64)  # its last token's, of 1, 2, ... tokens
        self._at = 0  # position in the sequence
        self._last_sequence = -1

    def add(self, sequence: int, ids: np.ndarray) -> None:
        """ids: int64 [tokens, layers, top_k], the next of their sequence."""
        if sequence != self._last_sequence:
            self._end_sequence()
            self._last_sequence = sequence
        used = np.zeros((len(ids), self.num_layers, self.num_experts), bool)
        np.put_along_axis(used, ids, True, axis=-1)
        self._counts += used.sum(axis=0)
        self._working_sets.add(used)
        hits = self._windows(used, ids)
        self.num_tokens += len(used)
        begin = 0
        while begin < len(used):
            end = min(len(used), begin + PIECE_TOKENS - self._at % PIECE_TOKENS)
            sums = hits[begin:end].sum(axis=0)
            self._piece += sums
            self._sequence += sums
            self._at += end - begin
            begin = end
            if self._at % PIECE_TOKENS == 0:
                self._end_piece()

    def _windows(self, used: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """Of the windows that end at each token: hits and whether there is one [tokens, num_values]. Adds to unions."""
        tokens, known = len(used), len(self._tail)
        history = np.concatenate([self._tail, used])
        padding = np.zeros((MAX_WINDOW - 1 - known, *used.shape[1:]), bool)
        padded = np.concatenate([padding, history])  # padded[i + MAX_WINDOW - 1] is token i of the block
        before = np.zeros_like(used)  # used by the n - 1 tokens before
        hits = np.zeros((tokens, self._num_lengths, self.num_layers + 1), np.int64)
        union = np.full((tokens, self.num_layers), self.top_k)  # of the n tokens that end here
        for i in range(self._num_lengths):
            lag = i + 1  # n - 1
            before |= padded[MAX_WINDOW - 1 - lag : MAX_WINDOW - 1 - lag + tokens]
            repeated = np.take_along_axis(before, ids, axis=-1).sum(axis=-1)
            # What the token adds to the n - 1 tokens that end before it.
            earlier = np.concatenate([self._unions[i : i + 1], union[:-1]])
            self._unions[i] = union[-1]
            union = earlier + self.top_k - repeated
            first = max(0, lag - known)  # the first token that has so many before it
            hits[first:, i, :-1] = repeated[first:]
            hits[first:, i, -1] = 1
            self._union[i] += union[first:].sum(axis=0)
        self._tail = history[-(MAX_WINDOW - 1) :]
        return hits.reshape(tokens, -1)

    def _end_piece(self) -> None:
        self._pieces.add(self._piece)
        self._piece[:] = 0

    def _end_sequence(self) -> None:
        if self._at:
            if self._at % PIECE_TOKENS:
                self._end_piece()
            self._sequences.add(self._sequence)
            self._sequence[:] = 0
            self.num_sequences += 1
            self._working_sets.end_sequence()
            self._tail = self._tail[:0]
        self._at = 0

    def result(self) -> Reuse:
        self._end_sequence()
        by_sequence = self.num_sequences >= MIN_SEQUENCES
        pieces = self._sequences if by_sequence else self._pieces
        of_one = pieces.parts_of_one * (1 if by_sequence else PIECE_TOKENS)
        sums = pieces.all().reshape(-1, self._num_lengths, self.num_layers + 1)
        kept = sums[:, :, -1].sum(axis=0) > 0
        sums = sums[:, kept]
        hits, windows = sums[..., :-1], sums[..., -1:]
        intervals = _intervals(hits / self.top_k, windows)
        return Reuse(
            num_tokens=self.num_tokens,
            num_sequences=self.num_sequences,
            num_layers=self.num_layers,
            num_experts=self.num_experts,
            top_k=self.top_k,
            n=np.arange(2, MAX_WINDOW + 1)[kept],
            rho=hits.sum(axis=0) / (self.top_k * windows.sum(axis=0)),
            rho_low=intervals[0],
            rho_high=intervals[1],
            mean_low=intervals[2],
            mean_high=intervals[3],
            union=self._union[kept] / windows.sum(axis=0),
            shares=self._counts / self._counts.sum(axis=1, keepdims=True),
            working_sets=self._working_sets.result(),
            resampled=f"{len(sums)} x {of_one} {'sequences' if by_sequence else 'tokens'}",
        )


def _intervals(hits: np.ndarray, windows: np.ndarray) -> tuple[np.ndarray, ...]:
    """Of hits [pieces, k, layers] over windows [pieces, k, 1]: low and high per layer, then of the layer mean. NaN for
    lengths of which fewer than MIN_PIECES have a window."""
    num_pieces, k, num_layers = hits.shape
    kept = (windows[..., 0] > 0).sum(axis=0) >= MIN_PIECES
    low, high = np.full((2, k, num_layers), np.nan)
    mean_low, mean_high = np.full((2, k), np.nan)
    if not kept.any():
        return low, high, mean_low, mean_high
    rng = np.random.default_rng(_SEED)
    flat_hits = hits[:, kept].reshape(num_pieces, -1)
    flat_windows = windows[:, kept, 0].astype(np.float64)
    even = np.full(num_pieces, 1 / num_pieces)
    resampled = np.empty((RESAMPLES, flat_windows.shape[1], num_layers))
    for begin in range(0, RESAMPLES, 100):
        weights = rng.multinomial(num_pieces, even, size=100).astype(np.float64)
        total = (weights @ flat_windows)[..., None]
        # A resample may by chance hold no window of a length: it says nothing about it.
        with np.errstate(invalid="ignore"):
            resampled[begin : begin + 100] = (weights @ flat_hits).reshape(*total.shape[:2], num_layers) / total
    low[kept], high[kept] = np.nanpercentile(resampled, (2.5, 97.5), axis=0)
    mean_low[kept], mean_high[kept] = np.nanpercentile(resampled.mean(axis=2), (2.5, 97.5), axis=0)
    return low, high, mean_low, mean_high
