"""MODEL on the command line: the name `tiny`, or a path."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

from headrace.errors import HeadraceError
from headrace.formats import open_checkpoint
from headrace.formats.checkpoint import Checkpoint, TokenizerSource
from headrace.text.tokenizer import Tokenizer, load_tokenizer

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


@dataclass(frozen=True)
class Text:
    """What turns text into token ids and back: part of what `run` holds, so part of every plan for it."""

    tokenizer: Tokenizer
    chat_template: str | None
    where: str  # what errors call the model

    def encode_chat(self, prompt: str) -> list[int]:
        """The ids of a conversation of one message. There must be a chat template."""
        from headrace.text.chat import encode_chat  # Jinja costs 5 MiB

        assert self.chat_template is not None
        messages = [{"role": "user", "content": prompt}]
        return encode_chat(self.tokenizer, self.chat_template, messages, where=f"{self.where}: chat template")


def open_model_and_text(name: str) -> tuple[Checkpoint, Text | None]:
    """A checkpoint without its tokenizer's source, and its text; None for one without vocabulary."""
    checkpoint = open_model(name)
    tokenizer = load_tokenizer(checkpoint.tokenizer, checkpoint.config)
    template = checkpoint.tokenizer.chat_template
    # The metadata that a tokenizer was rebuilt from is large and has done its work.
    checkpoint = replace(checkpoint, tokenizer=TokenizerSource())
    return checkpoint, Text(tokenizer, template, str(checkpoint.path)) if tokenizer else None


def warn(text: str) -> None:
    """A line on stderr about what does not stop the command."""
    print(f"headrace: {text}", file=sys.stderr)
