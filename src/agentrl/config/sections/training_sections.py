"""Sections of the training side: algorithm, training loop and publishing of weights."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from agentrl.config.gpu_lists import GpuList
from agentrl.config.own_function import BuiltInOr, OwnFunction, is_reference
from agentrl.config.recipes import RECIPES, expand_recipe
from agentrl.config.sections.tuning import AlgorithmTuning, PublishTuning, TrainerTuning
from agentrl.config.value_kinds import ADDRESS, CODE, PATH, PLAIN
from agentrl.schema import Control
from agentrl.schema.formulas import (
    ADVANTAGE_KINDS,
    LOSS_KINDS,
    OPD,
    RATE_SCHEDULES,
    CorrectionKind,
    ProximalKind,
)
from agentrl.schema.run import TEACHER_NAME


class AlgorithmSection(AlgorithmTuning):
    """Advantages, losses, filters and freshness."""

    recipe: Annotated[str | None, PLAIN] = None
    """A paper's objective, in place of its flags: grpo, dapo, dr_grpo, gspo, cispo, minirl, rloo or
    reinforce_pp (see docs/training.md). Flags that are also given take precedence."""
    loss_calculator: Annotated[str, BuiltInOr(LOSS_KINDS)] = "GRPO"
    """Policy loss, in upper or lower case, or your own function (see docs/own-algorithm.md)."""
    loss_args: Annotated[dict[str, Any] | None, CODE] = None
    """JSON object of keyword arguments of your own loss (`{"temperature": 0.5}`)."""
    epsilon: float = Field(default=0.2, ge=0)
    """Half-width of the clip range."""
    epsilon_higher: float = Field(default=0.1, ge=0)
    """Extra width of the upper side of the clip range."""
    loss_normalizer_length: int | None = Field(default=None, ge=1)
    """With skip_length_normalization: constant length in tokens to divide by (Dr.GRPO); off by
    default."""
    proximal: ProximalKind = "behavior"
    """Policy in the denominator of the clipped ratio. `behavior`: the sampler's; `recompute`: the
    trainer's at the start of the step; `loglinear`: an interpolation of the two by staleness
    (decoupled PPO)."""
    importance_correction: CorrectionKind = "none"
    """Weight of the proximal policy over the sampler's: `none`, `full` (unchanged), `tis`
    (truncated), or masked outside the bounds (`icepop`, `mis`). Requires a proximal other than
    behavior."""
    kl_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the KL penalty against a reference model; with 0, no reference model is loaded."""
    reference_model: Annotated[str | None, PATH] = None
    """Reference model of the KL penalty; model_name_or_path by default."""
    advantage_estimator: Annotated[str, BuiltInOr(ADVANTAGE_KINDS)] = "leave_one_out"
    """Baseline within the group, or your own function; `reinforce_plus_plus` also normalizes over the
    whole step, `tree_grpo`, `vine` and `arpo` read credit off the branches of a group, and `opd` has no
    rewards, only teachers (on-policy distillation)."""
    teachers: Annotated[tuple[str, ...], PLAIN] = ()
    """Names of the teachers (`agentrl teach`) whose logprobs a group needs before it is trained on;
    none by default (see docs/teachers.md)."""
    teacher_weight: float = Field(default=0.0, ge=0, le=1)
    """Weight w of the teachers in the advantage: (1 - w) * A_reward + w * A_teacher. 1 with the
    estimator `opd`."""
    sign_clip: bool = True
    """Clip advantages of wrong records (score <= 0.5) to <= 0 and those of correct records to >=
    0; not where turns have their own rewards or credit."""
    min_score_spread: float = Field(default=0.1, ge=0)
    """Minimum difference between the best and the worst score of a group; groups below it carry no
    learning signal and are dropped."""
    group_filter: OwnFunction | None = None
    """Your own function that selects the records of a group; off by default."""
    max_staleness: int = Field(default=1, ge=0, le=1_000_000_000)
    """Maximum age, in steps, of the policy version of a record that is trained on."""

    @model_validator(mode="before")
    @classmethod
    def _with_recipe(cls, values: Any) -> Any:
        return expand_recipe(values) if isinstance(values, dict) else values

    @field_validator("teachers")
    @classmethod
    def _check_teachers(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if not TEACHER_NAME.fullmatch(name):
                raise PydanticCustomError(
                    "teachers", "names of letters, digits, - and _, as in `agentrl teach`"
                )
        return names

    @field_validator("loss_calculator", mode="before")
    @classmethod
    def _canonical_loss(cls, name: object) -> str:
        if is_reference(str(name)) or "." in str(name):
            return str(name)
        kind = str(name).upper()
        if kind not in LOSS_KINDS and kind.lower() in RECIPES:
            raise PydanticCustomError(
                "loss_calculator", f"to select the whole recipe, use --recipe {kind.lower()}"
            )
        if kind == "CROSSENTROPY":
            raise PydanticCustomError(
                "loss_calculator",
                "CrossEntropy is the loss of supervised fine-tuning: use `agentrl sft`",
            )
        return kind

    @field_validator("advantage_estimator", mode="before")
    @classmethod
    def _estimator_of_recipe(cls, name: object) -> object:
        recipe = RECIPES.get(str(name).lower())
        if recipe is not None:
            raise PydanticCustomError(
                "advantage_estimator",
                "that is a whole recipe: its estimator is {estimator}, and --recipe {recipe} selects all of it",
                {"estimator": recipe.flags["advantage_estimator"], "recipe": str(name).lower()},
            )
        return name

    @property
    def teacher_share(self) -> float:
        """Weight of the teachers in the advantage."""
        return 1.0 if self.advantage_estimator == OPD else self.teacher_weight

    def control(self, groups_per_step: int) -> Control:
        """Return the control with which a run starts."""
        return Control(max_staleness=self.max_staleness, groups_per_step=groups_per_step)

    def under(self, control: Control) -> Self:
        """Return the section with the freshness that a run's control has now."""
        return self.model_copy(update={"max_staleness": control.max_staleness})


class TrainerSection(TrainerTuning):
    """The training loop."""

    max_steps: int = Field(default=1000, ge=1)
    """Total number of optimizer steps, including those before a resume. `agentrl sft`: by default as
    many as the epochs take; if given, it wins over num_train_epochs."""
    groups_per_step: int | None = Field(default=None, le=1_000_000)
    """Groups per optimizer step; by default per_device_train_batch_size *
    gradient_accumulation_steps records, rounded up to whole groups."""
    learning_rate: float = Field(default=1e-6, ge=0, le=1)
    """Peak learning rate of AdamW; 0 trains nothing (a control experiment). `agentrl sft`: 2e-5 by
    default, 2e-4 with lora_rank."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warm-up."""
    lr_scheduler_type: Annotated[str, BuiltInOr(RATE_SCHEDULES)] = "constant"
    """Learning rate schedule after the warm-up, or your own function of the step, in place of
    learning_rate and warmup_steps."""
    max_tokens: int = Field(default=65536, ge=1)
    """Maximum number of tokens in one forward pass; trees with longer paths are computed in
    chunks."""
    merge: Literal["auto", "tree", "packed", "none"] = "auto"
    """Prefix sharing in the forward pass. `tree`: over the whole step; `packed`: none, with turns
    side by side in a pass; `auto`: `tree`, or `packed` where a tree would save fewer than 8 tokens a
    turn; `none`: one turn per forward pass, with the model's own attention, for every model that
    transformers supports."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""
    torch_compile: bool | None = None
    """Compile the layers and the head's softmax with torch's compiler; the first steps take longer,
    and gradients differ by rounding. By default on GPUs, for runs of at least 100 steps."""
    cpu_offload: bool = False
    """Keep weights, gradients and optimizer state in host memory and copy one layer at a time to
    the GPU (FSDP2, several ranks). No effect without GPUs."""
    tp_size: int = Field(default=1, ge=1)
    """Ranks that split heads, hidden units and vocabulary (tensor and sequence parallel)."""
    ep_size: int = Field(default=1, ge=1)
    """Ranks that share the experts of a mixture-of-experts model (expert parallel)."""
    cp_size: int = Field(default=1, ge=1)
    """Ranks that split the tokens of every row (context parallel)."""
    pp_size: int = Field(default=1, ge=1)
    """Pipeline stages: ranks that split the model's layers (pipeline parallel); the rows of a step
    pass through them one after another."""
    num_processes: int = Field(default=1, ge=1, le=100_000)
    """Number of trainer ranks that `agentrl run` starts; more than one are started by `accelerate
    launch` with assets/fsdp2_dst.yml. On several machines, start them with `torchrun`."""
    trainer_gpus: GpuList = ()
    """GPUs of this machine for the ranks that `agentrl run` starts, one each (`0-3`, `0,2,5`);
    their number is the default of num_processes. By default the first GPUs."""
    trainer_threads: int | None = Field(default=None, ge=1, le=4096)
    """CPU threads of the trainer; torch's choice by default."""
    save_steps: int = Field(default=3, ge=1)
    """Steps between two checkpoints."""
    on_step: OwnFunction | None = None
    """Your own function that rank 0 calls after every step; off by default."""
    report_to: Annotated[tuple[str, ...], ADDRESS] = ()
    """Trackers that receive the metrics of every step, in addition to the console and
    metrics.jsonl: tensorboard, wandb, swanlab, trackio, mlflow (comma separated; see
    docs/monitoring.md)."""
    eval_strategy: Literal["no", "ends", "steps"] = "no"
    """When to evaluate. `no`: never; `ends`: before the first and after the last step; `steps`:
    also every eval_steps while training continues (see docs/training.md). `agentrl sft`: `ends`
    by default, if there is an eval_file."""
    consumer: Annotated[str, PLAIN] = Field(default="trainer", pattern=r"^[a-z][a-z0-9_]{0,31}$")
    """Name under which this trainer keeps its ledger. `trainer` publishes weights and admits
    samples; a trainer with another name reads the same records, writes only its own ledger, and
    needs its own output_dir."""


class PublishSection(PublishTuning):
    """How new weights reach the servers."""

    weight_sync: Literal["disk", "distributed", "ipc"] = "disk"
    """How weights reach the servers. `disk`: as files on a shared file system; `distributed`:
    broadcast from the trainer's memory over a process group (NCCL between GPUs, gloo otherwise);
    `ipc`: SGLang on the trainer's GPU copies them from the trainer's memory, which `--share_gpus` on
    one GPU chooses by itself. With all but `disk`, complete files for servers that join later are
    written while training continues."""
