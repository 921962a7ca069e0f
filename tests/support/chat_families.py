"""Model directories in the style of well-known families: template, special tokens, tokenizer."""

# ruff: noqa: RUF001 - DeepSeek's marks

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

MISTRAL = """{%- if messages[0].role == 'system' %}
{%- set system = messages[0].content %}{%- set rest = messages[1:] %}
{%- else %}{%- set rest = messages %}{%- endif %}
{%- set users = rest | selectattr('role', 'equalto', 'user') | list %}
{%- set ns = namespace(turn=0) %}
{%- for message in rest %}
{%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
{%- if (message.role == 'user') != (ns.turn % 2 == 0) %}
{{- raise_exception('after the optional system message, user and assistant alternate') }}
{%- endif %}
{%- set ns.turn = ns.turn + 1 %}
{%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in rest %}
{%- if message.role == 'user' %}
{%- if tools and message == users[-1] %}
{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
{%- endif %}
{{- '[INST]' }}
{%- if loop.last and system is defined %}{{- system + '\\n\\n' }}{%- endif %}
{{- message.content + '[/INST]' }}
{%- elif message.role == 'assistant' and message.tool_calls %}
{%- if message.content %}{{- message.content }}{%- endif %}
{{- '[TOOL_CALLS][' }}
{%- for call in message.tool_calls %}
{%- set out = call.function | tojson %}
{{- out[:-1] }}
{%- if call.id is not defined or call.id | length != 9 %}
{{- raise_exception('tool call ids are nine alphanumerics') }}
{%- endif %}
{{- ', "id": "' + call.id + '"}' }}{{- ', ' if not loop.last else ']' + eos_token }}
{%- endfor %}
{%- elif message.role == 'assistant' %}
{{- message.content + eos_token }}
{%- elif message.role == 'tool' %}
{%- if message.tool_call_id is not defined or message.tool_call_id | length != 9 %}
{{- raise_exception('tool call ids are nine alphanumerics') }}
{%- endif %}
{{- '[TOOL_RESULTS]{"content": ' + (message.content | tojson) }}
{{- ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- endif %}
{%- endfor %}
"""

_FOLDER = Path(os.environ.get("AGENTRL_CHAT_TEMPLATES", "/nonexistent"))

_QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>")
_QWEN_IMAGE = "<|image_pad|>"
_QWEN_SEEING = (*_QWEN_SPECIAL, "<|vision_start|>", "<|vision_end|>", _QWEN_IMAGE)
_QWEN_ADDED = ("<tool_call>", "</tool_call>")
_QWEN3_ADDED = (*_QWEN_ADDED, "<tool_response>", "</tool_response>", "<think>", "</think>")


@dataclass(frozen=True)
class Family:
    """The token-level properties that distinguish a family of models."""

    template: str
    """Its source; `trl:NAME` is the real one from the package TRL, `llama.cpp:NAME` the one in the
    folder that `AGENTRL_CHAT_TEMPLATES` names (docs/models.md describes how to get it).
    """
    special: tuple[str, ...]
    added: tuple[str, ...]
    bos: str | None
    eos: str
    nfc: bool
    call: str
    """A call of the tool `price` as the model writes it; `%s` is the JSON of its arguments."""
    extra_stops: tuple[str, ...] = ()
    thinks: bool = False
    begun: bool = False
    """The prompt opens the block of thinking."""
    stops: tuple[str, str] | None = None
    """How the model ends content and calls, if not with `eos`."""
    item: str = '"%s"'
    """How a text argument is written inside a call; JSON by default."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    thought: str = "<think>\n%s\n</think>\n\n"
    """How the model writes its thinking."""
    said: str = "%s"
    """How it writes an answer after that; with a call, it then writes no content."""
    image: str = ""
    """The placeholder that its template writes for an image; none for text-only models."""
    moves_words: bool = False
    """The template moves or drops content alongside a call, so its result starts a branch."""

    def rewrites_call(self, words: str) -> bool:
        """Return whether the template writes a call differently than the model did."""
        return self.moves_words and bool(words.strip())

    @property
    def is_there(self) -> bool:
        """Whether the template is available."""
        package, _, name = self.template.partition(":")
        return package != "llama.cpp" or (_FOLDER / f"{name}.jinja").is_file()

    @property
    def source(self) -> str:
        """The template's source."""
        package, _, name = self.template.partition(":")
        if package == "llama.cpp":
            return (_FOLDER / f"{name}.jinja").read_text()
        if package != "trl":
            return self.template
        trl = find_spec("trl")
        assert trl is not None
        assert trl.origin is not None
        return (Path(trl.origin).parent / "chat_templates" / f"{name}.jinja").read_text()


_HERMES_CALL = '<tool_call>\n{"name": "price", "arguments": %s}\n</tool_call>'
FAMILIES = {
    "qwen25": Family(
        "trl:qwen2_5", _QWEN_SPECIAL, _QWEN_ADDED, None, "<|im_end|>", True, _HERMES_CALL
    ),
    "qwen3_stripped": Family(
        "trl:qwen3",
        *(_QWEN_SPECIAL, _QWEN3_ADDED, None, "<|im_end|>", True, _HERMES_CALL),
        extra_stops=("<|endoftext|>",),
        thinks=True,
    ),
    "llama3": Family(
        "trl:llama3_1",
        (
            *("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
            *("<|eom_id|>", "<|eot_id|>", "<|python_tag|>"),
        ),
        (),
        *("<|begin_of_text|>", "<|eot_id|>", False, '{"name": "price", "parameters": %s}'),
        extra_stops=("<|eom_id|>",),
    ),
    "mistral": Family(
        MISTRAL,
        (
            *("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
            *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]"),
        ),
        (),
        *("<s>", "</s>", False, '[TOOL_CALLS][{"name":"price", "arguments": %s}]'),
    ),
}
_XML_CALL = (
    "<tool_call>\n<function=price>\n<parameter=item>\n%s\n</parameter>\n</function>\n</tool_call>"
)
_QWEN35 = (_QWEN_SEEING, _QWEN3_ADDED, None, "<|im_end|>", True, _XML_CALL)
_DEEPSEEK = (
    (
        *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
        *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>"),
        *("<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<｜tool▁output▁begin｜>"),
        *("<｜tool▁output▁end｜>", "｜DSML｜"),
    ),
    ("<think>", "</think>"),
    *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", False),
)
_DSML_CALL = (
    '<｜DSML｜{0}>\n<｜DSML｜invoke name="price">\n'
    '<｜DSML｜parameter name="item" string="true">%s</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜{0}>"
)
_MISTRAL = (
    (
        *("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
        *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[TOOL_CONTENT]", "[CALL_ID]"),
        *("[ARGS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[THINK]", "[/THINK]", "[IMG]"),
    ),
    (),
    *("<s>", "</s>", False),
)
_KIMI = (
    (
        *("[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>"),
        *("<|im_middle|>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    ),
    ("<think>", "</think>"),
    *("[BOS]", "<|im_end|>", False),
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.price:0"
    "<|tool_call_argument_begin|>%s<|tool_call_end|><|tool_calls_section_end|>",
)
_GLM_SPECIAL = (
    *("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>"),
    "<|observation|>",
)
_GLM_ADDED = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>"),
    *("<arg_value>", "</arg_value>", "<tool_response>", "</tool_response>"),
)
_GLM_STOPS = ("<|user|>", "<|observation|>")
_LFM_SPECIAL = (
    *("<|startoftext|>", "<|im_start|>", "<|im_end|>", "<|tool_list_start|>"),
    *("<|tool_list_end|>", "<|tool_call_start|>", "<|tool_call_end|>"),
)
_LFM_CALL = "<|tool_call_start|>[price(item=%s)]<|tool_call_end|>"
REAL_FAMILIES = {
    "gpt_oss": Family(
        "trl:gptoss",
        (
            *("<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>"),
            *("<|start|>", "<|end|>", "<|message|>", "<|call|>"),
        ),
        (),
        *("<|startoftext|>", "<|return|>", False),
        " to=functions.price<|channel|>commentary json<|message|>%s",
        extra_stops=("<|call|>",),
        thinks=True,
        stops=("<|return|>", "<|call|>"),
        thought="<|channel|>analysis<|message|>%s<|end|><|start|>assistant",
        said="<|channel|>final<|message|>%s",
    ),
    "glm45": Family(
        *("trl:glm4moe", _GLM_SPECIAL, _GLM_ADDED, None, "<|endoftext|>", False),
        "<tool_call>price\n<arg_key>item</arg_key>\n<arg_value>%s</arg_value>\n</tool_call>",
        extra_stops=_GLM_STOPS,
        thinks=True,
        stops=_GLM_STOPS,
        item="%s",
    ),
    "glm47": Family(
        *("llama.cpp:GLM-4.7-Flash", _GLM_SPECIAL, _GLM_ADDED, None, "<|endoftext|>", False),
        "<tool_call>price<arg_key>item</arg_key><arg_value>%s</arg_value></tool_call>",
        extra_stops=_GLM_STOPS,
        thinks=True,
        begun=True,
        stops=_GLM_STOPS,
        item="%s",
    ),
    "mistral_small32": Family(
        *("llama.cpp:Mistral-Small-3.2-24B-Instruct-2506", *_MISTRAL),
        "[TOOL_CALLS]price[CALL_ID]abcdefgh1[ARGS]%s",
        image="[IMG]",
        moves_words=True,
    ),
    "ministral3": Family(
        *("llama.cpp:mistralai-Ministral-3-14B-Reasoning-2512", *_MISTRAL),
        "[TOOL_CALLS]price[ARGS]%s",
        thinks=True,
        thought="[THINK]%s[/THINK]",
        image="[IMG]",
    ),
    "deepseek31": Family(
        *("llama.cpp:deepseek-ai-DeepSeek-V3.1", *_DEEPSEEK),
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>price<｜tool▁sep｜>%s<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
    ),
    "deepseek32": Family(
        *("llama.cpp:deepseek-ai-DeepSeek-V3.2", *_DEEPSEEK),
        _DSML_CALL.format("function_calls"),
        thinks=True,
        begun=True,
        item="%s",
        variables={"thinking": True},
    ),
    "deepseek4": Family(
        *("llama.cpp:deepseek-ai-DeepSeek-V4", *_DEEPSEEK),
        _DSML_CALL.format("tool_calls"),
        thinks=True,
        begun=True,
        item="%s",
        variables={"thinking": True},
    ),
    "kimi_k2": Family("llama.cpp:moonshotai-Kimi-K2", *_KIMI),
    "kimi_k2_thinking": Family("llama.cpp:Kimi-K2-Thinking-hub", *_KIMI, thinks=True),
    "minimax_m2": Family(
        "llama.cpp:MiniMax-M2",
        ("]~!b[", "]~b]", "[e~["),
        ("<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>"),
        *("]~!b[", "[e~[", False),
        '<minimax:tool_call>\n<invoke name="price">\n<parameter name="item">%s</parameter>\n'
        "</invoke>\n</minimax:tool_call>",
        thinks=True,
        begun=True,
        item="%s",
    ),
    "qwen35": Family(
        *("trl:qwen3_5_think", *_QWEN35), thinks=True, begun=True, item="%s", image=_QWEN_IMAGE
    ),
    "qwen36": Family(
        *("trl:qwen3_6", *_QWEN35), thinks=True, begun=True, item="%s", image=_QWEN_IMAGE
    ),
    "qwen38": Family(
        *("trl:qwen3_8", *_QWEN35), thinks=True, begun=True, item="%s", image=_QWEN_IMAGE
    ),
    "qwen25_vl": Family(
        *("trl:qwen2_5_vl", _QWEN_SEEING, _QWEN_ADDED, None, "<|im_end|>", True, _HERMES_CALL),
        image=_QWEN_IMAGE,
    ),
    "qwen3_vl": Family(
        *("trl:qwen3_vl", _QWEN_SEEING, _QWEN_ADDED, None, "<|im_end|>", True, _HERMES_CALL),
        image=_QWEN_IMAGE,
    ),
    "gemma3": Family(
        "trl:gemma3",
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>"),
        (),
        *("<bos>", "<end_of_turn>", False, _HERMES_CALL),
        image="<start_of_image>",
    ),
    "nemotron3": Family("trl:nemotron_3_nano", *_QWEN35, thinks=True, begun=True, item="%s"),
    "nemotron3_super": Family("trl:nemotron_3_super", *_QWEN35, thinks=True, begun=True, item="%s"),
    "lfm2": Family(
        *("trl:lfm2", _LFM_SPECIAL, (), "<|startoftext|>", "<|im_end|>", False, _LFM_CALL)
    ),
    "lfm25": Family(
        *("trl:lfm2_2_5_v2", _LFM_SPECIAL, (), "<|startoftext|>", "<|im_end|>", False, _LFM_CALL)
    ),
    "gemma4": Family(
        "trl:gemma4_v5",
        (
            *("<bos>", "<eos>", "<|turn>", "<turn|>", "<|tool>", "<tool|>", "<|tool_call>"),
            *("<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>', "<|channel>"),
            *("<channel|>", "<|think|>", "<|image|>"),
        ),
        (),
        *("<bos>", "<turn|>", False),
        "<|tool_call>call:price{item:%s}<tool_call|>",
        extra_stops=("<|tool_response>",),
        stops=("<turn|>", "<|tool_response>"),
        item='<|"|>%s<|"|>',
        image="<|image|>",
        moves_words=True,
    ),
}
"""Released models: their own templates, from the packages that contain them."""


def write_family(directory: Path, name: str) -> Path:
    """Write a model directory: a vocabulary of bytes, some merges, the family's own tokens."""
    family = {**FAMILIES, **REAL_FAMILIES}[name]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("i", "n"), ("Ġ", "the"), ("<", "|"), ("|", ">"), (">", "Ċ")]
    words = [*alphabet, *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=merges))
    if family.nfc:
        tokenizer.normalizer = normalizers.NFC()
    split = Regex(r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(split, behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(family.special))
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=False) for t in family.added])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": family.eos,
        "chat_template": family.source,
        **({"bos_token": family.bos} if family.bos else {}),
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    stops = [tokenizer.token_to_id(text) for text in (family.eos, *family.extra_stops)]
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    if family.image:
        image = {"image_token_id": tokenizer.token_to_id(family.image)}
        (directory / "config.json").write_text(json.dumps(image))
    return directory
