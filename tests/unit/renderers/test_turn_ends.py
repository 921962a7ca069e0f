"""What ends a turn: a model's files against its chat template."""

import json
from pathlib import Path

import pytest
from harness.tiny_tokenizer import CHAT_TEMPLATE, write_tokenizer

from agentrl.renderers.renderer import Renderer

# Ends the last reply with one token, earlier ones with another, as gpt-oss does.
TWO_ENDS = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{{- '<|endoftext|>' if loop.last and message.role == 'assistant' else '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
# Ends nothing; a turn ends where the next one starts, as GLM's.
NEXT_STARTS = """{%- for message in messages %}{{- '<|' + message.role + '|>' + message.content }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""
PLAIN = """{%- for message in messages %}{{- message.role + ': ' + message.content + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'assistant: ' }}{%- endif %}"""
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ROLES = (*SPECIAL, "<|user|>", "<|assistant|>")


@pytest.mark.parametrize(
    ("template", "special", "named", "ends", "note"),
    [
        (CHAT_TEMPLATE, SPECIAL, "<|im_end|>", {"<|im_end|>"}, None),
        # A base model with an instruction template.
        (
            *(CHAT_TEMPLATE, SPECIAL, "<|endoftext|>", {"<|im_end|>", "<|endoftext|>"}),
            "the chat template ends replies with <|im_end|>, and the model's files name "
            "<|endoftext|> (256) as the end of a turn: replies end at either",
        ),
        (TWO_ENDS, SPECIAL, "<|endoftext|>", {"<|endoftext|>"}, None),
        (NEXT_STARTS, ROLES, "<|user|>", {"<|user|>"}, None),
        (
            *(PLAIN, SPECIAL, "<|endoftext|>", {"<|endoftext|>"}),
            "the chat template writes no control token after a reply: replies end only where the "
            "model writes <|endoftext|> (256)",
        ),
    ],
)
def test_what_the_template_writes_after_a_reply_ends_it(
    tmp_path: Path,
    template: str,
    special: tuple[str, ...],
    named: str,
    ends: set[str],
    note: str | None,
) -> None:
    write_tokenizer(tmp_path, template, special=special)
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": named, "chat_template": template})
    )
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).unlink()
    renderer = Renderer.load(tmp_path)
    assert {renderer.decode([id_]) for id_ in renderer.stop_token_ids} == ends
    assert renderer.turn_end_note == note
