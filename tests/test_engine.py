"""Engine and Session as a library: several sessions and threads, failures in between, misuse."""

from __future__ import annotations

import gc
import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
from checkpoints import OLMOE, random_weights, write_gguf

from headrace import _core
from headrace.engine import Engine, EngineOptions
from headrace.errors import HeadraceError
from headrace.experts.pipeline import Pipeline
from headrace.formats import open_checkpoint
from headrace.models.families import build_graph
from headrace.program import compile_graph

SPEC = OLMOE.but(num_hidden_layers=3, vocab_size=50)
PROMPTS = [np.random.default_rng(i).integers(0, SPEC.vocab_size, 5 + 7 * i).tolist() for i in range(4)]


@pytest.fixture(scope="module")
def gguf(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("engine") / "model.gguf"
    return write_gguf(path, SPEC, random_weights(SPEC), dtype="Q4_0")


def load(gguf: Path, **options) -> Engine:
    return Engine(open_checkpoint(gguf), EngineOptions(context=64, num_threads=2, **options))


@pytest.fixture(scope="module")
def expected(gguf) -> list[np.ndarray]:
    """Logits after each prompt, each in an engine of its own."""
    out = []
    for prompt in PROMPTS:
        with load(gguf) as engine:
            out.append(engine.session().prefill(prompt).copy())
    return out


def test_logits_of_one_session_survive_a_pass_of_another(gguf, expected):
    with load(gguf, sessions=len(PROMPTS)) as engine:
        logits = [engine.session().prefill(prompt) for prompt in PROMPTS]
        assert all(np.array_equal(a, b) for a, b in zip(logits, expected, strict=True))


def test_threads_may_use_one_engine(gguf, expected):
    """Each with its own session, while another resizes the arena, reads figures and opens sessions in vain."""
    with load(gguf, sessions=len(PROMPTS)) as engine:
        wrong: list[object] = []
        done = threading.Event()

        def converse(i: int) -> None:
            try:
                session = engine.session()
                for _ in range(15):
                    if not np.array_equal(session.prefill(PROMPTS[i]), expected[i]):
                        wrong.append(i)
                    session.rollback(0)
                session.close()
            except BaseException as error:
                wrong.append(error)

        def disturb() -> None:
            while not done.is_set():
                engine._executor.op_seconds  # noqa: B018
                engine.counters()
                engine.report()
                gc.collect()

        threads = [threading.Thread(target=converse, args=(i,)) for i in range(len(PROMPTS))]
        other = threading.Thread(target=disturb)
        other.start()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        done.set()
        other.join()
        assert wrong == []


def test_closing_an_engine_waits_for_the_pass_and_ends_its_sessions(gguf):
    engine = load(gguf, sessions=2)
    session, idle = engine.session(), engine.session()
    errors: list[Exception] = []

    def converse() -> None:
        try:
            while True:
                session.prefill(PROMPTS[3])
                session.rollback(0)
        except HeadraceError as error:
            errors.append(error)

    thread = threading.Thread(target=converse)
    thread.start()
    engine.close()
    thread.join()
    engine.close()
    assert "closed" in str(errors[0])
    for call in (lambda: idle.step(1), engine.session, lambda: idle.prefill([1])):
        with pytest.raises(HeadraceError, match="closed"):
            call()
    idle.close()
    session.close()


def test_a_closed_session_does_not_touch_the_one_that_took_its_place(gguf, expected):
    with load(gguf) as engine:
        old = engine.session()
        old.prefill(PROMPTS[0])
        old.close()
        old.close()
        new = engine.session()
        new.prefill(PROMPTS[1][:3])
        for call in (lambda: old.rollback(0), lambda: old.length, lambda: old.step(1)):
            with pytest.raises(HeadraceError, match="closed"):
                call()
        assert np.array_equal(new.prefill(PROMPTS[1][3:]), expected[1])
        with pytest.raises(HeadraceError, match="sessions"):
            engine.session()


def test_a_prompt_that_fails_in_its_second_pass_leaves_nothing(gguf, expected, monkeypatch):
    with load(gguf, max_rows=8) as engine:
        session = engine.session()
        run, calls = engine._executor.run, []

        class Failing:
            scratch_bytes = engine._executor.scratch_bytes

            def run(self, *args: object, **kwargs: object) -> None:
                calls.append(1)
                if len(calls) == 2:
                    raise HeadraceError("a failed read")
                run(*args, **kwargs)

        monkeypatch.setattr(engine, "_executor", Failing())
        for call in (session.prefill, session.verify, session.score):
            calls.clear()
            with pytest.raises(HeadraceError, match="a failed read"):
                call(PROMPTS[2])
            assert session.length == 0
        assert np.array_equal(session.prefill(PROMPTS[2]), expected[2])


def test_scratch_is_as_large_as_the_passes_at_hand(gguf, expected):
    with load(gguf, sessions=2, prompt_rows=64) as engine:
        steps, prompts = (compiled.scratch_bytes for compiled in (_program(engine, 8), engine.program))
        page = 4096
        small, large = (-(-n // page) * page for n in (steps, prompts))
        assert small < large
        first, second = engine.session(), engine.session()

        def scratch() -> int:
            return engine._executor.scratch_bytes

        assert np.array_equal(first.prefill(PROMPTS[3]), expected[3])
        assert scratch() == large
        logits = first.step(1).copy()
        assert scratch() == small
        with pytest.raises(HeadraceError, match="scratch"):
            tokens, sequences, none = np.zeros(9, np.int32), np.zeros(9, np.uint32), np.zeros(0, np.uint32)
            engine._executor.run(tokens, sequences, [second._state], none, second._logits[:0])
        assert np.array_equal(second.prefill(PROMPTS[3]), expected[3])
        assert scratch() == large
        # Steps beside a prompt that is under way leave it its scratch, a prompt of few tokens alone too.
        with engine.prompt(20):
            assert np.array_equal(second.step(1), logits)
        first.rollback(0)
        assert np.array_equal(first.prefill(PROMPTS[0]), expected[0])
        assert scratch() == large
        first.step(1)
        assert scratch() == small
        first.rollback(0)
        assert np.array_equal(first.prefill(PROMPTS[0]), expected[0])
        assert scratch() == small


def _program(engine, rows):
    return compile_graph(build_graph(engine.checkpoint, route_capacity=rows * SPEC.num_experts_per_tok), rows)


def test_interrupts_in_the_middle_leave_a_session_as_it_was(gguf, expected):
    """A storm of signals whose handler raises, on the main thread, where Python runs handlers."""

    def handler(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    with load(gguf) as engine:
        session = engine.session()
        before = signal.signal(signal.SIGALRM, handler)
        interrupted = 0
        try:
            for i in range(60):
                try:
                    signal.setitimer(signal.ITIMER_REAL, 0.0002 + 0.0004 * (i % 10))
                    session.prefill(PROMPTS[3])
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except KeyboardInterrupt:
                    interrupted += 1
                session.rollback(0)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert interrupted > 0
        assert np.array_equal(session.prefill(PROMPTS[3]), expected[3])


def test_a_forked_child_is_refused_instead_of_hanging(gguf, expected):
    with load(gguf) as engine:
        session = engine.session()
        session.prefill(PROMPTS[0])
        pid = os.fork()
        if pid == 0:
            signal.alarm(20)
            status = 1
            try:
                session.step(1)
            except HeadraceError as error:
                status = 0 if "fork" in str(error) else 2
            finally:
                del session
                engine.close()
                os._exit(status)
        assert os.waitpid(pid, 0)[1] == 0
        session.rollback(0)
        assert np.array_equal(session.prefill(PROMPTS[1]), expected[1])


def test_engines_come_and_go_without_leaving_anything(gguf):
    def held() -> tuple[int, int, int]:
        gc.collect()
        _core.release_free_memory()
        rss = int(Path("/proc/self/statm").read_text().split()[1])
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), rss

    def cycle(close: bool) -> None:
        engine = load(gguf, sessions=2)
        session = engine.session()
        session.prefill(PROMPTS[1])
        if close:
            engine.close()

    for i in range(5):
        cycle(close=i % 2 == 0)
    fds, threads, pages = held()
    for i in range(16):
        cycle(close=i % 2 == 0)
    after = held()
    assert after[:2] == (fds, threads)
    assert after[2] - pages < 512  # 2 MiB: less than 16 leaked engines hold


@pytest.mark.parametrize("pipeline", [Pipeline(1, 1, 3), Pipeline(2, 3, 5), Pipeline(4, 2, 2, "after-routing")])
def test_a_prompt_from_a_device_that_stumbles(gguf, expected, pipeline):
    """Slow reads, short ones and one that fails, anywhere in the prompt: the right logits or an error that names the
    file, and nothing is left behind either way."""
    failed = 0
    with load(gguf, pipeline=pipeline) as engine:
        for fail_at in range(1, 60, 4):
            engine.limit_arena(1)  # forgets what was read
            engine.limit_arena(10 * engine._smallest_arena)
            session = engine.session()
            _core.disturb_reads(max_us=300, short_every=3, fail_at=fail_at)
            try:
                assert np.array_equal(session.prefill(PROMPTS[3]), expected[3])  # an early read may fail unused
            except HeadraceError as error:
                assert str(gguf) in str(error) and "Input/output error" in str(error)
                assert session.length == 0
                failed += 1
            finally:
                _core.disturb_reads()
            if session.length == 0:
                assert np.array_equal(session.prefill(PROMPTS[3]), expected[3])
            session.close()
    assert failed >= 5
