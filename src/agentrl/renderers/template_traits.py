"""Detects what a chat template does by rendering short conversations."""

from dataclasses import dataclass
from typing import Any, Literal

from agentrl.errors import ConfigError, RenderError
from agentrl.renderers.chat_template import ChatTemplate
from agentrl.renderers.thinking import ThinkingMarks, thinking_marks
from agentrl.renderers.tool_calls.call_format import ToolCallFormat
from agentrl.schema import Message

_PROBE = "\U000f0000"
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Fields in which messages hold their thinking."""
OpenedForm = Literal["text", "opened", "reasoning"]
_QUESTION: Message = {"role": "user", "content": "x"}


@dataclass(frozen=True)
class TemplateTraits:
    """How a template writes the turns of a model."""

    prompt_text: str
    """Generation prompt: text after the messages that asks for a reply."""
    close_text: str | None
    """Text after a reply; None if it does not write replies verbatim."""
    wants_structured_calls: bool
    """It renders calls and their results correctly only as structured `tool_calls`.

    Given calls as plain text, Mistral's templates reject the assistant's message as out of turn;
    Gemma 4's omit the result; DeepSeek V3.2's add no generation prompt; Kimi K2's remove the
    thinking from what looks like an answer.
    """
    opened_form: OpenedForm
    """How a reply is represented in the conversation if the prompt has opened its thinking.

    `text`: as it was written (Qwen3.5 looks for the end of the thinking alone); `opened`: preceded
    by the prompt's opening mark (Nemotron 3 looks for both marks); `reasoning`: separate from the
    content, in `reasoning_content` (Qwen3.8 reads thinking only from there).
    """
    marks: ThinkingMarks
    """The marks of the model's thinking."""
    reasoning_key: str | None
    """Field from which the template reads the thinking of a message with calls; None: its content."""
    shows_system: bool
    """Whether the template renders system prompts."""
    shows_developer: bool
    """Whether the template renders messages of the role `developer`."""
    shows_tools: bool
    """Whether the template renders tools."""
    shows_results: bool
    """Whether the template renders tool results."""

    @property
    def starts_inside_thinking(self) -> bool:
        """Whether the prompt ends inside a block of thinking."""
        return self.marks.ends_inside(self.prompt_text)

    def opened_message(self, text: str) -> Message:
        """Return the assistant message of a reply whose thinking the prompt has opened."""
        return _opened_message(self.opened_form, self.prompt_text, text, self.marks)

    def reply_text(self, message: Message) -> str:
        """Return a reply, as written after the prompt, from its message."""
        content = str(message.get("content") or "")
        if "reasoning_content" in message and self.opened_form == "reasoning":
            return f"{message['reasoning_content']}{self.marks.close}{content}"
        return (
            content.removeprefix(opening(self.prompt_text, self.marks))
            if self.starts_inside_thinking
            else content
        )


def template_traits(template: ChatTemplate, format_: ToolCallFormat) -> TemplateTraits:
    """Detect the traits of a template."""
    probe: Message = {"role": "assistant", "content": _PROBE}
    try:
        open_ = template.render([_QUESTION], (), add_generation_prompt=False)
        prompt = template.render([_QUESTION], (), add_generation_prompt=True)
        reply = template.render([_QUESTION, probe], (), add_generation_prompt=False)
    except RenderError as error:
        raise ConfigError(f"a plain question cannot be rendered: {error}") from error
    _, found, close = reply.partition(_PROBE)
    call_id, marks = format_.call_id(0, 0), thinking_marks(template.source)
    structured = _wants_structured_calls(template, format_, prompt, marks)
    return TemplateTraits(
        prompt_text=prompt.removeprefix(open_),
        close_text=close if found else None,
        wants_structured_calls=structured,
        opened_form=_opened_form(template, prompt, prompt.removeprefix(open_), marks),
        marks=marks,
        reasoning_key=_reasoning_key(template, call_id),
        shows_system=_shows_prompt_of(template, "system"),
        shows_developer=_shows_prompt_of(template, "developer"),
        shows_tools=bool(tools_as_shown(template)),
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


def tools_as_shown(template: ChatTemplate) -> str:
    """Return a template's text for a question with a tool; empty if it does not render tools."""
    tool: dict[str, Any] = {
        "type": "function",
        "function": {
            "name": _PROBE,
            "description": "",
            "parameters": {"type": "object", "properties": {}},
        },
    }
    text = _try_render(template, [_QUESTION], (tool,)) or ""
    return text if _PROBE in text else ""


def _wants_structured_calls(
    template: ChatTemplate, format_: ToolCallFormat, prompt: str, marks: ThinkingMarks
) -> bool:
    if format_.split is not None:
        return True
    call_id = format_.call_id(0, 0)
    question, structured, result = answered_call(call_id, {"content": _PROBE})
    written: Message = {"role": "assistant", "content": "x"}

    def after_result(reply: Message, *more: Message) -> str | None:
        text = _try_render(template, [question, reply, result, *more]) or ""
        return text.partition(_PROBE)[2] if _PROBE in text else None

    for more in ([], [written]):
        with_calls, with_text = after_result(structured, *more), after_result(written, *more)
        if with_calls is not None and with_calls != with_text:
            return True
    key = _reasoning_key(template, call_id)
    if key is None or marks.ends_inside(prompt):
        return False

    def keeps_thinking(reply: Message) -> bool:
        text = _try_render(template, [question, reply, result], add_generation_prompt=False) or ""
        expected = f"{prompt}{marks.open}{_PROBE}{marks.close}"
        return "".join(text.split()).startswith("".join(expected.split()))

    content = f"{marks.open}\n{_PROBE}\n{marks.close}\n\nx"
    return keeps_thinking({**structured, key: _PROBE}) and not keeps_thinking(
        {**written, "content": content}
    )


def _reasoning_key(template: ChatTemplate, call_id: str) -> str | None:
    question, structured, result = answered_call(call_id, {"content": "x"})
    for key in REASONING_KEYS:
        text = _try_render(template, [question, {**structured, key: _PROBE}, result])
        if text is not None and _PROBE in text:
            return key
    return None


def opening(prompt_text: str, marks: ThinkingMarks) -> str:
    """Return the text with which a prompt opens the thinking that it ends in."""
    return marks.open + prompt_text.rpartition(marks.open)[2]


def _opened_message(form: OpenedForm, prompt_text: str, text: str, marks: ThinkingMarks) -> Message:
    if form == "reasoning" and marks.close in text:
        reasoning, _, content = text.partition(marks.close)
        return {"role": "assistant", "content": content, "reasoning_content": reasoning}
    return {
        "role": "assistant",
        "content": (opening(prompt_text, marks) if form == "opened" else "") + text,
    }


def _opened_form(
    template: ChatTemplate, prompt: str, prompt_text: str, marks: ThinkingMarks
) -> OpenedForm:
    if not marks.ends_inside(prompt_text):
        return "text"
    reply = f"{_PROBE}\n{marks.close}\n\nx"
    forms: tuple[OpenedForm, ...] = ("text", "opened", "reasoning")
    for form in forms:
        messages = [_QUESTION, _opened_message(form, prompt_text, reply, marks)]
        text = _try_render(template, messages, add_generation_prompt=False) or ""
        if "".join(text.split()).startswith("".join((prompt + reply).split())):
            return form
    return "text"


def _shows_prompt_of(template: ChatTemplate, role: str) -> bool:
    messages: list[Message] = [{"role": role, "content": _PROBE}, _QUESTION]
    return _PROBE in (_try_render(template, messages) or "")


def _shows_results(template: ChatTemplate, call_id: str, *, structured: bool) -> bool:
    messages = answered_call(call_id, {"content": _PROBE})
    if not structured:
        messages[1] = {"role": "assistant", "content": "x"}
    return _PROBE in (_try_render(template, messages) or "")


def _try_render(
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
