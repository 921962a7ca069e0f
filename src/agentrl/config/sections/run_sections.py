"""Sections that define a run: its name and files, model, database and questions."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, SecretStr, field_validator
from pydantic_core import PydanticCustomError

from agentrl.config.named_files import existing_or_shipped, read_text_file
from agentrl.config.sections.section import ConfigSection
from agentrl.config.sections.tuning import DataTuning, ModelTuning, RunTuning
from agentrl.config.value_kinds import CODE, COMMAND, PATH, PLAIN, SECRET, Naming

_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")
MONGODB_DATABASES = frozenset({"admin", "config", "local"})
"""Databases that MongoDB reserves for itself."""
_MAX_NAME_CHARS = 256
_TEMPLATE_ARGUMENTS = {"messages", "tools", "documents", "add_generation_prompt"}
PRIVATE_MONGO_ROOT = Path(".agentrl/mongo")
"""Directory of the private mongods' data, with one directory for each run."""


@dataclass(frozen=True)
class _TemplateFile(Naming):
    """Annotation of a file that may be given as its text."""

    def is_plain(self, value: Any) -> bool:
        """Return whether a value is the text of a template."""
        return isinstance(value, str) and ("{%" in value or "{{" in value)


_TEMPLATE_FILE = _TemplateFile("path")


class RunSection(RunTuning):
    """Name of the run and locations of its files."""

    run_name: Annotated[str, PLAIN] = "run"
    """Name of the run; also names its database, output directory and log files."""
    output_dir: Path | None = None
    """Directory of checkpoints, published weights, metrics and summary; `output/RUN_NAME` by
    default."""
    logs_dir: Path = Path("logs/as")
    """Directory of the log files of all processes."""
    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Port of this process's Prometheus endpoint (`/metrics`); no endpoint by default. `agentrl
    run` gives this port to the trainer and the following ones to its samplers."""
    seed: int = Field(default=42, ge=0, lt=2**32)
    """Seed of all randomness: order of questions, sampling, initial weights."""
    num_gpus: int | None = Field(default=None, ge=0, le=1024)
    """Number of GPUs of this machine; counted with `nvidia-smi` by default. With `--dry_run`: plan
    for a machine with this many GPUs."""
    gpu_memory_gb: float | None = Field(default=None, gt=0)
    """Memory of a GPU in 10^9 bytes; as `nvidia-smi` reports it by default, or with `agentrl plan --gpu`
    that of the GPU model."""
    fresh: bool = False
    """Start over instead of resuming. Refused if the run's database or output exists, unless
    `--delete_existing` is also given."""
    delete_existing: bool = False
    """With `--fresh`: delete the run's database and output directory first."""

    join: bool = False
    """Train a run of `--db_connection_string` that another user or another machine started, although
    its checkpoints are not in `--output_dir`. Both then train on the same records."""

    @field_validator("run_name")
    @classmethod
    def _check_run_name(cls, name: str) -> str:
        if not _RUN_NAME.fullmatch(name):
            # The name is part of the names of databases, directories and files.
            raise PydanticCustomError(
                "run_name", "up to 63 letters, digits, - and _, the first a letter or digit"
            )
        if name.casefold() in MONGODB_DATABASES:
            raise PydanticCustomError("run_name", "is reserved by MongoDB; choose another")
        return name

    @property
    def output_path(self) -> Path:
        """The output directory, absolute."""
        return (self.output_dir or Path("output") / self.run_name).absolute()


class ModelSection(ModelTuning):
    """The policy that is trained."""

    model_name_or_path: Annotated[str, PATH] = Field(default="assets/demo/model", min_length=1)
    """Directory of a Hugging Face checkpoint (weights, tokenizer, chat template), or a hub id."""
    trust_remote_code: Annotated[bool, CODE] = False
    """Run Python code shipped with a checkpoint. Enable only for checkpoints that you trust."""
    torch_dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """Training precision; `auto` is bfloat16 on CUDA and float32 on CPU."""
    chat_template: Annotated[str | None, _TEMPLATE_FILE] = None
    """Chat template that replaces the model's own: a file, whose text is stored with the run and
    with every checkpoint, or the Jinja source itself."""
    chat_template_kwargs: Annotated[dict[str, Any] | None, PLAIN] = None
    """JSON object of variables that the chat template reads (`{"enable_thinking": false}`)."""
    router_replay: bool = False
    """Mixture-of-experts models: record the experts that the servers chose for every token, store
    them with the turns, and use the same experts in the trainer."""
    train_vision: bool = False
    """Vision models: also train the image encoder; it is frozen by default."""
    lora_rank: int = Field(default=0, ge=0, le=65_536)
    """Rank of a low-rank adapter (LoRA) that is trained on the frozen model; 0 trains all weights.
    Servers load adapters without interrupting sampling (see docs/models.md)."""
    lora_alpha: int = Field(default=32, ge=1)
    """Scale of the adapter: its output is multiplied by lora_alpha / lora_rank."""
    lora_target_modules: Annotated[tuple[str, ...], PLAIN] = (
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    )
    """Linear layers that get an adapter, by the last part of their name. Experts of a mixture
    cannot have one: remove the last three names for a model whose MLP layers are all experts."""

    @field_validator("chat_template")
    @classmethod
    def _read_chat_template(cls, given: str | None) -> str | None:
        if given is None or _TEMPLATE_FILE.is_plain(given):
            return given
        try:
            return read_text_file(Path(given).expanduser())
        except OSError as error:
            reason = {"reason": error.strerror}
            raise PydanticCustomError("chat_template", "{reason}", reason) from None

    @field_validator("chat_template_kwargs")
    @classmethod
    def _check_template_names(cls, given: dict[str, Any] | None) -> dict[str, Any] | None:
        reserved = sorted(_TEMPLATE_ARGUMENTS & (given or {}).keys())
        if reserved:
            raise PydanticCustomError(
                "chat_template_kwargs",
                "{name} is reserved for the conversation",
                {"name": reserved[0]},
            )
        return given

    @field_validator("model_name_or_path")
    @classmethod
    def _find_shipped_model(cls, name: str) -> str:
        found = existing_or_shipped(Path(name))
        return str(found) if found.is_absolute() else name


class StoreSection(ConfigSection):
    """The document store."""

    db_connection_string: SecretStr | None = None
    """MongoDB URI; `MONGODB_URI` by default. Without either, `agentrl run` starts a private mongod.
    The database is always named after the run."""
    mongo_data_dir: Path | None = None
    """Data directory of the private mongod; `.agentrl/mongo/RUN_NAME` by default."""
    mongo_port: int | None = Field(default=None, ge=0, le=65535)
    """Port of the private mongod on loopback, or the next free one. By default the run's previous
    port, which keeps its connection string valid; initially 27417."""
    retain_steps: int | None = Field(default=None, ge=0)
    """Remove the turns of groups that were consumed more than this many steps before the newest
    checkpoint, while the run goes on. By default nothing is removed. What the oldest checkpoint
    still needs stays, and so do questions, records, scores and figures (see docs/store.md)."""


class DataSection(DataTuning):
    """The questions."""

    train_file: Path | None = None
    """Training questions: a JSONL, JSON, CSV or Parquet file, a directory, or a Hugging Face
    dataset (`owner/name` or `owner/name@config`, optionally followed by `:split`). Parquet files,
    directories and datasets need `agentrl-mongo[data]`. By default, the run trains on the tasks in
    the database."""
    eval_file: Path | None = None
    """Held-out questions, in any format that train_file accepts; no evaluation by default."""
    env: Annotated[str | None, CODE] = None
    """Environment that provides, runs and rewards the training tasks, instead of train_file:
    `reasoning_gym:NAME?size=200&seed=1`, `textarena:NAME`, `verifiers:TASKSET`, `openenv:URL`,
    `harbor:FOLDER`, `bfcl:CATEGORY` (see docs/environments.md); `stored:RUN`: turns of an earlier run
    (see docs/stored-turns.md)."""
    eval_env: Annotated[str | None, CODE] = None
    """Environment of the held-out tasks, instead of eval_file. Without a seed, its tasks differ
    from those of env."""
    env_python: Annotated[Path | None, COMMAND] = None
    """Python that has the environments' packages; by default .agentrl/environments/KIND/bin/python
    if it exists, else this one."""
    env_variables: Annotated[tuple[str, ...], SECRET] = ()
    """Environment variables that are passed to an environment's process in addition to PATH, HOME,
    the locale, caches and certificates (comma separated)."""
    env_scorer: Annotated[str | None, PLAIN] = None
    """Scorer of the environments' tasks that sees all rollouts of a task together (`sees_group`),
    with the environment's rewards in `record.reward`; by default these rewards are the scores."""
    sampler_module: Annotated[Path | None, CODE] = None
    """Python file that registers kinds of tasks and the samplers that run them; its optional
    `train_tasks(seed)` yields the training tasks on demand and may be infinite (see
    docs/bring-your-own.md)."""
    warm_start: Path | None = None
    """Configuration of a fine-tuning that comes first: flags of `agentrl sft` in a YAML file. The run
    starts from its result, in `output/RUN_NAME-warm` (see docs/sft.md)."""
    records_of: Annotated[str | None, PLAIN] = Field(
        default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$"
    )
    """`agentrl sft`: learn from the training records of this run instead of a train_file."""
    min_score: float = 0.5
    """`agentrl sft`: minimum score of a record to learn from."""
    num_train_epochs: int = Field(default=1, ge=1)
    """Number of passes over the training questions. `agentrl sft`: 3 by default."""
    num_generations: int = Field(default=8, ge=1, le=10_000)
    """Rollouts per training question, which form a group."""
    rollouts: Literal["chains", "tree"] = "chains"
    """`chains`: every rollout of a training question starts at the question; `tree`: some start at
    turns of others (see docs/rollouts.md)."""
    eval_num_generations: int = Field(default=1, ge=1, le=10_000)
    """Rollouts per evaluation question."""
    default_scorer: Annotated[str | None, PLAIN] = None
    """Scorer of questions that name none, or a weighted sum of scorers, `gaia + 0.3*similarity`; by
    default `agentcpm`, the judge, if agent_config_path is given, else `exact`: the answer must equal
    the reference, ignoring surrounding whitespace."""
    default_answer_schema: Annotated[str | None, PLAIN] = None
    """Where the answer of questions that name no schema is found: `boxed`, a marker such as `####` or
    `Answer:`, three backquotes (a fenced block), or the name of a tag. By default what the question's
    text asks for, else what suits its data set, else `answer`."""
    system_prompt: Annotated[str | None, PLAIN] = None
    """System prompt of questions that have none; no system prompt by default."""

    @field_validator("system_prompt")
    @classmethod
    def _refuse_file(cls, given: str | None) -> str | None:
        if given and len(given) < _MAX_NAME_CHARS and Path(given).is_file():
            raise PydanticCustomError(
                "system_prompt", 'give the text and not its file, as in "$(cat FILE)"'
            )
        return given

    @property
    def rounds(self) -> tuple[int, ...]:
        """The number of a tree's rollouts by round; empty for chains."""
        if self.rollouts == "chains":
            return ()
        roots = self.tree_roots or max(1, self.num_generations // 2)
        others = self.num_generations - roots
        full, rest = divmod(others, self.tree_branches or others or 1)
        return (roots, *full * (self.tree_branches or others,), *((rest,) if rest else ()))

    @property
    def has_training(self) -> bool:
        """Whether training questions, an environment or a task module is given."""
        return any(one is not None for one in (self.train_file, self.env, self.sampler_module))

    @property
    def has_held_out(self) -> bool:
        """Whether held-out questions or an environment of them is given."""
        return self.eval_file is not None or self.eval_env is not None

    @property
    def environments(self) -> dict[str, str]:
        """The given environments, by flag."""
        named = {"env": self.env, "eval_env": self.eval_env}
        return {flag: uri for flag, uri in named.items() if uri is not None}

    @field_validator("train_file", "eval_file", "warm_start")
    @classmethod
    def _find_shipped_questions(cls, path: Path | None) -> Path | None:
        return None if path is None else existing_or_shipped(path)
