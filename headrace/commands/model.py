"""MODEL on the command line: the name `tiny`, or a path."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from headrace.errors import HeadraceError
from headrace.formats import open_checkpoint
from headrace.formats.checkpoint import Checkpoint

TINY = "tiny"


def resolve_model(name: str) -> Path:
    """`tiny` is the model that ships with the package; a path of that name needs a slash."""
    if name != TINY:
        return Path(name)
    path = Path(str(resources.files("headrace") / "data" / "tiny.gguf"))
    if not path.is_file():
        raise HeadraceError(f"{path}: the embedded model is missing; reinstall headrace")
    return path


def open_model(name: str) -> Checkpoint:
    return open_checkpoint(resolve_model(name))
