"""Whatever a user gets wrong is answered in one line, before any process starts.

Every case starts the command as a user does, in a folder that contains only the files below.
"""

import json
import os
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path

import pytest
from pymongo.common import SERVER_SELECTION_TIMEOUT
from support.processor_time import children_seconds

from agentrl.cli.main import main

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "assets/demo"
CPU_SECONDS = 5.0
NO_HUB = "http://127.0.0.1:1"
UNKNOWN = {"WANDB_MODE": "online", "WANDB_API_KEY": "", "NETRC": "/nowhere"}
GOOD = {"id": "a", "query": "q", "answer": 1, "scorer": "exact"}
MIXTURE = {"model_type": "qwen3_moe", "num_experts_per_tok": 2, "num_experts": 8}
TOKENIZER = json.loads((DEMO / "model/tokenizer_config.json").read_text())
WATCHED = """
import sys
STARTS = ("subprocess.Popen", "os.fork", "os.posix_spawn")
# Checks: what is asked answers in a process of its own, which then ends.
ASKED = (
    *("environment_host.py", "agentrl.rewards.scorer_worker", "agentrl-probe-"),
    "agentrl.trainer.learner.function_trial",
)
def tell(event, args):
    if event in STARTS and not any(asked in str(args) for asked in ASKED):
        print(event, args, file=sys.stderr)
sys.addaudithook(tell)
from agentrl.cli.main import main
sys.exit(main())
"""
NO_RESULTS = (
    "{% for m in messages %}{% if m.role != 'tool' %}{{ m.content }}{% endif %}{% endfor %}"
)


def model(folder: Path, name: str, config: dict[str, object] | str, **files: str) -> None:
    """Write a checkpoint as far as checks look at it: the demo's tokenizer and empty weights."""
    path = folder / name
    path.mkdir()
    (path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    (path / "tokenizer.json").write_text((DEMO / "model/tokenizer.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(TOKENIZER))
    (path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    for file, text in files.items():
        (path / file.replace("__", ".")).write_text(text)


def wrong_models(folder: Path, demo: dict[str, object]) -> None:
    """Write directories that are no checkpoints, or none that could be trained."""
    model(folder, "quantized", demo | {"quantization_config": {"quant_method": "awq"}})
    model(folder, "classifier", demo | {"architectures": ["Qwen3ForSequenceClassification"]})
    model(folder, "later", demo | {"model_type": "qwen9"})
    model(folder, "own_code", demo | {"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}})
    model(folder, "small", demo | {"vocab_size": 100})
    model(folder, "pointer", demo)
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n"
    (folder / "pointer/model.safetensors").write_text(pointer)
    model(folder, "cut", demo)
    header = b'{"a":{"dtype":"F32","shape":[8],"data_offsets":[0,32]}}'
    (folder / "cut/model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    model(folder, "shards", demo)
    places = {"a": "model.safetensors", "b": "model-2.safetensors"}
    index = folder / "shards/model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    for name, file in {
        "adapter": "adapter_config.json",
        "gguf": "qwen.gguf",
        "parent": "model/config.json",
    }.items():
        (folder / name / file).parent.mkdir(parents=True)
        (folder / name / file).write_text("{}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a user has at hand: models, questions, agents, scorers and configurations, all wrong."""
    folder = tmp_path_factory.mktemp("mistakes")
    demo = json.loads((DEMO / "model/config.json").read_text())
    wrong_models(folder, demo)
    model(folder, "mixture", demo | MIXTURE)
    model(folder, "broken", "{oops")
    model(folder, "blind", demo, chat_template__jinja=NO_RESULTS)
    model(folder, "no_weights", demo)
    (folder / "no_weights/model.safetensors").unlink()
    model(folder, "base", demo)
    (folder / "base/tokenizer_config.json").write_text(
        json.dumps({name: text for name, text in TOKENIZER.items() if name != "chat_template"})
    )
    (folder / "base/chat_template.jinja").unlink(missing_ok=True)
    (folder / "utf16.jsonl").write_text(json.dumps(GOOD), encoding="utf-16")
    (folder / "utf16.yaml").write_text("max_steps: 3\n", encoding="utf-16")
    texts = {
        "rows.csv": json.dumps(GOOD),
        "header.csv": "id,query,answer\n",
        "exits.py": "import sys\nsys.exit(3)\n",
        "kinds.py": "class Agent:\n    def __init__(self, task, endpoint): pass\n"
        "async def steps(task, endpoint):\n    yield 1\n",
        "twice.yaml": "max_steps: 3\nmax_steps: 5\n",
        "one_flag.yaml": "lr: 1.0e-5\nlearning_rate: 1.0e-6\n",
        "sections.yaml": "trainer:\n  max_steps: 3\n",
        "bool.yaml": "max_steps: true\n",
        "tabs.yaml": "max_steps: 3\n\tmax_turns: 2\n",
        "lists.yaml": "max_steps: [3]\n",
        "noscheme.json": '{"mcpServers": {"a": {"url": "localhost:8000/mcp"}}}',
        "malformed.jsonl": f"{json.dumps(GOOD)}\n{{oops\n",
        "twice.jsonl": f"{json.dumps(GOOD)}\n{json.dumps(GOOD)}\n",
        "empty.jsonl": "",
        "unknown_scorer.jsonl": json.dumps(GOOD | {"scorer": "exakt"}),
        "judged.jsonl": json.dumps(GOOD | {"scorer": "agentcpm"}),
        "no_answer.jsonl": json.dumps({"id": "a", "query": "q", "scorer": "exact"}),
        "no_query.jsonl": json.dumps({"id": "a", "answer": 1, "scorer": "exact"}),
        "images.jsonl": json.dumps(GOOD | {"images": "http://x.org/a.png"}),
        "no_image.jsonl": json.dumps(GOOD | {"images": ["chart.png"]}),
        "no_picture.jsonl": json.dumps(GOOD | {"images": ["good.jsonl"]}),
        "bomb.jsonl": json.dumps(GOOD | {"images": ["bomb.png"]}),
        "good.jsonl": json.dumps(GOOD),
        "list_answer.jsonl": json.dumps(GOOD | {"answer": ["1", "2"]}),
        "questions.xlsx": "PK",
        "broken.yaml": "a: [1",
        "list.yaml": "- a\n- b\n",
        "typo.yaml": "learning_rat: 1\n",
        "servers.json": '{"mcpServers": {"a": {"comand": "x"}}}',
        "broken.json": "{",
        "words.json": '{"mcpServers": {"a": {"command": "python tools.py"}}}',
        "text.json": '{"mcpServers": {"a": {"command": "python", "args": "tools.py"}}}',
        "syntax.py": "def f(:\n",
        "texts.jsonl": json.dumps(GOOD | {"scorer": "texts"}),
        "texts.py": "from agentrl.rewards import MCPScorerFactory\n"
        "@MCPScorerFactory.register_scorer('texts')\ndef texts(answer, truth): return answer\n",
        "unnamed.py": "from agentrl.rewards import MCPScorerFactory\n"
        "@MCPScorerFactory.register_scorer\ndef mine(answer, truth): return 1.0\n",
        "semicolons.csv": "query;answer\nq;1\n",
        "pretty.jsonl": json.dumps(GOOD, indent=2),
        "long.jsonl": json.dumps(GOOD | {"query": "x " * 5000}),
        "number.yaml": "model_name: 5\n",
        "importing.py": "import no_such_package\n",
        "agent.py": "async def play(task, endpoint):\n    return ''\n",
        "bad_template.jinja": "{% for %}",
        "judge.yml": "scorer_agent: {models: []}\n",
        "deep.yaml": "[" * 3000,
        "deep.json": '{"mcpServers": ' + "[" * 200_000,
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "bomb.png").write_bytes(
        b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + 2 * (30_000).to_bytes(4) + bytes(1000)
    )
    return folder


def given(folder: Path) -> list[str]:
    """The flags of every case."""
    words = ["--run_name", "wrong", "--config", str(DEMO / "grpo.yaml")]
    words += ["--output_dir", str(folder / "output"), "--logs_dir", str(folder / "logs")]
    return [*words, "--mongo_data_dir", str(folder / "mongo")]


def run(
    folder: Path, cwd: Path, *flags: str, command: str = "run", watched: bool = False
) -> "subprocess.CompletedProcess[str]":
    """Run a command; one that is `watched` says when it starts a process."""
    program = ["-c", WATCHED] if watched else ["-m", "agentrl"]
    words = [*given(folder), *flags]
    before = children_seconds()
    done = subprocess.run(
        [sys.executable, *program, *command.split(), *words],
        cwd=cwd,
        env=os.environ | UNKNOWN | {"HF_ENDPOINT": NO_HUB},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    spent = children_seconds() - before
    assert spent < CPU_SECONDS, f"{spent:.1f} s of CPU time"
    return done


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def assert_one_line(done: "subprocess.CompletedProcess[str]", folder: Path, *parts: str) -> None:
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    for part in parts:
        assert part in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert list(folder.glob("*")) == [], "something was started or written"


NO_TOOLS = "--tool_server_command none"
SGLANG = "--inference_backend sglang"
MISTAKES = {
    # flags
    "--learning_rat 1": "did you mean --learning_rate?",
    "--learning_rate fast": "--learning_rate: Input should be a valid number",
    "--max_steps 0": "--max_steps: Input should be greater than or equal to 1",
    "--max_steps": "--max_steps needs a value",
    "10": "unexpected argument '10'",
    "-x 1": "write flags as --max_steps 10",
    "--quux 1": "unknown flag --quux; see --help",
    "--batch_size 8": "docs/coming-from.md has the flags of other projects",
    "--epsilon_high 0.28": "did you mean --epsilon_higher? docs/coming-from.md has",
    "--resume_from_checkpoint x": "a run resumes from its newest checkpoint",
    "--loss_calculator PPO": "--loss_calculator PPO is not known (known: GRPO, MINIRL,",
    "--loss_calculator dapo": "to select the whole recipe, use --recipe dapo",
    "--recipe dappo": "--recipe dappo is not known; did you mean dapo?",
    "--loss_calculator CISPO --strict_in_bound": "CISPO ignores it; remove it",
    "--max_trained_count 0": "max_trained_count",
    "--retrained_interval 2": "the uses of a record (--max_trained_count) are all in one step",
    "--presence_penalty 0.5": "--presence_penalty 0.5 changes the servers' logprobs",
    "--loss_calculator CrossEntropy": "use `agentrl sft`",
    "--loss_args '{\"a\": 1}'": "--loss_args are arguments of your own loss",
    "--group_filter none.py:keep": "none.py: no such file in",
    "--on_step os.path:nothing": "--on_step: os.path defines no 'nothing'",
    "--advantage_estimator math:sqrt": "math:sqrt: it is no function; name one that `def` defines",
    "--num_generations 1": "use 2 or more",
    "--run_name ../other": "letters, digits",
    "--temperature -1": "--temperature: Input should be greater than or equal to 0",
    "--top_p 0": "--top_p: Input should be greater than 0",
    "--report_to comet": "--report_to comet is not supported",
    "--report_to wandb": "set WANDB_API_KEY, or set WANDB_MODE=offline",
    "--optim_args beta3=1": "--optim_args: unknown name 'beta3'",
    "--pp_size 2": "do not match a mesh of --pp_size 2",
    "--pp_size 0": "--pp_size: Input should be greater than or equal to 1",
    "--inf_tp_size 2": "--inf_tp_size 2 is a setting of SGLang",
    "--inf_mem_ratio 0.5": "--inf_mem_ratio 0.5 is a setting of SGLang",
    f"{SGLANG} --sglang_args=--tp=2": "--sglang_args --tp: use --inf_tp_size",
    "--sglang_args=--disable-radix-cache": "is a setting of SGLang, and the embedded engine",
    "--sync_sampling --max_staleness 2": "--sync_sampling means --max_staleness 0",
    "--json": "--json requires --dry_run",
    "--delete_existing": "--delete_existing requires --fresh",
    "--inference_gateway http://127.0.0.1:1": "--inference_gateway needs --inference_urls",
    "--inference_host 0.0.0.0": "set AGENTRL_API_KEY",
    "--eval_strategy steps --eval_file none": "needs --eval_file",
    "--default_answer_schema <answer>": "without angle brackets",
    "--preferred_sampling_params {": "is not valid JSON",
    "--max_steps abc": "--max_steps: Input should be a valid integer",
    "--MAX_STEPS 3": "did you mean --max_steps?",
    "--learning_rate inf": "--learning_rate: Input should be a finite number",
    "--learning_rate -1": "--learning_rate: Input should be greater than or equal to 0",
    "--seed -1": "--seed: Input should be greater than or equal to 0",
    "--top_k -7": "--top_k: Input should be greater than or equal to -1",
    "--context_length 100000": "--context_length 100000: the model has 2048 positions",
    "--temperature 0": "all rollouts of a question would be identical",
    "--learning_rate 2e6": "--learning_rate: Input should be less than or equal to 1",
    "--lora_alpha 16": "--lora_alpha requires --lora_rank",
    "--max_steps = 3": "write the = of a flag without spaces: --max_steps=10",
    "\u2014max_steps 3": "a flag begins with two hyphens",
    "--train_file good.jsonl rows.csv": "--train_file takes one value: put a value with "
    "spaces in quo",
    "--context_length 0": "--context_length: Input should be greater than or equal to 1",
    "--trainer_threads 0": "--trainer_threads: Input should be greater than or equal to 1",
    "--seed 5000000000": "--seed: Input should be less than 4294967296",
    "--max_steps 99999999999999999999": "--max_steps: Input should have at most 18 digits",
    "--num_samplers 1000000": "--num_samplers: Input should be less than or equal to 1000",
    "--run_name admin": "--run_name: is reserved by MongoDB",
    "--output_dir good.jsonl": "good.jsonl is a file; choose another folder",
    "--output_dir /proc/out": "--output_dir /proc/out: /proc is not writable",
    "--logs_dir good.jsonl/logs": "good.jsonl is a file; choose another folder",
    "--mongo_data_dir good.jsonl": "good.jsonl is a file; choose another folder",
    # ranks
    "--tp_size 4": "1 trainer rank(s) do not match a mesh",
    "--tp_size 3 --num_processes 3": "--tp_size 3 does not divide the model's",
    "--ep_size 2 --num_processes 2": "--ep_size 2 needs a mixture-of-experts model",
    "--cp_size 3 --num_processes 3": "--cp_size 3 does not divide",
    "--cpu_offload": "--cpu_offload requires FSDP2",
    "--num_processes 2000": "a machine starts at most 1024 ranks; give one per GPU",
    "--num_machines 2": "docs/coming-from.md has the flags",
    # GPUs
    "--trainer_gpus 0-": "--trainer_gpus: expected numbers and ranges of GPUs",
    "--trainer_gpus 0,0": "--trainer_gpus: a GPU occurs twice",
    "--trainer_gpus 0-3 --num_processes 2": "2 trainer ranks need one GPU each",
    "--num_gpus 2 --trainer_gpus 2": "GPU 2 does not exist; this machine has 2",
    "--num_gpus 0 --trainer_gpus 0": "no GPU found",
    "--num_gpus 0 --attention_implementation flex": "its kernels need a GPU, and none was found",
    "--num_gpus 1 --num_processes 2": "2 trainer ranks need one GPU each",
    "--num_gpus 1 --inference_gpus 1": "GPU 1 does not exist; this machine has 1",
    f"{SGLANG} --num_gpus 0": "--inference_backend sglang: no GPU found",
    f"{SGLANG} --num_gpus 1 --colocated false": "1 trainer rank(s) and 1 server(s) of 1 GPU(s) need 2 GPUs",
    f"{SGLANG} --num_gpus 4 --inf_tp_size 4": "need 5 GPUs, and this machine has 4",
    f"{SGLANG} --num_gpus 8 --num_processes 8": "or let both share GPUs with --share_gpus or --colocated",
    f"{SGLANG} --num_gpus 8 --trainer_gpus 0-3 --inference_gpus 3-7": "share 3",
    f"{SGLANG} --inference_gpus 4-6 --inf_tp_size 2": "need 2; name as many",
    f"{SGLANG} --num_gpus 4 --colocated --inf_tp_size 2": "must use the same number",
    "--colocated --cpu_offload": "remove one of the two",
    # files of questions
    "--train_file none": "nothing to train on",
    "--train_file=": "--train_file is empty",
    "--train_file nowhere.jsonl": "nowhere.jsonl: No such file or directory in /",
    "--train_file malformed.jsonl": "line 2: not valid JSON",
    "--train_file twice.jsonl": "id 'a' is already used",
    "--train_file empty.jsonl": "contains no questions",
    "--train_file questions.xlsx": "questions.xlsx",
    "--train_file no_query.jsonl": "line 1: no question",
    "--train_file images.jsonl": "does not support any; use a vision model",
    "--train_file no_image.jsonl": "chart.png': No such file",
    "--train_file no_picture.jsonl": "not PNG, JPEG, GIF, WebP or BMP",
    "--train_file bomb.jsonl": "30000 x 30000 pixels",
    "--train_file semicolons.csv": "columns are separated by semicolons",
    "--train_file pretty.jsonl": "line 1: an object starts here and spans several lines",
    "--train_file long.jsonl": "every question has 10000 tokens or more, and the limit of a prompt is 768",
    "--train_file=~/nowhere.jsonl": f"{Path.home()}/nowhere.jsonl: No such file",
    "--eval_file nowhere.jsonl": "nowhere.jsonl: No such file",
    "--train_file=~nosuchuser/q.jsonl": "no user of this name has a home directory here",
    "--train_file utf16.jsonl": "utf16.jsonl: not UTF-8 text",
    "--train_file rows.csv": "put JSON lines in a .jsonl file",
    "--train_file header.csv": "which is the header",
    "--train_file https://example.com/q.jsonl": "download the file first",
    "--train_file nobody/questions": f"the hub at {NO_HUB} cannot be reached",
    # scorers
    "--scorer_module exits.py": "importing it exits the program (3)",
    "--default_scorer exakt": "--default_scorer: unknown scorer 'exakt'; did you mean 'exact'?",
    "--train_file unknown_scorer.jsonl": "unknown scorer 'exakt'",
    "--train_file judged.jsonl": "agent_config_path",
    "--train_file no_answer.jsonl": "line 1",
    "--train_file list_answer.jsonl": "scorer 'exact' compares text, and an answer is a list",
    "--train_file judged.jsonl --agent_config_path nowhere.yml": "nowhere.yml",
    "--train_file judged.jsonl --agent_config_path judge.yml": "scorer_agent",
    "--agent_config_path deep.yaml": "agent config deep.yaml: nested too deeply",
    "--scorer_module nowhere.py": "nowhere.py: no such file in /",
    "--scorer_module unnamed.py": '@MCPScorerFactory.register_scorer("mine")',
    "--agent_config_path nowhere.yml": "--agent_config_path nowhere.yml: No such file or directory in /",
    "--scorer_module syntax.py": "SyntaxError",
    "--scorer_module texts.py --train_file texts.jsonl": "'texts' returned str, not a number; it was",
    "--scorer_module importing.py": "No module named 'no_such_package'",
    # models
    "--model_name_or_path ./no/model": "./no/model: no such directory",
    "--model_name_or_path no_weights": "no *.safetensors weights",
    "--model_name_or_path broken": "not JSON",
    "--model_name_or_path=": "--model_name_or_path: String should have at least 1 character",
    "--model_name_or_path good.jsonl": "it is a file; name the directory of a checkpoint, or a GGUF",
    "--model_name_or_path Qwen3-4B": "a model on the hub is named OWNER/NAME",
    "--model_name_or_path https://huggingface.co/Qwen/Qwen3-4B": "is named Qwen/Qwen3-4B",
    "--model_name_or_path nobody/model": "no such directory, and the download from the hub failed",
    "--model_name_or_path adapter": "it holds an adapter (LoRA): name its base model",
    "--model_name_or_path gguf": "qwen.gguf is not a GGUF file; download it again",
    "--model_name_or_path package:": "expected package:NAME or package:NAME==VERSION",
    "--model_name_or_path package:click": "the package holds no model",
    "--model_name_or_path parent": "did you mean parent/model?",
    "--model_name_or_path pointer": "is a Git LFS pointer, not the weights",
    "--model_name_or_path cut": "cut/model.safetensors is truncated",
    "--model_name_or_path shards": "model-2.safetensors is missing, which model.safetensors.index",
    "--model_name_or_path small": "the tokenizer has more tokens than the model",
    "--model_name_or_path quantized": "is quantized (awq)",
    "--model_name_or_path classifier": "Qwen3ForSequenceClassification is not a causal language model",
    "--model_name_or_path later": "model_type 'qwen9' of its config.json is not a language model",
    "--model_name_or_path own_code": "if you trust it, give --trust_remote_code",
    "--lora_rank 4 --lora_target_modules nosuch": "has no layer of this name",
    "--kl_coefficient 0.1 --reference_model nowhere": "--reference_model nowhere: no such dir",
    """--chat_template_kwargs '{"enable_thinkng":false}'""": "does not use 'enable_thinkng'",
    "--model_name_or_path blind": "does not render tool results",
    "--model_name_or_path base": "give one with --chat_template FILE",
    "--model_name_or_path mixture --lora_rank 4": "--lora_target_modules gate_proj",
    "--router_replay": "--router_replay needs a mixture-of-experts model",
    "--model_name a/b --model_name_or_path nowhere": "nowhere: no such directory",
    "--chat_template nowhere.jinja": "--chat_template: No such file",
    "--chat_template bad_template.jinja": "the chat template does not compile",
    "--chat_template_kwargs {": "--chat_template_kwargs is not valid JSON",
    """--chat_template_kwargs '{"tools":1}'""": "tools is reserved for the conversation",
    "--tool_call_parser nope": "nope",
    # environments
    "--env textarena:Hangman-v0": "--env and --train_file are mutually exclusive",
    "--train_file none --env textarna:Hangman-v0": "unknown kind 'textarna'; did you mean 'textarena'?",
    "--train_file none --env textarena": "no environment name; write textarena:NAME",
    "--train_file none --env textarena:Hangman-v0": "textarena is not installed for",
    (
        "--train_file none --env textarena:Hangman-v0 --env_python nowhere"
    ): "nowhere: program not found",
    "--train_file none --env textarena:Hangman-v0 --agent agent.py:play": "remove --agent",
    "--train_file none --env stored:nowhere": "no run 'nowhere' here",
    "--train_file none --env stored:x?size=3": "write stored:RUN, or stored:RUN?where=CONDITION",
    "--env_variables NOT_THERE": "the environment variable NOT_THERE is not set",
    "--train_file none --env harbor:nowhere": "nowhere does not exist",
    "--train_file none --env harbor:.": "no task.toml found in",
    "--train_file none --env harbor:.?runtim=process": "unknown parameter 'runtim'; did you "
    "mean runtime",
    "--env_scorer exact": "--env_scorer requires --env",
    "--train_file none --env harbor:. --env_scorer exact": "it scores single answers",
    "--train_file none --env harbor:. --env_scorer exat": "unknown scorer 'exat'; did you mean",
    "--train_file none --sampler_module nowhere.py": "--sampler_module nowhere.py: no such file",
    "--train_file none --sampler_module agent.py": "its train_tasks(seed) yields no task",
    "--agent agent.py:play --agent_python nowhere": "--agent_python nowhere: program not found",
    "--agent_python nowhere": "--agent_python requires --agent",
    # agents and tools
    "--agent nowhere.py:play": "nowhere.py",
    "--agent agent.py:plya": "plya",
    "--agent syntax.py:play": "SyntaxError",
    "--agent=": "--agent: String should have at least 1 character",
    "--agent agent.py::play": "use agent.py:play (file and function)",
    "--agent agent.py:play()": "use agent.py:play (file and function)",
    "--agent agent.py": "--agent agent.py does not name a function; use agent.py:function",
    "--agent exits.py:play": "importing it exits the program (3)",
    "--agent kinds.py:Agent": "it is a class; an agent must be a function",
    "--agent kinds.py:steps": "it is a generator; an agent must be a function",
    "--evaluated_route {}x": "--evaluated_route is not valid JSON",
    "--mcp_servers nowhere.json": "nowhere.json: No such file or directory in /",
    f"{NO_TOOLS} --mcp_servers broken.json": "broken.json",
    f"{NO_TOOLS} --mcp_servers servers.json": "mcpServers.a.comand: unknown setting",
    f"{NO_TOOLS} --mcp_servers noscheme.json": "is not an http(s) address",
    "--tool_server_command nosuchprogram": "program not found",
    "--tool_server_command agent.py": "program not found",
    """--tool_server_command "'python" """: "--tool_server_command: No closing quotation",
    '--tool_server_command "python nowhere.py {port}"': "nowhere.py: no such file in /",
    '--tool_server_command "python agent.py"': "has no {port}",
    f"{NO_TOOLS} --mcp_servers words.json": 'write "command": "python", "args": ["tools.py"]',
    f"{NO_TOOLS} --mcp_servers deep.json": "deep.json: nested too deeply",
    f"{NO_TOOLS} --mcp_servers text.json": "args: expected a list, as in",
    "--mcp_manager_url http://127.0.0.1:1/mcp": "are mutually exclusive",
    f"{NO_TOOLS} --mcp_manager_url http://127.0.0.1:1/mcp": "http://127.0.0.1:1/mcp",
    # servers and databases
    "--inference_urls http://127.0.0.1:1": "no server responds there",
    "--inference_urls nonsense": "expected http://HOST:PORT",
    "--inference_urls localhost:30000": "expected http://HOST:PORT",
    "--inference_urls http://127.0.0.1:99999": "expected http://HOST:PORT",
    "--inference_port 99999": "--inference_port: Input should be less than or equal to 65535",
    "--mongo_port -5": "--mongo_port: Input should be greater than or equal to 0",
    "--db_connection_string mongodb://127.0.0.1:1/?nosuch=1": "Unknown option: nosuch",
    f"{SGLANG} --num_gpus 2": "SGLang is not installed",
    "--db_connection_string nonsense": "expected mongodb://HOST:PORT",
    # configurations
    "--config nowhere.yaml": "--config nowhere.yaml: No such file",
    "--config broken.yaml": "is not valid YAML: while parsing a flow sequence at line 1, column 4",
    "--config=~nosuchuser/run.yaml": "--config ~nosuchuser/run.yaml: No such file",
    "--config deep.yaml": "--config deep.yaml: nested too deeply",
    "--config list.yaml": "expected `flag: value` lines",
    "--config=": "--config is empty",
    "--config utf16.yaml": "not UTF-8 text",
    "--config twice.yaml": "'max_steps' occurs twice",
    "--config one_flag.yaml": "'lr' and 'learning_rate' are the same flag",
    "--config sections.yaml": "flags are not grouped in sections",
    "--config bool.yaml": "--max_steps: Input should not be a boolean, got true",
    "--config tabs.yaml": "is not valid YAML",
    "--config lists.yaml": "--max_steps: Input should be a valid integer, got [3]",
    "--config number.yaml": "--model_name: quote it as text: model_name: '5'",
    "--config typo.yaml": "unknown flag --learning_rat",
}


def test_there_are_sixty_mistakes_at_least() -> None:
    assert len(MISTAKES) >= 60


@pytest.mark.parametrize("flags", MISTAKES)
def test_a_mistake_is_one_line(
    flags: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In this process, since starting Python and importing the checks takes seconds a case."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", NO_HUB)
    for name, value in UNKNOWN.items():
        monkeypatch.setenv(name, value)
    words = ["run", *given(tmp_path), *shlex.split(flags)]
    began = time.process_time()
    code = main(words)
    assert time.process_time() - began < CPU_SECONDS
    printed = capsys.readouterr()
    done = subprocess.CompletedProcess(words, code, printed.out, printed.err)
    assert_one_line(done, tmp_path, MISTAKES[flags])


@pytest.mark.slow
@pytest.mark.parametrize("flags", MISTAKES)
def test_the_command_says_the_same(
    flags: str, folder: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """As a process; a report (`--junit-xml`) has the seconds of each by the clock."""
    began = time.monotonic()
    done = run(tmp_path, folder, *shlex.split(flags), watched="wandb" not in flags)
    record_property("seconds", round(time.monotonic() - began, 2))
    assert_one_line(done, tmp_path, MISTAKES[flags])


def test_an_unreachable_database_is_named_without_its_password(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    port = closed_port()
    uri = f"mongodb://user:s3cret@127.0.0.1:{port}"
    assert main(["run", *given(tmp_path), "--db_connection_string", uri]) == 75  # it may come back
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1
    assert f"127.0.0.1:{port}" in printed.err
    assert "s3cret" not in printed.err + printed.out


@pytest.mark.slow
@pytest.mark.parametrize("command", ["run", "sample", "serve"])
def test_an_unreachable_database_is_told_before_the_driver_gives_up(
    folder: Path, tmp_path: Path, command: str
) -> None:
    began = time.monotonic()
    uri = f"mongodb://127.0.0.1:{closed_port()}"
    done = run(tmp_path, folder, "--db_connection_string", uri, command=command)
    assert time.monotonic() - began < SERVER_SELECTION_TIMEOUT
    assert done.returncode == 75
    assert "does not respond; check that it is running" in done.stderr.splitlines()[-1]


@pytest.fixture
def other_server() -> Iterator[str]:
    """A web server that is no inference server."""
    with HTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as other:
        serving = threading.Thread(target=other.serve_forever)
        serving.start()
        yield f"http://127.0.0.1:{other.server_port}"
        other.shutdown()
        serving.join()


def test_an_inference_server_that_is_none(folder: Path, tmp_path: Path, other_server: str) -> None:
    done = run(tmp_path, folder, "--inference_urls", other_server)
    assert_one_line(done, tmp_path, other_server, "is not an inference server")


@pytest.mark.parametrize("command", ["sample", "train", "serve"])
def test_a_process_without_a_database(folder: Path, tmp_path: Path, command: str) -> None:
    done = run(tmp_path, folder, command=command)
    assert_one_line(done, tmp_path, "--db_connection_string")


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (
            "serve --inference_backend sglang --inference_gpus 1",
            "--inference_gpus applies to `agentrl run`",
        ),
        ("train --trainer_gpus 1", "--trainer_gpus applies to `agentrl run`"),
        ("sft --num_gpus 1", "--num_gpus applies to `agentrl run`"),
        ("sft --loss_calculator GRPO", "supervised fine-tuning supports only cross-entropy"),
        ("eval --inference_backend sglang --num_gpus 2 --inf_tp_size 4", "lower"),
        ("eval --inference_backend sglang --num_gpus 0", "no GPU found"),
        ("run --dry_run --learning_rat 1", "did you mean --learning_rate?"),
        ("doctor --mcp_server x.json", "did you mean --mcp_servers?"),
    ],
)
def test_mistakes_with_other_commands(
    words: str,
    part: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    command, *flags = words.split()
    places = given(tmp_path) if command != "sft" else []
    model = [] if command == "sft" else ["--model_name_or_path", str(DEMO / "model")]
    code = main([command, *places, *model, *flags])
    printed = capsys.readouterr()
    assert_one_line(
        subprocess.CompletedProcess(words, code, printed.out, printed.err), tmp_path, part
    )


def test_fine_tuning_takes_the_name_of_its_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["sft", "--loss_calculater", "CrossEntropy", "--train_file", "talks.jsonl"]) == 2
    error = capsys.readouterr().err
    assert "talks.jsonl: No such file" in error
    assert "loss_calculator" not in error


@pytest.mark.parametrize("name", ["grpo", "minirl", "eval"])
def test_an_example_script_without_a_run_name_says_how_it_is_used(name: str) -> None:
    done = subprocess.run(
        [ROOT / f"{name}_example.sh"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert done.stderr == f"usage: {ROOT}/{name}_example.sh RUN_NAME [--flag value ...]\n"
