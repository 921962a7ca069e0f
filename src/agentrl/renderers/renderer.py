"""Messages to token ids and back, for one model.

Token in, token out: what a model sampled is never decoded and encoded again. The prompt of the next
turn consists of the parent's ids, unchanged, and the ids of the text that the template adds after
them. If the template rewrites history instead (or the context was edited), the prompt is rendered
from scratch and shares the longest common prefix with its parent.
"""

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.config.sections import ModelSection
from agentrl.errors import ConfigError, RenderError
from agentrl.renderers.chat_template import ChatTemplate
from agentrl.renderers.incremental import IncrementalRenderer, PromptIncrement
from agentrl.renderers.model_files import ModelFiles, read_model_files
from agentrl.renderers.own_call import own_format
from agentrl.renderers.reply import MessageForm, Reply, Thinking, parse_reply, reply_grammar
from agentrl.renderers.template_traits import (
    answered_call,
    template_traits,
    tools_as_shown,
)
from agentrl.renderers.tool_calls.call_format import with_tool_descriptions
from agentrl.renderers.tool_calls.call_format_registry import AUTO, tool_call_formats
from agentrl.renderers.turn_ends import turn_ends
from agentrl.renderers.untrusted_text import EscapedConversation, Tools, UntrustedTextEncoder
from agentrl.renderers.written_messages import MessageWriter, marked_texts, with_call_ids
from agentrl.schema import Message
from agentrl.schema.grammar import Grammar


class Renderer:
    """Renders conversations for one model and reads its replies.

    Example:
        renderer = Renderer.load("assets/demo/model")
        prompt_ids = renderer.render(messages, tools)
        reply = renderer.parse(output_ids)
        history = [*messages, reply.message]
        full_ids = np.concatenate([prompt_ids, output_ids])
        increment = renderer.extend_prompt(full_ids, history, [tool_message], tools)
    """

    def __init__(
        self,
        files: ModelFiles,
        *,
        tool_call_parser: str | None = None,
        template_variables: Mapping[str, Any] | None = None,
    ) -> None:
        """Build a renderer; callers normally use `load`."""
        self._tokenizer = files.tokenizer
        self._template = ChatTemplate(
            files.chat_template, {**files.named_tokens, **(template_variables or {})}
        )
        shown = tools_as_shown(self._template)
        added = files.tokenizer.get_added_tokens_decoder().values() if shown else ()
        formats = tool_call_formats(
            tool_call_parser or AUTO,
            files.chat_template + shown,
            [token.content for token in added],
        )
        self._format, self._unread_call = own_format(self._template, formats)
        self._name = files.name
        self.traits = template_traits(self._template, self._format)
        """How the chat template handles tools, calls and thinking."""
        # The tokenizer does not decide: it may have the marks of related models that think.
        self._knows_thinking = self.traits.marks.open in files.chat_template
        self._untrusted = UntrustedTextEncoder(
            files.tokenizer, files.tokenizer_json, self._format.control, self.traits.marks
        )
        self.image_token_id = files.image_token_id
        """Placeholder that appears once for every image of a prompt; None for models without
        images.
        """
        self.image_processor = files.image_processor
        """Settings of the model's image processor."""
        self.stop_token_ids, self.turn_end_note = self._turn_end_ids(files)
        """Ids that end a turn, int; sampling stops at any of them. And one line on a disagreement
        between the model's files and its chat template, if there is one.
        """
        self._stop_literals = {
            id_: text
            for id_ in self.stop_token_ids
            if (text := files.tokenizer.id_to_token(id_)) is not None
        }
        self._writer = MessageWriter(
            self._template, self.traits, self._format, self._stop_literals.values()
        )
        self._incremental = IncrementalRenderer(
            self._template, self.traits, self._format, self._stop_literals
        )
        self._image_roles = frozenset(filter(self._renders_image, ("user", "tool")))

    @classmethod
    def load(
        cls,
        model_dir: str | Path,
        *,
        tool_call_parser: str | None = None,
        template_variables: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> "Renderer":
        """Read a model directory (tokenizer.json, tokenizer_config.json, chat template, eos ids).

        Args:
            model_dir: directory in Hugging Face's layout; no weights are read.
            tool_call_parser: name of the format in which the model writes tool calls; None or
                `auto` chooses the one that the chat template shows.
            template_variables: further variables of the template (`enable_thinking`, ...).
            chat_template: source of a template instead of the directory's own.
        """
        return cls(
            read_model_files(model_dir, chat_template=chat_template),
            tool_call_parser=tool_call_parser,
            template_variables=template_variables,
        )

    @classmethod
    def of_policy(
        cls, model: ModelSection, model_dir: Path, *, tool_call_parser: str | None = None
    ) -> "Renderer":
        """Return the renderer of the policy that the flags describe; see `load`."""
        renderer = cls.load(
            model_dir,
            tool_call_parser=tool_call_parser,
            template_variables=model.chat_template_kwargs,
            chat_template=model.chat_template,
        )
        known = renderer._template.variables()
        for name in (model.chat_template_kwargs or {}).keys() - known:
            raise ConfigError(
                f"--chat_template_kwargs: the chat template does not use {name!r}; it uses "
                f"{', '.join(sorted(known))}"
            )
        return renderer

    def _turn_end_ids(self, files: ModelFiles) -> tuple[tuple[int, ...], str | None]:
        """Compare the ids that the model's files name with what the chat template writes."""
        tokenizer, named = files.tokenizer, files.stop_token_ids
        added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
        written = turn_ends(self._template, added)
        files_name = ", ".join(f"{tokenizer.id_to_token(id_)} ({id_})" for id_ in named)
        if not written:
            return named, (
                "the chat template writes no control token after a reply: replies end only where "
                f"the model writes {files_name}"
            )
        ids = tuple(id_ for text in written if (id_ := tokenizer.token_to_id(text)) is not None)
        if set(ids) & set(named):
            return named, None
        return (*ids[:1], *named), (
            f"the chat template ends replies with {written[0]}, and the model's files name "
            f"{files_name} as the end of a turn: replies end at either"
        )

    @property
    def tool_call_format(self) -> str:
        """Name of the format in which the model writes calls."""
        return self._format.names[0] if self._format.names else "registered"

    @property
    def calls_problem(self) -> str | None:
        """Why the model's calls would be taken for answers, in one line; None if they are read."""
        if not self._unread_call:
            return None
        names = ", ".join(format_.names[0] for format_ in tool_call_formats(AUTO))
        return (
            f"the chat template of {self._name} writes a call as {self._unread_call[:100]!r}, which "
            f"--tool_call_parser {self.tool_call_format} does not read; name one that does ({names}), "
            "or give another template with --chat_template FILE"
        )

    @property
    def vocab_size(self) -> int:
        """Number of ids the tokenizer knows, added tokens included (a model may have more rows)."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token."""
        return max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)))

    @property
    def control_token_ids(self) -> frozenset[int]:
        """Ids that only the template and the model may produce, never untrusted text."""
        return self._untrusted.control_ids

    def image_fields(self, images: Sequence[str]) -> dict[str, Any]:
        """Return the fields of a turn that describe how its added images are read."""
        if not images:
            return {}
        return {
            "image_placeholder": self.image_token_id,
            "image_processor": self.image_processor,
        }

    def shows_images_of(self, role: str) -> bool:
        """Return whether images in messages of `role` (`user` or `tool`) reach the model."""
        return role in self._image_roles

    def check_tools(self) -> None:
        """Refuse tools for a model that would not see their results, or call them without effect."""
        if self.calls_problem is not None:
            raise ConfigError(self.calls_problem)
        if not self.traits.shows_results:
            raise ConfigError(
                "the model's chat template does not render tool results (it rejects or omits "
                "messages of the role `tool`); use a model whose template does, give a template "
                "with --chat_template FILE, or remove the tool servers"
            )

    def check_fits(self, num_rows: int) -> None:
        """Refuse a tokenizer with tokens that the model has no embedding for.

        Added tokens that no prompt contains are harmless; some families have one for images that
        the text-only model lacks.
        """
        known = self._tokenizer.get_vocab(with_added_tokens=False).values()
        prompt: list[int] = []
        with contextlib.suppress(RenderError):  # the template requires more than a question
            prompt = self.render([{"role": "user", "content": "x"}]).tolist()
        largest = max(*known, *prompt, *self._stop_literals)
        if largest >= num_rows:
            token = self._tokenizer.id_to_token(largest)
            raise ConfigError(
                f"the tokenizer has more tokens than the model: {token!r} has id {largest}, and "
                f"the model's vocab_size is {num_rows}; they belong to different models"
            )

    def render(
        self,
        messages: Sequence[Message],
        tools: Tools = (),
        *,
        add_generation_prompt: bool = True,
    ) -> np.ndarray:
        """Return the prompt ids of a conversation, int32 [P]."""
        conversation, text = self._escaped(messages, tools, add_generation_prompt)
        return _int32(self._untrusted.encode(text, conversation.literals))

    def reply_ids(
        self,
        history: Sequence[Message],
        reply: Message,
        tools: Tools = (),
        *,
        following: Sequence[Message] = (),
    ) -> np.ndarray:
        """Return what a model would have sampled to give this reply, int32 [T].

        That is the template's text between the generation prompt and the token that ends the turn,
        including this token.
        """
        conversation, closed = self._escaped([*history, reply], tools, False)
        differences = []
        for text in self._writer.reply_texts(conversation, closed):
            sampled, stop = self._writer.until_stop(text)
            if not stop:
                stop = self._stop_of_next_message(reply, tools, following)
                sampled += stop
            if not stop:
                differences.append("the template ends a reply with none of the model's stop tokens")
                continue
            ids = _int32(self._untrusted.encode(sampled, conversation.literals, after_token=True))
            difference = self._writer.difference(reply, self.parse(ids, tools=tools), tools)
            if difference is None:
                return ids
            differences.append(difference)
        raise RenderError(
            next(
                iter(differences),
                "the template writes a reply differently than its generation prompt",
            )
        )

    def with_call_ids(self, messages: Sequence[Message]) -> list[Message]:
        """Return a conversation whose calls have ids as in a rollout, and results that name them.

        Templates check ids (Mistral's) or write them (Kimi's), and some write the name of the tool
        of a result.
        """
        return with_call_ids(messages, self._format)

    def unshown(self, messages: Sequence[Message], tools: Tools = ()) -> list[str]:
        """Return what the template leaves out of a conversation, apart from replies: `[1].content`."""
        marked, marks = marked_texts(messages)
        _, text = self._escaped(marked, tools, False)
        missing = [place for place, mark in marks.items() if mark not in text]
        for stop, message in enumerate(messages):
            # Some templates show a system prompt only in the prompt of the next reply.
            if missing and message["role"] == "assistant":
                _, text = self._escaped(marked[:stop], tools, True)
                missing = [place for place in missing if marks[place] not in text]
        return missing

    def extend_prompt(
        self,
        parent_full_ids: np.ndarray,
        messages_before: Sequence[Message],
        new_messages: Sequence[Message],
        tools: Tools = (),
    ) -> PromptIncrement:
        """Return the prompt of the next turn as an increment to its parent."""
        if not messages_before or messages_before[-1].get("role") != "assistant":
            raise RenderError(
                "a prompt is extended from the assistant message of the parent's reply"
            )
        messages = [*messages_before, *new_messages]
        conversation, text = self._escaped(messages, tools, True)
        num_before = len(conversation.messages) - len(new_messages)
        found = self._incremental.text_after_reply(conversation, text, num_before)
        if found is None:
            return self._branch(parent_full_ids, conversation, text, "drift")
        last = int(parent_full_ids[-1]) if len(parent_full_ids) else -1
        rest, num_dropped = self._incremental.text_after_stop(*found, last)
        added = self._untrusted.encode(rest, conversation.literals, after_token=True)
        return PromptIncrement(
            added_ids=_int32(added),
            shared_len=len(parent_full_ids) - num_dropped,
            exact=num_dropped == 0,
            reason="stop_token" if num_dropped else None,
        )

    def branch_prompt(
        self,
        parent_full_ids: np.ndarray,
        messages: Sequence[Message],
        tools: Tools = (),
        *,
        reason: str,
    ) -> PromptIncrement:
        """Render an edited context, sharing the longest common prefix with its parent."""
        conversation, text = self._escaped(messages, tools, True)
        return self._branch(parent_full_ids, conversation, text, reason)

    def parse(
        self, output_ids: Sequence[int] | np.ndarray, *, turn: int = 0, tools: Tools = ()
    ) -> Reply:
        """Parse a turn's output; never raises on a model's text."""
        ids = [int(id_) for id_ in output_ids]
        if ids and ids[-1] in self.stop_token_ids:
            ids.pop()
        text = self.decode(ids)
        inside = self.traits.starts_inside_thinking
        form = MessageForm(
            structured=self.traits.wants_structured_calls,
            opened_message=self.traits.opened_message(text) if inside else None,
            reasoning_key=self.traits.reasoning_key,
            in_channels=self._format.split is not None,
        )
        return parse_reply(
            text,
            self._format,
            starts_inside=inside,
            turn=turn,
            tools=tools,
            marks=self.traits.marks,
            form=form,
        )

    def call_beginning(
        self, tool: str | None = None, *, after_thinking: bool = False
    ) -> np.ndarray:
        """Return the first ids of a reply that calls a tool, int32 [B].

        They end where the model's own tokens may continue.

        Args:
            tool: name of the tool; None leaves it to the model.
            after_thinking: the thinking that the prompt may have opened has ended.
        """
        if tool is not None and self._untrusted.count(tool):
            raise RenderError(f"the tool's name {tool!r} contains a control token")
        if self._format.begin is None:
            raise RenderError(
                "this model's tool-call format does not support forced calls; omit tool_choice"
            )
        inside = self.traits.starts_inside_thinking and not after_thinking
        closed = f"\n{self.traits.marks.close}\n\n" if inside else ""
        return _int32(
            self._untrusted.encode(closed + self._format.begin(tool), {}, after_token=True)
        )

    def json_grammar(self, schema: Mapping[str, Any], *, may_call: bool = False) -> Grammar:
        """Return the grammar of a reply that must be JSON, apart from thinking."""
        if self._format.split is not None:
            raise RenderError(
                "a reply made of channels (gpt-oss) cannot be constrained to JSON; omit "
                "response_format"
            )
        mark = None
        if may_call:
            if self._format.begin is None:
                raise RenderError(
                    "this model's tool-call format cannot constrain a reply to either JSON or a "
                    "call; omit response_format when there are tools, or use tool_choice none"
                )
            mark = self._format.begin(None).partition("\n")[0]
        return reply_grammar(
            schema, thinking=self._thinking, marks=self.traits.marks, call_mark=mark
        )

    @property
    def _thinking(self) -> Thinking:
        if self.traits.starts_inside_thinking:
            return "opened"
        has_ended = self.traits.marks.close in self.traits.prompt_text
        return "optional" if self._knows_thinking and not has_ended else "none"

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of ids, special tokens included as their literals."""
        return str(self._tokenizer.decode([int(id_) for id_ in ids], skip_special_tokens=False))

    def sampled_ids(self, text: str) -> np.ndarray:
        """Return the ids of text that a model wrote, control tokens included, int32 [T]."""
        return _int32(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of untrusted text, without control tokens, int32 [T]."""
        message = {"role": "user", "content": text}
        escaped = self._untrusted.escape([message], ())
        content = str(escaped.messages[0]["content"])
        return _int32(self._untrusted.encode(content, escaped.literals))

    def fill(self, template: str, values: Mapping[str, str]) -> np.ndarray:
        """Return the ids of a text, control tokens included, with untrusted values in it, int32 [T]."""
        messages = [{"role": "user", "content": value} for value in values.values()]
        escaped = self._untrusted.escape(messages, (), edges=True)
        written = {
            place: str(message["content"])
            for place, message in zip(values, escaped.messages, strict=True)
        }
        places = re.compile("|".join(map(re.escape, values)) or "(?!)")
        text = places.sub(lambda match: written[match[0]], template)
        return _int32(self._untrusted.encode(text, escaped.literals))

    def _escaped(
        self, messages: Sequence[Message], tools: Tools, add_generation_prompt: bool
    ) -> tuple[EscapedConversation, str]:
        """Return the escaped conversation and its rendered text.

        If the template does not render tools, a system prompt may describe them. What it leaves out
        of messages is written into their text.
        """
        if tools and not self.traits.shows_tools:
            messages = with_tool_descriptions(
                messages, tools, self._format, as_system=self.traits.shows_system
            )
            tools = ()
        conversation = self._written(self._untrusted.escape(messages, tools))
        if self.image_token_id is None and any(map(_shows_images, conversation.messages)):
            raise RenderError("the model reads text only, but a message shows an image")
        text = conversation.rendered(
            self._template, None, add_generation_prompt=add_generation_prompt
        )
        if not conversation.dangling:
            return conversation, text
        # The template may join untrusted texts into a literal. It has done so if escaping their ends
        # removes a literal.
        guarded = self._written(self._untrusted.escape(messages, tools, edges=True))
        guarded_text = guarded.rendered(
            self._template, None, add_generation_prompt=add_generation_prompt
        )
        if self._untrusted.count(guarded_text) < self._untrusted.count(text):
            return guarded, guarded_text
        return conversation, text

    def _written(self, conversation: EscapedConversation) -> EscapedConversation:
        return replace(
            conversation,
            messages=self._writer.written(conversation.messages),
            given=conversation.messages,
        )

    def _stop_of_next_message(
        self, reply: Message, tools: Tools, following: Sequence[Message]
    ) -> str:
        """Return the stop token with which the template starts the next message, or ''."""
        # Without thinking and history: templates that remove earlier thinking would rewrite them.
        calls = reply.get("tool_calls")
        bare: Message = {"role": "assistant", "content": "" if calls else "x"}
        after: Message = {"role": "user", "content": "x"}
        messages = [after, bare | ({"tool_calls": calls} if calls else {})]
        _, closed = self._escaped(messages, tools, False)
        _, text = self._escaped([*messages, *(following[:1] or [after])], tools, False)
        following_text = text[len(closed) :] if text.startswith(closed) else ""
        for literal in self._stop_literals.values():
            if following_text.startswith(literal):
                return literal
        return ""

    def _branch(
        self,
        parent_full_ids: np.ndarray,
        conversation: EscapedConversation,
        text: str,
        reason: str,
    ) -> PromptIncrement:
        ids = _int32(self._untrusted.encode(text, conversation.literals))
        return PromptIncrement.after_common_prefix(parent_full_ids, ids, reason)

    def _renders_image(self, role: str) -> bool:
        """Return whether the template writes one placeholder for an image in this role's message."""
        if self.image_token_id is None:
            return False
        image: Message = {
            "role": role,
            "content": [{"type": "image_url", "image_url": {"url": ""}}],
        }
        # Alone: some templates refuse two questions in a row.
        messages = answered_call(self._format.call_id(0, 0), image) if role == "tool" else [image]
        try:
            ids = self.render(messages)
        except RenderError:
            return False
        return int((ids == self.image_token_id).sum()) == 1


def _shows_images(message: Message) -> bool:
    return isinstance(message.get("content"), list)


def _int32(ids: Sequence[int]) -> np.ndarray:
    return np.asarray(ids, dtype=np.int32)
