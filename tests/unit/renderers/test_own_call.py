"""The format of calls is the one that reads the chat template's own call, or tools are refused."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from support.chat_families import FAMILIES, Family, write_family

from agentrl.errors import ConfigError, RenderError
from agentrl.renderers import Renderer
from agentrl.renderers.chat_template import ChatTemplate
from agentrl.renderers.own_call import own_format
from agentrl.renderers.tool_calls.call_format_registry import tool_call_formats
from agentrl.rollout.agent.call_history import CallHistory
from agentrl.schema import Message

_TEMPLATE = """{%- if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}
{%- for message in messages %}
{{- '<|' + message.role + '|>' + message.content }}
{%- if message.tool_calls %}CALLS{% endif %}
{{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
_EACH = "{% for c in message.tool_calls %}{% set f = c.function %}"
_JSON = "{{ f.arguments | tojson }}"
_OBJECT = '{"name": "{{ f.name }}", "arguments": ' + _JSON + "}"
_CODER = "<function={{ f.name }}>\n" + (
    "{% for k, v in f.arguments.items() %}<parameter={{ k }}>\n"
    "{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>"
)
_GLM = (
    "{{ f.name }}\n{% for k, v in f.arguments.items() %}<arg_key>{{ k }}</arg_key>\n"
    "<arg_value>{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}"
)
_PYTHON = (
    "{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}={{ v | tojson }}"
    "{{ ', ' if not loop.last }}{% endfor %})"
)
_INVOKE = (
    '<invoke name="{{ f.name }}">\n{% for k, v in f.arguments.items() %}'
    '<parameter name="{{ k }}">{{ v if v is string else v | tojson }}</parameter>\n{% endfor %}'
    "</invoke>"
)
_GEMMA = (
    "{% macro value(v) %}{% if v is string %}Q{{ v }}Q{% elif v is mapping %}{{ '{' }}"
    "{% for k, w in v.items() %}{{ k }}:{{ value(w) }}{{ ',' if not loop.last }}{% endfor %}{{ '}' }}"
    "{% elif v is iterable %}[{% for w in v %}{{ value(w) }}{{ ',' if not loop.last }}{% endfor %}]"
    "{% else %}{{ v | tojson }}{% endif %}{% endmacro %}"
    "call:{{ f.name }}{{ value(f.arguments) }}"
)
_LIST = "[{% for c in message.tool_calls %}{% set f = c.function %}%s{{ ', ' if not loop.last }}{% endfor %}]"


def each(before: str, call: str = _OBJECT, after: str = "") -> str:
    return f"{_EACH}{before}{call}{after}{{% endfor %}}"


def listed(before: str, call: str = _OBJECT, after: str = "") -> str:
    return before + _LIST.replace("%s", call) + after


FORMS: dict[str, tuple[str, str | None]] = {
    "Qwen 2.5": (each("\n<tool_call>\n", after="\n</tool_call>"), "hermes"),
    "ERNIE 4.5": (each("<tool_call>", after="</tool_call>\n"), "hermes"),
    "Hermes 2": (
        each(
            "<tool_call>\n",
            '{"arguments": ' + _JSON + ', "name": "{{ f.name }}"}',
            "\n</tool_call>",
        ),
        "hermes",
    ),
    "Qwen3-Coder": (each("<tool_call>\n", _CODER, "\n</tool_call>"), "qwen3_coder"),
    "MiMo": (each("<tool_call>", _CODER.replace("\n", ""), "</tool_call>"), "qwen3_coder"),
    "Seed-OSS": (each("<seed:tool_call>\n", _CODER, "\n</seed:tool_call>"), "seed_oss"),
    "GLM 4.5": (each("\n<tool_call>", _GLM, "</tool_call>"), "glm45"),
    "OLMo 3": (
        "<function_calls>"
        + each("", _PYTHON, "{{ '\\n' if not loop.last }}")
        + "</function_calls>",
        "olmo3",
    ),
    "Granite 3": (listed("<|tool_call|>"), "granite"),
    "Granite 3.0": (each("<|tool_call|>"), "granite"),
    "Phi-4-mini": (listed("<|tool_call|>", after="<|/tool_call|>"), "phi4_mini"),
    "Jamba": (listed("<tool_calls>", after="</tool_calls>"), "jamba"),
    "Apriel": (
        listed(
            "\n<tool_calls>",
            '{"name": "{{ f.name }}", "arguments": ' + _JSON + ', "id": "{{ c.id }}"}',
            "</tool_calls>",
        ),
        "jamba",
    ),
    "MiniMax M1": ("<tool_calls>\n" + each("", after="\n") + "</tool_calls>", "jamba"),
    "Hunyuan": (
        "<tool_calls>"
        + each(
            "<tool_call>",
            "{{ c.type }}<tool_sep>{{ f.name }}\n```json\n" + _JSON + "\n```",
            "</tool_call>",
        )
        + "</tool_calls>",
        "hunyuan",
    ),
    "Hunyuan with text arguments": (
        "<tool_calls>"
        + each(
            "<tool_call>",
            "{{ 'function<tool_sep>' + f.name + '\\n```json\\n' + f.arguments + '\\n```' }}",
            "</tool_call>",
        )
        + "</tool_calls>",
        "hunyuan",
    ),
    "Command A": (
        listed(
            "<|START_ACTION|>",
            '\n    {"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ f.name }}", "parameters": '
            + _JSON
            + "}",
            "\n<|END_ACTION|>",
        ),
        "cohere",
    ),
    "Command R": (
        listed(
            "Action: ```json\n",
            '\n    {"tool_name": "{{ f.name }}", "parameters": ' + _JSON + "}",
            "\n```",
        ),
        "command_r",
    ),
    "Nemotron Nano 2": (listed("<TOOLCALL>", after="</TOOLCALL>"), "nemotron"),
    "InternLM 2": (
        each(
            "<|action_start|><|plugin|>\n",
            '{"name": "{{ f.name }}", "parameters": ' + _JSON + "}",
            "<|action_end|>\n",
        ),
        "internlm2",
    ),
    "LongCat": (each("<longcat_tool_call>\n", after="\n</longcat_tool_call>"), "longcat"),
    "Functionary": (each("<function={{ f.name }}>", _JSON, "</function>"), "functionary"),
    "FunctionGemma": (
        each("<start_function_call>", _GEMMA.replace("Q", "<escape>"), "<end_function_call>"),
        "function_gemma",
    ),
    "Gemma 4": (each("<|tool_call>", _GEMMA.replace("Q", '<|"|>'), "<tool_call|>"), "gemma4"),
    "LFM2": (listed("<|tool_call_start|>", _PYTHON, "<|tool_call_end|>"), "lfm2"),
    "MiniCPM 3": (
        "<|tool_call_start|>\n```python\n" + each("", _PYTHON, "\n") + "```\n<|tool_call_end|>",
        "minicpm",
    ),
    "ToolACE": (listed("", _PYTHON), "pythonic"),
    "Llama 4": (listed("<|python_start|>", _PYTHON, "<|python_end|>"), "pythonic"),
    "Llama 3.1": (each("", '{"name": "{{ f.name }}", "parameters": ' + _JSON + "}"), "llama3"),
    "xLAM": (listed(""), "llama3"),
    "OpenAI": ('{"tool_calls": {{ message.tool_calls | tojson }}}', "llama3"),
    "Mistral 7": (listed("[TOOL_CALLS]"), "mistral"),
    "Devstral": (each("[TOOL_CALLS]", "{{ f.name }}[ARGS]" + _JSON), "mistral"),
    "Kimi K2": (
        "<|tool_calls_section_begin|>"
        + each(
            "<|tool_call_begin|>",
            "{{ c.id }}<|tool_call_argument_begin|>" + _JSON,
            "<|tool_call_end|>",
        )
        + "<|tool_calls_section_end|>",
        "kimi_k2",
    ),
    "MiniMax M2": (
        "<minimax:tool_call>\n" + each("", _INVOKE, "\n") + "</minimax:tool_call>",
        "minimax_m2",
    ),
    # No format reads these: tools are refused.
    "Apertus": (
        "<|tools_prefix|>" + listed("", '{"{{ f.name }}": ' + _JSON + "}") + "<|tools_suffix|>",
        None,
    ),
    "Claude": ("<function_calls>\n" + each("", _INVOKE, "\n") + "</function_calls>", None),
    "xml": (each("<call>", "<name>{{ f.name }}</name>" + _JSON, "</call>"), None),
    "YAML": (each("tool: ", "{{ f.name }}\nargs: " + _JSON), None),
    "ReAct": (each("Action: ", "{{ f.name }}\nAction Input: " + _JSON), None),
    "fence": (each("```json\n", after="\n```"), None),
    "FireFunction": (listed(" functools"), None),
    # No call is shown: the marks, else Hermes, as documented.
    "no calls": ("", "hermes"),
    "no calls, GLM's marks": ("{# <arg_key> #}", "glm45"),
}


@pytest.mark.parametrize("family", FORMS)
def test_the_format_is_the_one_that_reads_the_templates_own_call(family: str) -> None:
    form, expected = FORMS[family]
    template = ChatTemplate(_TEMPLATE.replace("CALLS", form), {})
    format_, unread = own_format(template, tool_call_formats("auto", template.source))
    if expected is None:
        assert "look_up" in unread
    else:
        assert (format_.names[0], unread) == (expected, "")


def test_no_released_template_is_taken_for_another_in_silence() -> None:
    trl = find_spec("trl")
    assert trl is not None
    assert trl.origin is not None
    unread = set()
    for path in Path(trl.origin).parent.glob("chat_templates/*.jinja"):
        template = ChatTemplate(path.read_text(), {"bos_token": "<s>", "eos_token": "</s>"})
        if own_format(template, tool_call_formats("auto", template.source))[1]:
            unread.add(path.stem.removesuffix("_training"))
    assert unread <= {"muse_glimmer"}


@pytest.mark.parametrize(
    "family",
    [name for name, (form, format_) in FORMS.items() if format_ and form[:2] not in ("", "{#")],
)
def test_a_fine_tuning_learns_the_templates_own_call(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = _TEMPLATE.replace("CALLS", FORMS[family][0])
    monkeypatch.setitem(FAMILIES, "own", _family(template))
    renderer = Renderer.load(write_family(tmp_path, "own"))
    question: Message = {"role": "user", "content": "x"}
    function = {"name": "f", "arguments": {"a": "b", "c": {"d": [1, True]}}}
    reply = {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}
    asked, learned = renderer.with_call_ids([question, reply])
    properties = {"a": {"type": "string"}, "c": {"type": "object"}}
    parameters = {"type": "object", "properties": properties}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    text = renderer.decode(renderer.reply_ids([asked], learned, tools))
    if family == "Hunyuan with text arguments":
        assert '<tool_call>f<tool_sep>{"a": "b"' in text  # the template refuses objects
        return
    shown = ChatTemplate(template, {})
    prompt = shown.render([asked], tools, add_generation_prompt=True)
    assert prompt + text == shown.render([asked, learned], tools, add_generation_prompt=False)


def _family(template: str) -> Family:
    special = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>")
    return Family(template, special, (), None, "<|end|>", nfc=False, call="")


def test_tools_are_refused_for_a_model_whose_calls_no_format_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = _TEMPLATE.replace("CALLS", FORMS["ReAct"][0])
    monkeypatch.setitem(FAMILIES, "react", _family(source))
    renderer = Renderer.load(write_family(tmp_path / "model-x", "react"))
    told = r"of model-x writes a call as 'Action: look_up.* hermes does not read; .*granite"
    with pytest.raises(ConfigError, match=told):
        renderer.check_tools()
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    question = [{"role": "user", "content": "x"}]
    with pytest.raises(RenderError, match="model-x"):
        CallHistory(renderer).plan(question, tools)
    CallHistory(renderer).plan(question, [])
