"""The table of exclusions: flags that need one another, and flags that exclude one another.

A row names two conditions: `flag` (it is given), `flag=value` or `flag!=value`; `a|b` holds if one of
them does. What has to be computed, such as ranges and sums, is in `config.validation`.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from agentrl.config.sections import RootConfig


@dataclass(frozen=True)
class Rule:
    """Two conditions that exclude one another, or of which the first needs the second."""

    first: str
    second: str
    reason: str
    """What is wrong and what to do; `{flag}` stands for its value."""
    is_need: bool

    def is_broken(self, values: dict[str, Any]) -> bool:
        """Return whether values contradict the rule."""
        return _holds(self.first, values) and _holds(self.second, values) != self.is_need


def no(first: str, second: str, reason: str) -> Rule:
    """Return a rule: the two exclude one another."""
    return Rule(first, second, reason, is_need=False)


def need(first: str, second: str, reason: str) -> Rule:
    """Return a rule: the first needs the second."""
    return Rule(first, second, reason, is_need=True)


# fmt: off
RULES = (
    need("importance_correction!=none|veto_threshold", "proximal!=behavior",
         "--importance_correction and veto_threshold compare the trainer's policy with the sampler's; give --proximal "
         "recompute (or loglinear)"),
    no("proximal!=behavior", "loss_calculator=MINIRL",
         "MINIRL uses the sampler's policy as the proximal policy; use --proximal behavior"),
    no("proximal=recompute", "max_trained_count!=1",
         "--proximal recompute: only the first update of a step has the weights of its start; with max_trained_count "
         "{max_trained_count}, use --proximal behavior or loglinear"),
    need("strict_in_bound", "importance_weight_cap_ratio",
         "--strict_in_bound narrows the drop range, which --importance_weight_cap_ratio 0 turns off; remove one of the "
         "two"),
    need("out_of_date_decay", "importance_weight_cap_ratio",
         "--out_of_date_decay narrows the drop range, which --importance_weight_cap_ratio 0 turns off; remove one of "
         "the two"),
    no("agent", "agent_command", "--agent and --agent_command are mutually exclusive; give one of the two"),
    need("agent_python", "agent", "--agent_python requires --agent"),
    need("agent_env", "agent_command", "--agent_env requires --agent_command"),
    need("inference_gateway", "inference_urls",
         "--inference_gateway needs --inference_urls: the addresses of the servers behind it, which receive new "
         "weights"),
    no("inference_gateway", "lora_rank",
         "--inference_gateway and --lora_rank are mutually exclusive: a request names the adapter of one server, and a "
         "gateway may send it to another; give one of the two"),
    need("enable_repetition_compress", "new_context!=disabled",
         "--enable_repetition_compress needs --new_context discard_all_tools or discard_all"),
    need("tree_roots", "rollouts=tree", "tree_roots requires --rollouts tree"),
    need("tree_branches", "rollouts=tree", "tree_branches requires --rollouts tree"),
    need("branch_rule!=random", "rollouts=tree", "--branch_rule {branch_rule} requires --rollouts tree"),
    need("branch_depth", "rollouts=tree", "branch_depth requires --rollouts tree"),
    no("rollouts=tree", "agent",
         "--rollouts tree: --agent {agent} keeps its state in its own program, which cannot be taken to a turn of "
         "another rollout; give --rollouts chains"),
    no("rollouts=tree", "agent_command",
         "--rollouts tree: --agent_command keeps its state in its own program, which cannot be taken to a turn of "
         "another rollout; give --rollouts chains"),
    no("rollouts=tree", "new_context!=disabled|enable_repetition_compress",
         "--rollouts tree and a context that is rewritten (--new_context, --enable_repetition_compress) are mutually "
         "exclusive: the texts behind a rewrite are not stored; give one"),
    no("weight_sync=distributed", "lora_rank",
         "--weight_sync distributed supports whole models only; use --weight_sync disk with adapters (--lora_rank)"),
    need("colocated", "enable_sampling", "--colocated requires sampling; remove it or --enable_sampling false"),
    no("colocated", "inference_urls",
         "--colocated requires servers that AgentRL can start and restart; remove --inference_urls"),
    no("colocated", "cpu_offload",
         "--cpu_offload always keeps the trainer's state in host memory, and --colocated does so while the servers "
         "sample; remove one of the two"),
    no("colocated", "consumer!=trainer",
         "--consumer {consumer}: only the trainer that publishes weights can put the servers to sleep; remove "
         "--colocated"),
    no("colocated", "publish_mode=in_place",
         "publish_mode in_place keeps the servers' cache, and --colocated releases it; use retract or abort"),
    no("colocated", "weight_sync=distributed",
         "--weight_sync distributed needs one process per GPU (NCCL), and --colocated shares GPUs between trainer and "
         "servers; use --weight_sync disk with --colocated"),
    no("colocated", "lora_rank",
         "--colocated releases the servers' weights, and publishing an adapter (--lora_rank) does not restore them; "
         "give one of the two"),
    no("share_gpus", "colocated",
         "--share_gpus lets trainer and servers work concurrently, and --colocated in turns; give one of the two"),
    no("share_gpus", "inference_urls",
         "--share_gpus requires servers that AgentRL starts on the trainer's GPUs; remove --inference_urls"),
    need("share_gpus", "inference_backend=sglang|inference_backend=embedded",
         "--share_gpus: --inference_backend {inference_backend} starts no servers on GPUs; add --inference_backend "
         "sglang, or remove the flag"),
    need("share_gpus", "enable_sampling", "--share_gpus requires sampling; remove it or --enable_sampling false"),
    no("share_gpus", "weight_sync=distributed",
         "--weight_sync distributed needs one process per GPU (NCCL), and --share_gpus puts two on each; use "
         "--weight_sync disk with --share_gpus"),
    need("weight_sync=ipc", "share_gpus",
         "--weight_sync ipc gives SGLang on the trainer's GPU access to the trainer's memory; add --inference_backend "
         "sglang --share_gpus, or use --weight_sync disk"),
    need("weight_sync=ipc", "inference_backend=sglang",
         "--weight_sync ipc gives SGLang on the trainer's GPU access to the trainer's memory; add --inference_backend "
         "sglang --share_gpus, or use --weight_sync disk"),
    no("weight_sync=ipc", "lora_rank",
         "--weight_sync ipc supports whole models only; use --weight_sync disk with adapters (--lora_rank)"),
    no("torch_compile", "torch_dtype=float64",
         "--torch_compile true rounds to float32 where a modeling file does; with --torch_dtype float64, give "
         "--torch_compile false"),
    no("torch_compile", "tp_size!=1",
         "--torch_compile true and --tp_size are mutually exclusive: torch cannot compile layers that tensor "
         "parallelism splits; give one"),
    no("mcp_manager_url", "tool_server_command",
         "--mcp_manager_url and --tool_server_command are mutually exclusive; give one"),
    need("eval_strategy!=no", "eval_file|eval_env",
         "--eval_strategy {eval_strategy} needs --eval_file (or --eval_env)"),
    no("env", "train_file", "--env and --train_file are mutually exclusive; give one"),
    no("eval_env", "eval_file", "--eval_env and --eval_file are mutually exclusive; give one"),
    no("env", "agent", "--env runs its tasks itself; remove --agent"),
    no("env", "agent_command", "--env runs its tasks itself; remove --agent_command"),
    no("eval_env", "agent", "--eval_env runs its tasks itself; remove --agent"),
    no("eval_env", "agent_command", "--eval_env runs its tasks itself; remove --agent_command"),
    need("env_scorer", "env|eval_env",
         "--env_scorer requires --env; for the questions of a file, use --default_scorer"),
    need("delete_existing", "fresh", "--delete_existing requires --fresh"),
)
# fmt: on
"""Every two flags that need or exclude one another."""


def broken_rules(config: RootConfig, condition: str | None = None) -> Iterator[str]:
    """Yield what contradicts the table.

    Args:
        config: the configuration.
        condition: leaves out rules without it.
    """
    values = {name: value for _, section in config for name, value in section}
    for rule in RULES:
        if condition in (None, rule.first, rule.second) and rule.is_broken(values):
            yield rule.reason.format_map(values)


def _holds(conditions: str, values: dict[str, Any]) -> bool:
    for condition in conditions.split("|"):
        name, operator, wanted = re.split(r"(!?=|$)", condition, maxsplit=1)
        value = values[name]
        if (bool(value), str(value) == wanted, str(value) != wanted)[
            ("", "=", "!=").index(operator)
        ]:
            return True
    return False
