"""What every reader returns: a Checkpoint. Only places and shapes; no tensor data is held here.

A GGUF in place, a Hugging Face directory and a store all become this one description, so that
nothing after it knows which one it was.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # models/ imports this module
    from headrace.models.config import ModelConfig


class DType(IntEnum):
    """Weight types, with GGUF's ids (csrc/kernels/dtype.h has the same)."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q8_0 = 8
    BF16 = 30

    @property
    def is_quantized(self) -> bool:
        return self in (DType.Q4_0, DType.Q8_0)

    def row_bytes(self, cols: int) -> int:
        """Bytes of a row of `cols` values as files store it; quantized types need cols % 32 ==
        0."""
        if self == DType.F32:
            return cols * 4
        if self in (DType.F16, DType.BF16):
            return cols * 2
        return cols // 32 * (18 if self == DType.Q4_0 else 34)


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of the trunk (everything but routed experts).

    name: GGUF's canonical name whatever the source ("blk.0.attn_q.weight", "output.weight").
    shape: outermost first, (rows, cols) for matrices, (n,) for vectors.
    layout: "rows" as files store it, or "tile16" (csrc/kernels/dtype.h) in a store.
    crc32c: of the nbytes, in a store; None elsewhere.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    file: int  # index into Checkpoint.files
    offset: int
    nbytes: int
    layout: str = "rows"
    crc32c: int | None = None


@dataclass(frozen=True)
class EmbeddingTable:
    """Token embeddings, read row by row on demand and never resident.

    Row i lies at offset + i * stride_bytes, DType.row_bytes(cols) long. In a store (has_crc) the
    row is followed by the little-endian CRC-32C of its bytes.
    """

    dtype: DType
    rows: int
    cols: int
    file: int
    offset: int
    stride_bytes: int
    has_crc: bool = False


@dataclass(frozen=True)
class LayerExperts:
    """The routed experts of one layer. parts: (dtype, rows, cols) of gate, up and down.

    Either row extents (`file`, `offset`: [num_experts, 3]; each part contiguous in the file's row
    layout) or packed records (`file`, `offset`, `crc32c`: [num_experts]; see
    csrc/experts/expert_source.h).
    """

    parts: tuple[tuple[DType, int, int], ...]
    num_experts: int
    file: np.ndarray  # uint32
    offset: np.ndarray  # uint64
    crc32c: np.ndarray | None = None  # uint32 [num_experts]; not None means packed


@dataclass(frozen=True)
class TokenizerSource:
    """Where the tokenizer comes from; text/tokenizer.py turns it into a Tokenizer.

    Exactly one of: tokenizer_json (a Hugging Face directory or a store), or gguf (the tokenizer.*
    metadata of a GGUF), or neither (a checkpoint without vocabulary: token ids only). where: what
    errors call the GGUF.
    """

    tokenizer_json: Path | None = None
    gguf: dict[str, object] | None = None
    chat_template: str | None = None
    where: str = "GGUF"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as described by its files. `kind`: "gguf", "hf" or "store"."""

    path: Path
    kind: str
    name: str
    config: ModelConfig
    files: tuple[Path, ...]
    # The trunk: no experts and no token_embd. Tied: output.weight is there too, at the embedding's
    # bytes.
    tensors: dict[str, TensorInfo]
    embedding: EmbeddingTable
    experts: tuple[LayerExperts, ...]
    tokenizer: TokenizerSource
