"""What a chat template writes at the end of a model's turn.

The ids that end a turn are named in a checkpoint's files (`eos_token_id`), and written by its chat
template. The two disagree for base models whose template ends turns with its own token, and for
tokenizers read out of GGUF files. Replies would then run on to the limit.
"""

import re
from collections.abc import Iterable

from agentrl.errors import RenderError
from agentrl.renderers.chat_template import ChatTemplate
from agentrl.schema import Message

_REPLY = "\U000f0001"


def turn_ends(template: ChatTemplate, control_tokens: Iterable[str]) -> tuple[str, ...]:
    """Return the tokens that follow a reply: at a conversation's end, and before the next message.

    The two differ in some templates (gpt-oss ends the last reply with `<|return|>`, earlier ones
    with `<|end|>`), and some write only the start of the next message (GLM's `<|user|>`).
    """
    texts = sorted(filter(None, control_tokens), key=len, reverse=True)
    if not texts:
        return ()
    pattern = re.compile("|".join(map(re.escape, texts)))
    question: Message = {"role": "user", "content": "x"}
    reply: Message = {"role": "assistant", "content": _REPLY}
    found: list[str] = []
    for messages in ([question, reply], [question, reply, question]):
        try:
            text = template.render(messages, (), add_generation_prompt=False)
        except RenderError:
            continue
        match = pattern.search(text.rpartition(_REPLY)[2]) if _REPLY in text else None
        if match is not None:
            found.append(match[0])
    return tuple(dict.fromkeys(found))
