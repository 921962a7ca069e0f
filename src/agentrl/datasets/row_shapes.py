"""Known data sets: how their rows are recognized, and where question and reference stand in them.

A row is recognized by its columns and values, never by the name of its file. Of the shapes that fit,
the one that needs the most columns decides, and of these the one that needs the most values; the
order of the table says nothing. `docs/datasets.md` lists the data sets.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from agentrl.datasets import row_fields as read
from agentrl.datasets.entries import BadEntry
from agentrl.datasets.row_fields import Columns, Row
from agentrl.schema.answer_form import BOXED, FENCE, TAG

_TABLE = r"""
data sets | needs | question | reference | list | reader
SWE-bench, SWE-Gym, SWE-smith | repo, problem_statement | | | | repository
R2E-Gym | docker_image, problem_statement | | | | repository
ToolACE, APIGen-MT, OpenThoughts | conversations, -query, -question, -problem, -answer | | | | imitation
s1K | question, solution, cot_type | | | | imitation
τ-bench | user_id, instruction, actions | | | | environment
WebShop | asin, instruction_text | | | | environment
Countdown | target, nums | | | | numbers
ToolBench | api_list, query | | | | calls of live services
IFEval | query, instruction_id_list | | | | constraints
Tülu 3 RLVR (IFEval) | messages, ground_truth.func_name | | | | constraints
DS-1000 | query, code_context | | | | harness
BigCodeBench | instruct_prompt, test | | | | harness
MBPP | test_list, code | | | | mbpp
HumanEval | query, test, entry_point, canonical_solution | query | | | human_eval
APPS, TACO | question, input_output | question | input_output | | unit_tests
Eurus-2-RL (code) | messages, answer, data_source, ability=code/coding | | answer | | unit_tests
CodeContests | description, public_tests | description | | | code_contests
LiveCodeBench | question_content, public_test_cases | question_content | | | live_code_bench
GSM8K | question, answer:worked | | answer | | worked
SVAMP | Body, Question, Answer | Body & Question | Answer | | math
ASDiv | body, question, answer | body & question | answer | | math
MGSM | question, answer_number | question | answer_number | | math
MultiArith | question, final_ans | question | final_ans | | math
LIMO, GSM-Plus | question, answer, solution:text | question | answer | | math
MATH, NuminaMath-CoT, NuminaMath-TIR | problem, solution:text, -answer, -expected_answer | problem | solution | | boxed
MATH-500, DeepScaleR, OpenR1-Math, NuminaMath-1.5, Omni-MATH | problem, answer, solution, -expected_answer | problem | answer | | math
Big-Math | problem, answer, llama8b_solve_rate | problem | answer | | math
AIME 2025, AMC, POLARIS | problem, answer, -expected_answer | problem | answer | | math
OpenMathReasoning | problem, expected_answer | problem | expected_answer | | math
DeepMath-103K, OlympiadBench | question, final_answer | question | final_answer | | math
TheoremQA | Question, Answer, Answer_type | Question | Answer | | math
AIME 2024 | Problem, Answer | Problem | Answer | | math
AMC 23 | question, answer:number, url | question | answer | | math
DAPO-Math-17k (processed) | query, solution, data_source, ability=math | query | solution | | math
verl's GSM8K and MATH, DAPO-Math-17k, Eurus-2-RL (mathematics) | messages, answer:value, data_source, ability=math | | answer | | math
Open-Reasoner-Zero | 0.value, 1.ground_truth | 0.value | 1.ground_truth.value | | math
INTELLECT-2, SYNTHETIC (mathematics) | query, verification_info.ground_truth | query | verification_info.ground_truth | | math
INTELLECT-2, SYNTHETIC (code, others) | query, verification_info | | | | verified
Tülu 3 RLVR (GSM8K, MATH) | messages, ground_truth, dataset=gsm8k/math | | ground_truth | | math
TeX in `answer` | answer:tex | | answer | | math
TeX in `solution` (DeepMath of TRL) | solution:tex | | solution | | math
TeX in `ground_truth` | ground_truth:tex | | ground_truth | | math
NQ-open | question, answer:texts | | answer | | first
WebQuestions | question, answers:texts | question | answers | | first
PopQA | question, possible_answers | | | possible_answers | first
FlashRAG (NQ, TriviaQA, PopQA, 2Wiki, Bamboogle) | question, golden_answers | | | golden_answers | first
Search-R1 | messages, answer.target, data_source | | answer.target | | first
SQuAD | question, context, answers.text | context & question | answers.text | | first
DROP | passage, question, answers_spans.spans | passage & question | answers_spans.spans | | first
BoolQ | question, answer:truth, passage | passage & question | answer | | truth
StrategyQA | question, answer:truth | question | answer | | truth
TriviaQA | question, answer.aliases | | answer.value | answer.aliases | aliases
MuSiQue | question, answer, answer_aliases | | answer | answer_aliases | hidden_aliases
HotpotQA, 2WikiMultihopQA | question, answer, supporting_facts, context | | answer | | hidden
Bamboogle | Question, Answer | | Answer | | short
FRAMES | Prompt, Answer | Prompt | Answer | | short
BIG-Bench Hard | input, target:value | input | target | | short
SimpleQA | problem, answer, metadata | problem | answer | | short
SimpleQA Verified | problem, answer, topic | problem | answer | | short
`problem`, and words in `answer` | problem, answer:words, -expected_answer | problem | answer | | short
TruthfulQA (generation) | question, best_answer, correct_answers | | | | sentences
BrowseComp | problem, answer, canary | problem | answer | | encrypted
xbench-DeepSearch | query, answer, canary | query | answer | | encrypted
HLE, exact match | question, answer, answer_type=exactMatch, rationale | | answer | | short
HLE, multiple choice | question, answer, answer_type=multipleChoice, rationale | | answer | | letter
MMLU | question, choices, answer | question | answer | choices | choices
MMLU-Pro | question, options, answer | question | answer | options | choices
RACE, QuALITY | article, question, options, answer | article & question | answer | options | choices
LogiQA | context, query, options, correct_option | context & query | correct_option | options | choices
ReClor | context, question, answers, label | context & question | label | answers | choices
ARC, CommonsenseQA | question, choices, answerKey | question | answerKey | choices | choices
OpenBookQA | question_stem, choices, answerKey | question_stem | answerKey | choices | choices
AQuA | question, options, correct | question | correct | options | choices
MathQA | Problem, options, correct | Problem | correct | options | choices
MedMCQA | question, opa, cop | question | cop | opa & opb & opc & opd | choices
PIQA | goal, sol1, label | goal | label | sol1 & sol2 | choices
HellaSwag | ctx, endings, label | ctx | label | endings | from_0
WinoGrande | sentence, option1, answer | sentence | answer | option1 & option2 | from_1
SocialIQA | context, question, answerA, label | context & question | label | answerA & answerB & answerC | from_1
GPQA | Question, Correct Answer, Incorrect Answer 1 | Question | Correct Answer | Incorrect Answer 1 & Incorrect Answer 2 & Incorrect Answer 3 | drawn_choices
SciQ | question, correct_answer, distractor1 | question | correct_answer | distractor1 & distractor2 & distractor3 | drawn_choices
TruthfulQA (multiple choice) | question, mc1_targets.choices | question | mc1_targets.labels | mc1_targets.choices | drawn_choices
xLAM function calling | query, tools, answers | query | answers | tools | calls
BFCL | question, function | question | ground_truth | function | calls
GAIA | Question, Final answer | Question | Final answer | | attached
"""
"""Needs: `column` is there; `-column` is not; `column=word/word` holds one of these words, in any
case; `column.key` holds an object with this key, itself or as JSON; `column:kind` holds a value of a
kind of `_KINDS`. Question, reference and list are columns, or keys in them (`a & b`: several); without
one, the field stays as it is.
"""

_TEX = re.compile(
    r"\A\$[^$]+\$\Z|\A\\\(.+\\\)\Z|\\(?:[dt]?frac|sqrt|boxed|pi|infty|times|cdot|left|circ)(?![a-z])"
)
_WORDS = re.compile(
    r"(?![+-]?[\d.,/]+(?!\w)[^\d]*\Z)(?!.*[\\$^_={}+*<>|])(?=.*[^\W\d_]{3})"
    r"(?!(?:sqrt|log|sin|cos|tan|exp|inf|infinity|yes|odd|even)\b).+",
    re.DOTALL | re.IGNORECASE,
)
"""A name, a date or a sentence: neither a formula nor a number with its unit."""
_KINDS: Mapping[str, Callable[[Any], bool]] = {
    "number": lambda value: isinstance(value, int | float),
    "value": lambda value: isinstance(value, str | int | float),
    "text": lambda value: isinstance(value, str) and bool(value.strip()),
    "texts": lambda value: (
        isinstance(value, list) and bool(value) and all(isinstance(one, str) for one in value)
    ),
    "truth": lambda value: isinstance(value, bool),
    "tex": lambda value: isinstance(value, str) and bool(_TEX.search(value.strip())),
    "words": lambda value: isinstance(value, str) and bool(_WORDS.fullmatch(value.strip())),
    "worked": lambda value: read.gsm8k_reference(value) is not None,
}


class RowReader(NamedTuple):
    """One way to read rows, and what follows from it."""

    fields: Callable[[Row, Columns, Path | None], Row] | None
    """Returns the fields that differ from a plain row's, of a row and the folder of its file; None
    refuses the row."""
    explanation: str
    """What the reference is, for the user, or what to do with rows that cannot be read."""
    scorer: str = "em"
    answer_schema: str = TAG
    """Schema if the text asks for none."""
    id: str = "id"
    """Column of the id, before the `_ID_COLUMNS`."""


def _code(fields: Callable[[Row, Columns, Path | None], Row], identity: str = "id") -> RowReader:
    explanation = (
        "the reference holds the unit tests; your scorer runs them "
        "(--scorer_module, --default_scorer)"
    )
    return RowReader(fields, explanation, "", FENCE, identity)


_REFERENCE = "the reference is `{0.answer}`"
_FIRST = "the reference is the first of `{0.answer}{0.listed}`; the others count as right"
_SEARCH = "the paragraphs are not shown (give the model a search tool)"
_CHOICES = (
    "the choices in `{0.listed}` are written into the question; `{0.answer}` becomes a letter"
)
_READERS = {
    "math": RowReader(read.math, _REFERENCE, "math", BOXED),
    "worked": RowReader(read.math, "the reference is what follows the last ####", "math", BOXED),
    "boxed": RowReader(
        partial(read.math, boxed=True),
        "the reference is the last \\boxed{{}} of `{0.answer}`",
        "math",
        BOXED,
    ),
    "short": RowReader(read.short, _REFERENCE),
    "truth": RowReader(read.short, "`{0.answer}` is yes or no; true and false count as well"),
    "first": RowReader(read.short, _FIRST),
    "aliases": RowReader(read.short, f"{_REFERENCE}; its aliases count as right", id="question_id"),
    "hidden": RowReader(read.short, f"{_REFERENCE}; {_SEARCH}"),
    "hidden_aliases": RowReader(read.short, f"`{{0.listed}}` count as right; {_SEARCH}"),
    "encrypted": RowReader(read.encrypted, "question and reference are decrypted with `canary`"),
    "letter": RowReader(
        read.short,
        "the reference is the letter in `{0.answer}`; the question holds its choices",
        "choice",
    ),
    "choices": RowReader(read.choices, _CHOICES, "choice"),
    "from_0": RowReader(partial(read.choices, first=0), _CHOICES, "choice"),
    "from_1": RowReader(partial(read.choices, first=1), _CHOICES, "choice"),
    "drawn_choices": RowReader(
        read.drawn_choices,
        "the choices are written into the question in an order drawn from its text; the reference is "
        "a letter",
        "choice",
    ),
    "calls": RowReader(
        read.calls,
        "the functions in `{0.listed}` are written into the question; the reference is `{0.answer}`",
        "calls",
    ),
    "attached": RowReader(
        read.attached, f"{_REFERENCE}; attachments are shown (images) or added (text)", "gaia"
    ),
    "mbpp": _code(read.mbpp),
    "human_eval": _code(read.human_eval),
    "unit_tests": _code(read.unit_tests),
    "code_contests": _code(read.code_contests),
    "live_code_bench": _code(read.live_code_bench, "question_id"),
}
_REFUSED = r"""
repository | its reward needs the repository and its tests; convert the tasks to Harbor's format and give --env harbor:FOLDER (docs/environments.md)
harness | its tests need their own harness; convert the tasks to Harbor's format and give --env harbor:FOLDER (docs/environments.md)
environment | its reward needs its environment, with tools and a state: give it as --env (docs/environments.md)
numbers | numbers and a target, without a question: give --env reasoning_gym:countdown
imitation | something to imitate, without a reference: learn from it with `agentrl sft --train_file`
calls of live services | requests without a reference: give the services as tools (--mcp_servers), and the requests alone to a judge (--agent_config_path)
constraints | its reward checks named constraints, which no built-in scorer does: leave the row out, or give it a `scorer` of --scorer_module
verified | `verification_info` holds no `ground_truth`, so its reward needs a checker of its own: leave the row out
sentences | its answers are sentences, which no comparison of text pays in other words: use its configuration `multiple_choice`
"""
_READERS |= {
    name: RowReader(None, text)
    for name, _, text in (line.partition(" | ") for line in _REFUSED.strip().splitlines())
}
_PICTURES = ("Picture", *(f"image_{number}" for number in range(1, 10)))
_ID_COLUMNS = ("id", "ID", "unique_id", "_id", "Record ID")


@dataclass(frozen=True)
class RowShape:
    """How the rows of some data sets are recognized and read: a line of the table."""

    name: str
    """The data sets, as the start of a run names them."""
    present: frozenset[str]
    absent: frozenset[str]
    values: Mapping[str, Callable[[Any], bool]]
    """What the values of columns must be."""
    at: Columns
    reader: RowReader

    @property
    def explanation(self) -> str:
        """See `RowReader`."""
        return self.reader.explanation.format(self.at)

    @property
    def rank(self) -> tuple[int, int]:
        """The numbers of columns and of values that it needs."""
        return len(self.present), len(self.values)

    def holds(self, row: Row) -> bool:
        """Return whether the values of a row with its columns are as needed."""
        return all(is_right(row[column]) for column, is_right in self.values.items())

    def fields(self, row: Row, folder: Path | None, *, has_scorer: bool) -> dict[str, Any]:
        """Return the fields that differ from those of a plain row; raises BadEntry if it cannot be used.

        Rows of programs are for a scorer of the user, who must have chosen one.
        """
        if self.reader.fields is None:
            raise BadEntry(f"a row of {self.name}: {self.explanation}")
        if self.reader.answer_schema == FENCE and not has_scorer:
            raise BadEntry(
                f"a program with unit tests ({self.name}): no built-in scorer runs tests of this form; "
                "give --scorer_module and --default_scorer with one that does, in a sandbox, or convert "
                "the tasks and give --env harbor:FOLDER"
            )
        fields = {"id": read.first_of(row, self.reader.id, *_ID_COLUMNS)}
        fields["images"] = [row[name] for name in _PICTURES if row.get(name)] or None
        fields |= self.reader.fields(row, self.at, folder)
        return {key: value for key, value in fields.items() if value is not None}


def _shape(line: str) -> RowShape:
    name, needs, query, answer, listed, reader = (cell.strip() for cell in line.split("|"))
    absent = {need[1:] for need in needs.split(", ") if need.startswith("-")}
    present = {
        column: (sign, wanted)
        for column, sign, wanted in re.findall(r"(?:^|, )([^-=.:,][^=.:,]*)([=.:]?)([^,]*)", needs)
    }
    values = {column: _is_right(*need) for column, need in present.items() if need[0]}
    at = Columns(query, answer, listed)
    return RowShape(name, frozenset(present), frozenset(absent), values, at, _READERS[reader])


def _is_right(sign: str, wanted: str) -> Callable[[Any], bool]:
    if sign == ":":
        return _KINDS[wanted]
    if sign == ".":
        return lambda value: wanted in read.decoded(value)
    words = wanted.casefold().split("/")
    return lambda value: str(value).casefold() in words


SHAPES = sorted(
    map(_shape, _TABLE.strip().splitlines()[1:]), key=lambda shape: shape.rank, reverse=True
)


def shapes_of(row: Row) -> list[RowShape]:
    """Return the shapes that fit a row, the best first."""
    return [shape for shape in _with_columns(frozenset(row)) if shape.holds(row)]


@lru_cache
def _with_columns(columns: frozenset[str]) -> list[RowShape]:
    return [one for one in SHAPES if one.present <= columns and not one.absent & columns]


def shape_of(row: Row) -> RowShape | None:
    """Return the shape of a row, or None for a plain row, whose fields are taken as they are."""
    return next(iter(shapes_of(row)), None)


def explanation_of(name: str) -> str:
    """Return the explanation of the shape with this name, or "" if there is none."""
    return next((shape.explanation for shape in SHAPES if shape.name == name), "")
