"""The float32 values that a Checkpoint points at, read with NumPy and decoded by the gguf
package."""

from __future__ import annotations

import numpy as np
from checkpoints import decode
from layout_twin import unpack

from headrace.formats.checkpoint import Checkpoint, DType


def trunk_values(checkpoint: Checkpoint, name: str) -> np.ndarray:
    t = checkpoint.tensors[name]
    rows, cols = (1, t.shape[0]) if len(t.shape) == 1 else t.shape
    data = _read(checkpoint, t.file, t.offset, t.nbytes)
    data = _rows(t.dtype, data, rows, cols, t.layout == "tile16")
    return decode(data, t.dtype.name).reshape(t.shape)


def embedding_values(checkpoint: Checkpoint) -> np.ndarray:
    """[rows, cols]"""
    e = checkpoint.embedding
    data = _read(checkpoint, e.file, e.offset, e.rows * e.stride_bytes)
    data = data.reshape(e.rows, e.stride_bytes)[:, : e.dtype.row_bytes(e.cols)]
    return decode(np.ascontiguousarray(data), e.dtype.name)


def expert_values(checkpoint: Checkpoint, layer: int, expert: int) -> list[np.ndarray]:
    """gate, up and down, each [rows, cols]."""
    e = checkpoint.experts[layer]
    packed = e.crc32c is not None
    values = []
    at = int(e.offset[expert]) if packed else 0
    for i, (dtype, rows, cols) in enumerate(e.parts):
        if packed:
            nbytes = -(-rows // 16) * 16 * dtype.row_bytes(cols)
            data = _read(checkpoint, int(e.file[expert]), at, nbytes)
            at += -(-nbytes // 64) * 64
        else:
            nbytes = rows * dtype.row_bytes(cols)
            data = _read(checkpoint, int(e.file[expert, i]), int(e.offset[expert, i]), nbytes)
        values.append(decode(_rows(dtype, data, rows, cols, packed), dtype.name))
    return values


def _rows(dtype: DType, data: np.ndarray, rows: int, cols: int, tiled: bool) -> np.ndarray:
    return unpack(dtype, data, rows, cols) if tiled else data.reshape(rows, -1)


def _read(checkpoint: Checkpoint, file: int, offset: int, nbytes: int) -> np.ndarray:
    data = np.fromfile(checkpoint.files[file], np.uint8, nbytes, offset=offset)
    assert len(data) == nbytes
    return data


def assert_values(checkpoint: Checkpoint, weights: dict[str, np.ndarray]) -> None:
    """Every tensor of the checkpoint decodes to exactly `weights` (tests/checkpoints.py's
    names)."""
    expected = dict(weights)
    np.testing.assert_array_equal(embedding_values(checkpoint), expected["token_embd.weight"])
    if checkpoint.config.tie_word_embeddings:
        expected["output.weight"] = expected["token_embd.weight"]
    for layer in range(checkpoint.config.num_hidden_layers):
        parts = [expected.pop(f"blk.{layer}.ffn_{x}_exps.weight") for x in ("gate", "up", "down")]
        for e in range(checkpoint.config.num_experts):
            found = expert_values(checkpoint, layer, e)
            for part, values in zip(parts, found, strict=True):
                np.testing.assert_array_equal(values, part[e])
    del expected["token_embd.weight"]
    assert set(checkpoint.tensors) == set(expected)
    for name, values in expected.items():
        np.testing.assert_array_equal(trunk_values(checkpoint, name), values, err_msg=name)
