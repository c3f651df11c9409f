"""The bindings of the expert memory; what it promises is tested in tests/cpp/experts_*_test.cc."""

from pathlib import Path

import numpy as np
import pytest

from headrace import _core
from headrace.errors import HeadraceError
from headrace.formats.checkpoint import DType, LayerExperts

Q4_0, F16 = DType.Q4_0, DType.F16
NUM_EXPERTS = 5
PARTS = [(Q4_0, 24, 64), (Q4_0, 24, 64), (F16, 17, 24)]


def matrix_file_bytes(dtype: int, rows: int, cols: int) -> int:
    return rows * (cols // 32 * 18 if dtype == Q4_0 else cols * 2)


def slot_bytes(matrices: list[np.ndarray]) -> bytes:
    """gate, up and down in tile layout, each padded to 64 bytes, the whole to 4 KiB."""
    slot = b""
    for (dtype, rows, cols), matrix in zip(PARTS, matrices, strict=True):
        out = np.zeros(_core.matrix_bytes(dtype, rows, cols), np.uint8)
        _core.pack_rows(dtype, rows, cols, 0, matrix, out)
        slot += out.tobytes() + bytes(-out.size % 64)
    return slot + bytes(-len(slot) % 4096)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory):
    """(source of a rows layer and a packed layer of the same experts, each expert's slot bytes)."""
    rng = np.random.default_rng(3)
    path: Path = tmp_path_factory.mktemp("experts") / "weights"
    file_bytes = [matrix_file_bytes(*part) for part in PARTS]
    experts = [[rng.integers(0, 256, n, np.uint8) for n in file_bytes] for _ in range(NUM_EXPERTS)]
    slots = [slot_bytes(matrices) for matrices in experts]

    data = bytearray(b"header")
    row_offsets = np.zeros((NUM_EXPERTS, 3), np.uint64)
    for part in range(3):
        for e in range(NUM_EXPERTS):
            row_offsets[e, part] = len(data)
            data += experts[e][part].tobytes()
    data += bytes(-len(data) % 4096)
    records = np.arange(NUM_EXPERTS, dtype=np.uint64) * len(slots[0]) + len(data)
    crc = np.array([_core.crc32c(slot) for slot in slots], np.uint32)
    path.write_bytes(bytes(data) + b"".join(slots))
    rows = LayerExperts(PARTS, NUM_EXPERTS, np.zeros((NUM_EXPERTS, 3), np.uint32), row_offsets)
    packed = LayerExperts(PARTS, NUM_EXPERTS, np.zeros(NUM_EXPERTS, np.uint32), records, crc)
    layers = [rows, packed]
    return _core.ExpertSource([str(path)], layers), slots


def run_layer(memory, layer: int, ids: list[int]) -> dict[int, bytes]:
    """Each expert's slot bytes."""
    found = {}
    memory.begin(layer, ids)
    try:
        while taken := memory.take(in_order=True):
            for i in taken:
                found[ids[i]] = memory.read_slot(layer, i)
                memory.release(i)
    finally:
        memory.end()
    return found


@pytest.mark.parametrize("direct_io", [True, False])
def test_slots_hold_the_experts_from_either_source(stored, direct_io):
    source, slots = stored
    record = source.record_bytes(0)
    assert record == source.record_bytes(1) == len(slots[0])
    assert source.total_bytes() == 2 * NUM_EXPERTS * record
    memory = _core.ExpertMemory(source, 3 * record, loader_threads=2, direct_io=direct_io)
    assert (memory.num_slots, memory.total_experts) == (3, 2 * NUM_EXPERTS)
    for layer in (0, 1):
        assert run_layer(memory, layer, [0, 2, 3, 4]) == {e: slots[e] for e in (0, 2, 3, 4)}
    assert run_layer(memory, 1, []) == {}
    counters = memory.counters()
    assert (counters["hits"], counters["loads"], counters["bytes_unused"]) == (0, 8, 0)
    assert counters["bytes_read"] >= 4 * record
    assert memory.resident_experts == 3
    memory.resize(record)
    assert memory.committed_bytes <= memory.arena_bytes == record
    assert _core.ExpertMemory.overhead_bytes(source) > 0


def test_errors_are_headrace_errors(stored, tmp_path):
    source, _ = stored
    record = source.record_bytes(0)
    with pytest.raises(HeadraceError, match=f"expected an arena of at least .* {record} bytes"):
        _core.ExpertMemory(source, record - 1)
    with pytest.raises(HeadraceError, match="expected a layer below 2, found 2"):
        source.record_bytes(2)

    file, offset = np.zeros((1, 3), np.uint32), np.zeros((1, 3), np.uint64)
    for layer, message in [
        (LayerExperts(PARTS, 2, file, offset), "expected 6 files and offsets"),
        (LayerExperts(PARTS[:2], 1, file, offset), "gate, up and down"),
        (LayerExperts([(9, 1, 1), *PARTS[1:]], 1, file, offset), "dtype 9"),
        (LayerExperts([(Q4_0, 24, 40), *PARTS[1:]], 1, file, offset), "multiple of 32 columns"),
        (LayerExperts([(F16, 0, 32), *PARTS[1:]], 1, file, offset), "found 0 x 32"),
        (LayerExperts(PARTS, 0, file[:0], offset[:0]), "at least one expert"),
    ]:
        with pytest.raises(HeadraceError, match=message):
            _core.ExpertSource([], [layer])

    short = tmp_path / "short"
    short.write_bytes(b"x" * 100)
    source = _core.ExpertSource([str(short)], [LayerExperts(PARTS, 1, file, offset)])
    with pytest.raises(HeadraceError, match=r"short: layer 0 expert 0 gate: .* file of 100 bytes"):
        _core.ExpertMemory(source, 1 << 20)
