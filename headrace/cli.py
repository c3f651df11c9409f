"""The command line: parses, calls a command, turns errors into one line and an exit status.

0 done; 1 a problem with the input or the machine; 2 wrong usage; 130 interrupted. A closed pipe is not an error.
"""

from __future__ import annotations

import functools
import math
import os
import re
import signal
import sys
from collections.abc import Callable
from enum import Enum, StrEnum
from fractions import Fraction
from pathlib import Path
from typing import Annotated, NoReturn, TextIO, TypeVar

import typer

from headrace.errors import HeadraceError, UsageError

app = typer.Typer(
    name="headrace",
    help="Run Mixture-of-Experts models inside a memory budget that you name.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

T = TypeVar("T")

INTERRUPTED = 130

MAX_SEED = 2**64 - 1  # what the simulator's generator takes
MAX_WINDOW = 1 << 20  # tokens
MAX_SECONDS = 1e6
MAX_RECORD_BYTES = 1 << 36
MAX_LINK_BYTES = 1 << 50  # a second


def _named(value: str | None) -> str | None:
    """For a model or a store: an empty word would mean the directory that one is in."""
    if value == "":
        raise typer.BadParameter("expected a path, found ''")
    return value


def _file(value: Path | None) -> Path | None:
    """For a file that is read more than once, or appears only when it is whole."""
    if value in (Path("-"), Path("")):
        what = "standard input and output cannot be used here" if value == Path("-") else "give a name"
        raise typer.BadParameter(f"expected a file, found '{value}': {what}")
    return value


Model = Annotated[
    str,
    typer.Argument(
        help="A GGUF file, a Hugging Face directory, a store, or `tiny`.", show_default=False, callback=_named
    ),
]
Memory = Annotated[
    str | None,
    typer.Option(
        "--memory",
        metavar="SIZE",
        help="Budget of the whole process: 2GiB, 1500MB. Default: what everything resident needs, at most "
        "85 % of available memory.",
        show_default=False,
    ),
]
Threads = Annotated[
    int | None,
    typer.Option("-t", "--threads", min=1, max=256, help="Threads. Default: all processors."),
]
Context = Annotated[
    int | None,
    typer.Option("-c", "--context", min=1, help="Positions. Default: what prompt and -n need."),
]
InspectContext = Annotated[
    int | None,
    typer.Option("-c", "--context", min=1, help="Positions to plan for. Default: 512, or the model's limit."),
]
PolicyName = Annotated[
    str,
    typer.Option("--policy", metavar="POLICY", help="Which experts make room: lru, lfu, lfru, prefill-hot or markov."),
]
OraclePolicyName = Annotated[
    str,
    typer.Option(
        "--policy",
        metavar="POLICY",
        help="Which experts make room: lru, lfu, lfru, prefill-hot or markov; with --replay also belady.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def _memory_bytes(text: str | None) -> int | None:
    return _size_bytes(text, "--memory")


def _size_bytes(text: str | None, option: str) -> int | None:
    from headrace.sizes import parse_size

    return _parsed(text, parse_size, option) if text is not None else None


def _positive_size(text: str, option: str, most_bytes: int) -> int:
    from headrace.sizes import format_size, parse_size

    size_bytes = _parsed(text, parse_size, option)
    if not 1 <= size_bytes <= most_bytes:
        raise typer.BadParameter(f"expected 1 byte to {format_size(most_bytes)}, found {text}", param_hint=option)
    return size_bytes


def _parsed(text: str, parse: Callable[[str], T], option: str) -> T:
    """What parse() refuses is wrong usage of the option."""
    try:
        return parse(text)
    except HeadraceError as error:
        raise typer.BadParameter(str(error), param_hint=option) from error


def _check_sampling(temperature: float | None, top_p: float | None) -> None:
    if temperature is not None and not math.isfinite(temperature):
        raise typer.BadParameter(f"expected a number of at least 0, found {temperature}", param_hint="--temp")
    if top_p is not None and not 0 < top_p <= 1:
        raise typer.BadParameter(f"expected a number above 0 and at most 1, found {top_p}", param_hint="--top-p")


def _given(context: typer.Context) -> dict[str, str]:
    """What stands on the command line: names of parameters, and how the option or argument is written."""
    sources = {p.name: context.get_parameter_source(p.name) for p in context.command.params if p.name}
    written = {p.name: p.opts[-1] for p in context.command.params if p.name}
    return {name: written[name] for name, source in sources.items() if source and source.name == "COMMANDLINE"}


def _only_with(context: typer.Context, needed: str, *names: str) -> None:
    """These mean nothing without what is needed."""
    for name, written in _given(context).items():
        if name in names:
            raise typer.BadParameter(f"goes with {needed}", param_hint=written)


def _read_prompt(text: str | None, file: Path | None) -> str:
    if text is not None and file is not None:
        raise typer.BadParameter("give -p or -f, not both", param_hint="-p")
    if text is not None:
        return text
    if file is None and sys.stdin.isatty():
        raise typer.BadParameter("give a prompt: -p TEXT, -f FILE, or standard input", param_hint="-p")
    from headrace.text.files import STDIN, read_text

    return read_text(file if file is not None else STDIN)


def _show_version(wanted: bool) -> None:
    if wanted:
        from headrace import __version__

        print(f"headrace {__version__}", flush=True)
        raise typer.Exit


@app.callback()
def top_level(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


class KvType(str, Enum):
    f16 = "f16"
    f32 = "f32"


def command(name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Registers a command whose errors become one line and an exit status."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def run(*args: object, **kwargs: object) -> None:
            try:
                function(*args, **kwargs)
                sys.stdout.flush()
            except UsageError as error:
                raise typer.BadParameter(str(error), param_hint=error.option) from None
            except HeadraceError as error:
                _fail(str(error))
            except KeyboardInterrupt:
                raise typer.Exit(INTERRUPTED) from None
            except BrokenPipeError:  # the reader has left
                _discard(sys.stdout, sys.stderr)
                raise typer.Exit(0) from None
            except OSError as error:  # among them a full disk under standard output
                _fail(_reason(error))
            except MemoryError:
                _fail("the system refused memory; use a smaller --memory or a smaller context")

        return app.command(name)(run)

    return register


def _fail(message: str) -> NoReturn:
    _tell(message)
    raise typer.Exit(1) from None


def _tell(message: str) -> None:
    try:
        print(f"headrace: {' '.join(message.split())}", file=sys.stderr)
        sys.stdout.flush()
    except OSError:  # nobody can be told
        _discard(sys.stdout, sys.stderr)


def _reason(error: OSError) -> str:
    return f"{error.filename or 'input or output'}: {error.strerror or error}"


def _discard(*streams: TextIO) -> None:
    """What is still in the buffers goes nowhere, so that the interpreter's last flush does not complain."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in streams:
        os.dup2(null, stream.fileno())


@command("run")
def run_command(
    model: Model,
    prompt: Annotated[
        str | None, typer.Option("-p", "--prompt", help="Text. Without -p and -f: standard input.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("-f", "--file", readable=False, help="File with the text; - is standard input.")
    ] = None,
    num_tokens: Annotated[int, typer.Option("-n", "--num-tokens", min=1, help="Tokens to generate at most.")] = 256,
    memory: Memory = None,
    threads: Threads = None,
    context: Context = None,
    temperature: Annotated[
        float | None,
        typer.Option("--temp", min=0.0, help="Temperature; 0 is greedy. Default: the model's."),
    ] = None,
    top_p: Annotated[float | None, typer.Option("--top-p", help="Nucleus: 0 < P <= 1. Default: the model's.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="Seed for sampling.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Do not apply the chat template.")] = False,
    kv: Annotated[KvType, typer.Option("--kv", help="Keys and values.")] = KvType.f16,
    policy: PolicyName = "lru",
    record: Annotated[
        Path | None,
        typer.Option(
            "--record",
            metavar="T",
            readable=False,
            callback=_file,
            help="Write a trace of this run, which `headrace simulate T --recorded` replays.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Generate text from a prompt."""
    _check_sampling(temperature, top_p)
    from headrace.experts.simulate import parse_policy

    known = _parsed(policy, lambda name: parse_policy(name, oracles=False), "--policy")
    text = _read_prompt(prompt, file)
    from headrace.commands.run import RunOptions, run

    run(
        RunOptions(
            model=model,
            prompt=text,
            max_tokens=num_tokens,
            memory_bytes=_memory_bytes(memory),
            num_threads=threads,
            context=context,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            raw=raw,
            kv=kv.value,
            policy=known.native,
            record=record,
            json=json,
        )
    )


@command("inspect")
def inspect_command(
    model: Model,
    memory: Memory = None,
    threads: Threads = None,
    context: InspectContext = None,
    json: Json = False,
) -> None:
    """Say what a model is, what fits and what would be read, without loading it."""
    from headrace.commands.inspect import inspect

    inspect(model, _memory_bytes(memory), threads, context, json)


class _Terminated(Exception):
    """SIGTERM or SIGHUP came, as an exception, so that what is half-written is removed."""


def _terminate(signum: int, frame: object) -> None:
    for other in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(other, signal.SIG_IGN)
    raise _Terminated(signum)


@command("pack")
def pack_command(
    source: Annotated[str, typer.Argument(metavar="SRC", help="GGUF file or model directory.", callback=_named)],
    destination: Annotated[str, typer.Argument(metavar="DEST", help="The store to make.", callback=_named)],
    json: Json = False,
) -> None:
    """Pack a checkpoint into a store: one read an expert, everything checksummed."""
    from headrace.commands.store import pack

    for signum in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) != signal.SIG_IGN:  # as nohup sets it
            signal.signal(signum, _terminate)
    try:
        pack(source, destination, json)
    except _Terminated as end:
        raise typer.Exit(128 + end.args[0]) from None


@command("verify")
def verify_command(
    store: Annotated[str, typer.Argument(metavar="STORE", help="A packed store.", callback=_named)],
    json: Json = False,
) -> None:
    """Read a whole store and check every checksum."""
    from headrace.commands.store import verify

    verify(store, json)


class ScheduleName(StrEnum):
    early = "early"
    after_routing = "after-routing"
    on_demand = "on-demand"
    naive = "naive"
    whole_layers = "whole-layers"
    resident = "resident"


@command("bench")
def bench_command(
    model: Model,
    prompt: Annotated[int, typer.Option("--prompt", min=1, help="Tokens of prefill, a number.")] = 512,
    gen: Annotated[int, typer.Option("--gen", min=0, help="Tokens of decode.")] = 32,
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="Runs; medians are shown.")] = 3,
    memory: Memory = None,
    threads: Threads = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the token ids.")] = 0,
    replay: Annotated[
        Path | None,
        typer.Option(
            "--replay",
            metavar="TRACE",
            readable=False,
            callback=_file,
            help="Take routes from a recorded trace, repeated if short.",
        ),
    ] = None,
    policy: OraclePolicyName = "lru",
    schedule: Annotated[
        ScheduleName,
        typer.Option("--schedule", help="How prompts read experts; naive, whole-layers and resident for comparison."),
    ] = ScheduleName.early,
    group_size: Annotated[int | None, typer.Option("--group-size", min=1, help="Experts a read; as tuned.")] = None,
    queue_depth: Annotated[
        int | None, typer.Option("--queue-depth", min=1, max=64, help="Reads in flight; as tuned.")
    ] = None,
    banks: Annotated[int | None, typer.Option("--banks", min=1, help="Groups in memory; as tuned.")] = None,
    oracle_recall: Annotated[
        float | None,
        typer.Option("--oracle-recall", min=0, max=1, help="Prefetch as a forecaster of this recall would; --replay."),
    ] = None,
    json: Json = False,
) -> None:
    """Measure prefill and decode speed on random token ids."""
    from headrace.commands.bench import Schedule, bench
    from headrace.experts.simulate import parse_policy

    known = _parsed(policy, lambda name: parse_policy(name, oracles=replay is not None), "--policy")
    how = Schedule(schedule.value, group_size, queue_depth, banks)
    if oracle_recall is not None and replay is None:
        raise typer.BadParameter("needs --replay TRACE, the future to tell", param_hint="--oracle-recall")
    if how.is_fixed and (group_size or queue_depth or banks):
        raise typer.BadParameter(f"{how.name} has its own group size, queue depth and banks", param_hint="--schedule")
    bench(model, prompt, gen, repeat, _memory_bytes(memory), threads, seed, replay, known, how, oracle_recall, json)


@command("score")
def score_command(
    model: Model,
    file: Annotated[
        Path,
        typer.Argument(
            readable=False,
            show_default=False,
            help='A text, or, named *.jsonl, an object a line: {"text": ...}. With --choices, an object a line: '
            '{"prompt": ..., "choices": [..., ...], "answer": ...}, the answer a choice or its number from 0 and '
            "not needed. - is standard input: a text, unless --choices.",
        ),
    ],
    choices: Annotated[
        bool, typer.Option("--choices", help="Score each line's choices as continuations of its prompt, and compare.")
    ] = False,
    stride: Annotated[
        int | None,
        typer.Option(
            "--stride",
            min=1,
            metavar="S",
            help="Score a text longer than the context in windows, each S tokens further; every token once. Takes "
            "context / S times as long as without windows.",
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            "-c", "--context", min=2, help="Positions. Default: the longest text's, at most the model's limit."
        ),
    ] = None,
    memory: Memory = None,
    threads: Threads = None,
    token_log_probs: Annotated[
        bool, typer.Option("--token-log-probs", help="Report each token's log-probability too.")
    ] = False,
    json: Json = False,
) -> None:
    """Log-likelihood and perplexity of texts, or of choices after a prompt; prefill only.

    Natural logarithms. A text's first token has no probability, unless the tokenizer puts a BOS before every text.
    Prompt and choice are tokenized together, and the choice begins where the prompt's own tokens end.
    """
    if choices and stride is not None:
        raise typer.BadParameter(
            "goes without --choices: prompt and choice must fit the context", param_hint="--stride"
        )
    from headrace.commands.score import ScoreOptions, score

    score(
        ScoreOptions(
            model=model,
            file=file,
            choices=choices,
            stride=stride,
            context=context,
            memory_bytes=_memory_bytes(memory),
            num_threads=threads,
            token_log_probs=token_log_probs,
            json=json,
        )
    )


@command("tune")
def tune_command(
    model: Model,
    memory: Memory = None,
    threads: Threads = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot", metavar="PNG", readable=False, help="Plot prefill time against memory, and two layers' timeline."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Measure the device, and keep what configures prefill for any budget and prompt."""
    from headrace.commands.tune import tune

    tune(model, _memory_bytes(memory), threads, plot, json)


def _list(text: str, parse: Callable[[str], T], option: str) -> list[T]:
    """What stands between commas, each once."""
    found = [_parsed(part.strip(), parse, option) for part in text.split(",")]
    for i, item in enumerate(found):
        if item in found[:i]:
            raise typer.BadParameter(f"expected each once, found {text.split(',')[i].strip()} again", param_hint=option)
    return found


_SHARE = re.compile(r"([0-9]{0,18}\.?[0-9]{1,18}|[0-9]{1,18}\.)(?:/([0-9]{1,18}))?")


def _residency(text: str) -> Fraction:
    match = _SHARE.fullmatch(text)
    if match and (match[2] is None or int(match[2])):
        share = Fraction(match[1]) / int(match[2] or 1)
        if 0 < share <= 1:
            return share
    raise HeadraceError(f"expected shares above 0 and at most 1, such as .25,1/3, found {text!r}")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= MAX_SECONDS:
        raise HeadraceError(f"expected two times of 0 to {MAX_SECONDS:.0f} seconds, such as 5e-4,5e-4, found {text!r}")
    return seconds


def _layer_times(text: str) -> tuple[float, float]:
    times = [_parsed(part.strip(), _seconds, "--layer-s") for part in text.split(",")]
    if len(times) != 2:
        raise typer.BadParameter(
            f"expected two times, before a layer's router and after it, found {text!r}", param_hint="--layer-s"
        )
    return times[0], times[1]


def _trigger(text: str) -> int:
    if re.fullmatch("[0-9]{1,6}", text):
        return int(text)
    raise HeadraceError(f"expected ascending layers counted from 0, or all, found {text!r}")


def _triggers(text: str) -> tuple[int, ...] | None:
    if text == "all":
        return None
    layers = tuple(_list(text, _trigger, "--triggers"))
    if layers != tuple(sorted(layers)):
        raise typer.BadParameter(f"expected ascending layers, found {text}", param_hint="--triggers")
    return layers


@command("simulate")
def simulate_command(
    ctx: typer.Context,
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="Recorded routing.", readable=False, callback=_file)],
    policies: Annotated[
        str, typer.Option("--policies", metavar="P,...", help="Cache policies; belady-c for c passes.")
    ] = "lru,lfu,lfru,prefill-hot,markov,belady-8,belady",
    residency: Annotated[
        str, typer.Option("--residency", metavar="R,...", help="Shares of all experts that are resident.")
    ] = ".15,.25,.35,.45",
    window: Annotated[
        int, typer.Option("--window", min=1, max=MAX_WINDOW, help="Tokens a pass, as in verification.")
    ] = 1,
    pins: Annotated[
        bool,
        typer.Option("--pins/--no-pins", help="Whether a layer's experts stay while it runs, as in the engine."),
    ] = True,
    prefetch: Annotated[
        float, typer.Option("--prefetch", min=0.0, max=1e6, help="Experts moved ahead while a layer runs.")
    ] = 0.0,
    recall: Annotated[
        float,
        typer.Option(
            "--recall", min=0.0, max=1.0, help="With --prefetch: share of absent experts that the forecast knows."
        ),
    ] = 1.0,
    prompt: Annotated[
        int | None,
        typer.Option("--prompt", min=1, help="Tokens that prefill-hot takes for the prompt. Default: the first tenth."),
    ] = None,
    experts: Annotated[
        int | None,
        typer.Option("--experts", min=1, max=65536, help="Experts a layer. Default: as the trace says or shows."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", callback=_named, help="The model that the trace came from, for sizes in bytes."),
    ] = None,
    record: Annotated[
        str | None, typer.Option("--record", metavar="SIZE", help="Size of an expert, where there is no model.")
    ] = None,
    bound: Annotated[
        bool, typer.Option("--bound", help="The best speed that any prefetch schedule reaches over this link.")
    ] = False,
    link: Annotated[str, typer.Option("--link", metavar="SIZE", help="For --bound: bytes a second.")] = "2GB",
    latency: Annotated[
        float, typer.Option("--latency", min=0.0, max=MAX_SECONDS, help="For --bound: seconds a transfer.")
    ] = 1e-4,
    layer_s: Annotated[
        str,
        typer.Option("--layer-s", metavar="S,S", help="For --bound: seconds of a layer before and after its router."),
    ] = "5e-4,5e-4",
    triggers: Annotated[
        str,
        typer.Option("--triggers", metavar="L,...", help="For --bound: layers at which forecasts are made, or all."),
    ] = "all",
    horizon: Annotated[
        int, typer.Option("--horizon", min=1, max=1000, help="For --bound: passes that a forecast tells of.")
    ] = 1,
    threads: Threads = None,
    seed: Annotated[
        int, typer.Option("--seed", min=0, max=MAX_SEED, help="With --recall: seed of the forecast's errors.")
    ] = 0,
    recorded: Annotated[
        bool,
        typer.Option("--recorded", help="Replay a run of `run --record` as it was, and compare all that it counted."),
    ] = False,
    partial: Annotated[
        bool, typer.Option("--partial", help="With --recorded: an unfinished trace, up to its last whole pass.")
    ] = False,
    json: Json = False,
) -> None:
    """Compare cache policies on recorded routing, or replay a recorded run."""
    if recorded:
        for name in _given(ctx):
            if name not in ("trace", "recorded", "partial", "json"):
                raise typer.BadParameter("takes no other settings: the trace has the run's", param_hint="--recorded")
        from headrace.commands.simulate import simulate_recorded

        simulate_recorded(trace, partial, json)
        return
    _only_with(ctx, "--recorded", "partial")
    if not prefetch:
        _only_with(ctx, "--prefetch", "recall")
    if "recall" not in _given(ctx):
        _only_with(ctx, "--recall", "seed")
    if not bound:
        _only_with(ctx, "--bound", "link", "latency", "layer_s", "triggers", "horizon")
    elif model is None and record is None:
        raise typer.BadParameter("needs the experts' size: give --model M or --record SIZE", param_hint="--bound")
    elif prefetch:
        raise typer.BadParameter("tells of every prefetch schedule: give no --prefetch", param_hint="--bound")
    if model is not None and (record is not None or experts is not None):
        other = "--record" if record is not None else "--experts"
        raise typer.BadParameter("goes not with --model, which says it", param_hint=other)
    from headrace.commands.simulate import run_simulate
    from headrace.experts.simulate import Link, Simulation, parse_policy

    chosen = _list(policies, parse_policy, "--policies")
    if all(policy.name != "prefill-hot" for policy in chosen):
        _only_with(ctx, "prefill-hot among the --policies", "prompt")
    schedule = None
    if bound:
        rate = _positive_size(link, "--link", MAX_LINK_BYTES)
        schedule = Link(rate, latency, *_layer_times(layer_s), _triggers(triggers), horizon)
    run_simulate(
        trace,
        chosen,
        _list(residency, _residency, "--residency"),
        Simulation(window=window, pins=pins, transfers_per_layer=prefetch, recall=recall, seed=seed, link=schedule),
        prompt,
        experts,
        model,
        _positive_size(record, "--record", MAX_RECORD_BYTES) if record is not None else None,
        threads,
        json,
    )


@command("trace")
def trace_command(
    ctx: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            help="A GGUF file, a Hugging Face directory, a store, or `tiny`.", show_default=False, callback=_named
        ),
    ] = None,
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[FILE]...",
            readable=False,
            help="Texts, each a sequence of its own; - is standard input.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="T", readable=False, callback=_file, help="The trace to write."),
    ] = None,
    num_tokens: Annotated[
        int | None,
        typer.Option(
            "-n", "--num-tokens", min=1, help="Treat each FILE as a prompt and generate so many tokens first."
        ),
    ] = None,
    memory: Memory = None,
    threads: Threads = None,
    context: Annotated[
        int | None,
        typer.Option(
            "-c", "--context", min=1, help="Longer texts are cut into sequences. Default: at most the model's limit."
        ),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option("--temp", min=0.0, help="With -n: temperature; 0 is greedy. Default: the model's.")
    ] = None,
    top_p: Annotated[float | None, typer.Option("--top-p", help="With -n: nucleus. Default: the model's.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="With -n: seed for sampling.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="With -n: do not apply the chat template.")] = False,
    report: Annotated[
        Path | None,
        typer.Option(
            "--report", metavar="T", readable=False, callback=_file, help="Report on a trace instead of recording one."
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="PNG", readable=False, callback=_file, help="With --report: plot it too."),
    ] = None,
    partial: Annotated[
        bool, typer.Option("--partial", help="With --report: read an unfinished trace up to its last whole block.")
    ] = False,
    json: Json = False,
) -> None:
    """Record the routing of texts, or report on a recorded trace: reuse, unions, expert shares, working sets."""
    if report is not None:
        for name, written in _given(ctx).items():
            if name not in ("report", "plot", "partial", "json"):
                raise typer.BadParameter("goes not with --report, which reads a trace", param_hint=written)
        from headrace.commands.trace_report import report_trace

        report_trace(report, plot, partial, json)
        return
    _only_with(ctx, "--report", "plot", "partial")
    if model is None or not files:
        raise typer.BadParameter("give MODEL and FILE, or --report T", param_hint="MODEL FILE")
    if output is None:
        raise typer.BadParameter("give the trace to write", param_hint="-o")
    if files.count(Path("-")) > 1:
        raise typer.BadParameter("standard input can be read once", param_hint="FILE")
    if num_tokens is None:
        _only_with(ctx, "-n", "temperature", "top_p", "seed", "raw")
    elif context is not None and num_tokens >= context:
        raise typer.BadParameter(f"a context of {context} leaves no room for a prompt", param_hint="-n")
    _check_sampling(temperature, top_p)
    from headrace.commands.trace import TraceOptions, record

    record(
        TraceOptions(
            model=model,
            files=files,
            output=output,
            max_tokens=num_tokens,
            memory_bytes=_memory_bytes(memory),
            num_threads=threads,
            context=context,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            raw=raw,
            json=json,
        )
    )


def _prepare_streams() -> None:
    """Makes the three standard streams fit for any text and any caller.

    One that the caller closed becomes /dev/null: a model's file would get its number. What a terminal's encoding
    cannot write is escaped, since models write every character and files have names of any bytes.
    """
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != fd:
                os.dup2(null, fd)
                os.close(null)
            setattr(sys, name, open(fd, "w" if fd else "r", encoding="utf-8"))  # noqa: SIM115
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


def _interrupt_once(signum: int, frame: object) -> None:
    """Ctrl-C is a KeyboardInterrupt once: a second one must not break off the cleaning up after the first."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def main() -> None:
    try:
        if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # as in a shell's background jobs
            signal.signal(signal.SIGINT, _interrupt_once)
        _prepare_streams()
        app()
    except KeyboardInterrupt:  # before a command has begun
        sys.exit(INTERRUPTED)
    except SystemExit as end:
        gone = end.__context__
        if not isinstance(gone, BrokenPipeError):
            raise
        # Help or a usage error whose reader has left: the status is what it would have been.
        _discard(sys.stdout, sys.stderr)
        sys.exit(getattr(gone.__context__, "exit_code", 0))
    except OSError as error:  # help that cannot be written
        _tell(_reason(error))
        sys.exit(1)


if __name__ == "__main__":
    main()
