"""What every figure of a run is called, its unit, what it means, and what to do about it.

The one table behind the inspector, `agentrl inspect`, the Prometheus help texts and docs/metrics.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class FigureWords:
    """One figure in words."""

    name: str
    unit: str
    meaning: str
    """What it is."""
    advice: str
    """What is healthy, and what to do otherwise."""


_TWO_ENGINES = (
    "Compare the server's data type and kernels with the trainer's, and lower --max_staleness."
)
_NO_ACTION = "For orientation; it needs no action."

STEP_FIGURES: Mapping[str, FigureWords] = {
    "step": FigureWords(
        "Step",
        "steps",
        "Number of the optimizer step, counted from 1.",
        "Grows steadily; if it stands still, `agentrl inspect progress` shows what the run waits for.",
    ),
    "reward_mean": FigureWords(
        "Reward, mean",
        "score",
        "Mean score of the rollouts in the groups that the step read first; branches of a tree "
        "count by their probability under chains.",
        "Rises over tens of steps; if it stays at its first value, read answers with "
        "`agentrl inspect records`.",
    ),
    "reward_std": FigureWords(
        "Reward, spread",
        "score",
        "Standard deviation of the same scores.",
        "Above 0: equal scores teach nothing, so choose questions that are solved sometimes.",
    ),
    "reward_min": FigureWords(
        "Reward, lowest",
        "score",
        "Lowest of the same scores.",
        "Within the range that the scorer is meant to give; otherwise correct the scorer.",
    ),
    "reward_max": FigureWords(
        "Reward, highest",
        "score",
        "Highest of the same scores.",
        "Reaches the scorer's maximum in most steps; if never, the questions are too hard.",
    ),
    "num_groups": FigureWords(
        "Groups read",
        "groups",
        "Groups that the step read, dropped ones and repeated ones included.",
        "Near --groups_per_step; far more means that most groups were dropped, and `dropped` says why.",
    ),
    "num_records": FigureWords(
        "Rollouts read",
        "rollouts",
        "Rollouts that the step read for the first time.",
        "About the groups read times --num_generations; fewer means rollouts without a score.",
    ),
    "num_trained_records": FigureWords(
        "Rollouts trained",
        "rollouts",
        "Rollouts that contributed to the gradient.",
        "Most of the rollouts read; otherwise `dropped` says why the others were left out.",
    ),
    "loss": FigureWords(
        "Loss",
        "loss",
        "Value of the loss that the step minimized.",
        "In reinforcement learning it moves around 0 and shows no progress, so watch the reward; in "
        "fine-tuning it falls.",
    ),
    "grad_norm": FigureWords(
        "Gradient norm",
        "norm",
        "Length of the gradient before clipping.",
        "Stays within a factor of ten; lower --learning_rate if it jumps repeatedly.",
    ),
    "learning_rate": FigureWords(
        "Learning rate",
        "per step",
        "Step size of the optimizer.",
        "Follows the configured schedule; change it with --learning_rate and --warmup_steps.",
    ),
    "clip_fraction": FigureWords(
        "Clipped tokens",
        "share of tokens",
        "Share of the trained tokens whose gradient the clip range cut off.",
        "Below 0.1; if higher, lower --learning_rate or --max_staleness.",
    ),
    "clip_fraction_positive": FigureWords(
        "Clipped tokens of good rollouts",
        "share of tokens",
        "The same share among tokens with a positive advantage.",
        "Below 0.1; if higher, good answers are learned more slowly: lower --learning_rate.",
    ),
    "clip_fraction_negative": FigureWords(
        "Clipped tokens of bad rollouts",
        "share of tokens",
        "The same share among tokens with a negative advantage.",
        "Below 0.1; if it grows, add dual_clip 3 or lower --learning_rate.",
    ),
    "drop_fraction": FigureWords(
        "Tokens out of range",
        "share of tokens",
        "Share of the tokens beyond the hard ratio range, or masked by a correction.",
        "Below 0.01; if higher, trainer and sampler disagree: lower --max_staleness.",
    ),
    "mask_fraction": FigureWords(
        "Tokens masked by the correction",
        "share of tokens",
        "Share of the tokens that an importance correction masked.",
        f"Below 0.01; otherwise the two engines disagree. {_TWO_ENGINES}",
    ),
    "kl": FigureWords(
        "Distance to the reference model",
        "nats/token",
        "Mean estimate of the KL divergence from the reference model.",
        "Grows slowly; if it runs away while the evaluation does not rise, raise --kl_coefficient.",
    ),
    "sampler_kl_k1": FigureWords(
        "Trainer against sampler (KL, plain)",
        "nats/token",
        "Mean log ratio: the unbiased but noisy estimate of the KL divergence between the trainer "
        "and the sampler.",
        f"Near 0, of either sign. {_TWO_ENGINES}",
    ),
    "sampler_kl_k2": FigureWords(
        "Trainer against sampler (KL, squared)",
        "nats/token",
        "Half the mean squared log ratio: the estimate with little noise and some bias.",
        f"Below 0.01. {_TWO_ENGINES}",
    ),
    "sampler_kl_k3": FigureWords(
        "Trainer against sampler (KL)",
        "nats/token",
        "Estimate of the KL divergence between trainer and sampler that is never negative.",
        f"Below 0.01. {_TWO_ENGINES}",
    ),
    "entropy": FigureWords(
        "Entropy",
        "nats/token",
        "Mean uncertainty of the model about its next token.",
        "Falls slowly; if it drops below a fifth of its first value, the model stops exploring: "
        "lower --learning_rate, or raise --temperature.",
    ),
    "ratio_mean": FigureWords(
        "Probability ratio, mean",
        "ratio",
        "Mean of the trainer's over the sampler's probability of each trained token.",
        f"Between 0.95 and 1.05; the inspector warns beyond 0.85 to 1.15. {_TWO_ENGINES}",
    ),
    "ratio_max": FigureWords(
        "Probability ratio, largest",
        "ratio",
        "Largest of the same ratios.",
        "Single tokens may reach 10; if it stays far higher, bound the ratio or lower --max_staleness.",
    ),
    "ratio_quantiles": FigureWords(
        "Probability ratio, quantiles",
        "ratio",
        "The ratios below which 1, 10, 50, 90 and 99 % of the tokens lie.",
        f"The median is 1, and p01 and p99 lie between 0.5 and 2. {_TWO_ENGINES}",
    ),
    "loss_metrics": FigureWords(
        "Figures of your own loss",
        "as returned",
        "Means over the target tokens of what the function of --loss_calculator returned beside the "
        "losses.",
        "Whatever that function says.",
    ),
    "logprob_gap": FigureWords(
        "Trainer against sampler, per token",
        "nats/token",
        "Mean absolute difference between the trainer's and the sampler's logprob of a token.",
        f"Below 0.05 at staleness 0. {_TWO_ENGINES}",
    ),
    "merge": FigureWords(
        "Shared prefixes",
        "way",
        "What was computed once: prefixes of the whole group (tree), or none (packed, none).",
        "`tree`; `packed` where `--merge auto` finds that turns share too little, `none` for models "
        "that do not train on trees.",
    ),
    "merge_tokens": FigureWords(
        "Tokens saved by merging",
        "factor",
        "Tokens of one row per turn, over the tokens that went through the model.",
        "1 without shared prefixes, several for long rollouts; near 1 with many turns means that "
        "prompts rewrite their history.",
    ),
    "merge_rollouts": FigureWords(
        "Tokens saved by shared prefixes",
        "factor",
        "Tokens of one row per rollout, over the tokens that went through the model.",
        "Above 1 with long prompts or branches, whose shared turns are computed once; it needs no "
        "action.",
    ),
    "merge_attention": FigureWords(
        "Attention saved by merging",
        "factor",
        "The factor of the tokens saved by merging, for the pairs of tokens that see each other.",
        "1 or above; it needs no action.",
    ),
    "merge_blocks": FigureWords(
        "Attention blocks saved by merging",
        "factor",
        "The same factor for the blocks of 128 x 128 token pairs that the attention kernel computes.",
        "1 or above; the time that attention saves follows it.",
    ),
    "tokens_per_second": FigureWords(
        "Training speed",
        "tokens/s",
        "Tokens through the model, forward and backward, of all trainer processes together.",
        "Steady; if it falls, other work shares the devices.",
    ),
    "tflops": FigureWords(
        "Computing rate of a device",
        "TFLOP/s",
        "Operations of the model per second on one device, without recomputation.",
        "Steady; compare it with the device's peak as the utilization does.",
    ),
    "mfu": FigureWords(
        "Device utilization",
        "share of peak",
        "The computing rate over the device's peak (MFU).",
        "0.2 to 0.5 on data-center GPUs; if lower, raise --max_tokens.",
    ),
    "route_conflicts": FigureWords(
        "Conflicting expert routes",
        "tokens",
        "Tokens that the servers of several rollouts sent to different experts.",
        "Few against the tokens computed; otherwise the servers differ in kernels or weights.",
    ),
    "merge_error": FigureWords(
        "Gradient error of merging",
        "relative error",
        "Difference of the merged gradient from that of separate turns (verify_merge).",
        "Rounding only: 1e-4 in float32, 0.04 in bfloat16; beyond it the run stops with a report.",
    ),
    "skipped": FigureWords(
        "Skipped because",
        "reason",
        "Why the step changed no weights, if it did not.",
        "Absent; the reason says what to change.",
    ),
    "num_output_tokens": FigureWords(
        "Sampled tokens",
        "tokens",
        "Tokens that the model sampled in the groups read.",
        "Follows the length of answers; steady growth without more reward is a habit of padding.",
    ),
    "num_prompt_tokens": FigureWords(
        "Prompt and tool tokens",
        "tokens",
        "Tokens from outside the model in the groups read, each counted once per rollout.",
        "If far above the sampled tokens, shorten tool results.",
    ),
    "max_output_tokens": FigureWords(
        "Longest rollout",
        "tokens",
        "Sampled tokens of the longest rollout.",
        "Far from the limits; a reply that reaches --max_new_tokens is cut off, so raise it or reward "
        "shorter answers.",
    ),
    "turns_mean": FigureWords(
        "Turns per rollout",
        "turns",
        "Model calls per rollout.",
        "Below --max_turns; at the limit, rollouts end without an answer.",
    ),
    "num_trained_tokens": FigureWords(
        "Trained tokens",
        "tokens",
        "Sampled tokens that the loss contains.",
        "Most of the sampled tokens; otherwise the masked tokens say why.",
    ),
    "masked_tokens": FigureWords(
        "Masked tokens",
        "tokens by reason",
        "Sampled tokens that the loss leaves out, turns left out as a whole included.",
        "Few against the trained tokens; the largest reason says what to change. `inherited` counts "
        "copies in branches, which nobody had to sample.",
    ),
    "branched_records": FigureWords(
        "Rollouts of later rounds",
        "rollouts by rule",
        "Rollouts of later rounds of trees, by the rule that chose their turn; `none` started at the "
        "question.",
        "Few are `none`; otherwise lower `branch_depth`, or see `no_branch` of the records.",
    ),
    "branch_reuse": FigureWords(
        "Sampling saved by branches",
        "factor",
        "Sampled tokens of all rollouts, with the copies in branches, over the tokens that were "
        "sampled.",
        "Above 1; the later the rollouts branch, the more they copy.",
    ),
    "credit_spread": FigureWords(
        "Spread of credit",
        "advantage",
        "Mean standard deviation of the advantages of a trained rollout's turns.",
        "0 where all turns of a rollout have its advantage; branches and step rewards raise it.",
    ),
    "saved_groups": FigureWords(
        "Groups that branches saved",
        "share",
        "Share of the groups that branch that are trained although their rollouts from the question "
        "alone have equal scores.",
        "The higher it is, the more branches find; at 0, chains would teach as much.",
    ),
    "num_forward_tokens": FigureWords(
        "Computed tokens",
        "tokens",
        "Tokens that went through the model after merging.",
        _NO_ACTION,
    ),
    "num_flat_tokens": FigureWords(
        "Tokens without merging",
        "tokens",
        "Tokens that one row for every turn would have had.",
        _NO_ACTION,
    ),
    "staleness": FigureWords(
        "Staleness",
        "rollouts by versions behind",
        "Trained rollouts by the number of policy versions that they are behind.",
        "At most --max_staleness; mostly at the limit means that sampling is ahead of training.",
    ),
    "token_staleness": FigureWords(
        "Staleness of tokens",
        "tokens by versions behind",
        "Trained tokens by the number of policy versions that they are behind.",
        "As the staleness of rollouts; long rollouts have older first turns.",
    ),
    "dropped": FigureWords(
        "Dropped rollouts",
        "rollouts by reason",
        "Rollouts that were read and not trained.",
        "Few; if equal scores (`zero_variance`) dominate, choose easier or harder questions.",
    ),
    "teacher_wait_seconds": FigureWords(
        "Waited for teachers",
        "seconds",
        "How long complete groups were at hand and waited for teachers' logprobs.",
        "Short against the step; otherwise start more processes of `agentrl teach`.",
    ),
    "seconds": FigureWords(
        "Time by phase",
        "s by phase",
        "Wall time of the step by phase.",
        "If `wait_samples` dominates, add samplers or servers; if computing does, add trainer devices.",
    ),
    "time": FigureWords(
        "End of the step",
        "Unix time in s",
        "When the step ended.",
        _NO_ACTION,
    ),
}
"""Field of `StepMetrics` -> words."""

EVAL_FIGURES: Mapping[str, FigureWords] = {
    "version": FigureWords(
        "Evaluated version",
        "version",
        "Policy version that was evaluated; version 0 is the model before training.",
        _NO_ACTION,
    ),
    "reward_mean": FigureWords(
        "Evaluation, mean reward",
        "score",
        "Mean score over the held-out questions.",
        "Rises with the training reward; if only the latter rises, the model memorizes its questions.",
    ),
    "num_tasks": FigureWords(
        "Evaluated questions",
        "questions",
        "Held-out questions with a score.",
        "100 or more; fewer give wide intervals.",
    ),
    "num_unscored": FigureWords(
        "Evaluation rollouts without a score",
        "rollouts",
        "Rollouts that infrastructure failures left without a score; they enter no mean.",
        "0; otherwise see `agentrl inspect failures`.",
    ),
    "num_off_version": FigureWords(
        "Evaluation rollouts of mixed versions",
        "rollouts",
        "Rollouts with tokens of another version, because weights were published meanwhile.",
        "Few; otherwise read the mean over `on_version` alone.",
    ),
    "low": FigureWords(
        "Evaluation, lower bound",
        "score",
        "Lower end of the 95 % interval of the mean.",
        "Two versions differ if their intervals do not overlap; more questions narrow the interval.",
    ),
    "high": FigureWords(
        "Evaluation, upper bound",
        "score",
        "Upper end of the 95 % interval of the mean.",
        "Two versions differ if their intervals do not overlap; more questions narrow the interval.",
    ),
    "pass_at": FigureWords(
        "Solved in k tries (pass@k)",
        "share of questions",
        "Share of the questions that at least one of k rollouts solves, for each k.",
        "During training, pass@1 approaches pass@k; if pass@k falls, the model loses variety.",
    ),
    "total": FigureWords(
        "Evaluation, all questions",
        "figures",
        "Mean, interval and pass@k over all questions.",
        _NO_ACTION,
    ),
    "on_version": FigureWords(
        "Evaluation, one version only",
        "figures",
        "The same figures over rollouts that the evaluated version sampled entirely.",
        "Close to the total.",
    ),
    "by_scorer": FigureWords(
        "Evaluation by scorer",
        "figures by scorer",
        "The same figures for the questions of each scorer.",
        "No scorer stays at 0; otherwise read its records.",
    ),
    "by_tag": FigureWords(
        "Evaluation by label",
        "figures by label",
        "The same figures for the questions of each label.",
        "Labels rise together; add training questions for a label that lags behind.",
    ),
    "seconds": FigureWords(
        "Evaluation time",
        "s",
        "Wall time of the evaluation.",
        "Short against the steps between evaluations; otherwise evaluate less often.",
    ),
    "loss": FigureWords(
        "Held-out loss",
        "nats/token",
        "Loss on held-out conversations during fine-tuning.",
        "Falls; stop when it rises while the training loss falls.",
    ),
}
"""Figure of an evaluation -> words; trackers receive it as `eval/NAME`, the last as `eval_loss`."""

SAMPLER_FIGURES: Mapping[str, FigureWords] = {
    "running_rollouts": FigureWords(
        "Running rollouts",
        "rollouts",
        "Rollouts that are running or being scored.",
        "Near the limit on concurrent rollouts; if 0, the waiting seconds say why.",
    ),
    "concurrency": FigureWords(
        "Limit on concurrent rollouts",
        "rollouts",
        "Rollouts that may run at the same time now.",
        "At --max_concurrent_samples_per_process; lower while failures are frequent.",
    ),
    "servers_up": FigureWords(
        "Servers up",
        "servers",
        "Inference servers that accept requests.",
        "All of them; otherwise `agentrl inspect servers` shows the error.",
    ),
    "slots": FigureWords(
        "Attempts by outcome",
        "attempts by outcome",
        "Attempts at rollouts that ended, by outcome.",
        "`failed` and `lost` stay few; otherwise see `agentrl inspect failures`.",
    ),
    "output_tokens": FigureWords(
        "Sampled tokens",
        "tokens",
        "Tokens sampled since the process started.",
        "Grows steadily while the run trains.",
    ),
    "branched_rollouts": FigureWords(
        "Rollouts of later rounds",
        "rollouts by rule",
        "Finished rollouts of later rounds of trees, by the rule that chose their turn; `none` "
        "started at the question.",
        "Few are `none`; otherwise lower `branch_depth`, or see `no_branch` of the records.",
    ),
    "branches": FigureWords(
        "Branches",
        "turns by reason",
        "Turns whose prompts do not extend their parents in full, by reason.",
        "`drift` is 0; otherwise the chat template rewrites history, which costs training time.",
    ),
    "failures_in_a_row": FigureWords(
        "Failures in a row",
        "failures",
        "Infrastructure failures since the last rollout that finished.",
        "0; otherwise see `agentrl inspect failures`.",
    ),
    "waiting_seconds": FigureWords(
        "Time without work",
        "s by reason",
        "Time in which the sampler had nothing to do, by reason.",
        "Small against the run's time; the largest reason says what is missing.",
    ),
}
"""Prometheus metric without `agentrl_sampler_` -> words."""

TRAINER_TOTALS: Mapping[str, FigureWords] = {
    "step": FigureWords(
        "Steps done",
        "steps",
        "Optimizer steps done.",
        "Grows steadily; alert if it stands still for many times a step's duration.",
    ),
    "groups": FigureWords(
        "Groups consumed",
        "groups",
        "Groups consumed by the trainer, dropped ones included.",
        "Grows with the steps; faster growth means that groups are dropped.",
    ),
    "trained_tokens": FigureWords(
        "Trained tokens, total",
        "tokens",
        "Sampled tokens trained on.",
        _NO_ACTION,
    ),
    "forward_tokens": FigureWords(
        "Computed tokens, total",
        "tokens",
        "Tokens that went through the model.",
        _NO_ACTION,
    ),
    "masked_tokens": FigureWords(
        "Masked tokens, total",
        "tokens by reason",
        "Sampled tokens left out of the loss.",
        "Few against the trained tokens.",
    ),
    "dropped_records": FigureWords(
        "Dropped rollouts, total",
        "rollouts by reason",
        "Rollouts not trained on.",
        "Few; if equal scores dominate, choose easier or harder questions.",
    ),
    "staleness_records": FigureWords(
        "Staleness, total",
        "rollouts by versions behind",
        "Trained rollouts by the number of policy versions that they are behind.",
        "At most --max_staleness.",
    ),
    "seconds": FigureWords(
        "Time by phase, total",
        "s by phase",
        "Wall time of the run by phase.",
        "If waiting for samples dominates, add samplers or servers.",
    ),
}
"""Prometheus metric without `agentrl_trainer_` that is no figure of one step -> words."""

QUEUE_FIGURES: Mapping[str, FigureWords] = {
    "policy_version": FigureWords(
        "Policy version",
        "version",
        "Number of the newest published weights.",
        "Grows by one with each step.",
    ),
    "num_groups": FigureWords(
        "Groups complete",
        "groups of all",
        "Groups whose rollouts have all ended, of those that the run has created.",
        "Grows while samplers work.",
    ),
    "num_groups_consumed": FigureWords(
        "Groups used by the trainer",
        "groups",
        "Complete groups that the trainer trained on or dropped.",
        "Close to the complete groups.",
    ),
    "num_groups_ready": FigureWords(
        "Groups waiting for the trainer",
        "groups",
        "Complete groups that the trainer has not taken yet.",
        "Few: 0 all the time means that training waits for sampling, many the opposite.",
    ),
    "admitted_groups": FigureWords(
        "Groups allowed to start",
        "groups",
        "Groups that samplers may have started, which the staleness bound limits.",
        "Ahead of the groups used; if samplers wait for it, raise --max_staleness.",
    ),
    "num_output_tokens": FigureWords(
        "Sampled tokens",
        "tokens",
        "Tokens sampled by the whole run.",
        "Grows while samplers work.",
    ),
}
"""Figure of a run's queue -> words."""

TABLES: Mapping[str, Mapping[str, FigureWords]] = {
    "step": STEP_FIGURES,
    "eval": EVAL_FIGURES,
    "sampler": SAMPLER_FIGURES,
    "trainer": TRAINER_TOTALS,
    "queue": QUEUE_FIGURES,
}
