"""Streamed text against the decode of all ids."""

import codecs
import random

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from headrace.text.stream import TextStream
from headrace.text.tokenizer import Tokenizer

TEXT = "Grüße 👩‍👩‍👧‍👦 日本語 e\u0301 ﬁ 🇩🇪 \ufffd\x00 plain ascii\n\tعربى\U0010ffff"
NUM_BYTES = 256
EOS = 300


@pytest.fixture(scope="module")
def tokenizer():
    """256 byte tokens (ids as in the sorted stand-ins), two merges that end inside characters."""
    stand_ins = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(stand_ins)}
    smiley = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str("😀")
    bytes_of_smiley = smiley[0][0]
    vocab[bytes_of_smiley[:2]] = 256
    vocab[bytes_of_smiley[:3]] = 257
    merges = [
        (bytes_of_smiley[0], bytes_of_smiley[1]),
        (bytes_of_smiley[:2], bytes_of_smiley[2]),
    ]
    vocab["<eos>"] = EOS
    backend = Backend(models.BPE(vocab, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    return Tokenizer(backend, EOS + 1, None, [EOS])


def stream(tokenizer, ids):
    out = TextStream(tokenizer)
    return [*(out.push(i) for i in ids), out.finish()]


def test_text_comes_in_whole_characters(tokenizer):
    ids = tokenizer.encode(TEXT + "😀")
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == TEXT + "😀"
    assert pieces[-1] == ""
    assert "\ufffd" not in "".join(pieces).replace("\ufffd", "", 1)  # the one in TEXT
    # A character appears with its last byte's token, no earlier and no later.
    for n in range(len(ids)):
        held = b"".join(tokenizer.token_bytes(i) for i in ids[: n + 1])
        whole = codecs.getincrementaldecoder("utf-8")().decode(held)
        assert "".join(pieces[: n + 1]) == whole


def test_a_token_that_ends_inside_a_character_waits(tokenizer):
    first, last = tokenizer.encode("😀")
    assert first == 257
    assert stream(tokenizer, [first, last]) == ["", "😀", ""]
    assert stream(tokenizer, [first]) == ["", "\ufffd"]
    assert stream(tokenizer, [256, 257, last]) == ["", "\ufffd", "😀", ""]


def test_special_tokens_and_padding_are_not_shown(tokenizer):
    first, last = tokenizer.encode("😀")
    assert stream(tokenizer, [EOS, first, EOS, 299, 5000, last, EOS]) == [""] * 5 + ["😀", "", ""]


def test_invalid_bytes_become_replacement_characters(tokenizer):
    for data in (
        b"\xff",
        b"a\x80b",
        b"\xc0\xaf",
        b"\xed\xa0\x80",
        b"\xf4\x90\x80\x80",
        b"\xe2\x82",
    ):
        ids = [bytes_to_id(tokenizer)[byte] for byte in data]
        pieces = stream(tokenizer, ids)
        assert "".join(pieces) == data.decode("utf-8", errors="replace")
        assert "".join(pieces) == tokenizer._backend.decode(ids)


def bytes_to_id(tokenizer):
    return {tokenizer.token_bytes(i)[0]: i for i in range(NUM_BYTES)}


@pytest.mark.parametrize("seed", range(20))
def test_stream_equals_decode_of_any_ids(tokenizer, seed):
    rng = random.Random(seed)
    ids_of = bytes_to_id(tokenizer)
    lead = [ids_of[b] for b in (0x41, 0xC3, 0xE2, 0xF0, 0x80, 0xBF, 0x9F, 0xFF)]
    for _ in range(200):
        ids = rng.choices([*range(EOS + 3), *lead * 20], k=rng.randrange(40))
        pieces = stream(tokenizer, ids)
        assert "".join(pieces) == tokenizer.decode(ids)
        assert "".join(pieces) == tokenizer._backend.decode([i for i in ids if i <= EOS])


def test_a_finished_stream_starts_anew(tokenizer):
    out = TextStream(tokenizer)
    first, last = tokenizer.encode("😀")
    assert out.push(first) + out.finish() == "\ufffd"
    assert out.push(first) + out.push(last) + out.finish() == "😀"
