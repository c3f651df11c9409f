"""Scoring: log-probabilities of given tokens, by prefill alone. Whole texts, sliding windows, choices after a prompt.

Every pass reads what experts it routes to from disk, so passes are filled: rows of texts follow each other, whichever
text they are of, and are cut where a pass is full. A prompt runs once for all its choices, in the same pass if there
is room. What a text gets does not depend on what it shares a pass with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from headrace import _core
from headrace.engine import Engine, EngineOptions, Figures, make_plan
from headrace.errors import HeadraceError
from headrace.experts.plan import EFFICIENT_ROWS
from headrace.formats.checkpoint import Checkpoint

TILE = 16  # positions that a state's memory is divided by
KEY_BLOCK = 64  # positions that a state shares with the one it continues: csrc/kernels/kernels.h, kKeyBlock


@dataclass(frozen=True, eq=False)
class Sequence:
    """What is run in one go. tokens: int32 [n + 1], of which all but the last are rows, and all but the first are their
    targets. skip: rows before the first whose target is asked for. base: the sequence that this one continues, in the
    same item and before it; its last token is this one's first."""

    tokens: np.ndarray
    skip: int = 0
    base: Sequence | None = None

    @property
    def num_rows(self) -> int:
        return len(self.tokens) - 1

    @property
    def base_rows(self) -> int:
        return self.base.num_rows if self.base is not None else 0

    @property
    def positions(self) -> int:
        """That it needs for itself."""
        return -(-(self.num_rows + self.base_rows % KEY_BLOCK) // TILE) * TILE


# Sequences of one text or one question. They are done together.
Item = list[Sequence]


def text_item(tokens: np.ndarray, context: int, stride: int | None = None) -> Item:
    """A text, int32 [n], n >= 2: tokens[1:] are scored. One longer than the context goes through it in windows, each
    `stride` tokens further: every token is scored once, after at least context - stride tokens where there are so many
    (as in Hugging Face's guide to perplexity). HeadraceError if it is too long and there is no stride."""
    n = len(tokens)
    if n < 2:
        raise HeadraceError(f"a text of {n} token{'s' * (n != 1)}: expected at least 2, the first has no probability")
    if n <= context:
        return [Sequence(tokens)]
    if stride is None:
        raise HeadraceError(
            f"a text of {n} tokens does not fit the context of {context}; give --stride to score it in windows, or a "
            "shorter text"
        )
    if not 1 <= stride < context:
        raise HeadraceError(f"a stride of {stride}, expected 1 to {context - 1} for a context of {context}")
    begins = range(0, n - context + stride, stride)  # the last is the first that reaches the end
    return [Sequence(tokens[b : b + context], 0 if b == 0 else context - stride - 1) for b in begins]


def choice_item(prompt: np.ndarray, wholes: list[np.ndarray], context: int) -> Item:
    """Choices after one prompt. prompt: its tokens. wholes: the tokens of prompt and choice together, one array each.

    A choice begins where the prompt's tokens end: where the tokenizer joined the prompt's end with the choice's begin,
    with the first token that is not the prompt's. The result has the prompt's sequence first, unless it has no rows.
    """
    ends = [_common_prefix(prompt, whole) for whole in wholes]
    for i, (whole, end) in enumerate(zip(wholes, ends, strict=True)):
        if end == 0:
            raise HeadraceError("the prompt has no tokens of its own before the choices; give a longer one")
        if len(whole) == end:
            raise HeadraceError(f"choice {i} adds no token to the prompt; give some text")
        if len(whole) > context:
            raise HeadraceError(
                f"prompt and choice {i} have {len(whole)} tokens, the context holds {context}; shorten them"
            )
    shared = min(ends)
    base = Sequence(wholes[0][:shared], shared - 1) if shared > 1 else None
    choices = [Sequence(w[shared - 1 :], end - shared, base) for w, end in zip(wholes, ends, strict=True)]
    return ([base] if base is not None else []) + choices


def _common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    n = min(len(a), len(b))
    different = np.nonzero(a[:n] != b[:n])[0]
    return int(different[0]) if len(different) else n


def scoring_options(checkpoint: Checkpoint, items: list[Item], options: EngineOptions) -> EngineOptions:
    """`options` with memory for scoring the items and no sessions.

    A pass reads every expert that is not resident, and a file takes rows over rows-a-pass passes: so what serves for
    more rows saves more than what keeps experts, until half of the arena is gone. Where all experts are resident, they
    stay so. It is at least what the largest item needs with one choice at a time."""
    least = max(s.positions + _largest_continuation(item, s) for item in items for s in item)
    rows = sum(s.num_rows for item in items for s in item)
    wanted = max(least, sum(s.positions for item in items for s in item))
    options = replace(options, sessions=0, scoring_positions=least, prompt_rows=rows)
    if wanted > least:
        plan = make_plan(checkpoint, replace(options, prompt_rows=min(rows, EFFICIENT_ROWS)))
        spare_bytes = plan.arena_bytes // 2
        if plan.arena_bytes == plan.expert_bytes:
            free_bytes = plan.budget_bytes - plan.other_bytes - plan.expert_bytes
            spare_bytes = max(free_bytes, plan.arena_bytes // 8)
        positions = min(wanted, least + spare_bytes * least // plan.state_bytes // TILE * TILE)
        max_rows = make_plan(checkpoint, replace(options, scoring_positions=positions)).max_rows
        for_rows = least + math.ceil(wanted / rows * max_rows / TILE) * TILE  # more would lie idle
        options = replace(options, scoring_positions=min(positions, for_rows))
    return replace(options, prompt_rows=min(rows, options.scoring_positions))


def _largest_continuation(item: Item, base: Sequence) -> int:
    return max((s.positions for s in item if s.base is base), default=0)


@dataclass(eq=False)
class _Job:
    """A sequence on its way through passes."""

    sequence: Sequence
    base: _Job | None
    is_last: bool  # of its item
    reserve: int  # positions of the largest sequence that continues it
    continuations: int  # of those, how many are not done
    log_probs: np.ndarray
    rows_done: int = 0
    first: int = 0  # its place in the room
    state: _core.SessionState | None = None  # None: not started, or gone


def _jobs(items: Iterable[Item]) -> Iterator[_Job]:
    for item in items:
        jobs: dict[int, _Job] = {}
        for s in item:
            base = jobs[id(s.base)] if s.base is not None else None
            log_probs = np.empty(s.num_rows - s.skip, np.float32)
            continuations = sum(other.base is s for other in item)
            job = _Job(s, base, s is item[-1], _largest_continuation(item, s), continuations, log_probs)
            jobs[id(s)] = job
            yield job


class _Room:
    """Which positions of the memory for keys and values are taken."""

    def __init__(self, positions: int):
        self.positions = positions
        self._taken: list[tuple[int, int]] = []  # [first, end), ascending

    def take(self, positions: int, reserve: int) -> int | None:
        """The first place with room for `positions`, which are taken, and for `reserve` after them, which are not.

        So what follows a base is large enough for each of its continuations, once all others have gone."""
        at = 0
        for i, (first, end) in enumerate([*self._taken, (self.positions, 0)]):
            if first - at >= positions + reserve:
                self._taken.insert(i, (at, at + positions))
                return at
            at = end
        return None

    def free(self, first: int) -> None:
        self._taken = [t for t in self._taken if t[0] != first]


class Scorer:
    """Runs items through an engine that was loaded with scoring_options().

    prefill_figures, num_passes: what it did so far."""

    def __init__(self, engine: Engine):
        self.engine, self.num_passes = engine, 0
        self.prefill_figures, self.decode_figures = Figures(), Figures()  # as a Session has them; it decodes nothing

    def run(self, items: Iterable[Item], progress: Callable[[int], None] | None = None) -> Iterator[list[np.ndarray]]:
        """Of each item in turn, for each of its sequences: float32 log-probabilities of the targets that it asks for.

        progress: called with the number of rows done before each pass and at the end."""
        room = _Room(self.engine.options.scoring_positions)
        jobs = _jobs(items)
        job = next(jobs, None)
        results: list[np.ndarray] = []
        while job is not None:
            parts: list[tuple[_Job, int]] = []  # and how many of its rows
            rows = self.engine.max_rows
            while job is not None and rows > 0 and self._start(job, room):
                n = min(rows, job.sequence.num_rows - job.rows_done)
                parts.append((job, n))
                rows -= n
                if job.rows_done + n < job.sequence.num_rows:
                    break
                job = next(jobs, None)
            if job is not None and not parts:
                raise HeadraceError(
                    f"a text needs {job.sequence.positions + job.reserve} positions, this engine has memory for "
                    f"{room.positions}; load it with scoring_options() for what it is to score"
                )
            if progress is not None:
                progress(self.prefill_figures.tokens)
            self._pass(parts)
            for done, n in parts:
                done.rows_done += n
                if done.rows_done < done.sequence.num_rows:
                    continue
                self._finish(done, room)
                results.append(done.log_probs)
                if done.is_last:
                    yield results
                    results = []
        if progress is not None:
            progress(self.prefill_figures.tokens)

    def _start(self, job: _Job, room: _Room) -> bool:
        """Gives the job its state, if it has none; False if there is no place for it now."""
        if job.state is not None:
            return True
        place = room.take(job.sequence.positions, job.reserve)
        if place is None:
            return False
        base = job.base.state if job.base is not None else None
        assert self.engine._room is not None  # a place was found in it
        job.first = place
        job.state = _core.SessionState.part(
            self.engine._room, place, job.sequence.positions, base, job.sequence.base_rows
        )
        return True

    def _finish(self, job: _Job, room: _Room) -> None:
        """Frees what nothing needs any more: the job's own memory, and its base's after the last continuation."""
        gone = [job] if job.continuations == 0 else []
        if job.base is not None:
            job.base.continuations -= 1
            gone += [job.base] if job.base.continuations == 0 else []
        for g in gone:
            room.free(g.first)
            g.state = None

    def _pass(self, parts: list[tuple[_Job, int]]) -> None:
        tokens, sequences, out_rows, targets = [], [], [], []
        asked = []  # of each part, which of its log-probabilities
        at = 0
        for i, (job, n) in enumerate(parts):
            s, begin, end = job.sequence, job.rows_done, job.rows_done + n
            first = min(max(begin, s.skip), end)
            tokens.append(s.tokens[begin:end])
            sequences.append(np.full(n, i, np.uint32))
            out_rows.append(np.arange(at + first - begin, at + n, dtype=np.uint32))
            targets.append(s.tokens[first + 1 : end + 1])
            asked.append(job.log_probs[max(first - s.skip, 0) : max(end - s.skip, 0)])
            at += n
        log_probs = np.empty(sum(map(len, asked)), np.float32)
        engine = self.engine
        with engine._lock:
            engine.check_open()
            engine.run_pass(
                np.concatenate(tokens),
                np.concatenate(sequences),
                [job.state for job, _ in parts if job.state is not None],  # all have been started
                np.concatenate(out_rows),
                self.prefill_figures,
                targets=np.concatenate(targets),
                log_probs=log_probs,
                stream=True,
            )
        self.num_passes += 1
        at = 0
        for part in asked:
            part[:] = log_probs[at : at + len(part)]
            at += len(part)
