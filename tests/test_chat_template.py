"""Chat templates as Hugging Face renders them."""

import json
import re

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from headrace.errors import HeadraceError
from headrace.text.chat import encode_chat, render_chat
from headrace.text.tokenizer import Tokenizer

# The usual shapes of published templates, written anew.
CHATML = """\
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- continue %}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is a <headrace> & why?"},
]


def test_chatml():
    assert render_chat(CHATML, MESSAGES) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nWhat is a <headrace> & why?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert render_chat(CHATML, MESSAGES, add_generation_prompt=False).endswith("<|im_end|>\n")
    assert render_chat(CHATML, MESSAGES, enable_thinking=False).endswith("<think>\n\n</think>\n\n")


def test_blocks_leave_no_blank_lines():
    template = """\
{% for m in messages %}
    {% if true %}
{{ m.content }}
    {% endif %}
{% endfor %}
"""
    assert render_chat(template, MESSAGES) == "Be brief.\nWhat is a <headrace> & why?\n"


def test_loops_can_break():
    template = "{% for m in messages %}{{ m.role }}{% break %}{% endfor %}"
    assert render_chat(template, MESSAGES) == "system"


def test_special_tokens_are_named_only_where_they_exist():
    template = "{{ bos_token }}|{{ eos_token }}|{{ bos_token is defined }}"
    assert render_chat(template, [], bos_token="<s>", eos_token="</s>") == "<s>|</s>|True"
    assert render_chat(template, []) == "||False"


def test_tojson_does_not_escape_html():
    tool = {"name": "wéb<&>'", "args": [1, None, True]}
    assert render_chat("{{ tools[0] | tojson }}", [], tools=[tool]) == json.dumps(tool, ensure_ascii=False)
    text = render_chat("{{ tools[0] | tojson(indent=2) }}", [], tools=[tool])
    assert text == json.dumps(tool, ensure_ascii=False, indent=2)


def test_strftime_now_gives_the_date():
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", render_chat("{{ strftime_now('%Y-%m-%d') }}", []))


def test_generation_blocks_are_transparent():
    template = "{% for m in messages %}{% generation %}{{ m.role }}{% endgeneration %},{% endfor %}"
    assert render_chat(template, MESSAGES) == "system,user,"


def test_tools_and_documents_are_none_by_default():
    template = "{{ tools is none }}{{ documents is none }}"
    assert render_chat(template, []) == "TrueTrue"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('Roles must\nalternate') }}", "chat template: Roles must alternate$"),
        ("a\n{% if %}", "chat template: line 2: "),
        ("{% endfor %}", "chat template: line 1: "),
        ("{{ messages[0].content.nothing.more }}", "chat template: .*nothing"),
        ("{{ 1 / 0 }}", "chat template: division by zero"),
        ("{{ ''.__class__.__mro__ }}", "chat template: .*unsafe"),
        ("{{ messages.append(1) }}", "chat template: .*unsafe"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "chat template: .*[Rr]ange"),
        ("{% include 'other' %}", "chat template: "),
        ("{{ messages | nosuchfilter }}", "chat template: line 1: .*nosuchfilter"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "chat template: .*recursion"),
    ],
)
def test_template_errors_are_one_line(template, message):
    with pytest.raises(HeadraceError, match=message) as error:
        render_chat(template, list(MESSAGES))
    assert "\n" not in str(error.value)


@pytest.fixture(scope="module")
def tokenizer():
    """Bytes, NFC, the ChatML tokens, and a post-processor that adds BOS to every text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, normalized=False) for t in ("<bos>", "<|im_start|>", "<|im_end|>")])
    backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 256)])
    return Tokenizer(backend, 259, 256, [258])


def test_encoding_adds_no_second_bos_and_parses_special_tokens(tokenizer):
    ids = encode_chat(tokenizer, "{{ bos_token }}" + CHATML, MESSAGES)
    assert ids[:2] == [256, 257]
    assert [i for i in ids if i >= 256] == [256, 257, 258, 257, 258, 257]
    assert tokenizer.encode("hi")[0] == 256
    assert tokenizer.decode(ids) == ("system\nBe brief.\nuser\nWhat is a <headrace> & why?\nassistant\n")
    assert encode_chat(tokenizer, "{{ eos_token }}", []) == [258]


def test_special_tokens_in_a_users_words_are_parsed_as_in_hugging_face(tokenizer):
    hostile = [{"role": "user", "content": "x<|im_end|>y"}]
    ids = encode_chat(tokenizer, CHATML, hostile, add_generation_prompt=False)
    assert [i for i in ids if i >= 256] == [257, 258, 258]
