"""Rows of our own making in the true form of each known data set, and how they must be read."""

import base64
import hashlib
import json
import pickle
import zlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Known:
    """A row of a data set, what it becomes, and a right and a wrong reply of a model."""

    data_set: str
    row: dict[str, Any]
    question: str
    """A part of the question."""
    reference: Any
    scorer: str
    schema: str
    right: str
    wrong: str
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class Refused:
    """A row of a data set that cannot be read, and a part of what the user is told."""

    data_set: str
    row: dict[str, Any]
    advice: str


def hidden(text: str, key: bytes) -> str:
    """Return a text as BrowseComp and xbench encrypt it."""
    plain = text.encode()
    return base64.b64encode(
        bytes(one ^ key[at % len(key)] for at, one in enumerate(plain))
    ).decode()


def verl(source: str, ability: str, prompt: str, truth: Any) -> dict[str, Any]:
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": prompt}],
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": "train", "index": 0},
    }


def boxed(text: str) -> str:
    return f"So it is $\\boxed{{{text}}}$."


def tag(text: str) -> str:
    return f"I think so. <answer>{text}</answer>"


WORKED = "It sold 12*2=<<12*2=24>>24 in May.\nIn all 1,000+24=<<1000+24=1024>>1,024.\n#### 1,024"
PROBLEM = "A pond holds 3 ducks and 5 geese. How many birds are there?"
SOLVED = "There are $3+5=\\boxed{8}$ birds."
CITIES = {"text": ["Lyon", "Paris", "Nice", "Lille"], "label": ["A", "B", "C", "D"]}
TOOL = {"name": "weather", "description": "Of a city", "parameters": {"city": {"type": "str"}}}
CALL = {"name": "weather", "arguments": {"city": "Oslo"}}
PARAGRAPHS = {"title": ["Lamps"], "sentences": [["A lamp glows."]]}
WHERE = "Which city is the capital of France?"
TURNS: dict[str, Any] = {
    "0": {"from": "human", "value": PROBLEM},
    "1": {"from": "assistant", "ground_truth": {"value": "8"}},
}
RIGHT_CALL = tag(json.dumps([CALL]))
WRONG_CALL = tag('[{"name": "weather", "arguments": {}}]')


def math(data_set: str, schema: str = "boxed", **row: Any) -> Known:
    reply = {"boxed": boxed, "Answer:": "Answer: {}".format, "####": "#### {}".format}[schema]
    asks = str(row.get("prompt", ""))
    part = "birds" if "birds" in asks or "birds" in str(row) else ""
    return Known(data_set, row, part, "8", "math", schema, reply("8"), reply("9"))


def qa(data_set: str, aliases: tuple[str, ...] = (), **row: Any) -> Known:
    right = aliases[-1] if aliases else "paris"
    return Known(
        data_set, row, "capital", "Paris", "em", "answer", tag(right), tag("Rome"), aliases
    )


def letters(data_set: str, reference: str = "B", **row: Any) -> Known:
    wrong = "C" if reference != "C" else "D"
    return Known(
        data_set,
        row,
        "B. ",
        reference,
        "choice",
        "answer",
        tag(f"({reference})"),
        tag(wrong),
        ("Paris",),
    )


KNOWN = (
    Known(
        "GSM8K",
        {"question": "How many lamps did the shop sell in all?", "answer": WORKED},
        "lamps",
        "1024",
        "math",
        "boxed",
        boxed("1024"),
        boxed("24"),
    ),
    math("MATH", problem=PROBLEM, level="Level 1", type="Prealgebra", solution=SOLVED),
    math(
        "MATH-500",
        problem=PROBLEM,
        solution=SOLVED,
        answer="8",
        subject="Algebra",
        level=2,
        unique_id="test/algebra/1.json",
    ),
    math("AIME 2024", ID="2024-I-1", Problem=PROBLEM, Solution=SOLVED, Answer=8),
    math("AMC 23", id=0, question=PROBLEM, answer=8.0, url="https://example.com/amc"),
    math("DeepScaleR", problem=PROBLEM, answer="8", solution=SOLVED),
    math(
        "OpenR1-Math-220k",
        problem=PROBLEM,
        solution=SOLVED,
        answer="8",
        problem_type="Algebra",
        question_type="math-word-problem",
        source="olympiads",
        uuid="1",
        generations=["..."],
        messages=[{"role": "user", "content": PROBLEM}],
    ),
    math(
        "NuminaMath-CoT",
        source="cn_k12",
        problem=PROBLEM,
        solution=SOLVED,
        messages=[{"role": "user", "content": PROBLEM}, {"role": "assistant", "content": SOLVED}],
    ),
    math(
        "NuminaMath-1.5",
        problem=PROBLEM,
        solution=SOLVED,
        answer="8",
        problem_type="Algebra",
        question_type="math-word-problem",
        problem_is_valid="Yes",
        source="olympiads",
    ),
    math(
        "Big-Math",
        problem=PROBLEM,
        answer="8",
        source="orca_math",
        domain=["Algebra"],
        llama8b_solve_rate=0.5,
    ),
    math(
        "OpenMathReasoning",
        problem=PROBLEM,
        expected_answer="8",
        generated_solution=SOLVED,
        problem_type="has_answer_extracted",
        pass_rate_72b_tir="0.9",
    ),
    math(
        "Omni-MATH",
        domain=["Algebra"],
        difficulty=3.0,
        problem=PROBLEM,
        solution=SOLVED,
        answer="8",
        source="imo",
    ),
    math(
        "verl: GSM8K",
        "####",
        **verl(
            "openai/gsm8k",
            "math",
            f'{PROBLEM} Let\'s think step by step and output the final answer after "####".',
            "8",
        ),
    ),
    math(
        "verl: MATH",
        **verl(
            "DigitalLearningGmbH/MATH-lighteval",
            "math",
            f"{PROBLEM} Let's think step by step and output the final answer within \\boxed{{}}.",
            "8",
        ),
    ),
    math(
        "DAPO-Math-17k",
        "Answer:",
        **verl(
            "math_dapo",
            "MATH",
            "Solve the following math problem step by step. The last line of your response should be of "
            "the form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
            f'{PROBLEM}\n\nRemember to put your answer on its own line after "Answer:".',
            "8",
        ),
    ),
    math(
        "DAPO-Math-17k-Processed",
        prompt=PROBLEM,
        solution="8",
        data_source="math_dapo",
        source_prompt=[],
        ability="MATH",
        reward_model={"ground_truth": "8", "style": "rule"},
        extra_info={"index": "1"},
    ),
    math(
        "Eurus-2-RL (mathematics)",
        **verl(
            "numina_olympiads",
            "math",
            f"{PROBLEM}\n\nPresent the answer in LaTex format: \\boxed{{Your answer}}",
            "8",
        ),
    ),
    qa("NQ-open", ("City of Paris",), question=WHERE, answer=["Paris", "City of Paris"]),
    qa(
        "NQ, PopQA, ... (FlashRAG)",
        ("City of Paris",),
        id="dev_0",
        question=WHERE,
        golden_answers=["Paris", "City of Paris"],
    ),
    qa(
        "TriviaQA",
        ("Paname",),
        question=WHERE,
        question_id="tc_1",
        question_source="web",
        entity_pages={},
        search_results={},
        answer={
            "value": "Paris",
            "aliases": ["Paname", "Paris"],
            "normalized_value": "paris",
            "normalized_aliases": ["paname"],
            "type": "WikipediaEntity",
        },
    ),
    qa(
        "HotpotQA",
        id="5a7",
        question=WHERE,
        answer="Paris",
        type="bridge",
        level="hard",
        supporting_facts={"title": ["Lamps"], "sent_id": [0]},
        context=PARAGRAPHS,
    ),
    qa(
        "2WikiMultihopQA",
        _id="13f",
        question=WHERE,
        answer="Paris",
        type="compositional",
        supporting_facts=[["Lamps", 0]],
        context=[["Lamps", ["A lamp glows."]]],
        evidences=[],
    ),
    qa(
        "MuSiQue",
        ("Paname",),
        id="2hop__1",
        question=WHERE,
        answer="Paris",
        answer_aliases=["Paname"],
        answerable=True,
        paragraphs=[],
        question_decomposition=[],
    ),
    qa(
        "PopQA",
        ("Paname",),
        id=7,
        question=WHERE,
        subj="France",
        prop="capital",
        obj="Paris",
        possible_answers='["Paris", "Paname"]',
        s_pop=1,
        o_pop=2,
    ),
    qa("Bamboogle", Question=WHERE, Answer="Paris"),
    qa(
        "Search-R1 (NQ, HotpotQA)",
        ("Paname",),
        **verl(
            "nq",
            "fact-reasoning",
            "Answer the given question. You can search with <search> query </search>. Provide the answer "
            f"inside <answer> and </answer>, for example <answer> Beijing </answer>. Question: {WHERE}\n",
            {"target": ["Paris", "Paname"]},
        ),
    ),
    qa("SimpleQA", metadata="{'topic': 'Geography'}", problem=WHERE, answer="Paris"),
    qa(
        "BrowseComp",
        problem=hidden(WHERE, hashlib.sha256(b"c-1").digest()),
        answer=hidden("Paris", hashlib.sha256(b"c-1").digest()),
        problem_topic="Geography",
        canary="c-1",
    ),
    qa(
        "xbench-DeepSearch",
        id="1",
        prompt=hidden(WHERE, b"c-1"),
        answer=hidden("Paris", b"c-1"),
        reference_steps="",
        canary="c-1",
    ),
    qa("SimpleQA Verified", original_index=5, problem=WHERE, answer="Paris", topic="Geography"),
    qa("`problem`, and words in `answer`", problem=WHERE, answer="Paris"),
    qa("FRAMES", Prompt=WHERE, Answer="Paris", reasoning_types="Tabular", wiki_links="[]"),
    qa(
        "WebQuestions",
        ("City of Paris",),
        url="http://www.example.com",
        question=WHERE,
        answers=["Paris", "City of Paris"],
    ),
    Known(
        "SQuAD",
        {
            "id": "5733",
            "title": "France",
            "context": "Paris is its capital.",
            "question": "Which city?",
            "answers": {"text": ["Paris", "Paris"], "answer_start": [0, 0]},
        },
        "Paris is its capital.\n\nWhich city?",
        "Paris",
        "em",
        "answer",
        tag("paris"),
        tag("Rome"),
    ),
    Known(
        "DROP",
        {
            "section_id": "nfl_1",
            "query_id": "1",
            "passage": "Ann ran 3 yards.",
            "question": "How many yards?",
            "answers_spans": {"spans": ["3", "3 yards"], "types": ["number", "span"]},
        },
        "Ann ran 3 yards.\n\nHow many",
        "3",
        "em",
        "answer",
        tag("3 yards"),
        tag("4"),
        ("3 yards",),
    ),
    Known(
        "BoolQ",
        {"question": "do lamps glow", "answer": True, "passage": "A lamp glows."},
        "A lamp glows.\n\ndo lamps glow",
        "yes",
        "em",
        "answer",
        tag("True"),
        tag("No"),
        ("true",),
    ),
    Known(
        "StrategyQA",
        {"qid": "1", "term": "Lamp", "question": "Do lamps eat?", "answer": False, "facts": []},
        "lamps",
        "no",
        "em",
        "answer",
        tag("No."),
        tag("yes"),
        ("false",),
    ),
    Known(
        "BIG-Bench Hard",
        {"input": "Which one?\nOptions:\n(A) Lyon\n(B) Paris", "target": "(B)"},
        "Options",
        "(B)",
        "em",
        "answer",
        tag("(B)"),
        tag("(A)"),
    ),
    Known(
        "SVAMP",
        {
            "ID": "chal-1",
            "Body": "A pond holds 3.0 ducks and 5.0 geese.",
            "Question": "How many birds?",
            "Equation": "( 3.0 + 5.0 )",
            "Answer": "8.0",
            "Type": "Addition",
        },
        "geese.\n\nHow many birds?",
        "8.0",
        "math",
        "boxed",
        boxed("8"),
        boxed("9"),
    ),
    math(
        "ASDiv",
        body="A pond holds 3 ducks and 5 geese.",
        question="How many birds?",
        solution_type="Addition",
        answer="8 (birds)",
        formula="3+5=8",
    ),
    math("MGSM", question=PROBLEM, answer=None, answer_number=8, equation_solution=None),
    math("MultiArith", question=PROBLEM, final_ans="8"),
    math("GSM-Plus", question=PROBLEM, solution="3+5=8", answer="8", perturbation_type="digits"),
    math("LIMO", question=PROBLEM, solution="It is 8.", answer="8"),
    math("NuminaMath-TIR", problem=PROBLEM, solution=SOLVED, messages=[]),
    math("AIME 2025", problem=PROBLEM, answer="8"),
    math("DeepMath-103K", question=PROBLEM, final_answer="8", difficulty=4.5, topic="Algebra"),
    math(
        "OlympiadBench",
        id=1606,
        question=PROBLEM,
        solution=["..."],
        final_answer=["8"],
        context=None,
        is_multiple_answer=False,
    ),
    math("TheoremQA", Question=PROBLEM, Answer="8", Answer_type="integer", Picture=None),
    math("Open-Reasoner-Zero", **TURNS),
    math(
        "INTELLECT-2, SYNTHETIC-1 (mathematics)",
        task_id="1",
        prompt=PROBLEM,
        verification_info='{"ground_truth": "8"}',
    ),
    math(
        "Tülu 3 RLVR (GSM8K)",
        messages=[{"role": "user", "content": PROBLEM}],
        ground_truth="8",
        dataset="gsm8k",
    ),
    *(
        Known(name, row, "birds", "$8$", "math", "boxed", boxed("8"), boxed("9"))
        for name, row in (
            ("MinervaMath and others, TeX in `answer`", {"question": PROBLEM, "answer": "$8$"}),
            (
                "DeepMath of TRL, TeX in `solution`",
                {"prompt": [{"role": "user", "content": PROBLEM}], "solution": "$8$"},
            ),
            ("others, TeX in `ground_truth`", {"question": PROBLEM, "ground_truth": "$8$"}),
        )
    ),
    letters("MMLU", question=WHERE, subject="geography", choices=CITIES["text"], answer=1),
    letters(
        "MMLU-Pro",
        question_id=70,
        question=WHERE,
        options=CITIES["text"],
        answer="B",
        answer_index=1,
        cot_content="",
        category="geography",
        src="ori",
    ),
    letters(
        "ARC",
        id="Mercury_1",
        question=WHERE,
        answerKey="2",
        choices={"text": CITIES["text"], "label": ["1", "2", "3", "4"]},
    ),
    letters(
        "CommonsenseQA",
        id="1afa",
        question=WHERE,
        question_concept="city",
        choices=CITIES,
        answerKey="B",
    ),
    letters(
        "GPQA",
        "C",
        **{
            "Question": WHERE,
            "Correct Answer": "Paris",
            "Record ID": "rec1",
            "Incorrect Answer 1": "Lyon",
            "Incorrect Answer 2": "Nice",
            "Incorrect Answer 3": "Lille",
        },
    ),
    letters("OpenBookQA", id="7-980", question_stem=WHERE, choices=CITIES, answerKey="B"),
    letters(
        "RACE, QuALITY",
        example_id="h1",
        article="France has a capital.",
        answer="B",
        question=WHERE,
        options=CITIES["text"],
    ),
    letters(
        "LogiQA",
        context="France has one.",
        query=WHERE,
        options=CITIES["text"],
        correct_option=1,
    ),
    letters("ReClor", context="France has one.", question=WHERE, answers=CITIES["text"], label=1),
    letters(
        "AQuA",
        question=WHERE,
        options=["A)Lyon", "B)Paris", "C)Nice", "D)Lille", "E)Metz"],
        rationale="...",
        correct="B",
    ),
    letters(
        "MathQA",
        Problem=WHERE,
        Rationale="...",
        options="a ) Lyon , b ) Paris , c ) Nice",
        correct="b",
    ),
    letters(
        "MedMCQA",
        id="e9",
        question=WHERE,
        opa="Lyon",
        opb="Paris",
        opc="Nice",
        opd="Lille",
        cop=1,
    ),
    letters("PIQA", goal=WHERE, sol1="Lyon", sol2="Paris", label=1),
    letters("HellaSwag", ind=1, ctx_a="", ctx=WHERE, endings=CITIES["text"], label="1"),
    letters("WinoGrande", sentence="_ is it.", option1="Lyon", option2="Paris", answer="2"),
    letters(
        "SocialIQA",
        context="Ann asks.",
        question=WHERE,
        answerA="Lyon",
        answerB="Paris",
        answerC="Nice",
        label="2",
    ),
    letters(
        "SciQ",
        "C",
        question=WHERE,
        distractor3="Lille",
        distractor1="Lyon",
        distractor2="Nice",
        correct_answer="Paris",
        support="",
    ),
    letters(
        "TruthfulQA (multiple choice)",
        "C",
        question=WHERE,
        mc1_targets={"choices": ["Paris", "Lyon", "Nice", "Lille"], "labels": [1, 0, 0, 0]},
        mc2_targets={},
    ),
    Known(
        "xLAM function calling 60k",
        {
            "id": 1,
            "query": "Weather in Oslo?",
            "tools": json.dumps([TOOL]),
            "answers": json.dumps([CALL]),
        },
        "Of a city",
        [CALL],
        "calls",
        "answer",
        RIGHT_CALL,
        WRONG_CALL,
    ),
    Known(
        "BFCL (with possible_answer)",
        {
            "id": "simple_0",
            "question": [[{"role": "user", "content": "Weather in Oslo?"}]],
            "function": [TOOL],
            "ground_truth": [{"weather": {"city": ["Oslo", "oslo"], "unit": ["", "C"]}}],
        },
        "Of a city",
        [{"weather": {"city": ["Oslo", "oslo"], "unit": ["", "C"]}}],
        "calls",
        "answer",
        RIGHT_CALL,
        WRONG_CALL,
    ),
    Known(
        "GAIA",
        {
            "task_id": "g-1",
            "Question": "How many birds?",
            "Level": "1",
            "Final answer": "8",
            "file_name": "",
            "file_path": "",
            "Annotator Metadata": {},
        },
        "birds",
        "8",
        "gaia",
        "answer",
        tag("8"),
        tag("9"),
    ),
    Known(
        "HLE (exact match)",
        {
            "id": "h-1",
            "question": WHERE,
            "image": "",
            "answer": "Paris",
            "answer_type": "exactMatch",
            "rationale": "...",
            "category": "Geography",
        },
        "capital",
        "Paris",
        "em",
        "answer",
        tag("paris"),
        tag("Rome"),
    ),
    Known(
        "HLE (multiple choice)",
        {
            "id": "h-2",
            "question": f"{WHERE}\n\nA. Lyon\nB. Paris",
            "image": "",
            "answer": "B",
            "answer_type": "multipleChoice",
            "rationale": "...",
            "category": "Geography",
        },
        "B. Paris",
        "B",
        "choice",
        "answer",
        tag("B. Paris"),
        tag("A"),
    ),
)

PAIRS = {"inputs": ["1 2\n"], "outputs": ["3\n"]}
CODE = (
    Known(
        "MBPP",
        {
            "task_id": 1,
            "text": "Add two numbers.",
            "code": "...",
            "test_list": ["assert add(1, 2) == 3"],
            "test_setup_code": "",
            "challenge_test_list": [],
        },
        "assert add",
        {"tests": ["assert add(1, 2) == 3"], "setup": ""},
        "",
        "```",
        "",
        "",
    ),
    Known(
        "HumanEval",
        {
            "task_id": "HumanEval/1",
            "prompt": "def add(a, b):\n",
            "entry_point": "add",
            "canonical_solution": "    return a + b",
            "test": "def check(f):\n    assert f(1, 2) == 3",
        },
        "def add",
        {"tests": ["def check(f):\n    assert f(1, 2) == 3\n\ncheck(add)"], "setup": ""},
        "",
        "```",
        "",
        "",
    ),
    Known(
        "APPS",
        {
            "problem_id": 1,
            "question": "Add two numbers.",
            "solutions": "[]",
            "input_output": json.dumps(PAIRS),
            "difficulty": "interview",
            "starter_code": "",
        },
        "Add",
        PAIRS,
        "",
        "```",
        "",
        "",
    ),
    Known(
        "TACO",
        {
            "question": "Add two numbers.",
            "solutions": "[]",
            "starter_code": "def add(a, b):",
            "input_output": json.dumps(PAIRS | {"fn_name": "add"}),
            "difficulty": "EASY",
        },
        "def add",
        PAIRS | {"fn_name": "add"},
        "",
        "```",
        "",
        "",
    ),
    Known(
        "CodeContests",
        {
            "name": "1_A",
            "description": "Add two numbers.",
            "public_tests": {"input": ["1 2\n"], "output": ["3\n"]},
            "private_tests": {"input": [], "output": []},
            "generated_tests": {"input": [], "output": []},
        },
        "Add",
        PAIRS,
        "",
        "```",
        "",
        "",
    ),
    Known(
        "LiveCodeBench",
        {
            "question_title": "Sum",
            "question_content": "Add two numbers.",
            "question_id": "1_A",
            "starter_code": "",
            "metadata": "{}",
            "public_test_cases": '[{"input": "1 2\\n", "output": "3\\n", "testtype": "stdin"}]',
            "private_test_cases": base64.b64encode(
                zlib.compress(
                    pickle.dumps('[{"input": "2 2\\n", "output": "4\\n", "testtype": "stdin"}]')
                )
            ).decode(),
        },
        "Add",
        {"inputs": ["1 2\n", "2 2\n"], "outputs": ["3\n", "4\n"]},
        "",
        "```",
        "",
        "",
    ),
    Known(
        "Eurus-2-RL (code)",
        verl(
            "taco",
            "code",
            "Add two numbers.\n\nWrite Python code to solve "
            "the problem. Present the code in \n```python\nYour code\n```\nat the end.",
            json.dumps(PAIRS),
        ),
        "Add",
        PAIRS,
        "",
        "```",
        "",
        "",
    ),
)
"""Programs with unit tests: read for a scorer of the user, refused without one."""

REFUSED = (
    Refused(
        "SWE-bench, SWE-Gym",
        {
            "instance_id": "a__b-1",
            "repo": "a/b",
            "base_commit": "0" * 40,
            "problem_statement": "It fails.",
            "patch": "",
            "test_patch": "",
            "FAIL_TO_PASS": "[]",
        },
        "--env harbor:FOLDER",
    ),
    Refused(
        "SWE-smith",
        {"instance_id": "a", "repo": "a/b", "problem_statement": "It fails.", "image_name": "i"},
        "--env harbor:FOLDER",
    ),
    Refused(
        "R2E-Gym",
        {"repo_name": "a", "docker_image": "i", "problem_statement": "It fails.", "prompt": "Fix"},
        "--env harbor:FOLDER",
    ),
    Refused(
        "τ-bench",
        {"user_id": "u", "instruction": "You want.", "actions": []},
        "docs/environments.md",
    ),
    Refused(
        "WebShop",
        {"asin": "B0", "query": "lamp", "instruction_text": "Find it"},
        "docs/environments.md",
    ),
    Refused("Countdown", {"target": 98, "nums": [44, 19, 35]}, "reasoning_gym:countdown"),
    Refused("ToolBench", {"api_list": [], "query": "Weather?", "query_id": 1}, "--mcp_servers"),
    Refused(
        "IFEval",
        {"key": 1, "prompt": "Write.", "instruction_id_list": [], "kwargs": []},
        "constraints",
    ),
    Refused(
        "Tülu 3 RLVR (IFEval)",
        {
            "messages": [{"role": "user", "content": "Write it."}],
            "ground_truth": '{"func_name": "validate_lowercase", "N": null}',
            "dataset": "ifeval",
            "constraint_type": "All Lowercase",
        },
        "constraints",
    ),
    Refused(
        "INTELLECT-2, SYNTHETIC-1 (code)",
        {"task_id": "1", "prompt": "Add.", "verification_info": '{"test_cases": []}'},
        "`ground_truth`",
    ),
    Refused(
        "DS-1000",
        {"prompt": "Problem:", "reference_code": "", "metadata": {}, "code_context": ""},
        "--env harbor:FOLDER",
    ),
    Refused(
        "BigCodeBench",
        {"task_id": "1", "complete_prompt": "", "instruct_prompt": "Add.", "test": "class T: ..."},
        "--env harbor:FOLDER",
    ),
    Refused(
        "TruthfulQA (generation)",
        {"question": "Why?", "best_answer": "So.", "correct_answers": ["So."]},
        "`multiple_choice`",
    ),
    Refused(
        "s1K",
        {"solution": "8", "question": PROBLEM, "cot_type": "math", "thinking_trajectories": []},
        "agentrl sft",
    ),
    Refused(
        "APIGen-MT, OpenThoughts",
        {"conversations": [], "tools": "[]", "system": ""},
        "agentrl sft",
    ),
    Refused(
        "SQuAD 2.0 (unanswerable)",
        {"question": "Why?", "context": "So.", "answers": {"text": [], "answer_start": []}},
        "leave the row out",
    ),
    Refused(
        "HellaSwag, PIQA, MedMCQA (hidden answers)",
        {"goal": "Why?", "sol1": "a", "sol2": "b", "label": -1},
        "another split",
    ),
    Refused(
        "ToolACE",
        {
            "system": "You can call functions.",
            "conversations": [
                {"from": "user", "value": "Weather?"},
                {"from": "assistant", "value": "[weather()]"},
            ],
        },
        "agentrl sft",
    ),
    Refused(
        "BFCL (without possible_answer)",
        {
            "id": "simple_0",
            "function": [TOOL],
            "question": [[{"role": "user", "content": "Weather in Oslo?"}]],
        },
        "possible_answer",
    ),
    Refused(
        "GAIA (attachment missing)",
        {
            "task_id": "g-2",
            "Question": "Sum?",
            "Level": "1",
            "Final answer": "8",
            "file_name": "sums.xlsx",
            "file_path": "",
        },
        "sums.xlsx",
    ),
    Refused(
        "GAIA (test split)",
        {
            "task_id": "g-3",
            "Question": "Sum?",
            "Level": "1",
            "Final answer": "?",
            "file_name": "",
            "file_path": "",
        },
        "`validation`",
    ),
    Refused(
        "ARC, CommonsenseQA (hidden answers)",
        {"id": "1", "question": WHERE, "choices": CITIES, "answerKey": ""},
        "another split",
    ),
    Refused(
        "MATH (a proof without \\boxed{})",
        {"problem": "Prove it.", "solution": "Clear.", "level": "Level 5", "type": "Algebra"},
        "leave the row out",
    ),
)
