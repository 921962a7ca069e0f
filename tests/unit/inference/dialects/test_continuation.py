"""Which earlier call a conversation continues."""

from typing import Any

import pytest

from agentrl.inference.dialects.continuation import ContinuationIndex, conversation_key, meaning
from agentrl.inference.dialects.messages import read_message
from agentrl.schema import Message

USER: Message = {"role": "user", "content": "How many?"}
REPLY: Message = {"role": "assistant", "content": "Seven."}
MORE: Message = {"role": "user", "content": "And then?"}


def called(arguments: str, call_id: str, content: Any = "") -> Message:
    call = {"id": call_id, "function": {"name": "price", "arguments": arguments}}
    return read_message({"role": "assistant", "content": content, "tool_calls": [call]}, 0)


def test_a_reply_means_the_same_however_a_framework_spells_it() -> None:
    sampled = called('{"item": "honey"}', "a")
    assert meaning(called('{"item":"honey"}', "own-1", content=None)) == meaning(sampled)
    assert meaning(called('{"item": "silk"}', "a")) != meaning(sampled)
    assert meaning({**REPLY, "reasoning_content": "hm"}) == meaning(REPLY)
    lines = [{**REPLY, "content": text} for text in (" Seven.\r\nNo.", "Seven.\nNo.", "Seven. No.")]
    assert meaning(lines[0]) == meaning(lines[1]) != meaning(lines[2])


@pytest.mark.parametrize(
    ("sampled", "returned"),
    [
        ("1.0", "1"),
        ("1e5", "100000"),
        ("-0.0", "0"),
        ("9007199254740993", "9007199254740992"),
        ('[{"x": 2.0}]', '[{"x":2}]'),
        ('{"x": null}', "{}"),
    ],
)
def test_arguments_that_javascript_wrote_are_compared_by_value(sampled: str, returned: str) -> None:
    written = [called(f'{{"n": {text}}}', "a") for text in (sampled, returned, "true")]
    assert meaning(written[0]) == meaning(written[1])
    assert meaning(written[0]) != meaning(written[2])


def test_the_longest_known_conversation_comes_first_and_its_calls_in_order() -> None:
    index = ContinuationIndex[str]()
    index.add(conversation_key([USER]), REPLY, "first")
    index.add(conversation_key([USER]), REPLY, "second")
    index.add(conversation_key([USER, REPLY, MORE]), REPLY, "third")
    asked = conversation_key([USER, REPLY, MORE, REPLY, MORE])
    assert list(index.matches(asked)) == [(4, ["third"]), (2, ["first", "second"])]


@pytest.mark.parametrize(
    "messages", [[USER], [MORE, REPLY], [USER, {**REPLY, "content": "Eight."}, MORE]]
)
def test_a_conversation_that_repeats_no_reply_continues_nothing(messages: list[Message]) -> None:
    index = ContinuationIndex[str]()
    index.add(conversation_key([USER]), REPLY, "first")
    assert list(index.matches(conversation_key(messages))) == []


def test_conversations_of_other_scopes_never_match() -> None:
    index = ContinuationIndex[str]()
    index.add(conversation_key([USER], scope="one model"), REPLY, "first")
    assert list(index.matches(conversation_key([USER, REPLY], scope="another"))) == []
    assert list(index.matches(conversation_key([USER, REPLY], scope="one model")))
