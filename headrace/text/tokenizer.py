"""A checkpoint's tokenizer: from its tokenizer.json, or rebuilt from GGUF metadata.

Both ways meet in one tokenizer.json text: `tokenizer_json_from_gguf` writes it, the store keeps it,
and `load_tokenizer` reads it through the `tokenizers` library. So a packed GGUF has exactly the
tokenizer of the GGUF in place.

A vocabulary of 150,000 tokens holds about 40 MiB, and 90 MiB for a moment while it loads.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import tokenizers

from headrace.errors import HeadraceError
from headrace.formats.checkpoint import TokenizerSource
from headrace.formats.header import read_small
from headrace.formats.safetensors import read_json
from headrace.models.config import ModelConfig
from headrace.models.fields import shown

# GGUF names a pre-tokenizer and not its regex. Both families also normalize to NFC in their
# tokenizer.json, which GGUF does not record.
_GPT2_PRE_TOKENIZER = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": False,
    "use_regex": True,
}
_QWEN2_PRE_TOKENIZER = {
    "type": "Sequence",
    "pretokenizers": [
        {
            "type": "Split",
            "pattern": {
                "Regex": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
                r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            },
            "behavior": "Isolated",
            "invert": False,
        },
        {**_GPT2_PRE_TOKENIZER, "use_regex": False},
    ],
}
_PRE_TOKENIZERS = {"olmo": _GPT2_PRE_TOKENIZER, "qwen2": _QWEN2_PRE_TOKENIZER}

# tokenizer.ggml.token_type
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)

# Tokens that end a document or a turn wherever they exist as special tokens.
_END_TOKENS = ("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|end_of_text|>")

_PIECE_CHARS = 32 << 10  # tokenized at a time
_WORD_GAP = re.compile("(?<=[A-Za-z]) (?=[A-Za-z])")

# A real tokenizer.json has at most some 35 MB; a larger file is a mistake, and parsing costs RAM.
_MAX_JSON_BYTES = 128 << 20


def _byte_of_char() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes, as used in byte-level vocabularies."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()


class Tokenizer:
    """Text to token ids and back, for byte-level BPE vocabularies.

    vocab_size: one more than the highest id that has text; the embedding table may have more rows.
    bos_token_id: the token that begins a sequence, for chat templates; None where there is none.
    eos_token_ids: the tokens that end generation; the first is eos_token in chat templates.
    """

    vocab_size: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        vocab_size: int,
        bos_token_id: int | None,
        eos_token_ids: Iterable[int],
    ) -> None:
        self.vocab_size = vocab_size
        self.bos_token_id = bos_token_id
        self.eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        self._backend = backend
        self._added = backend.get_added_tokens_decoder()
        special = {token_id for token_id, token in self._added.items() if token.special}
        self._special_ids = frozenset(special.union(self.eos_token_ids))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The token ids of `text`.

        As in Hugging Face, the text of a special token becomes that token wherever it stands, in a
        user's words too. `add_special_tokens` adds what the tokenizer puts around every text (often
        a BOS); a rendered chat template already has it.
        """
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError:  # what `tokenizers` says of a str that cannot be UTF-8
            surrogate = re.search("[\ud800-\udfff]", text)
            if surrogate is None:
                raise
            raise HeadraceError(
                f"text: character {surrogate.start()} is not valid Unicode "
                f"({surrogate.group()!r}); give the text as UTF-8"
            ) from None

    def encode_long(self, text: str) -> np.ndarray:
        """The ids of a text of any length, int32: piece by piece, since tokenizing takes some 200 bytes of memory a
        byte. Pieces end between two words, where tokens end in any case, or else at the end of a line."""
        with_special, plain = self.encode("a"), self.encode("a", add_special_tokens=False)
        before = next(i for i in range(len(with_special)) if with_special[i : i + len(plain)] == plain)
        parts, begin = [with_special[:before]], 0
        while begin < len(text):
            end = begin + _PIECE_CHARS
            if end < len(text):
                gaps = [m.start() for m in _WORD_GAP.finditer(text, max(begin + 1, end - 1000), end)]
                end = gaps[-1] if gaps else text.rfind("\n", begin, end) + 1 or end
            parts.append(self.encode(text[begin:end], add_special_tokens=False))
            begin = end
        parts.append(with_special[before + len(plain) :])
        return np.concatenate([np.array(part, np.int32) for part in parts])

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids` without special tokens; bytes that are not UTF-8 become U+FFFD."""
        shown = (self.token_bytes(i) for i in ids if not self.is_special(i))
        return b"".join(shown).decode("utf-8", errors="replace")

    def is_special(self, token_id: int) -> bool:
        """Whether the token steers the model and is not shown in text."""
        return token_id in self._special_ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; empty for an id without text (the table's padding)."""
        added = self._added.get(token_id)
        if added is not None:
            return added.content.encode()
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        try:
            return bytes([_BYTE_OF_CHAR[char] for char in token])
        except KeyError:  # not written in stand-ins: plain text, as `tokenizers` takes it
            return token.encode()

    def token_text(self, token_id: int | None) -> str | None:
        """The text of one token, special or not, as chat templates name it; None for None."""
        if token_id is None:
            return None
        return self.token_bytes(token_id).decode("utf-8", errors="replace")


def load_tokenizer(source: TokenizerSource, config: ModelConfig) -> Tokenizer | None:
    """The checkpoint's tokenizer, or None where it has no vocabulary (token ids only).

    Raises HeadraceError for an unsupported or damaged tokenizer, and for one that does not fit the
    embedding table (config.vocab_size rows).
    """
    bos_token: object = config.bos_token_id
    eos_tokens: list[object] = [*config.eos_token_ids]
    if source.tokenizer_json is not None:
        where = str(source.tokenizer_json)
        text = _read(source.tokenizer_json)
        backend = _parse(text, where)
        _check_added_ids(backend, text, where)
        del text
        settings = _tokenizer_config(source.tokenizer_json.with_name("tokenizer_config.json"))
        # What Hugging Face gives to chat templates: these, and not config.json's ids.
        bos_token = settings.get("bos_token", bos_token)
        eos_tokens.insert(0, settings.get("eos_token"))
    elif source.gguf is not None and source.gguf.get("tokenizer.ggml.model", "none") != "none":
        where = f"{source.where}: tokenizer"
        text = tokenizer_json_from_gguf(source.gguf, source.where)
        num_tokens = len(_strings(source.gguf, "tokenizer.ggml.tokens"))
        if num_tokens > config.vocab_size:
            raise HeadraceError(
                f"{where}: {num_tokens} tokens, but the embedding table has {config.vocab_size} "
                "rows; tokenizer and weights belong to different models"
            )
        backend = _parse(text, where)
        del text
        bos_token = _id(source.gguf, "bos_token_id") if bos_token is None else bos_token
        eos_tokens += _end_ids(source.gguf)
    else:
        return None

    vocab_size = _vocab_size(backend, config.vocab_size, where)
    around = backend.encode("").ids
    if any(token_id >= config.vocab_size for token_id in around):
        raise HeadraceError(
            f"{where}: adds tokens {around} to every text, but the embedding table has {config.vocab_size} rows"
        )

    def token_id(token: object) -> int | None:
        try:
            return backend.token_to_id(token) if isinstance(token, str) else token  # type: ignore
        except UnicodeEncodeError:  # half a surrogate pair: in no vocabulary
            return None

    bos_id = token_id(bos_token)
    if bos_id is not None and not 0 <= bos_id < config.vocab_size:
        raise HeadraceError(f"{where}: bos_token_id {bos_id} is outside the vocabulary of {config.vocab_size}")
    eos_ids = [i for token in eos_tokens if (i := token_id(token)) is not None]
    added = backend.get_added_tokens_decoder()
    eos_ids += [i for i, token in added.items() if token.special and token.content in _END_TOKENS]
    return Tokenizer(backend, vocab_size, bos_id, eos_ids)


def tokenizer_json_from_gguf(metadata: dict[str, object], where: str = "GGUF") -> str:
    """The tokenizer.json (ASCII) of a GGUF's `tokenizer.*` metadata: full keys, Python values.

    Control and user-defined tokens become added tokens, found in text before the merges apply, the
    former special. Unused tokens, which pad the table, are left out. where: what errors call it.
    """
    try:
        return _tokenizer_json(metadata)
    except HeadraceError as error:
        raise HeadraceError(f"{where}: {error}") from None


def _tokenizer_json(metadata: dict[str, object]) -> str:
    model = metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise HeadraceError(
            f"tokenizer.ggml.model: {shown(model)} is not supported; supported: 'gpt2' (byte-level BPE)"
        )
    pre = metadata.get("tokenizer.ggml.pre")
    if not isinstance(pre, str) or pre not in _PRE_TOKENIZERS:
        supported = ", ".join(map(repr, _PRE_TOKENIZERS))
        raise HeadraceError(f"tokenizer.ggml.pre: {shown(pre)} is not supported; supported: {supported}")
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    merges = _strings(metadata, "tokenizer.ggml.merges")
    types = _token_types(metadata, len(tokens))
    _check_unique(tokens, types)

    special = {_CONTROL, _UNKNOWN}
    _id(metadata, "bos_token_id")  # refused here if it is wrong, whatever uses it
    ends = set(_end_ids(metadata))
    added = [
        # GGUF drops the other flags; neither family sets them.
        {
            "id": token_id,
            "content": tokens[token_id],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind in special or token_id in ends,
        }
        for token_id, kind in enumerate(types)
        if kind in (_CONTROL, _UNKNOWN, _USER_DEFINED) or token_id in ends
    ]
    head = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": _PRE_TOKENIZERS[pre],
        "post_processor": _post_processor(metadata, tokens),
        "decoder": _GPT2_PRE_TOKENIZER,
    }
    # Written in pieces: the vocabulary as one dict of a 150,000-token model would cost 30 MiB more.
    out = io.StringIO()
    out.write(json.dumps(head)[:-1])
    out.write(
        ', "model": {"type": "BPE", "dropout": null, "unk_token": null, '
        '"continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": false, '
        '"byte_fallback": false, "ignore_merges": false, "vocab": {'
    )
    kept = ((token, i) for i, token in enumerate(tokens) if types[i] != _UNUSED)
    _write_chunks(out, kept, dict)
    out.write('}, "merges": [')
    _write_chunks(out, _checked_merges(merges), list)
    out.write("]}}")
    return out.getvalue()


def _write_chunks(out: io.StringIO, items: Iterator, container: type) -> None:
    """Writes the items of a JSON object or array, without its brackets."""
    separator = ""
    while chunk := container(islice(items, 4096)):
        out.write(separator)
        out.write(json.dumps(chunk)[1:-1])
        separator = ", "


def _checked_merges(merges: Sequence[str]) -> Iterator[str | list[str]]:
    """Merges as "a b", which takes 65 MiB less to parse than ["a", "b"] (150,000 merges)."""
    # `tokenizers` drops a merge in the short form that looks like the first line of a merges.txt.
    in_pairs = any(merge.startswith("#version") for merge in merges)
    for rank, merge in enumerate(merges):
        pair = merge.split(" ")
        if len(pair) != 2 or not all(pair):
            raise HeadraceError(
                f"tokenizer.ggml.merges: entry {rank} is {shown(merge)}; expected two tokens and a space"
            )
        yield pair if in_pairs else merge


def _strings(metadata: dict[str, object], key: str) -> Sequence[str]:
    value = metadata.get(key)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        found = "nothing" if value is None else type(value).__name__
        raise HeadraceError(f"{key}: expected a list of strings, found {found}")
    return value


def _token_types(metadata: dict[str, object], num_tokens: int) -> Sequence[int]:
    types = metadata.get("tokenizer.ggml.token_type")
    if types is None:
        return [_NORMAL] * num_tokens
    if not isinstance(types, list) or len(types) != num_tokens:
        found = len(types) if isinstance(types, list) else type(types).__name__
        raise HeadraceError(f"tokenizer.ggml.token_type: expected {num_tokens} types, found {found}")
    for token_id, kind in enumerate(types):
        if kind not in range(_NORMAL, _BYTE + 1):
            raise HeadraceError(f"tokenizer.ggml.token_type: token {token_id} has type {kind!r}; expected 1 to 6")
    return types


def _check_unique(tokens: Sequence[str], types: Sequence[int]) -> None:
    kept = [token for token, kind in zip(tokens, types, strict=True) if kind != _UNUSED]
    if len(set(kept)) == len(kept):
        return
    first: dict[str, int] = {}
    for token_id, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind != _UNUSED and first.setdefault(token, token_id) != token_id:
            raise HeadraceError(f"tokenizer.ggml.tokens: tokens {first[token]} and {token_id} are both {shown(token)}")


def _id(metadata: dict[str, object], name: str) -> int | None:
    """The token id under tokenizer.ggml.NAME, checked against the list of tokens."""
    key = f"tokenizer.ggml.{name}"
    value = metadata.get(key)
    if value is None:
        return None
    num_tokens = len(metadata["tokenizer.ggml.tokens"])  # type: ignore[arg-type]
    if not isinstance(value, int) or not 0 <= value < num_tokens:
        raise HeadraceError(f"{key}: expected an id below {num_tokens}, found {shown(value)}")
    return value


def _end_ids(metadata: dict[str, object]) -> list[int]:
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    return [token_id for name in names if (token_id := _id(metadata, name)) is not None]


def _post_processor(metadata: dict[str, object], tokens: Sequence[str]) -> dict[str, object] | None:
    """What puts BOS and EOS around a text, where the metadata asks for it."""
    template: list[dict] = [{"Sequence": {"id": "A", "type_id": 0}}]
    special_tokens = {}
    for flag, name, position in (
        ("add_bos_token", "bos_token_id", 0),
        ("add_eos_token", "eos_token_id", len(template)),
    ):
        if not metadata.get(f"tokenizer.ggml.{flag}"):
            continue
        token_id = _id(metadata, name)
        if token_id is None:
            raise HeadraceError(f"tokenizer.ggml.{flag} is set, but tokenizer.ggml.{name} is missing")
        token = tokens[token_id]
        special_tokens[token] = {"id": token, "ids": [token_id], "tokens": [token]}
        entry = {"SpecialToken": {"id": token, "type_id": 0}}
        template.insert(0, entry) if position == 0 else template.append(entry)
    if not special_tokens:
        return None
    pair = [*template, {"Sequence": {"id": "B", "type_id": 0}}]
    return {
        "type": "TemplateProcessing",
        "single": template,
        "pair": pair,
        "special_tokens": special_tokens,
    }


def _read(path: Path) -> str:
    try:
        return read_small(path, _MAX_JSON_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        raise HeadraceError(f"{path}: byte {error.start} is not UTF-8") from None


def _tokenizer_config(path: Path) -> dict[str, str | None]:
    """The texts of BOS and EOS in a Hugging Face directory, None for none, absent if not said."""
    if not path.is_file():
        return {}
    settings = read_json(path)
    texts = {}
    for key in settings.keys() & {"bos_token", "eos_token"}:
        value = settings[key]
        text = value.get("content") if isinstance(value, dict) else value
        texts[key] = text if isinstance(text, str) else None
    return texts


def _parse(text: str, where: str) -> tokenizers.Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_str(text)
        backend.encode("a")  # some faults of a post-processor show only here
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a Rust panic is no Exception
        reason = " ".join(str(error).split())
        raise HeadraceError(f"{where}: not a usable tokenizer: {reason[:300]}") from None
    for part, expected in (
        (backend.model, tokenizers.models.BPE),
        (backend.decoder, tokenizers.decoders.ByteLevel),
    ):
        if not isinstance(part, expected):
            found = "nothing" if part is None else type(part).__name__
            raise HeadraceError(
                f"{where}: only byte-level BPE is supported; expected {expected.__name__}, found {found}"
            )
    # Settings for training; here they would cut, pad or blur a prompt.
    backend.no_truncation()
    backend.no_padding()
    backend.model.dropout = None
    return backend


def _check_added_ids(backend: tokenizers.Tokenizer, text: str, where: str) -> None:
    """`tokenizers` silently renumbers an added token whose id is not the next one."""
    start = re.search(r'"added_tokens"\s*:\s*(?=\[)', text)
    try:
        entries = json.JSONDecoder().raw_decode(text, start.end())[0] if start else []
        places = [(entry["content"], entry["id"], backend.token_to_id(entry["content"])) for entry in entries]
    except (ValueError, TypeError, KeyError, RecursionError):  # a key of that name in another place
        raise HeadraceError(f"{where}: not a usable tokenizer: added_tokens are not what they should be") from None
    for content, token_id, found in places:
        if found != token_id:
            raise HeadraceError(
                f"{where}: added token {shown(content)} has id {shown(token_id)}, but its place in "
                f"the vocabulary is {found}"
            )


def _vocab_size(backend: tokenizers.Tokenizer, num_embeddings: int, where: str) -> int:
    """One more than the highest id; every id must have a row in the embedding table.

    Ids are probed one by one, since asking for the vocabulary as a dict costs 25 MiB.
    """
    model = backend.model
    num_found = 0
    highest = max(backend.get_added_tokens_decoder(), default=-1)
    for token_id in range(num_embeddings):
        if model.id_to_token(token_id) is not None:
            num_found += 1
            highest = max(highest, token_id)
    num_tokens = backend.get_vocab_size(with_added_tokens=False)
    if num_found != num_tokens or highest >= num_embeddings:
        raise HeadraceError(
            f"{where}: {max(num_tokens, highest + 1)} tokens, not all of which have one of the "
            f"embedding table's {num_embeddings} rows; "
            "tokenizer and weights belong to different models"
        )
    return highest + 1
