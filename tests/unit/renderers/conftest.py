from pathlib import Path

import pytest
from harness.tiny_tokenizer import write_tokenizer

# Thinking of all but the last assistant message is taken out, and user texts that look like tool
# responses are no questions.
REWRITING = """{%- set state = namespace(last=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' and not message.content.startswith('<tool_response>') %}
{%- set state.last = loop.index0 %}
{%- endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{%- set content = message.content %}
{%- if loop.index0 < state.last and '</think>' in content %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>assistant\\n' + content + '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

TEXTS = [
    "What is the price of the lamp? Look it up with the tool, then multiply.",
    '{"type": "function", "function": {"name": "price", "parameters": {"type": "object"}}}',
    "system user assistant tool answer the question in <answer> tags",
    "def main():\n    print('hello, world')\n",
]


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A template that appends text where messages are appended."""
    return write_tokenizer(tmp_path_factory.mktemp("appending"), texts=TEXTS)


@pytest.fixture(scope="session")
def rewriting_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("rewriting"), REWRITING, texts=TEXTS)
