"""What the start of a run says about how its questions are read: a short block for the first one."""

from pathlib import Path
from typing import Any

from agentrl.config.sections import RootConfig
from agentrl.datasets.entries import folder_of, read_entries
from agentrl.datasets.question import Question, question_of
from agentrl.datasets.row_shapes import explanation_of
from agentrl.schema.answer_form import added_instruction, is_asked, written

_MAX_CHARS = 100
_MAX_ALIASES = 3


def first_question_lines(config: RootConfig, path: Path | None) -> list[str]:
    """Return the block: question, reference, scorer, and where the answer is looked for."""
    return [] if path is None else _lines(path, _first(config, path), config)


def first_instruction(config: RootConfig) -> str:
    """Return what a run adds to its first question, or ""."""
    path = config.data.train_file
    if path is None or config.agents.has_agent:
        return ""
    question, setting = _first(config, path), config.rollout.answer_instruction
    told = (question.query, question.system_prompt)
    return added_instruction(setting, question.answer_schema, *told)


def _first(config: RootConfig, path: Path) -> Question:
    where, entry = next(read_entries(path))
    return question_of(entry, config.data, where, folder_of(path))


def _lines(path: Path, question: Question, config: RootConfig) -> list[str]:
    explanation = explanation_of(question.read_as)
    known = f", read as {question.read_as} ({explanation})" if explanation else ""
    reference = "none" if question.answer is None else _short(question.answer)
    if question.aug_answers:
        shown = ", ".join(_short(one) for one in question.aug_answers[:_MAX_ALIASES])
        more = len(question.aug_answers) - _MAX_ALIASES
        reference += f"; also right: {shown}" + (f" and {more} more" if more > 0 else "")
    system = [f"  system     {_short(question.system_prompt)}"] if question.system_prompt else []
    return [
        f"first question of {path}{known}:",
        *system,
        f"  question   {_short(question.query)}",
        f"  reference  {reference} (scorer `{question.scorer}`)",
        f"  answer     {_place(question, config)}",
    ]


def _place(question: Question, config: RootConfig) -> str:
    setting = config.rollout.answer_instruction
    place = f"looked for in {written(question.answer_schema)}"
    if config.agents.has_agent:
        return f"{place} of what the agent returns, else all of it"
    told = (question.query, question.system_prompt)
    added = added_instruction(setting, question.answer_schema, *told)
    if added:
        return f"{place}; added to the question: {_short(added)} (--answer_instruction none turns it off)"
    if any(is_asked(question.answer_schema, text) for text in told):
        return f"{place}, as the question or the system prompt asks"
    return (
        f"{place}; neither the question nor the system prompt says so, and --answer_instruction is "
        f"{setting}: a model that was not trained to write it gets no reward"
    )


def _short(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]} ..."
