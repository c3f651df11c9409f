"""Which tokens end generation."""

from __future__ import annotations

from headrace.errors import HeadraceError
from headrace.models.config import ModelConfig
from headrace.text.tokenizer import Tokenizer


def stop_token_ids(config: ModelConfig, tokenizer: Tokenizer | None) -> frozenset[int]:
    """The ids that stop generation: the config's, and the tokenizer's ends of text and turn.

    A stop token ends the answer; it is counted as generated and not shown.
    """
    ids = frozenset(config.eos_token_ids) | frozenset(tokenizer.eos_token_ids if tokenizer else ())
    for token_id in sorted(ids):
        if not 0 <= token_id < config.vocab_size:
            raise HeadraceError(f"config: eos_token_id {token_id} is outside the vocabulary of {config.vocab_size}")
    return ids
