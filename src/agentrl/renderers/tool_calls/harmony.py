"""gpt-oss's channels (harmony): a reply consists of messages, each with a channel and a recipient.

`<|channel|>analysis<|message|>thought<|end|><|start|>assistant<|channel|>final<|message|>said`, or,
in place of the last, ` to=functions.f<|channel|>commentary json<|message|>{...}`. Models write the
recipient before or after the channel.
"""

import re

from agentrl.renderers.tool_calls.call_format import (
    FormatError,
    ParsedCall,
    SplitReply,
    ToolCallFormat,
    Tools,
    checked,
    decode_object,
    refused,
    skip_space,
    tool_name,
)

_CHANNEL, _MESSAGE, _END, _START = "<|channel|>", "<|message|>", "<|end|>", "<|start|>"
IN_CHANNELS = re.compile(rf"(?: to=[^\s<]{{1,256}})?{re.escape(_CHANNEL)}\w{{1,40}}+")
"""Start of a reply that consists of channels."""
_BODY_END = re.compile("|".join(map(re.escape, (_END, _START, "<|call|>", "<|return|>"))))
_NAMED_CHANNEL = re.compile(rf"{re.escape(_CHANNEL)}(\w{{1,40}}+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]{1,256}+)")
_CALL_HEADER = re.compile(
    rf"\s*+(?:{re.escape(_START)})?+(?:assistant)?+"
    rf"(?:\s*+(?:to=[^\s<]++|{re.escape(_CHANNEL)}\w++))++"
    r"\s*+(?:<\|constrain\|>)?+[\w/+.-]*+\s*+"
)
_FUNCTIONS = "functions."


def split_channels(text: str, tools: Tools = ()) -> SplitReply:
    """Parse a reply: thinking is in the channel `analysis`, calls have a recipient."""
    reasoning: list[str] = []
    content: list[str] = []
    calls: list[ParsedCall] = []
    position = 0
    while position < len(text):
        begin = text.find(_MESSAGE, position)
        if begin < 0:
            rest = text[position:]  # no message: plain text, or a truncated header
            recipient = _RECIPIENT.search(rest)
            if _CHANNEL in rest and recipient is not None and recipient[1].startswith(_FUNCTIONS):
                calls.append(_call(recipient[1], rest, None, tools))
            else:
                content.append(rest)
            break
        header, inside = text[position:begin], begin + len(_MESSAGE)
        end = _BODY_END.search(text, inside)
        body = text[inside : len(text) if end is None else end.start()]
        position = len(text) if end is None else end.end()
        channel, recipient = _NAMED_CHANNEL.search(header), _RECIPIENT.search(header)
        if recipient is not None and recipient[1] != "assistant":
            calls.append(_call(recipient[1], header, body, tools))
        elif recipient is None and _FUNCTIONS in header:
            calls.append(
                refused(FormatError(f"expected to={_FUNCTIONS}NAME in front of {_MESSAGE}"))
            )
        elif channel is not None and channel[1] == "analysis":
            reasoning.append(body)
        else:
            content.append(body)
    return SplitReply("\n\n".join(reasoning), "\n\n".join(content), calls)


def _call(recipient: str, header: str, body: str | None, tools: Tools) -> ParsedCall:
    name = ""
    try:
        name = tool_name(recipient.removeprefix(_FUNCTIONS), tools)
        if body is None:
            raise FormatError(f"expected {_MESSAGE} behind the recipient")
        if _CALL_HEADER.fullmatch(header) is None or header.count("to=") > 1:
            raise FormatError(f"only recipient and channel stand in front of {_MESSAGE}")
        arguments, end = decode_object(body, skip_space(body, 0), _MESSAGE)
        if body[end:].strip():
            raise FormatError("expected the end of the message behind the JSON object")
        return checked(name, arguments)
    except FormatError as error:
        error.name = error.name or name
        return refused(error)


def _begin(tool: str | None) -> str:
    rest = "" if tool is None else f"{tool} <|constrain|>json{_MESSAGE}"
    return f"{_CHANNEL}commentary to={_FUNCTIONS}{rest}"


HARMONY = ToolCallFormat(
    split=split_channels,
    preamble=f"{_CHANNEL}commentary{_MESSAGE}%s{_END}{_START}assistant",
    begin=_begin,
    names=("harmony", "gpt-oss"),
    giveaways=(f"{_CHANNEL}analysis{_MESSAGE}",),
    example=f'{_begin("NAME")}{{"KEY": "VALUE"}}<|call|>',
)
