"""Tokenizers from tokenizer.json and from GGUF metadata, against `tokenizers` built directly."""

import json
import os
import random

import pytest
import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

from headrace.errors import HeadraceError
from headrace.formats.checkpoint import TokenizerSource
from headrace.models.config import ModelConfig
from headrace.text.stop import stop_token_ids
from headrace.text.tokenizer import load_tokenizer, tokenizer_json_from_gguf

CORPUS = [
    "The headrace brings water to the wheel; it's what we're for, and they'll say so.\n\n",
    "def forward(self, x: int = 10) -> int:\n    return self.weights[x] * 2 + 1234567\n",
    "\tfor i in range(100):\r\n\t\tprint('ok')   # three   spaces\n",
    "Grüße aus Köln, ça va? Ñandú, naïve café, Ελληνικά, русский текст, ещё слово.",
    "日本語のテキスト、中文文本。한국어 문장입니다. ภาษาไทย",
    "😀 👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪 😀😀",
    "עברית العربية हिन्दी",
]
TEXTS = [
    *CORPUS,
    "",
    " ",
    "  leading and trailing  ",
    "a\u0301e\u0301 combining, Å and Å, \ufb01, \u212b",
    "12345 3.14159 1e-9 ½ ²³ ٣٤",
    "DON'T don't I'LL i'm we'VE",
    "\x00\x01\x7f\u200b\u200d\ufeff\ufffd\U0010ffff",
    "line\n\n\n\nline\r\n\r\nline \n x\t\t\n",
    "unseen: ꙮ 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𓀀 ᚠᛇᚻ",
    "<|im_start|>user\nhi<|im_end|>\n<think>no</think><|endoftext|>",
    "<|im_start|> <|im_en <|im_end|><|im_end|>x",
]
QWEN2_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
NOT_SPECIAL = ["<think>", "</think>", "   "]
PADDING = 5


def config(vocab_size, **fields):
    numbers = dict.fromkeys(
        (
            "num_hidden_layers",
            "hidden_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "num_experts",
            "num_experts_per_tok",
            "moe_intermediate_size",
            "max_position_embeddings",
        ),
        1,
    )
    return ModelConfig(
        "olmoe",
        vocab_size=vocab_size,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        norm_topk_prob=False,
        tie_word_embeddings=False,
        **{**numbers, **fields},
    )


def train(pre, num_merges=350):
    """A small byte-level BPE as Hugging Face builds these families' tokenizers."""
    tok = tokenizers.Tokenizer(models.BPE())
    tok.normalizer = normalizers.NFC()
    if pre == "olmo":
        tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        tok.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(QWEN2_REGEX), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=256 + num_merges,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tok.train_from_iterator(CORPUS * 3, trainer)
    tok.add_special_tokens([tokenizers.AddedToken(t, normalized=False) for t in SPECIAL])
    tok.add_tokens([tokenizers.AddedToken(t, normalized=False) for t in NOT_SPECIAL])
    return tok


def gguf_metadata(tok, pre):
    """What a converter writes for `tok`, with padding of the embedding table at the end."""
    vocab = sorted(tok.get_vocab(), key=tok.get_vocab().get)
    types = [3 if t in SPECIAL else 4 if t in NOT_SPECIAL else 1 for t in vocab]
    merges = [" ".join(pair) for pair in json.loads(tok.to_str())["model"]["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": vocab + [f"[PAD{len(vocab) + i}]" for i in range(PADDING)],
        "tokenizer.ggml.token_type": types + [5] * PADDING,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": tok.token_to_id("<|endoftext|>"),
        "tokenizer.ggml.bos_token_id": tok.token_to_id("<|endoftext|>"),
    }


@pytest.fixture(scope="module", params=["olmo", "qwen2"])
def pre(request):
    return request.param


@pytest.fixture(scope="module")
def reference(pre):
    return train(pre)


@pytest.fixture
def metadata(reference, pre):
    return gguf_metadata(reference, pre)


def load(metadata, **fields):
    rows = len(metadata["tokenizer.ggml.tokens"])
    return load_tokenizer(TokenizerSource(gguf=metadata), config(rows, **fields))


def random_texts(count):
    rng = random.Random(7)
    pieces = [*"".join(TEXTS), *SPECIAL, *NOT_SPECIAL, "the", " wheel", "\u0301", "12"]
    return ["".join(rng.choices(pieces, k=rng.randrange(1, 60))) for _ in range(count)]


@pytest.mark.parametrize("kind", ["gguf", "tokenizer.json", "packed"])
def test_encodes_as_the_library_does(kind, reference, metadata, tmp_path):
    path = tmp_path / "tokenizer.json"
    if kind == "gguf":
        tok = load(metadata)
    else:
        text = reference.to_str() if kind != "packed" else tokenizer_json_from_gguf(metadata)
        path.write_text(text, encoding="utf-8")
        tok = load_tokenizer(TokenizerSource(tokenizer_json=path), config(10_000))
    assert tok.vocab_size == reference.get_vocab_size()
    for text in [*TEXTS, *random_texts(300)]:
        ids = tok.encode(text)
        assert ids == reference.encode(text).ids, text
        assert tok.decode(ids) == reference.decode(ids, skip_special_tokens=True), text


def test_merges_and_regex_are_used(reference, metadata, pre):
    """The comparison above would hold trivially if every text fell apart into bytes."""
    tok = load(metadata)
    assert len(tok.encode(CORPUS[0])) < len(CORPUS[0]) // 2
    tokens = [tok.token_bytes(i) for i in tok.encode("x\n\n12")]
    assert tokens[-2:] == [b"1", b"2"] if pre == "qwen2" else b"\n\n" not in b"|".join(tokens[1:])


def test_round_trip_gives_the_normalized_text(metadata):
    tok = load(metadata)
    for text in TEXTS[:-2]:
        assert tok.decode(tok.encode(text)) == normalizers.NFC().normalize_str(text)


def test_any_ids_decode_as_the_library_does(reference, metadata):
    tok = load(metadata)
    rng = random.Random(3)
    for _ in range(500):
        ids = rng.choices(range(reference.get_vocab_size()), k=rng.randrange(20))
        assert tok.decode(ids) == reference.decode(ids, skip_special_tokens=True)


def test_token_bytes_cover_all_bytes(metadata):
    tok = load(metadata)
    single = {tok.token_bytes(i) for i in range(tok.vocab_size)}
    assert {bytes([b]) for b in range(256)} <= single
    assert tok.token_bytes(tok.encode("<|im_end|>")[0]) == b"<|im_end|>"
    assert tok.token_bytes(tok.encode("   ")[0]) == b"   "


def test_padding_of_the_table_has_no_text(metadata):
    tok = load(metadata)
    padding = range(tok.vocab_size, tok.vocab_size + PADDING + 100)
    assert tok.decode(padding) == ""
    assert tok.encode(f"[PAD{tok.vocab_size}]")[0] < tok.vocab_size


def test_special_tokens_are_parsed_but_not_shown(metadata, reference):
    tok = load(metadata)
    ids = tok.encode("a<|im_end|><think>")
    assert ids[-2:] == [reference.token_to_id(t) for t in ("<|im_end|>", "<think>")]
    assert tok.decode(ids) == "a<think>"
    assert [tok.is_special(i) for i in ids] == [False, True, False]


def test_stop_tokens_come_from_config_and_tokenizer(metadata, reference):
    endoftext, im_end = (reference.token_to_id(t) for t in ("<|endoftext|>", "<|im_end|>"))
    assert load(metadata).eos_token_ids == (endoftext, im_end)
    tok = load(metadata, eos_token_ids=(65,))
    assert stop_token_ids(config(1000, eos_token_ids=(65,)), tok) == {65, endoftext, im_end}
    assert tok.decode([65, 66]) == tok.decode([66])  # an end token is not shown
    assert stop_token_ids(config(1000, eos_token_ids=(7,)), None) == {7}
    metadata["tokenizer.ggml.eot_token_id"] = 70
    assert 70 in load(metadata).eos_token_ids
    with pytest.raises(HeadraceError, match="eos_token_id 1000 is outside the vocabulary of 1000"):
        stop_token_ids(config(1000, eos_token_ids=(1000,)), None)


def test_bos_and_eos_are_added_where_the_metadata_says(metadata, reference):
    eos = reference.token_to_id("<|endoftext|>")
    bos = metadata["tokenizer.ggml.bos_token_id"] = reference.token_to_id("<|im_start|>")
    plain = reference.encode("hello").ids
    assert load(metadata).encode("hello") == plain
    metadata["tokenizer.ggml.add_bos_token"] = True
    assert load(metadata).encode("hello") == [bos, *plain]
    assert load(metadata).encode("hello", add_special_tokens=False) == plain
    metadata["tokenizer.ggml.add_eos_token"] = True
    assert load(metadata).encode("hello") == [bos, *plain, eos]
    assert load(metadata).bos_token_id == bos
    del metadata["tokenizer.ggml.bos_token_id"]
    with pytest.raises(HeadraceError, match="bos_token_id is missing"):
        load(metadata)


def test_tokenizer_config_names_bos_and_eos(reference, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(reference.to_str(), encoding="utf-8")
    settings = {"bos_token": {"content": "<|im_start|>"}, "eos_token": "<think>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    own = config(1000, bos_token_id=5, eos_token_ids=(6,))
    tok = load_tokenizer(TokenizerSource(tokenizer_json=path), own)
    assert tok.token_text(tok.bos_token_id) == "<|im_start|>"
    assert tok.eos_token_ids[:2] == (reference.token_to_id("<think>"), 6)
    assert tok.token_text(None) is None
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": null, "eos_token": 7}')
    tok = load_tokenizer(TokenizerSource(tokenizer_json=path), own)
    assert tok.bos_token_id is None and tok.eos_token_ids[0] == 6
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert load_tokenizer(TokenizerSource(tokenizer_json=path), own).bos_token_id == 5
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(HeadraceError, match=r"tokenizer_config\.json: not valid JSON"):
        load_tokenizer(TokenizerSource(tokenizer_json=path), config(1000))


def test_truncation_padding_and_dropout_of_the_file_are_ignored(reference, tmp_path):
    limited = tokenizers.Tokenizer.from_str(reference.to_str())
    limited.enable_truncation(3)
    limited.enable_padding(length=50)
    limited.model.dropout = 0.5
    path = tmp_path / "tokenizer.json"
    path.write_text(limited.to_str(), encoding="utf-8")
    tok = load_tokenizer(TokenizerSource(tokenizer_json=path), config(1000))
    assert tok.encode(CORPUS[0]) == reference.encode(CORPUS[0]).ids


def test_no_vocabulary_gives_no_tokenizer():
    assert load_tokenizer(TokenizerSource(), config(10)) is None
    assert load_tokenizer(TokenizerSource(gguf={}), config(10)) is None
    none = {"tokenizer.ggml.model": "none"}
    assert load_tokenizer(TokenizerSource(gguf=none), config(10)) is None


def test_lone_surrogates_are_refused(metadata):
    with pytest.raises(HeadraceError, match=r"character 2 is not valid Unicode .*udc80"):
        load(metadata).encode("ab\udc80")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "llama"}, r"tokenizer.ggml.model: 'llama' is not supported; supported: 'gpt2'"),
        ({"pre": "llama-bpe"}, r"tokenizer.ggml.pre: 'llama-bpe' .* supported: 'olmo', 'qwen2'"),
        ({"pre": None}, r"tokenizer.ggml.pre: None is not supported"),
        ({"pre": ["olmo"]}, r"tokenizer.ggml.pre: \['olmo'\] is not supported"),
        ({"merges": ["x" * 5000]}, r"merges: entry 0 is 'xxx"),
        ({"tokens": None}, r"tokenizer.ggml.tokens: expected a list of strings, found nothing"),
        ({"tokens": [1, 2]}, r"tokenizer.ggml.tokens: expected a list of strings, found list"),
        ({"merges": None}, r"tokenizer.ggml.merges: expected a list of strings"),
        ({"merges": ["Ġ t", "abc"]}, r"merges: entry 1 is 'abc'"),
        ({"merges": ["nothere neither"]}, r"tokenizer: not a usable tokenizer: .*nothere"),
        ({"token_type": [1, 2]}, r"token_type: expected \d+ types, found 2"),
        ({"token_type": 1}, r"token_type: expected \d+ types, found int"),
        ({"eos_token_id": 10**6}, r"eos_token_id: expected an id below \d+, found 1000000"),
        ({"bos_token_id": -1}, r"bos_token_id: expected an id below \d+, found -1"),
        ({"eot_token_id": "x"}, r"eot_token_id: expected an id below \d+, found 'x'"),
    ],
)
def test_bad_metadata_is_named(metadata, change, message):
    for name, value in change.items():
        metadata[f"tokenizer.ggml.{name}"] = value
    rows = 10_000
    with pytest.raises(HeadraceError, match=message) as error:
        load_tokenizer(TokenizerSource(gguf=metadata, where="model.gguf"), config(rows))
    assert "\n" not in str(error.value) and len(str(error.value)) < 500
    assert str(error.value).startswith("model.gguf: ")


def test_a_tokenizer_json_that_is_no_file_is_refused_at_once(tmp_path):
    path = tmp_path / "tokenizer.json"
    os.mkfifo(path)
    with pytest.raises(HeadraceError, match="tokenizer.json: expected a regular file"):
        load_tokenizer(TokenizerSource(tokenizer_json=path), config(1000))
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(HeadraceError, match="tokenizer.json: expected a regular file"):
        load_tokenizer(TokenizerSource(tokenizer_json=path), config(1000))


@pytest.mark.parametrize(
    "settings", [b"[" * 100_000, b'{"bos_token": ' + b"9" * 5000 + b"}", b'{"bos_token": "\\ud800"}', b"\xff", b"[]"]
)
def test_hostile_settings_beside_a_tokenizer(reference, tmp_path, settings):
    path = tmp_path / "tokenizer.json"
    path.write_text(reference.to_str(), encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_bytes(settings)
    source = TokenizerSource(tokenizer_json=path)
    if b"ud800" in settings:  # a text that no vocabulary holds
        assert load_tokenizer(source, config(1000)).bos_token_id is None
        return
    with pytest.raises(HeadraceError, match="tokenizer_config.json"):
        load_tokenizer(source, config(1000))


@pytest.mark.parametrize(
    "other", ["[1]", '["a"]', "[" * 5000 + "]" * 5000, '[{"id": 1}]', '[{"content": [], "id": 1}]']
)
def test_another_key_named_added_tokens(reference, tmp_path, other):
    path = tmp_path / "tokenizer.json"
    path.write_text('{"x": {"added_tokens": ' + other + "}, " + reference.to_str()[1:], encoding="utf-8")
    with pytest.raises(HeadraceError, match="tokenizer.json: not a usable tokenizer"):
        load_tokenizer(TokenizerSource(tokenizer_json=path), config(1000))


def test_a_merge_that_looks_like_a_header_is_kept():
    word = "#versions"
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet()) + [word[:n] for n in range(2, 10)]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": [f"{word[:n]} {word[n]}" for n in range(1, 9)],
    }
    assert metadata["tokenizer.ggml.merges"][-1] == "#version s"
    assert load(metadata).encode(word) == [tokens.index(word)]


def test_bad_token_type_and_double_token_are_named(metadata):
    metadata["tokenizer.ggml.token_type"][9] = 77
    with pytest.raises(HeadraceError, match="token 9 has type 77"):
        load(metadata)
    metadata["tokenizer.ggml.token_type"][9] = 1
    tokens = metadata["tokenizer.ggml.tokens"]
    tokens[300] = tokens[20]
    with pytest.raises(HeadraceError, match="tokens 20 and 300 are both"):
        load(metadata)


def test_tokenizer_larger_than_the_table_is_refused(metadata, reference, tmp_path):
    num_tokens = reference.get_vocab_size()
    with pytest.raises(HeadraceError, match=rf"{num_tokens + PADDING} tokens, .* has 100 rows"):
        load_tokenizer(TokenizerSource(gguf=metadata), config(100))
    path = tmp_path / "tokenizer.json"
    path.write_text(reference.to_str(), encoding="utf-8")
    for rows in (100, num_tokens - 1):
        with pytest.raises(HeadraceError, match=rf"{num_tokens} tokens, .* {rows} rows"):
            load_tokenizer(TokenizerSource(tokenizer_json=path), config(rows))
    assert load_tokenizer(TokenizerSource(tokenizer_json=path), config(num_tokens)) is not None


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"model": {"type": "BPE"}}', '{"version": "1.0", "model": 3}', "\0"],
)
def test_bad_tokenizer_json_is_refused(tmp_path, text):
    path = tmp_path / "tokenizer.json"
    path.write_text(text)
    with pytest.raises(HeadraceError, match=r"tokenizer\.json: ") as error:
        load_tokenizer(TokenizerSource(tokenizer_json=path), config(1000))
    assert "\n" not in str(error.value)


def test_tokenizer_json_cut_anywhere_is_refused(tmp_path, reference):
    whole = reference.to_str()
    path = tmp_path / "tokenizer.json"
    for length in range(0, len(whole) - 1, len(whole) // 40):
        path.write_text(whole[:length], encoding="utf-8")
        with pytest.raises(HeadraceError, match="not a usable tokenizer"):
            load_tokenizer(TokenizerSource(tokenizer_json=path), config(1000))


def test_other_kinds_of_tokenizer_are_refused(tmp_path):
    path = tmp_path / "tokenizer.json"
    unigram = tokenizers.Tokenizer(models.Unigram([("a", 0.0)], unk_id=0))
    metaspace = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    metaspace.decoder = decoders.Metaspace()
    bare = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    for other, message in (
        (unigram, "only byte-level BPE is supported; expected BPE, found Unigram"),
        (metaspace, "expected ByteLevel, found Metaspace"),
        (bare, "expected ByteLevel, found nothing"),
    ):
        path.write_text(other.to_str())
        with pytest.raises(HeadraceError, match=message):
            load_tokenizer(TokenizerSource(tokenizer_json=path), config(1000))


def edit_json(reference, tmp_path, edit):
    data = json.loads(reference.to_str())
    edit(data)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(data))
    return load_tokenizer(TokenizerSource(tokenizer_json=path), config(1000))


def add_to_vocabulary(data, token_id):
    data["added_tokens"] = []
    data["model"]["vocab"]["zz"] = token_id


def template(token_id):
    return {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "x", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [],
        "special_tokens": {"x": {"id": "x", "ids": [token_id], "tokens": ["x"]}},
    }


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda d: d["added_tokens"][0].update(id=5), "'<.endoftext.>' has id 5, but its place"),
        (lambda d: d["added_tokens"][-1].update(id=900), "has id 900, but its place"),
        (lambda d: d["added_tokens"][-1].update(id=-1), "not a usable tokenizer"),
        (lambda d: add_to_vocabulary(d, 3), r"tokens, not all of which have .* 1000 rows"),
        (lambda d: add_to_vocabulary(d, 2**32 - 1), r"not all of which have .* 1000 rows"),
        (lambda d: d.update(post_processor=template(999_999)), r"adds tokens \[999999\] to every"),
        (
            lambda d: d["model"].update(merges=[["no", "pe"]]),
            "not a usable tokenizer: .*out of voc",
        ),
    ],
)
def test_tokenizer_json_that_contradicts_itself_is_refused(reference, tmp_path, edit, message):
    with pytest.raises(HeadraceError, match=message):
        edit_json(reference, tmp_path, edit)


def test_bos_of_a_post_processor_is_added(reference, tmp_path):
    tok = edit_json(reference, tmp_path, lambda d: d.update(post_processor=template(7)))
    assert tok.encode("hello") == [7, *reference.encode("hello").ids]


def test_ids_outside_the_vocabulary_are_refused(metadata):
    for fields in ({"bos_token_id": 10**6}, {"bos_token_id": -1}):
        with pytest.raises(HeadraceError, match=r"bos_token_id -?\d+ is outside the vocabulary"):
            load(metadata, **fields)


def test_missing_and_unreadable_files_are_named(tmp_path):
    path = tmp_path / "tokenizer.json"
    with pytest.raises(HeadraceError, match=r"tokenizer\.json: no such file"):
        load_tokenizer(TokenizerSource(tokenizer_json=path), config(1000))
    path.write_bytes(b'{"model": "\xff"}')
    with pytest.raises(HeadraceError, match="byte 11 is not UTF-8"):
        load_tokenizer(TokenizerSource(tokenizer_json=path), config(1000))
    with path.open("wb") as file:
        file.truncate(1 << 40)  # sparse
    with pytest.raises(HeadraceError, match="found 1099511627776"):
        load_tokenizer(TokenizerSource(tokenizer_json=path), config(1000))
