"""Where the native core finds a checkpoint's experts."""

from __future__ import annotations

from headrace import _core
from headrace.formats.checkpoint import Checkpoint


def expert_source(checkpoint: Checkpoint) -> _core.ExpertSource:
    return _core.ExpertSource([str(f) for f in checkpoint.files], list(checkpoint.experts))
