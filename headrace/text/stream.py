"""Incremental detokenization: text as it comes, in whole characters."""

from __future__ import annotations

import codecs

from headrace.text.tokenizer import Tokenizer


class TextStream:
    """Turns token ids into text one at a time.

    A byte-level token can end inside a character; its bytes wait for the rest. So text once
    returned never changes, and all of it together equals `tokenizer.decode` of all the ids.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty for a special token or part of a character."""
        if self._tokenizer.is_special(token_id):
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        """What is left: U+FFFD if the last character is incomplete. The stream is then as new."""
        return self._decoder.decode(b"", final=True)
