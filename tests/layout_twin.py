"""The tile layout "tile16" and CRC-32C in NumPy and plain Python: slow, short, and written from the
text of docs/format.md rather than from the core's code. The oracle for byte-exactness tests."""

from __future__ import annotations

import numpy as np

from headrace.formats.checkpoint import DType

TILE = 16


def pack(dtype: DType, rows: np.ndarray) -> np.ndarray:
    """File rows, uint8 [rows, row_bytes], to tile layout, uint8 [whole tiles * 16 * row_bytes]."""
    n, row_bytes = rows.shape
    padded = np.zeros((-(-n // TILE) * TILE, row_bytes), np.uint8)
    padded[:n] = rows
    tiles = padded.reshape(-1, TILE, row_bytes)
    return np.concatenate([_tile(dtype, tile) for tile in tiles])


def unpack(dtype: DType, packed: np.ndarray, rows: int, cols: int) -> np.ndarray:
    """The inverse of pack: uint8 [rows, row_bytes]."""
    row_bytes = dtype.row_bytes(cols)
    # The layout is a permutation of a tile's bytes: pack the bytes' own numbers to learn it.
    where = np.arange(TILE * row_bytes).reshape(TILE, row_bytes)
    order = _tile(dtype, where)
    out = np.empty((len(packed) // (TILE * row_bytes), TILE * row_bytes), np.uint8)
    out[:, order] = packed.reshape(out.shape)
    return out.reshape(-1, row_bytes)[:rows]


def _tile(dtype: DType, tile: np.ndarray) -> np.ndarray:
    """One tile [16, row_bytes] of bytes (or of anything that stands for them)."""
    if not dtype.is_quantized:
        size = dtype.row_bytes(1)
        values = tile.reshape(TILE, -1, size)  # row, column, byte of the value
        return values.transpose(1, 0, 2).reshape(-1)  # a column is 16 values
    block_bytes = dtype.row_bytes(32)
    out = []
    for begin in range(0, tile.shape[1], block_bytes):
        block = tile[:, begin : begin + block_bytes]
        out.append(block[:, :2].reshape(-1))  # 16 scales
        for v in range(2, block_bytes, 4):  # vectors of 16 lanes of 4 bytes
            out.append(block[:, v : v + 4].reshape(-1))
    return np.concatenate(out)


def record(parts: list[tuple[DType, np.ndarray]]) -> np.ndarray:
    """An expert's record from (type, file rows) of gate, up and down."""
    pieces = []
    for dtype, rows in parts:
        packed = pack(dtype, rows)
        pieces += [packed, np.zeros(-len(packed) % 64, np.uint8)]
    whole = np.concatenate(pieces)
    return np.concatenate([whole, np.zeros(-len(whole) % 4096, np.uint8)])


def _crc_table() -> list[int]:
    table = []
    for n in range(256):
        for _ in range(8):
            n = n >> 1 ^ (0x82F63B78 if n & 1 else 0)
        table.append(n)
    return table


_CRC_TABLE = _crc_table()


def crc32c(data: bytes, crc: int = 0) -> int:
    """CRC-32C (Castagnoli): reflected polynomial 0x82F63B78, start and end inverted."""
    crc ^= 0xFFFFFFFF
    for byte in bytes(data):
        crc = crc >> 8 ^ _CRC_TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF
