"""Headrace's native core: kernels, expert memory, executor."""

from collections.abc import Sequence
from typing import Annotated, Any, overload

import numpy
from numpy.typing import NDArray

kernels: Any  # for tests

def exit_on_interrupt(on: bool) -> None:
    """
    SIGINT ends the process at once with status 130 (on), or is Python's again (off).
    """

def release_free_memory() -> None:
    """Gives what the allocator keeps for later back to the system."""

def row_bytes(dtype: int, cols: int) -> int:
    """Bytes of one row of `cols` values as files store it."""

def matrix_bytes(dtype: int, rows: int, cols: int) -> int:
    """Bytes of a matrix in the kernels' tile layout (rows padded to 16)."""

def pack_rows(
    dtype: int,
    rows: int,
    cols: int,
    row_begin: int,
    src: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu", writable=False)],
    dst: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu")],
) -> None:
    """
    Rearranges whole file rows from `row_begin` on (src, uint8) into their places in the tile layout of the whole matrix (dst, uint8 [matrix_bytes]).
    """

def unpack_row(
    dtype: int,
    rows: int,
    cols: int,
    row: int,
    src: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu", writable=False)],
) -> NDArray[numpy.uint8]:
    """
    One row of a matrix in tile layout (src) as files store it: uint8 [row_bytes].
    """

def dequantize_rows(
    dtype: int,
    cols: int,
    src: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu", writable=False)],
) -> NDArray[numpy.float32]:
    """File rows (src, uint8) as float32 [n, cols], exactly as gguf-py does."""

@overload
def crc32c(
    data: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu", writable=False)], crc: int = 0
) -> int:
    """CRC-32C of uint8 data, continuing from `crc`."""

@overload
def crc32c(data: bytes, crc: int = 0) -> int: ...
def isa() -> str:
    """
    The instruction set in use: HEADRACE_ISA, else the best this processor has.
    """

class ExpertSource:
    """Where the experts of a checkpoint lie in its files."""

    def __init__(self, files: Sequence[str], layers: list) -> None: ...
    def record_bytes(self, layer: int) -> int:
        """Bytes of a slot that holds an expert of this layer."""

    def total_bytes(self) -> int:
        """Bytes of slots that hold all experts."""

def disturb_reads(max_us: int = 0, short_every: int = 0, fail_at: int = 0) -> None:
    """
    For tests: every read of an expert waits for up to max_us before it starts, each short_every-th gives half of
    what was asked for, and the fail_at-th from now fails. Without arguments nothing of that happens.
    """

class ExpertMemory:
    """The arena of expert slots, and the threads that load experts."""

    def __init__(
        self,
        source: ExpertSource,
        arena_bytes: int,
        loader_threads: int = 2,
        direct_io: bool = True,
        policy: str = "lru",
        hot_routes: int = 0,
        oracle_recall: float | None = None,
        oracle_seed: int = 0,
    ) -> None:
        """
        policy: one of policy_names(). hot_routes: of a layer, those that prefill-hot counts (docs/policies.md). oracle_recall: prefetches what expect() told, as an oracle that names this share of what is absent.
        """

    @staticmethod
    def overhead_bytes(source: ExpertSource, loader_threads: int = 2, policy: str = "lru") -> int:
        """What it holds besides the arena."""

    def counters(self) -> dict:
        """Expert counters since construction, by name."""

    def record_events(self) -> None:
        """Keeps what happens beside the routes from now on, for a replay."""

    def take_events(self) -> tuple:
        """
        (uint32 words of csrc/experts/read_events.h, counters) since the last call.
        """

    def record_timeline(self, on: bool) -> None:
        """
        Starts keeping when experts of streamed passes are read and used, in seconds from now; or stops.
        """

    def take_timeline(self) -> dict:
        """
        {'reads': {layer, first_expert, num_experts, bytes, start_s, end_s}, 'computes': {layer, first_expert, num_experts, num_routes, start_s, end_s}, 'layers': {layer, routed_s}}, arrays with an element each; first_expert: of the layer.
        """

    def resize(self, arena_bytes: int) -> None:
        """Moves the ceiling on slot bytes, between passes."""

    @property
    def arena_bytes(self) -> int: ...
    @property
    def committed_bytes(self) -> int: ...
    @property
    def num_slots(self) -> int:
        """Slots of the largest record that the arena holds."""

    @property
    def resident_experts(self) -> int: ...
    def read_bytes(self, layer: int) -> list[int]:
        """Of each expert of the layer, what loading it adds to bytes_read."""

    @property
    def total_experts(self) -> int: ...
    def begin(self, layer: int, ids: Sequence[int], num_routes: Sequence[int] = []) -> None: ...
    def expect(self, layer: int, ids: Sequence[int]) -> None:
        """What a later pass will route to, for a policy with an oracle."""

    def take(self, in_order: bool = False, max_taken: int = 4294967295) -> list[int]:
        """Indices into ids; empty when all were taken."""

    def begin_stream(
        self,
        group_size: int,
        queue_depth: int,
        banks: int,
        reads_early: bool,
        may_read_early: Sequence[bool],
        is_first: bool,
    ) -> None: ...
    def end_stream(self) -> None: ...
    def release(self, index: int) -> None: ...
    def end(self) -> None: ...
    def read_slot(self, layer: int, index: int) -> bytes:
        """The bytes of a taken expert of the layer in progress."""

def policy_names() -> list[str]:
    """The cache policies."""

class Link:
    """What a schedule bound assumes: csrc/experts/schedule_bound.h."""

    def __init__(
        self,
        bytes_per_s: float,
        latency_s: float,
        before_s: Sequence[float],
        after_s: Sequence[float],
        triggers: Sequence[int],
        horizon: int = 1,
    ) -> None: ...

class ScheduleBound:
    """How fast layers with given loads can be at best."""

    def __init__(self, record_bytes: Sequence[int], link: Link) -> None: ...
    def add(self, num_used: int, num_loads: int) -> None:
        """The next layer, pass after pass."""

    def finish(self) -> None: ...
    @property
    def seconds(self) -> float: ...
    @property
    def compute_seconds(self) -> float: ...
    @property
    def link_seconds(self) -> float: ...

class Simulator:
    """The engine's residency and policy, driven by the routes of a trace."""

    def __init__(
        self,
        num_experts: Sequence[int],
        record_bytes: Sequence[int],
        capacity_bytes: int,
        policy: str = "lru",
        *,
        hot_routes: int = 0,
        pins: bool = True,
        window: int = 1,
        lookahead: int = 0,
        transfers_per_layer: float = 0.0,
        recall: float = 1.0,
        seed: int = 0,
        links: Sequence[Link] = [],
        read_bytes: Sequence[int] = [],
    ) -> None:
        """
        num_experts and record_bytes: of each layer. window: tokens a pass. links: a bound is kept for each. read_bytes: of each expert, if loading it reads more than its record.
        """

    @property
    def num_layers(self) -> int: ...
    def feed(
        self,
        ids: Annotated[NDArray[numpy.int32], dict(shape=(None, None, None), order="C", device="cpu", writable=False)],
    ) -> None:
        """Routes int32 [tokens, layers, top_k]; a negative id is no route."""

    @overload
    def end_pass(
        self, events: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order="C", device="cpu", writable=False)]
    ) -> None:
        """
        As below; events: uint32, what ExpertMemory.take_events() gave for the pass.
        """

    @overload
    def end_pass(self) -> None:
        """What is fed next begins a pass of its own."""

    def resize(self, capacity_bytes: int) -> None:
        """From the pass on that is being fed."""

    def finish(self) -> None:
        """The trace is over."""

    @property
    def bounds(self) -> list[ScheduleBound]:
        """Of each link; complete after finish()."""

    def counters(self) -> dict:
        """By name."""

class PipelineModel:
    """How long streamed prefill takes: csrc/experts/pipeline_model.h."""

    def __init__(
        self,
        non_expert_s: Sequence[float],
        begins_pass: Sequence[bool],
        reads_early: Sequence[bool],
        num_groups: Sequence[int],
        groups: Annotated[NDArray[numpy.float64], dict(shape=(None, 3), order="C", device="cpu", writable=False)],
        after_s: float = 0.0,
    ) -> None:
        """
        Lists: of each layer. groups: float64 [groups, 3], seconds to read all absent experts, to read those that have routes, and to compute; layer after layer. after_s: what follows the last layer's experts.
        """

    @property
    def num_groups(self) -> int: ...
    def sweep_banks(
        self, queue_depth: int, banks: int, max_banks: int, schedule: str = "early"
    ) -> NDArray[numpy.float64]:
        """Seconds with each number of banks from `banks` to `max_banks`."""

    def times(self, queue_depth: int, banks: int, schedule: str = "early") -> dict:
        """
        When each group is read and computed (NaN: it is not), when each layer is routed, and sums; seconds.
        """

class Program:
    """A compiled graph (headrace/program.py), parsed and checked."""

    def __init__(self, data: bytes) -> None:
        """
        Parses the bytes of a compiled graph. HeadraceError if they are not one.
        """

    @property
    def max_rows(self) -> int:
        """Rows of the largest pass."""

    @property
    def max_out_rows(self) -> int:
        """Rows whose logits one pass can return."""

    @property
    def scratch_bytes(self) -> int:
        """What an executor commits for values and workspaces."""

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""

class Weights:
    """The trunk: all resident tensors of a program, and its embedding table."""

    def __init__(self, program: Program) -> None:
        """Reserves memory; loading commits it."""

    @staticmethod
    def resident_bytes(program: Program) -> int:
        """Bytes that loading everything commits."""

    def load(
        self,
        index: int,
        tensor: str,
        file: str,
        offset: int,
        nbytes: int,
        dtype: int,
        packed: bool = False,
        crc: int | None = None,
    ) -> None:
        """
        Reads a matrix or vector from a file: rows as files store them, or a matrix already in tile layout (packed). crc: the bytes' CRC-32C. HeadraceError names file, offset, tensor, expected and found.
        """

    def set_vector(
        self,
        index: int,
        data: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu", writable=False)],
    ) -> None:
        """Sets a vector that is computed, float32 [cols]."""

    def set_table(self, index: int, file: str, offset: int, stride: int, has_crc: bool = False) -> None:
        """
        Row i of the embedding lies at offset + i * stride, followed by its CRC-32C if has_crc.
        """

    def check_complete(self) -> None:
        """HeadraceError unless every weight was loaded or set."""

class SessionState:
    """What one session keeps between passes: its keys and values."""

    def __init__(self, program: Program, capacity: int, kv_dtype: int = 1) -> None:
        """Commits room for `capacity` positions; kv_dtype F16 or F32."""

    @staticmethod
    def bytes(program: Program, capacity: int, kv_dtype: int = 1) -> int:
        """Bytes that such a state commits."""

    @staticmethod
    def part(
        room: SessionState, first: int, rows: int, base: SessionState | None = None, base_length: int = 0
    ) -> SessionState:
        """
        A state in `rows` positions of another's memory, from `first` on (multiples of 16). With a base it continues that state's first base_length positions, and its rows also hold what of them is no whole block of 64.
        """

    @property
    def capacity(self) -> int:
        """Positions that it has room for."""

    @property
    def length(self) -> int:
        """Positions that hold a token."""

    def rollback(self, length: int) -> None:
        """Shortens to `length` positions."""

class CancelFlag:
    """Ends a running pass from another thread."""

    def __init__(self) -> None: ...
    def set(self) -> None: ...
    def clear(self) -> None: ...
    @property
    def is_set(self) -> bool: ...

class Executor:
    """Replays a program. One pass runs at a time; a second caller waits."""

    def __init__(
        self,
        program: Program,
        weights: Weights,
        experts: ExpertMemory | None,
        num_threads: int,
        shorter: Sequence[Program] = [],
    ) -> None:
        """
        num_threads counts the caller. Commits the program's scratch. shorter: the same graph compiled for fewer rows, ascending; a pass runs the first program that has room for it.
        """

    @staticmethod
    def overhead_bytes(program: Program, num_threads: int) -> int:
        """
        Bytes that such an executor commits beside scratch, buffer_bytes() and its threads' stacks.
        """

    @staticmethod
    def buffer_bytes(program: Program, max_rows: int) -> int:
        """
        Bytes that an executor for passes of up to max_rows rows keeps beside scratch.
        """

    def resize_scratch(self, rows: int) -> None:
        """
        Commits the scratch that passes of up to `rows` rows need and gives back the rest; larger passes are refused until it is called again. HeadraceError if the system has no memory: nothing has changed.
        """

    @property
    def scratch_bytes(self) -> int:
        """Scratch that is committed now."""

    def run(
        self,
        tokens: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        sequences: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        states: Sequence[SessionState],
        out_rows: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        logits: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu")] | None,
        cancel: CancelFlag | None = None,
        routes: Annotated[NDArray[numpy.int32], dict(shape=(None, None, None), order="C", device="cpu", writable=False)]
        | None = None,
        ids: Annotated[NDArray[numpy.int32], dict(shape=(None, None, None), order="C", device="cpu")] | None = None,
        weights: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order="C", device="cpu")]
        | None = None,
        scores: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order="C", device="cpu")]
        | None = None,
        per_slot: bool = False,
        stream: tuple[int, int, int, bool, bool] | None = None,
        targets: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)]
        | None = None,
        log_probs: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu")] | None = None,
    ) -> None:
        """
        One pass over n rows. tokens: int32 [n]; sequences: uint32 [n], indices into states, each sequence's rows in order; out_rows: uint32 [m], ascending; logits: float32 [m, vocab], filled. On success the states have grown; on an exception none has. routes: int32 [layers, n, top_k], ascending expert ids that replace the routers' choice, each with weight scaling / top_k. ids, weights, scores: int32, float32, float32 [layers, n, top_k], filled with the routes that were used and the routers' logits of them. targets: int32 [m], and no logits: log_probs, float32 [m], is filled with the log-probability of each after its row. HeadraceError("cancelled") if `cancel` was set; a signal handler's exception (KeyboardInterrupt) is raised within some 50 ms.
        """

    @property
    def num_threads(self) -> int: ...
    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""

    @property
    def op_seconds(self) -> dict:
        """Time spent in each op since construction, by the op's name."""
