"""A model's chat template: messages → the text the model was trained on. Rendered as `transformers` does.

Source: transformers `utils/chat_template_utils.py` (trim_blocks, lstrip_blocks, loop controls, `tojson` without HTML
escapes, `raise_exception`, `strftime_now`, the `generation` tag). A template comes with the model and so is foreign
code: it runs in Jinja's immutable sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from client.errors import PromptError

Message = dict[str, Any]
"""{"role": "system" | "user" | "assistant" | …, "content": text}, with whatever else the template knows."""


class ChatTemplate:
    """One compiled template. Raises PromptError when it does not compile."""

    def __init__(self, source: str, special_tokens: dict[str, str]):
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
        self._special_tokens = special_tokens
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise PromptError(f"the model's chat template does not compile: {error}") from None

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any) -> str:
        """The conversation as text, by default up to where the model's answer begins. Raises PromptError.

        variables: what else the template may know (tools, …); they win over nothing that is ours.
        """
        known = {"messages": list(messages), "add_generation_prompt": add_generation_prompt, **self._special_tokens}
        try:
            return self._template.render(variables | known)
        except (TemplateError, TypeError, KeyError, AttributeError, ValueError, ArithmeticError, LookupError) as error:
            raise PromptError(f"the model's chat template refuses these messages: {error}") from None


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's tokens for training; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
