"""What a chat template does, found by trying it on short conversations."""

from dataclasses import dataclass
from typing import Any

from agentrl.errors import ConfigError, RenderError
from agentrl.renderers.chat_template import ChatTemplate
from agentrl.renderers.thinking import ends_inside_thinking
from agentrl.schema import Message

_PROBE = "\U000f0000"
_QUESTION: Message = {"role": "user", "content": "x"}


@dataclass(frozen=True)
class TemplateTraits:
    """How a template writes the turns of a model."""

    prompt_text: str
    """What it puts behind the messages to ask for a reply."""
    close_text: str | None
    """What it puts behind a reply; None where it does not write replies as they are."""
    wants_structured_calls: bool
    """It refuses calls inside an assistant's text, but not beside it.

    Mistral's templates do: to them, an answered call that is not marked as one is an assistant's
    message out of turn.
    """
    shows_tools: bool
    """The model is told of its tools."""
    shows_results: bool
    """The model is told what its tools returned."""

    @property
    def starts_inside_thinking(self) -> bool:
        """Whether the prompt ends inside a `<think>` block."""
        return ends_inside_thinking(self.prompt_text)


def template_traits(template: ChatTemplate, call_id: str) -> TemplateTraits:
    """Try a template.

    Args:
        template: the model's.
        call_id: an id of a tool call in the form that it wants.

    Raises:
        ConfigError: the template cannot render a plain question.
    """
    probe: Message = {"role": "assistant", "content": _PROBE}
    try:
        open_ = template.render([_QUESTION], (), add_generation_prompt=False)
        prompt = template.render([_QUESTION], (), add_generation_prompt=True)
        reply = template.render([_QUESTION, probe], (), add_generation_prompt=False)
    except RenderError as error:
        raise ConfigError(f"a plain question cannot be rendered: {error}") from error
    _, found, close = reply.partition(_PROBE)
    structured = _wants_structured_calls(template, call_id)
    return TemplateTraits(
        prompt_text=prompt.removeprefix(open_),
        close_text=close if found else None,
        wants_structured_calls=structured,
        shows_tools=_shows_tools(template),
        shows_results=_shows_results(template, call_id, structured=structured),
    )


def answered_call(call_id: str, result: Message) -> list[Message]:
    """Return a conversation in which a tool was called and returned `result`."""
    call = {"id": call_id, "type": "function", "function": {"name": "f", "arguments": {}}}
    return [
        _QUESTION,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {**result, "role": "tool", "name": "f", "tool_call_id": call_id},
    ]


def _wants_structured_calls(template: ChatTemplate, call_id: str) -> bool:
    question, structured, result = answered_call(call_id, {"content": "x"})
    written: Message = {"role": "assistant", "content": "x"}

    def refuses(reply: Message) -> bool:
        messages = [question, reply, result, written]
        return _rendered(template, messages, add_generation_prompt=False) is None

    return refuses(written) and not refuses(structured)


def _shows_tools(template: ChatTemplate) -> bool:
    tool: dict[str, Any] = {
        "type": "function",
        "function": {
            "name": _PROBE,
            "description": "",
            "parameters": {"type": "object", "properties": {}},
        },
    }
    return _PROBE in (_rendered(template, [_QUESTION], (tool,)) or "")


def _shows_results(template: ChatTemplate, call_id: str, *, structured: bool) -> bool:
    messages = answered_call(call_id, {"content": _PROBE})
    if not structured:
        messages[1] = {"role": "assistant", "content": "x"}
    return _PROBE in (_rendered(template, messages) or "")


def _rendered(
    template: ChatTemplate,
    messages: list[Message],
    tools: tuple[dict[str, Any], ...] = (),
    *,
    add_generation_prompt: bool = True,
) -> str | None:
    try:
        return template.render(messages, tools, add_generation_prompt=add_generation_prompt)
    except RenderError:
        return None
