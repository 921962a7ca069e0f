"""What a chat template does, found by trying it on short conversations."""

from dataclasses import dataclass
from typing import Any, Literal

from agentrl.errors import ConfigError, RenderError
from agentrl.renderers.chat_template import ChatTemplate
from agentrl.renderers.thinking import THINK_CLOSE, THINK_OPEN, ends_inside_thinking
from agentrl.schema import Message

_PROBE = "\U000f0000"
BegunForm = Literal["text", "opened", "reasoning"]
_QUESTION: Message = {"role": "user", "content": "x"}


@dataclass(frozen=True)
class TemplateTraits:
    """How a template writes the turns of a model."""

    prompt_text: str
    """What it puts behind the messages to ask for a reply."""
    close_text: str | None
    """What it puts behind a reply; None where it does not write replies as they are."""
    wants_structured_calls: bool
    """It refuses calls inside an assistant's text or hides their results, but not beside it.

    To Mistral's templates, an answered call that is not marked as one is an assistant's message out of
    turn; Gemma 4's leave its result out.
    """
    begun_form: BegunForm
    """How a reply stands in the conversation whose thinking the prompt has begun.

    `text`: as it was written (Qwen3.5 looks for the end of the thinking alone); `opened`: with the
    prompt's beginning of it in front (Nemotron 3 looks for both marks); `reasoning`: apart from what
    was said, in `reasoning_content` (Qwen3.8 takes thinking from nowhere else).
    """
    shows_system: bool
    """The model is shown a system prompt."""
    shows_tools: bool
    """The model is told of its tools."""
    shows_results: bool
    """The model is told what its tools returned."""

    @property
    def starts_inside_thinking(self) -> bool:
        """Whether the prompt ends inside a `<think>` block."""
        return ends_inside_thinking(self.prompt_text)

    def begun_message(self, text: str) -> Message:
        """Return the assistant message of a reply whose thinking the prompt has begun."""
        return _begun_message(self.begun_form, self.prompt_text, text)

    def spoken(self, message: Message) -> str:
        """Return a reply from its message, as it was written behind the prompt."""
        content = str(message.get("content") or "")
        if "reasoning_content" in message and self.begun_form == "reasoning":
            return f"{message['reasoning_content']}{THINK_CLOSE}{content}"
        return (
            content.removeprefix(opening(self.prompt_text))
            if self.starts_inside_thinking
            else content
        )


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
        begun_form=_begun_form(template, prompt, prompt.removeprefix(open_)),
        shows_system=_shows_system(template),
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
    question, structured, result = answered_call(call_id, {"content": _PROBE})
    written: Message = {"role": "assistant", "content": "x"}

    def shows(reply: Message) -> bool:
        messages = [question, reply, result, written]
        return _PROBE in (_rendered(template, messages, add_generation_prompt=False) or "")

    return shows(structured) and not shows(written)


def opening(prompt_text: str) -> str:
    """Return how a prompt begins the thinking inside which it ends."""
    return THINK_OPEN + prompt_text.rpartition(THINK_OPEN)[2]


def _begun_message(form: BegunForm, prompt_text: str, text: str) -> Message:
    if form == "reasoning" and THINK_CLOSE in text:
        thought, _, said = text.partition(THINK_CLOSE)
        return {"role": "assistant", "content": said, "reasoning_content": thought}
    return {
        "role": "assistant",
        "content": (opening(prompt_text) if form == "opened" else "") + text,
    }


def _begun_form(template: ChatTemplate, prompt: str, prompt_text: str) -> BegunForm:
    if not ends_inside_thinking(prompt_text):
        return "text"
    reply = f"{_PROBE}\n{THINK_CLOSE}\n\nx"
    forms: tuple[BegunForm, ...] = ("text", "opened", "reasoning")
    for form in forms:
        messages = [_QUESTION, _begun_message(form, prompt_text, reply)]
        text = _rendered(template, messages, add_generation_prompt=False) or ""
        if "".join(text.split()).startswith("".join((prompt + reply).split())):
            return form
    return "text"


def _shows_system(template: ChatTemplate) -> bool:
    messages: list[Message] = [{"role": "system", "content": _PROBE}, _QUESTION]
    return _PROBE in (_rendered(template, messages) or "")


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
