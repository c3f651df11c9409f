"""Chat templates: the checkpoint's own Jinja template, with what Hugging Face gives it.

A user's words that contain a special token's text ("<|im_end|>") become that token when the
rendered text is encoded, as in Hugging Face: a template cannot tell them apart. Whoever passes on
text from strangers must remove such strings first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

# Jinja costs some 5 MiB, so this module is imported only where a template is used.
import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from headrace.errors import HeadraceError
from headrace.text.tokenizer import Tokenizer


class _Generation(jinja2.ext.Extension):
    """{% generation %}…{% endgeneration %} marks what to train on; it changes no text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own tojson escapes HTML, which templates do not expect."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    bos_token: str | None = None,
    eos_token: str | None = None,
    where: str = "chat template",
    **variables: Any,
) -> str:
    """The text of a conversation, ready to be encoded without further special tokens.

    messages: dicts with "role" and "content". `variables` are the template's own (enable_thinking,
    tools). where: what errors call the template. Raises HeadraceError for a template that does not
    parse or that refuses the messages.
    """
    names = {"bos_token": bos_token, "eos_token": eos_token}
    variables = {
        "tools": None,
        "documents": None,
        **{name: text for name, text in names.items() if text is not None},
        **variables,
    }
    try:
        return (
            _environment()
            .from_string(template)
            .render(messages=messages, add_generation_prompt=add_generation_prompt, **variables)
        )
    except jinja2.TemplateSyntaxError as error:
        raise HeadraceError(f"{where}: line {error.lineno}: {_one_line(error)}") from None
    except Exception as error:  # a template is a program of the checkpoint and can fail in any way
        raise HeadraceError(f"{where}: {_one_line(error)}") from None


def encode_chat(
    tokenizer: Tokenizer,
    template: str,
    messages: Sequence[Mapping[str, Any]],
    **variables: Any,
) -> list[int]:
    """The token ids of a conversation: `render_chat` with the tokenizer's BOS and EOS, encoded."""
    eos_token_id = next(iter(tokenizer.eos_token_ids), None)
    text = render_chat(
        template,
        messages,
        bos_token=tokenizer.token_text(tokenizer.bos_token_id),
        eos_token=tokenizer.token_text(eos_token_id),
        **variables,
    )
    return tokenizer.encode(text, add_special_tokens=False)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
