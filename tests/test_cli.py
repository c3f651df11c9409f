"""The command line as a user meets it: output, exit statuses, one-line errors, interruption."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import checkpoints
import pytest
from typer.testing import CliRunner

from headrace import cli

HEADRACE = [sys.executable, "-m", "headrace"]


def headrace(*args: object, timeout: float = 120, **kwargs) -> subprocess.CompletedProcess:
    return subprocess.run(
        [*HEADRACE, *map(str, args)], capture_output=True, text=True, timeout=timeout, check=False, **kwargs
    )


def assert_one_line_error(done: subprocess.CompletedProcess, *parts: str) -> None:
    assert done.returncode == 1, (done.returncode, done.stderr)
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("headrace: "), done.stderr
    for part in parts:
        assert part in done.stderr, (part, done.stderr)


def parsed(*args: object) -> subprocess.CompletedProcess:
    """As headrace(), in this process: for what is refused before a command begins."""
    result = CliRunner().invoke(cli.app, [*map(str, args)])
    return subprocess.CompletedProcess(args, result.exit_code, result.stdout, result.stderr)


def assert_wrong_usage(done: subprocess.CompletedProcess, *parts: str) -> None:
    """Exit status 2, nothing on standard output, and these words in the box that Typer draws."""
    assert done.returncode == 2, (done.returncode, done.stderr)
    assert done.stdout == "" and "Traceback" not in done.stderr, done.stderr
    words = " ".join(re.sub("[│╭╮╰╯─]", " ", done.stderr).split())
    for part in parts:
        assert part in words, (part, words)


@pytest.fixture(scope="module")
def gguf(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "model.gguf"
    weights = checkpoints.random_weights(checkpoints.QWEN3)
    checkpoints.write_gguf(path, checkpoints.QWEN3, weights, dtype="Q8_0", vocabulary=True)
    return path


@pytest.fixture(scope="module")
def store(gguf) -> Path:
    path = gguf.parent / "model.store"
    done = headrace("pack", gguf, path)
    assert done.returncode == 0 and "packed" in done.stdout, done.stderr
    return path


# ---- output


def test_run_streams_text_and_one_line_of_figures():
    done = headrace("run", "tiny", "-p", "In the beginning", "-n", 16, "--temp", 0)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip()) > 0
    assert done.stderr.count("\n") == 1
    for figure in ("tokens/s", "hit rate", "read", "peak memory"):
        assert figure in done.stderr


def test_run_json_is_one_object_with_every_figure():
    done = headrace("run", "tiny", "-p", "def main(", "-n", 12, "--json")
    report = json.loads(done.stdout)
    assert done.stderr == "" and done.returncode == 0
    assert set(report) >= {
        *("model", "budget_bytes", "peak_rss_bytes", "slots", "residency", "prompt_tokens", "generated_tokens"),
        *("ttft_s", "prefill_tps", "decode_tps", "prefill", "decode", "text", "token_ids"),
    }
    for phase in ("prefill", "decode"):
        assert set(report[phase]) == {
            "expert_hits",
            "expert_late_hits",
            "expert_loads",
            "expert_prefetches",
            "expert_bytes_read",
            "expert_bytes_unused",
            "io_wait_s",
            "io_busy_s",
            *(["bubble_rate"] if phase == "prefill" else []),
        }
    assert report["generated_tokens"] == len(report["token_ids"]) == 12
    assert 0 < report["peak_rss_bytes"] <= report["budget_bytes"]
    assert report["decode"]["expert_hits"] > 0


def test_a_small_budget_gives_the_same_text():
    prompt = ["run", "tiny", "-p", "In the beginning", "-n", 300, "--json", "--temp", 0.8, "--seed", 3]
    resident = json.loads(headrace(*prompt).stdout)
    refused = headrace(*prompt, "--memory", "20MiB")
    assert_one_line_error(refused, "too small", "--memory")
    smallest = refused.stderr.split("--memory ")[1].split()[0]
    tight = headrace(*prompt, "--memory", smallest)
    assert tight.returncode == 0, tight.stderr
    tight = json.loads(tight.stdout)
    assert tight["token_ids"] == resident["token_ids"] and tight["text"] == resident["text"]
    assert tight["residency"] < 1 == resident["residency"]
    assert tight["decode"]["expert_loads"] > resident["decode"]["expert_loads"]
    assert tight["peak_rss_bytes"] <= tight["budget_bytes"]


def test_the_smallest_budget_that_inspect_names_is_enough_to_run(store):
    for model in ("tiny", store):
        plan = json.loads(headrace("inspect", model, "-c", 60, "--json").stdout)["plan"]
        run = [
            "run",
            model,
            "-p",
            "In the beginning",
            "-n",
            20,
            "-c",
            60,
            "--temp",
            1,
            "--memory",
            plan["minimum_bytes"],
        ]
        done = headrace(*run, "--json")
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        assert report["peak_rss_bytes"] <= report["budget_bytes"]


def test_without_a_budget_a_memory_cgroup_is_one():
    plan = json.loads(headrace("inspect", "tiny", "--json").stdout)["plan"]
    limit = plan["minimum_bytes"] + (1 << 20) + 100  # not whole pages
    memcap = [sys.executable, str(Path(__file__).parents[1] / "benchmarks" / "memcap.py"), str(limit)]
    for memory in ([], ["--memory", str(limit)]):
        command = [*memcap, *HEADRACE, "run", "tiny", "-p", "The", "-n", "20", "--json", *memory]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode == 3:
            pytest.skip("no memory cgroup can be made here")
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        assert report["peak_rss_bytes"] <= report["budget_bytes"] <= limit


def test_sampling_repeats_with_its_seed():
    args = ["run", "tiny", "-p", "The", "-n", 24, "--json", "--temp", 1.0, "--top-p", 0.9]
    a, b, c = (json.loads(headrace(*args, "--seed", seed).stdout)["token_ids"] for seed in (1, 1, 2))
    assert a == b != c


def test_prompt_from_file_and_standard_input(tmp_path):
    (tmp_path / "prompt.txt").write_text("In the beginning")
    args = ["run", "tiny", "-n", 8, "--json", "--temp", 0]
    by_flag = headrace(*args, "-p", "In the beginning").stdout
    by_file = headrace(*args, "-f", tmp_path / "prompt.txt").stdout
    by_stdin = headrace(*args, input="In the beginning").stdout
    ids = [json.loads(x)["token_ids"] for x in (by_flag, by_file, by_stdin)]
    assert ids[0] == ids[1] == ids[2]


def test_packed_gives_the_same_tokens_as_in_place(gguf, store):
    args = ["-p", "abc", "-n", 20, "--json", "--temp", 0]
    a, b = (json.loads(headrace("run", m, *args).stdout) for m in (gguf, store))
    assert a["token_ids"] == b["token_ids"]


def test_inspect_says_what_fits_and_loads_nothing(gguf):
    report = json.loads(headrace("inspect", gguf, "--json").stdout)
    assert report["model_type"] == "qwen3_moe" and report["kind"] == "gguf"
    assert report["plan"]["minimum_bytes"] <= report["plan"]["budget_bytes"]
    text = headrace("inspect", gguf)
    assert text.returncode == 0 and "smallest" in text.stdout


def test_bench_reports_medians(gguf):
    report = json.loads(headrace("bench", gguf, "--prompt", 20, "--gen", 4, "--repeat", 3, "--json").stdout)
    assert len(report["runs"]) == 3 and report["decode_tps"] > 0 and report["prefill_tps"] > 0
    assert report["prompt_tokens"] == 20 and report["generated_tokens"] == 4


def test_what_did_not_run_has_no_speed():
    report = json.loads(headrace("bench", "tiny", "--prompt", 3, "--gen", 0, "--repeat", 1, "--json").stdout)
    assert report["prefill_tps"] > 0
    for r in (report, *report["runs"]):
        assert r["decode_tps"] is r["decode_hit_rate"] is None
    text = headrace("bench", "tiny", "--prompt", 3, "--gen", 0, "--repeat", 1)
    assert text.returncode == 0 and "decode" not in text.stdout
    one = headrace("run", "tiny", "-p", "x", "-n", 1, "--json")
    assert json.loads(one.stdout)["decode_tps"] is None
    one = headrace("run", "tiny", "-p", "x", "-n", 1)
    assert one.returncode == 0 and "decode" not in one.stderr and "prefill" in one.stderr


def test_verify_and_its_failure(store, tmp_path):
    assert headrace("verify", store).returncode == 0
    damaged = tmp_path / "damaged.store"
    shutil.copytree(store, damaged)
    experts = max(damaged.iterdir(), key=lambda p: p.stat().st_size)
    data = bytearray(experts.read_bytes())
    data[len(data) // 2] ^= 4
    experts.write_bytes(data)
    done = headrace("verify", damaged)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert experts.name in done.stdout and "1 damaged" in done.stderr


COMMANDS = ("run", "inspect", "pack", "verify", "bench", "score", "tune", "simulate", "trace")


def test_help_of_every_command():
    for command in COMMANDS:
        done = headrace(command, "--help")
        assert done.returncode == 0 and "Usage" in done.stdout


# ---- wrong usage: 2


@pytest.mark.parametrize(
    "args",
    [
        ["run"],
        ["run", "tiny", "-p", "x", "--memory", "lots"],
        ["run", "tiny", "-p", "x", "-n", "0"],
        ["run", "tiny", "-p", "x", "-f", "y"],
        ["run", "tiny", "-p", "x", "--no-such-flag"],
        ["run", "tiny", "-p", "x", "--kv", "q3"],
        ["run", "tiny", "-p", "x", "--top-p", "0"],
        ["run", "tiny", "-p", "x", "--top-p", "nan"],
        ["run", "tiny", "-p", "x", "--temp", "nan"],
        ["run", "tiny", "-p", "x", "--temp", "inf"],
        ["nonsense"],
        ["bench", "tiny", "--gen", "-1"],
    ],
)
def test_wrong_usage_is_2(args):
    assert_wrong_usage(parsed(*args))


def test_wrong_usage_leaves_the_process_with_2():
    assert_wrong_usage(headrace("run", "tiny", "-p", "x", "-n", "0"), "-n")
    assert_wrong_usage(headrace("simulate", "t", "--policies", "lru,lru"), "--policies")


def test_wrong_usage_says_what_can_be_typed():
    for command in (["run", "tiny", "-p", "x"], ["bench", "tiny"]):
        assert_wrong_usage(parsed(*command, "--policy", "fifo"), "'fifo'", "expected one of lru, lfu, lfru, prefill")
        assert_wrong_usage(parsed(*command, "--policy", "belady"), "markov; an oracle needs", "--replay TRACE")
    for name in ("belady-0", "belady-1000000"):
        done = parsed("bench", "tiny", "--replay", "t", "--policy", name)
        assert_wrong_usage(done, f"'{name}'", "belady-c for c of 1 to 999999 passes")


@pytest.mark.parametrize(
    "args",
    [
        ["bench", "tiny", "--replay", "{}"],
        ["run", "tiny", "-p", "x", "--record", "{}"],
        ["trace", "tiny", "x", "-o", "{}"],
        ["trace", "--report", "{}"],
        ["trace", "--report", "x", "--plot", "{}"],
        ["simulate", "{}"],
    ],
)
def test_files_that_are_no_streams(args):
    """An empty word would be the working directory, a dash a file of that name."""
    for name in ("", "-"):
        assert_wrong_usage(parsed(*(a.format(name) for a in args)), f"expected a file, found '{name or '.'}'")


@pytest.mark.parametrize(
    "args",
    [
        ["run", "", "-p", "x"],
        ["inspect", ""],
        ["pack", "", "x.store"],
        ["pack", "tiny", ""],
        ["verify", ""],
        ["bench", ""],
        ["trace", "", "x", "-o", "y"],
        ["simulate", "x", "--model", ""],
    ],
)
def test_a_model_or_store_without_a_name(args):
    assert_wrong_usage(parsed(*args), "expected a path, found ''")


# ---- bad input: 1 and one line


def test_no_such_file(tmp_path):
    assert_one_line_error(headrace("run", tmp_path / "none.gguf", "-p", "x"), "none.gguf")
    assert_one_line_error(headrace("inspect", tmp_path / "none.gguf"), "none.gguf")
    assert_one_line_error(headrace("pack", tmp_path / "none.gguf", tmp_path / "out"), "none.gguf")
    assert_one_line_error(headrace("run", "tiny", "-f", tmp_path / "none.txt"), "none.txt")


def test_truncated_tensor_data(gguf, tmp_path):
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(gguf.read_bytes()[:-1000])
    assert_one_line_error(headrace("run", cut, "-p", "x"), "cut.gguf")


def test_context_and_prompt_too_long():
    long = "word " * 9000
    assert_one_line_error(headrace("run", "tiny", "-p", "x", "-c", 10_000_000), "context")
    assert_one_line_error(headrace("run", "tiny", input=long), "prompt", "tokens")
    assert_one_line_error(headrace("run", "tiny", "-p", "one two three four", "-c", 2), "prompt", "-c")
    assert_one_line_error(headrace("run", "tiny", "-p", ""), "empty")


def test_prompt_that_is_not_utf8(tmp_path):
    (tmp_path / "bytes.txt").write_bytes(b"abc\xff\xfe")
    assert_one_line_error(headrace("run", "tiny", "-f", tmp_path / "bytes.txt"), "UTF-8", "offset 3")


def test_store_damaged_anywhere_is_found_before_a_wrong_token(store, tmp_path):
    """One flipped bit in each file in turn; experts before their first use."""
    for file in sorted(store.iterdir()):
        damaged = tmp_path / f"{file.name}.store"
        shutil.copytree(store, damaged)
        data = bytearray((damaged / file.name).read_bytes())
        if not data:
            continue
        if "expert" in file.name:  # whichever expert is used first
            for at in range(100, len(data), 4096):
                data[at] ^= 1
        else:
            data[len(data) // 3] ^= 1
        (damaged / file.name).write_bytes(data)
        done = headrace("run", damaged, "-p", "abc", "-n", 4)
        if "embed" in file.name and done.returncode == 0:
            continue  # rows are read on demand: this one was not asked for
        assert_one_line_error(done, str(damaged))
    missing = tmp_path / "missing.store"
    shutil.copytree(store, missing)
    max(missing.iterdir(), key=lambda p: p.stat().st_size).unlink()
    assert_one_line_error(headrace("run", missing, "-p", "abc"), "missing.store")


def test_a_prompt_file_that_may_not_be_read(tmp_path):
    (tmp_path / "secret.txt").write_text("x")
    (tmp_path / "secret.txt").chmod(0)
    capabilities = "-dac_override,-dac_read_search"  # root reads everything otherwise
    drop = ["setpriv", f"--bounding-set={capabilities}", f"--inh-caps={capabilities}"] if os.geteuid() == 0 else []
    if drop and subprocess.run([*drop, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("root's right to read everything cannot be dropped here")
    command = [*drop, *HEADRACE, "run", "tiny", "-f", tmp_path / "secret.txt"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert_one_line_error(done, "secret.txt", "Permission denied")


def test_prompts_without_an_end(tmp_path):
    assert_one_line_error(headrace("run", "tiny", "-f", "/dev/zero"), "/dev/zero", "bytes")
    with open("/dev/zero") as zero:
        assert_one_line_error(headrace("run", "tiny", stdin=zero), "standard input", "bytes")


def test_a_prompt_far_too_long_takes_little_memory():
    """8 MB would take 1.5 GB to tokenize as a whole."""
    prlimit = ["prlimit", f"--as={1 << 30}"]
    done = subprocess.run(
        [*prlimit, *HEADRACE, "run", "tiny"], input="word " * 1_600_000, capture_output=True, text=True, check=False
    )
    assert_one_line_error(done, "prompt", "tokens")


def test_threads_that_the_system_refuses():
    done = headrace("run", "tiny", "-p", "x", "-t", 256, preexec_fn=lambda: limit_address_space(600 << 20))
    assert_one_line_error(done, "thread", "-t")


def limit_address_space(nbytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (nbytes, nbytes))


def test_a_working_directory_that_is_gone(tmp_path):
    gone = tmp_path / "gone"
    script = f"mkdir {gone} && cd {gone} && rmdir {gone} && exec {sys.executable} -m headrace pack tiny out.store"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=env, check=False)
    assert_one_line_error(done)


# ---- streams


def in_shell(redirections: str, *args: str, **env: str) -> subprocess.CompletedProcess:
    command = " ".join([*HEADRACE, *args])
    return subprocess.run(
        ["bash", "-c", f"{command} {redirections}"],
        capture_output=True,
        timeout=120,
        check=False,
        env={**os.environ, **env},
    )


SHORT = ("run", "tiny", "-p", "Hi", "-n", "4", "--temp", "0")


def test_streams_that_the_caller_closed():
    assert in_shell(">&-", *SHORT).returncode == 0
    quiet = in_shell("2>&-", *SHORT)
    assert quiet.returncode == 0 and b"tokens/s" not in quiet.stdout
    report = in_shell("2>&-", *SHORT, "--json")
    assert json.loads(report.stdout)["generated_tokens"] == 4
    failed = in_shell("2>&-", "run", "/none.gguf", "-p", "x")
    assert failed.returncode == 1 and failed.stdout == b""
    no_prompt = in_shell("<&-", "run", "tiny")
    assert no_prompt.returncode == 1 and no_prompt.stderr.count(b"\n") == 1
    assert in_shell("<&- >&- 2>&-", *SHORT).returncode == 0


def test_a_full_disk_under_standard_output():
    for args in (SHORT, (*SHORT, "--json"), ("inspect", "tiny"), ("--help",), ("run", "--help")):
        done = in_shell(">/dev/full", *args)
        assert done.returncode == 1
        assert done.stderr.count(b"\n") == 1 and b"No space left" in done.stderr
    assert in_shell("2>/dev/full", *SHORT).returncode == 1


def test_text_that_the_terminal_cannot_show(tmp_path):
    for encoding in ("ascii", "latin-1", "utf-8"):
        done = in_shell("", *SHORT[:-1], "3", "-n", "200", "--seed", "5", PYTHONIOENCODING=encoding)
        assert done.returncode == 0 and b"Traceback" not in done.stderr
    name = os.fsdecode(bytes(tmp_path) + b"/\xff.store")
    assert headrace("pack", "tiny", name).returncode == 0
    assert headrace("verify", name, env={**os.environ, "PYTHONIOENCODING": "utf-8:strict"}).returncode == 0


def test_pack_refuses_an_existing_destination(gguf, store):
    assert_one_line_error(headrace("pack", gguf, store), str(store))


def test_full_disk_while_packing_leaves_nothing(gguf, tmp_path):
    """A file size limit stands in for a full disk: writes fail in the middle."""
    destination = tmp_path / "out.store"
    script = f"ulimit -f 100; exec {sys.executable} -m headrace pack {gguf} {destination}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert_one_line_error(done, "out.store")
    assert list(tmp_path.iterdir()) == []


# ---- interruption and pipes


@contextmanager
def start(args: list[object], program: Sequence[str] = HEADRACE) -> Iterator[subprocess.Popen]:
    """A running command that has the terminal's signals, whatever this process was started with."""
    process = subprocess.Popen(
        [*program, *map(str, args)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def catches_interrupts(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    caught = int(status.split("SigCgt:")[1].split()[0], 16)
    return bool(caught >> (signal.SIGINT - 1) & 1)


def interrupt(
    args: list[object], after_s: float, wait_for_output: bool, program: Sequence[str] = HEADRACE
) -> tuple[int, float]:
    """Starts a command, sends SIGINT, and returns its status and the seconds until it ended."""
    with start(args, program) as process:
        while not catches_interrupts(process.pid):
            time.sleep(0.01)  # until the interpreter has begun
        if wait_for_output:
            process.stdout.read(1)
        time.sleep(after_s)
        assert process.poll() is None, process.stderr.read()
        begin = time.monotonic()
        process.send_signal(signal.SIGINT)
        status = process.wait(timeout=30)
        seconds = time.monotonic() - begin
        assert b"Traceback" not in process.stderr.read()
    return status, seconds


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_a_terminated_pack_leaves_nothing(tmp_path, signum):
    import synth

    source = tmp_path / "large.gguf"
    synth.write_synthetic(source, synth.SHAPES["small"], layers=4)
    with start(["pack", source, tmp_path / "out.store"]) as process:
        while process.poll() is None and len(list(tmp_path.iterdir())) == 1:
            time.sleep(0.01)
        process.send_signal(signum)
        status = process.wait(timeout=30)
    left = sorted(p.name for p in tmp_path.iterdir())
    assert (status, left) in ((128 + signum, ["large.gguf"]), (0, ["large.gguf", "out.store"]))


def test_inspect_names_a_budget_that_run_accepts():
    plan = json.loads(headrace("inspect", "tiny", "-c", 64, "--json").stdout)["plan"]
    done = headrace("run", "tiny", "-p", "In the beginning", "-n", 32, "--memory", plan["minimum_bytes"])
    assert done.returncode == 0, done.stderr


def test_version():
    assert headrace("--version").stdout.startswith("headrace 0.")


def test_ctrl_c_while_generating():
    # Long output, so that it is still running; the time itself is for benchmarks (it should be under 0.2 s).
    status, seconds = interrupt(["run", "tiny", "-p", "The", "-n", 3000, "--temp", 1], 0.2, True)
    assert status == 130 and seconds < 5


@pytest.mark.parametrize("after_s", [0.6, 1.0])
def test_ctrl_c_while_loading_or_in_prefill(after_s):
    status, seconds = interrupt(["bench", "tiny", "--prompt", 3000, "--gen", 500, "--repeat", 50], after_s, False)
    assert status == 130 and seconds < 5


def test_ctrl_c_while_a_slow_device_reads_for_a_prompt(tmp_path):
    # An arena of one expert, so hundreds of reads; what is in flight ends first (150 ms at most: benchmarks time it).
    (tmp_path / "prompt").write_text("And the earth was without form, and void. " * 20)
    plan = json.loads(headrace("inspect", "tiny", "-c", 512, "--json").stdout)["plan"]
    args = ["run", "tiny", "-f", tmp_path / "prompt", "-n", 1, "-c", 512, "--memory", plan["minimum_bytes"]]
    script = "from headrace import _core, cli; _core.disturb_reads(max_us=150000); cli.main()"
    status, seconds = interrupt(args, 1.0, False, program=[sys.executable, "-c", script])
    assert status == 130 and seconds < 5


def test_ctrl_c_while_packing_leaves_nothing(tmp_path):
    import synth

    source = tmp_path / "large.gguf"
    synth.write_synthetic(source, synth.SHAPES["small"], layers=6)
    with start(["pack", source, tmp_path / "out.store"]) as process:
        while process.poll() is None and len(list(tmp_path.iterdir())) == 1:
            time.sleep(0.01)  # until it has begun to write
        process.send_signal(signal.SIGINT)
        status = process.wait(timeout=30)
        assert b"Traceback" not in process.stderr.read()
    left = sorted(p.name for p in tmp_path.iterdir())
    # It may have finished just before the signal.
    assert (status, left) in ((130, ["large.gguf"]), (0, ["large.gguf", "out.store"]))


def test_ctrl_c_from_the_first_moment_on():
    for after_ms in (20, 60, 100, 150, 200, 300, 400, 600):
        with start(["bench", "tiny", "--repeat", "1000"]) as process:
            time.sleep(after_ms / 1000)
            process.send_signal(signal.SIGINT)
            status, error = process.wait(timeout=30), process.stderr.read()
        if (
            b"Fatal Python error" in error or b"site" in error or b"Could not" in error or status == -signal.SIGINT
        ):  # Python had not begun
            continue
        assert (status, error) == (130, b"")


def stop_packing(tmp_path: Path, *signals: signal.Signals) -> int:
    """Its status when it is sent these while it writes; it leaves nothing."""
    import synth

    source = tmp_path / "large.gguf"
    synth.write_synthetic(source, synth.SHAPES["small"], layers=6)
    with start(["pack", source, tmp_path / "out.store"]) as process:
        while process.poll() is None and len(list(tmp_path.iterdir())) == 1:
            time.sleep(0.01)
        for number in signals:
            process.send_signal(number)
            time.sleep(0.002)
        status, error = process.wait(timeout=30), process.stderr.read()
    assert error == b""
    assert sorted(p.name for p in tmp_path.iterdir()) == ["large.gguf"] + ["out.store"] * (status == 0)
    return status


def test_ctrl_c_pressed_again_and_again_while_packing_leaves_nothing(tmp_path):
    assert stop_packing(tmp_path, *[signal.SIGINT] * 30) in (130, 0)


def test_being_told_to_end_while_packing_leaves_nothing(tmp_path):
    assert stop_packing(tmp_path, signal.SIGTERM) in (128 + signal.SIGTERM, 0)


def test_a_closed_pipe_is_not_an_error():
    command = " ".join([*HEADRACE, "run", "tiny", "-p", "The", "-n", "400", "--temp", "1"])
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f"{command} | head -c 1"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=dict(os.environ),
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr and "Error" not in done.stderr


def test_help_and_usage_errors_whose_reader_has_left():
    def status(*args: str, stderr_too: bool = False) -> int:
        reader, writer = os.pipe()
        os.close(reader)
        stderr = writer if stderr_too else subprocess.PIPE
        try:
            done = subprocess.run([*HEADRACE, *args], stdout=writer, stderr=stderr, timeout=60, check=False)
        finally:
            os.close(writer)
        assert stderr_too or (b"Traceback" not in done.stderr and b"Exception" not in done.stderr)
        return done.returncode

    helps = [("--help",), ("--version",), *((command, "--help") for command in COMMANDS)]
    assert {args: status(*args) for args in helps} == dict.fromkeys(helps, 0)
    assert status("inspect", "tiny") == status("--help", stderr_too=True) == 0
    assert status("nonsense") == status("nonsense", stderr_too=True) == 2
    assert status("inspect", "/none.gguf", stderr_too=True) == 1


def test_nohup_lets_a_pack_go_on(tmp_path):
    """SIGHUP that the caller ignores stays ignored."""
    import synth

    source = tmp_path / "large.gguf"
    synth.write_synthetic(source, synth.SHAPES["small"], layers=4)
    process = subprocess.Popen(
        [*HEADRACE, "pack", source, tmp_path / "out.store"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    while process.poll() is None and len(list(tmp_path.iterdir())) == 1:
        time.sleep(0.01)
    process.send_signal(signal.SIGHUP)
    error = process.communicate(timeout=60)[1]
    assert (process.returncode, error) == (0, b"")
    assert (tmp_path / "out.store").is_dir()


def test_read_error_in_the_middle_of_generation(store, tmp_path):
    """The expert file is cut short while the engine runs on it."""
    from headrace.engine import Engine, EngineOptions
    from headrace.errors import HeadraceError
    from headrace.formats import open_checkpoint

    copy = tmp_path / "copy.store"
    shutil.copytree(store, copy)
    with Engine(open_checkpoint(copy), EngineOptions(context=64)) as engine:
        engine.limit_arena(engine._smallest_arena)
        session = engine.session()
        logits = session.prefill([1, 2, 3])
        length = session.length
        experts = max(copy.iterdir(), key=lambda p: p.stat().st_size)
        whole = experts.read_bytes()
        os.truncate(experts, 4096)
        with pytest.raises(HeadraceError, match=experts.name):
            for token in range(10, 40):
                session.step(token)
                length = session.length
        assert session.length == length  # the failed pass left nothing
        experts.write_bytes(whole)
        after = session.step(10)
        assert after.shape == logits.shape
