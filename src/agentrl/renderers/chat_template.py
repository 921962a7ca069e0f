"""Chat templates: messages in, text out.

The environment offers what Hugging Face chat templates expect (a sandbox, `tojson` without HTML
escapes, `raise_exception`, `strftime_now`, loop controls, `generation` blocks). Templates come from
the hub and are untrusted: they run in Jinja's immutable sandbox, see only plain JSON values, and
their own length and that of their text are limited.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import ext, meta, nodes, parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from agentrl.errors import ConfigError, RenderError
from agentrl.schema import Message

MAX_SOURCE_CHARS = 1 << 20
"""Length of a template."""
MAX_TEXT_CHARS = 1 << 26
"""Length of a rendered conversation."""


class _GenerationBlock(ext.Extension):
    """`{% generation %}` marks assistant text for trainers; in rendering it is transparent."""

    tags = {"generation"}

    def parse(self, parser: parser.Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    # Templates print the local date for the model to read, so a naive local time is meant.
    return datetime.now().strftime(pattern)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """A compiled chat template with the variables that its model's configuration gives it."""

    def __init__(self, source: str, variables: Mapping[str, Any]) -> None:
        """Compile `source`."""
        if len(source) > MAX_SOURCE_CHARS:
            raise ConfigError(f"the chat template has more than {MAX_SOURCE_CHARS:,} characters")
        try:
            self._template = _environment().from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ConfigError(f"the chat template does not compile: {error}") from error
        self.source = source
        """The template's source, unchanged."""
        self._variables = dict(variables)

    def variables(self) -> frozenset[str]:
        """Return the names of the variables that the template reads."""
        return frozenset(meta.find_undeclared_variables(_environment().parse(self.source)))

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
    ) -> str:
        """Return the text of a conversation."""
        parts, num_left = list[str](), MAX_TEXT_CHARS
        try:
            for part in self._template.generate(
                **self._variables,
                messages=list(messages),
                tools=list(tools) or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            ):
                parts.append(part)
                num_left -= len(part)
                if num_left < 0:
                    raise ValueError(f"it writes more than {MAX_TEXT_CHARS:,} characters")
            return "".join(parts)
        except (
            jinja2.TemplateError,
            ArithmeticError,
            AttributeError,
            LookupError,
            MemoryError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            raise RenderError(f"the chat template refuses the conversation: {error}") from error
