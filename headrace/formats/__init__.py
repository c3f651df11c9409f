"""Readers of checkpoints, and the expert store. open_checkpoint() is the one way in."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from headrace.errors import HeadraceError
from headrace.formats.checkpoint import Checkpoint
from headrace.formats.gguf import MAGIC, read_gguf
from headrace.formats.header import opened, read_at
from headrace.formats.hf import read_hf
from headrace.formats.store import MANIFEST, read_store

__all__ = ["open_checkpoint"]

_CONFIG = "config.json"


def open_checkpoint(path: Path) -> Checkpoint:
    """Reads what `path` is, by its content: a store, a Hugging Face directory or a GGUF file.

    Only headers are read. Raises HeadraceError with one line that says what is wrong and what to
    do.
    """
    path = Path(path)
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        raise HeadraceError(f"{path}: no such file; give a GGUF file, a Hugging Face directory or a store") from None
    except (OSError, ValueError) as e:
        raise HeadraceError(f"{path}: cannot open: {getattr(e, 'strerror', e)}") from None
    if stat.S_ISDIR(mode):
        return _open_directory(path)
    with opened(path) as (fd, size):
        magic = read_at(fd, min(4, size), 0, path)
    if magic != MAGIC and path.name.endswith((".safetensors", ".bin", ".json")):
        raise HeadraceError(
            f"{path}: one file of a checkpoint does not say what model it is; give its directory, {path.parent}"
        )
    return read_gguf(path)


def _open_directory(path: Path) -> Checkpoint:
    try:
        names = set(os.listdir(path))
    except OSError as e:
        raise HeadraceError(f"{path}: cannot open: {e.strerror}") from None
    if MANIFEST in names:
        return read_store(path)
    if _CONFIG in names:
        return read_hf(path)
    hint = ""
    ggufs = sorted(n for n in names if n.endswith(".gguf"))
    if ggufs:
        hint = f"; it holds GGUF files: give one of them, for example {path / ggufs[0]}"
    raise HeadraceError(
        f"{path}: expected {MANIFEST} (a store) or {_CONFIG} (a Hugging Face directory), found neither{hint}"
    )
