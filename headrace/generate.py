"""Generation: sample, step, repeat, until a stop token, the token limit or the end of the context."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from headrace.engine import Session
from headrace.errors import HeadraceError
from headrace.text.sampling import Sampler


@dataclass
class Generation:
    """Iterate to get token ids as they are made. finish_reason: "stop", "length" or "context"."""

    session: Session
    logits: np.ndarray  # of the last prompt token
    sampler: Sampler
    max_tokens: int
    stop_ids: frozenset[int]
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = "length"

    def __iter__(self) -> Iterator[int]:
        logits = self.logits
        while len(self.token_ids) < self.max_tokens:
            try:
                token = self.sampler.sample(logits)
            except HeadraceError as error:
                raise HeadraceError(f"{self.session.engine.checkpoint.path}: {error}") from None
            self.token_ids.append(token)
            yield token
            if token in self.stop_ids:
                self.finish_reason = "stop"
                return
            if len(self.token_ids) == self.max_tokens:
                return
            if self.session.length == self.session.engine.options.context:
                self.finish_reason = "context"
                return
            logits = self.session.step(token)
