"""The documents of AWorld Train and of the original AgentRL: their blocks of code.

They belong to their projects and lie beside the checkout, or in AGENTRL_ORIGIN_DOCUMENTS.
"""

import os
import re
from pathlib import Path

import pytest
from support.doc_blocks import DOCS

FOLDER = Path(os.environ.get("AGENTRL_ORIGIN_DOCUMENTS", DOCS.parents[1] / "shared/seeds"))
README, PAGE, CHINESE_README, TRAINER_PAGE, AGENTRL_README = range(5)
_FENCED = re.compile(r"^( *)```\S*\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`((?:timeout \d+ )?python [^`]+)`")

# Two documents are texts of web pages, without marks: the first and the last words of each block.
_SPANS = {
    PAGE: [
        ("pip install -e .", ""),
        ("git clone https://github.com/inclusionAI/AWorld", "~/AWorld"),
        ("cd ~/AWorld/env/gaia-mcp-server", "cp .env_template .env"),
        ("cd ~/AWorld/env\n", "sh run-local.sh"),
        ("export MCP_SERVER_URL", "/mcp"),
        ("gaia_env_config, gaia_env_servers =", "'browser-server', ...]"),
        ("llm_base_url=self", "model_name(),"),
        ("from aworld.agents.llm_agent", "mcp_servers=gaia_env_servers,\n)"),
        ("- name: gaia_agent", "GaiaAgentLoop"),
        ("# Agent config", "agent.yaml"),
        ("import re\n", "else:\nreturn 0.0\n"),
        ("reward_fn_name=gaia", "gaia_reward_function.py"),
        ("#!/usr/bin/env bash", '"$@"'),
        ("bash run.sh", ""),
    ],
    TRAINER_PAGE: [
        ("trainer = AgentTrainer(", "\n)"),
        ("def train(self) -> None:", "if not initialized"),
        ("AgentTrainer.register_processor(", "Subclass of `TrainerProcessor`"),
        ("AgentTrainer.unregister_processor(", ")"),
        ("# train/adapter/your_framework/my_trainer.py", "'warmup_steps': 1000,\n        }"),
        ("# train/adapter/your_framework/__init__.py", "['MyFrameworkTrainer']"),
        ("from train.integration.my_framework", "train_engine_name='my_framework'\n)"),
        ("# train/trainer/__init__.py", "('my_framework', MyFrameworkTrainer)"),
    ],
}


def origin_blocks(document: int) -> list[str]:
    """Return the blocks of code and the commands of a document, in its order."""
    text = _text(document)
    if document not in _SPANS:
        found = [(match.start(), _unindented(match)) for match in _FENCED.finditer(text)]
        found += [(match.start(), match[1]) for match in _INLINE.finditer(_FENCED.sub("", text))]
        return [block for _, block in found]
    blocks, end = [], 0
    for first, last in _SPANS[document]:
        start = text.index(first, end)
        end = text.index(last, start + len(first)) + len(last)
        blocks.append(text[start:end] + "\n")
    return blocks


def outside_of_blocks(document: int) -> str:
    """Return what a document says between its blocks."""
    text = _text(document)
    for block in origin_blocks(document):
        text = text.replace(block.rstrip("\n"), "", 1)
    return text


def _text(document: int) -> str:
    paths = sorted(FOLDER.glob("*.txt"))
    if len(paths) != 5:
        pytest.skip("the documents are not beside the checkout")
    return paths[document].read_text(encoding="utf-8")


def _unindented(match: re.Match[str]) -> str:
    return re.sub(f"^{match[1]}", "", match[2], flags=re.MULTILINE)
