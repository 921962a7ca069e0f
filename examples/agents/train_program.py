"""Train an unchanged program, mini-swe-agent: python examples/agents/train_program.py MODEL."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

FOLDER = Path("runs/program")
# The program's output is its answer; its own report goes to the log.
SHELL = (
    'mini -t "$0" -m openai/{model} -y --exit-immediately -o run.json >&2; '
    "python3 -c \"import json; print(json.load(open('run.json'))['info']['submission'])\""
)
# AgentRL repeats failed calls itself; the program would also repeat calls beyond a rollout's limits.
SETTINGS = "MSWEA_COST_TRACKING=ignore_errors MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT=1"
COMMAND = f"env MSWEA_CONFIGURED=true {SETTINGS} sh -c {shlex.quote(SHELL)}"

if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    rows = [{"query": f"Submit {n} * {n + 3}.", "answer": str(n * (n + 3))} for n in range(200)]
    questions = FOLDER / "questions.jsonl"
    questions.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    flags = {
        "run_name": "program",
        "model_name_or_path": sys.argv[1],
        "agent_command": f"{COMMAND} {{query}}",
        "train_file": questions,
        "default_scorer": "exact",
        "max_new_tokens": 1024,
        "max_steps": 50,
        "output_dir": FOLDER / "output",
    }
    words = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
    subprocess.run([sys.executable, "-m", "agentrl", "run", *words], check=True)
