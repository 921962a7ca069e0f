"""The `--trl` run of `benchmarks/bfcl.py`: TRL's GRPO trainer learns to call functions.

    python benchmarks/bfcl_trl.py MODEL FOLDER MAX_STEPS SEED

Questions, rollouts a step, learning rate and limits are those of `assets/bfcl/bfcl.yaml`; the reward is
the official checker's, by way of the same environment. Every prompt is rendered by both sides and must be
equal to the token. Each step becomes a line of `FOLDER/metrics.jsonl`, and the trained model is
`FOLDER/model`.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from real_model_trl import configuration, load_tokenizer, told, train

from agentrl.renderers import Renderer
from agentrl.rollout.agent.reply_delivery import as_delivered
from examples.bfcl.demonstrations import Message, environment, played, scores

RECIPE = Path(__file__).parents[1] / "assets/bfcl/bfcl.yaml"


def main(model: Path, folder: Path, max_steps: int, seed: int) -> None:
    """Train for a number of steps."""
    tokenizer, renderer = load_tokenizer(model), Renderer.load(model)
    recipe = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))
    rows, tools = [], []
    for number, (_, _, oracle) in enumerate(played(recipe["env"])):
        tools.append(oracle.tools)
        prompt = told(oracle.messages[:-1], oracle.tools)
        ours = list(renderer.render(oracle.messages[:-1], oracle.tools))
        theirs = tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, return_dict=False
        )
        assert ours == theirs, f"{model}: the two sides render question {number} differently"
        if len(ours) <= recipe["max_prompt_tokens"]:
            rows.append({"prompt": prompt, "number": number})

    def message(ids: Sequence[int], number: int) -> Message:
        """Return a reply as an environment receives it."""
        reply = as_delivered(renderer.parse(ids, tools=tools[number]), may_call=True)
        for call in reply.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
        return reply

    with environment(recipe["env"]) as process:

        def score(
            completion_ids: Sequence[Sequence[int]], number: Sequence[int], **_: Any
        ) -> list[float]:
            replies = [message(*pair) for pair in zip(completion_ids, number, strict=True)]
            policies = [lambda *_, reply=reply: reply for reply in replies]
            return scores(process, list(zip(number, policies, strict=True)))

        # Four rollouts with prompts of 2,048 tokens already take 20 GB.
        settings = configuration(recipe, folder, max_steps, cpu_rows=4, seed=seed)
        trained = train(model, settings, score, rows, processing_class=tokenizer)
    trained.save_model(str(folder / "model"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
