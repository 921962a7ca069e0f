"""Incremental rendering: what a template adds after a reply, if it only appends.

Text in, text out; `PromptIncrement` holds the result in tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from agentrl.renderers.chat_template import ChatTemplate
from agentrl.renderers.reply import parse_reply
from agentrl.renderers.template_traits import TemplateTraits
from agentrl.renderers.tool_calls.call_format import ToolCallFormat
from agentrl.renderers.untrusted_text import EscapedConversation
from agentrl.schema import num_shared_ids


@dataclass(frozen=True)
class PromptIncrement:
    """The prompt of a next turn: `full_ids_of_parent[:shared_len] + added_ids`."""

    added_ids: np.ndarray
    """int32 [A]."""
    shared_len: int
    exact: bool
    """The prompt extends the parent's ids in full."""
    reason: str | None
    """Why it does not (`drift`, `stop_token`, or the caller's own reason); None if it does."""

    def prompt_ids(self, parent_full_ids: np.ndarray) -> np.ndarray:
        """Return the whole prompt, int32 [shared_len + A]."""
        shared = np.asarray(parent_full_ids[: self.shared_len], dtype=np.int32)
        return np.concatenate([shared, self.added_ids])

    @classmethod
    def after_common_prefix(
        cls, parent_full_ids: np.ndarray, ids: np.ndarray, reason: str
    ) -> "PromptIncrement":
        """Return a newly rendered prompt as an increment to its common prefix."""
        shared_len = num_shared_ids(ids, np.asarray(parent_full_ids))
        exact = shared_len == len(parent_full_ids)
        return cls(
            added_ids=ids[shared_len:],
            shared_len=shared_len,
            exact=exact,
            reason=None if exact else reason,
        )


class IncrementalRenderer:
    """Finds the text that one template adds after a reply."""

    def __init__(
        self,
        template: ChatTemplate,
        traits: TemplateTraits,
        format_: ToolCallFormat,
        stop_literals: Mapping[int, str],
    ) -> None:
        """Prepare for a template whose model writes calls in a format.

        Args:
            template: the model's.
            traits: its traits.
            format_: how the model writes calls.
            stop_literals: the ids that end a turn, and their texts.
        """
        self._template = template
        self._stop_literals = stop_literals
        self._traits = traits
        self._format = format_

    def text_after_reply(
        self, conversation: EscapedConversation, text: str, num_before: int
    ) -> tuple[str, str] | None:
        """Return how the template closes the parent's reply and what it adds after that, or None.

        None means that the template does not only append: with the new messages, it renders the
        parent's prompt or reply differently.

        Args:
            conversation: the messages up to the parent's reply, and the new ones.
            text: the template's text for all of them.
            num_before: number of messages up to and including the parent's reply.
        """
        prompt_text, close_text = self._traits.prompt_text, self._traits.close_text
        prompt = conversation.rendered(self._template, num_before - 1, add_generation_prompt=True)
        if close_text is None:
            return None
        if not prompt.endswith(prompt_text):
            # After results, some templates add no generation prompt: the model continues its turn.
            open_ = conversation.rendered(
                self._template, num_before - 1, add_generation_prompt=False
            )
            if not prompt.startswith(open_):
                return None
            prompt_text = prompt[len(open_) :]
        context = prompt[: len(prompt) - len(prompt_text)]
        if not text.startswith(context):
            return None
        if conversation.messages[num_before - 1].get("tool_calls"):
            return self._text_after_calls(conversation, text, num_before, prompt)
        reply = self._traits.reply_text(conversation.messages[num_before - 1])
        verbatim = prompt_text + reply
        # Templates omit empty thinking, or add it, which changes no content.
        marks = self._traits.marks
        forms = [verbatim, marks.empty.sub("", verbatim)]
        if marks.close not in verbatim:
            forms.append(f"{prompt_text}{marks.open}{marks.close}{reply}")
        for expected in dict.fromkeys(forms):
            end = _match_ignoring_space(text, len(context), expected + close_text)
            if end is not None:
                return close_text, text[end:]
        return None

    def text_after_stop(self, close_text: str, following: str, last_id: int) -> tuple[str, int]:
        """Return the text to append to the parent's ids, and how many of these to drop first.

        The model closes its own turn by a stop token, which the template writes too: in the closing
        text, or (GLM) as the start of what follows.

        Args:
            close_text: how the template closes the reply.
            following: the text after the closed reply.
            last_id: the last of the parent's ids; -1 if there is none.
        """
        literal = self._stop_literals.get(last_id)
        if literal is None:
            return close_text + following, 0
        _, found, rest = close_text.partition(literal)
        if found:
            return rest + following, 0
        if (close_text + following).startswith(literal):
            return (close_text + following).removeprefix(literal), 0
        # The model stopped with another token than the one with which the template ends turns.
        return close_text + following, 1

    def _text_after_calls(
        self, conversation: EscapedConversation, text: str, num_before: int, prompt: str
    ) -> tuple[str, str] | None:
        """Do the same as `text_after_reply` for a reply whose calls the template renders itself.

        It may render them with different spacing or order of parts than the model did. That is not
        drift if the meaning is the same: parsed as a reply, it yields the same thinking, prose and
        calls.
        """
        message = conversation.messages[num_before - 1]
        closed = conversation.rendered(self._template, num_before, add_generation_prompt=False)
        endings = (self._traits.close_text, *self._stop_literals.values())
        close_text = next((end for end in endings if end and closed.endswith(end)), "")
        prompts = (prompt, self._traits.marks.empty.sub("", prompt))
        begin = next((form for form in prompts if closed.startswith(form)), None)
        if begin is None or not text.startswith(closed):
            return None
        rendered = parse_reply(
            closed[len(begin) : len(closed) - len(close_text)],
            self._format,
            starts_inside=self._traits.marks.ends_inside(prompt),
            tools=conversation.tools,
            marks=self._traits.marks,
        )
        functions = [call["function"] for call in message["tool_calls"]]
        reasoning = message.get(self._traits.reasoning_key or "")
        # Without a separate field, thinking is part of the content.
        shown = rendered.prose if reasoning is None else f"{rendered.reasoning} {rendered.content}"
        same = shown.split() == f"{reasoning or ''} {message.get('content') or ''}".split()
        same = same and [(call.name, call.arguments) for call in rendered.tool_calls] == [
            (function["name"], function["arguments"]) for function in functions
        ]
        return (close_text, text[len(closed) :]) if same else None


def _match_ignoring_space(text: str, start: int, expected: str) -> int | None:
    """Return where `expected` ends in `text` if it occurs at `start`, else None.

    Whitespace inside `expected` may differ: templates trim and pad replies, while sampled tokens
    are kept.
    """
    if text.startswith(expected, start):
        return start + len(expected)
    visible = expected.rstrip()
    position = start
    for char in visible:
        if char.isspace():
            continue
        while position < len(text) and text[position].isspace():
            position += 1
        if not text.startswith(char, position):
            return None
        position += 1
    tail = expected[len(visible) :]
    return position + len(tail) if text.startswith(tail, position) else None
