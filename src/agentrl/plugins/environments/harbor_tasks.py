"""Tasks in Harbor's format (`task.toml`, `instruction.md`, `environment/`, `tests/`), read from a folder.

Input: a folder with one task or many. Output: `HarborTask`s, or a `ConfigError` of one line. The
format is parsed here because Harbor's own package needs a newer Python than AgentRL and depends on
a client for every cloud; single-step, single-container tasks of schema 1.0 to 1.4 are supported.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.errors import AgentError, ConfigError
from agentrl.plugins.environments.harbor_format import (
    Dockerfile,
    Table,
    check_own,
    read_dockerfile,
    read_text,
)
from agentrl.plugins.environments.harbor_sandboxes import (
    PROGRAMS,
    DockerSandbox,
    ProcessSandbox,
    Sandbox,
    check_docker,
    check_processes,
)

_MAX_DEPTH = 6
_CLEANUP_SECONDS = 30.0
_DEFAULT_SECONDS, _MAX_SECONDS = 600.0, 86_400.0
_MAX_CPUS = 1024.0
_IMAGE = re.compile(r"[a-z0-9][\w./:@-]*", re.ASCII)
"""Valid image names; anything else could be interpreted as an option of Docker."""
_REWARD, _REWARDS = "/logs/verifier/reward.txt", "/logs/verifier/reward.json"
_VERIFIER_FOLDERS = ("/tests", "/logs")


@dataclass(frozen=True)
class HarborTask:
    """One task."""

    folder: Path
    instruction: str
    tags: tuple[str, ...]
    agent_seconds: float
    verifier_seconds: float
    build_seconds: float
    verifier_variables: Mapping[str, str]
    variables: Mapping[str, str]
    directory: str
    """Working directory of the policy's commands."""
    image: str | None
    """A ready image, which need not be built."""
    memory_mb: int
    num_cpus: float
    has_network: bool
    copied: Sequence[tuple[Path, str]]
    """Files that the Dockerfile copies; without a Dockerfile, all files of `environment/`."""

    def open(self, runtime: str) -> Sandbox:
        """Start the task's sandbox; the caller closes it."""
        if runtime == "process":
            sandbox = ProcessSandbox(
                self.directory,
                self.variables,
                memory_mb=self.memory_mb,
                network=self.has_network,
            )
            for source, target in self.copied:
                sandbox.put(source, target)
            return sandbox
        context = self.folder / "environment"
        return DockerSandbox(
            self.image or context,
            self.directory if self.image else None,
            self.variables,
            memory_mb=self.memory_mb,
            num_cpus=self.num_cpus,
            network=self.has_network,
            build_seconds=self.build_seconds,
        )

    def reward(self, sandbox: Sandbox) -> tuple[float, dict[str, float]]:
        """Run the verifier; return the reward and further figures."""
        # Remove the policy's remaining processes, and its files at the verifier's output paths.
        sandbox.shell("kill -9 -1", _CLEANUP_SECONDS)
        sandbox.shell("rm -rf /logs/verifier /tests/*; mkdir -p /logs/verifier", _CLEANUP_SECONDS)
        sandbox.put(self.folder / "tests", "/tests")
        status, output = sandbox.shell(
            "bash /tests/test.sh", self.verifier_seconds, self.verifier_variables
        )
        text, figures = sandbox.read(_REWARD), sandbox.read(_REWARDS)
        try:
            given = json.loads(figures) if figures else {"reward": float(text or "")}
            numbers = {
                str(name): float(value)
                for name, value in given.items()
                if isinstance(value, int | float)
            }
            if text and "reward" not in numbers:
                numbers["reward"] = float(text)
            reward = numbers.pop("reward") if "reward" in numbers else numbers[_only_key(numbers)]
            if not math.isfinite(reward):
                raise ValueError(reward)
        except (ValueError, AttributeError, KeyError, OverflowError, RecursionError):
            last = (output.strip().splitlines() or ["it printed nothing"])[-1]
            raise AgentError(
                f"the verifier of {self.folder.name} wrote no reward to {_REWARD} or {_REWARDS} "
                f"(status {status}: {last})"
            ) from None
        return reward, numbers


def load_tasks(name: str, runtime: str, *, skip_build: bool) -> list[HarborTask]:
    """Return the tasks of a folder, by their paths."""
    checks = {"docker": check_docker, "process": check_processes}
    if runtime not in checks:
        raise ConfigError(f"runtime={runtime}: expected docker or process")
    root = Path(name).expanduser()
    if not root.is_dir():
        raise ConfigError(f"folder {root.absolute()} does not exist")
    files = [path for path in root.rglob("task.toml") if not _is_skipped(path.relative_to(root))]
    if not files:
        raise ConfigError(f"no task.toml found in {root.absolute()} or its subfolders")
    tasks = []
    for path in sorted(files):
        context = path.parent / "environment"
        dockerfile = read_dockerfile(context, root, is_built=runtime == "docker")
        tasks.append(_read_task(path.parent, root, dockerfile))
        if runtime == "process":
            _check_process_support(tasks[-1], None if skip_build else dockerfile)
    checks[runtime]()
    return tasks


def _read_task(folder: Path, root: Path, dockerfile: Dockerfile | None) -> HarborTask:
    content = Table.of_file(folder / "task.toml", root)
    instruction = read_text(folder / "instruction.md", root).strip()
    verifier, agent = content.table("verifier"), content.table("agent")
    environment, metadata = content.table("environment"), content.table("metadata")
    if "steps" in content:
        raise ConfigError(f"{folder}: it has several steps; only single-step tasks are supported")
    if verifier.text("environment_mode") not in (None, "shared"):
        raise ConfigError(
            f"{folder}: its verifier requires its own container; only `shared` is supported"
        )
    context = folder / "environment"
    if (context / "docker-compose.yaml").exists():
        raise ConfigError(
            f"{folder}: it has several services; only single-container tasks are supported"
        )
    if not (folder / "tests/test.sh").is_file():
        raise ConfigError(f"{folder}: tests/test.sh, which computes the reward, is missing")
    image = environment.text("docker_image")
    if image is not None and not _IMAGE.fullmatch(image):
        raise ConfigError(
            f"{folder / 'task.toml'}: environment.docker_image: {image[:40]!r} is not a valid "
            "image name"
        )
    check_own(folder / "tests", root)
    if context.exists():
        check_own(context, root)
    directory = environment.place("workdir") or (dockerfile.directory if dockerfile else "/")
    directory = "/app" if directory == "/" else directory
    all_files = [(context, directory)] if context.is_dir() else []
    return HarborTask(
        folder=folder.absolute(),
        instruction=instruction,
        tags=tuple(filter(None, (metadata.text(name) for name in ("category", "difficulty")))),
        agent_seconds=agent.number("timeout_sec", _DEFAULT_SECONDS, _MAX_SECONDS),
        verifier_seconds=verifier.number("timeout_sec", _DEFAULT_SECONDS, _MAX_SECONDS),
        build_seconds=environment.number("build_timeout_sec", _DEFAULT_SECONDS, _MAX_SECONDS),
        verifier_variables=verifier.variables("env"),
        variables=environment.variables("env") | dict(dockerfile.variables if dockerfile else {}),
        directory=directory,
        image=image,
        memory_mb=environment.megabytes("memory_mb", "memory", "2G"),
        num_cpus=environment.number("cpus", 1.0, _MAX_CPUS),
        has_network=_has_network(agent, environment),
        copied=dockerfile.copied if dockerfile else all_files,
    )


def _has_network(agent: Table, environment: Table) -> bool:
    """Return whether the policy's commands have network access; an allowlist counts as no access."""
    mode = agent.text("network_mode") or environment.text("network_mode")
    return "allow_internet" in environment if mode is None else mode == "public"


def _check_process_support(task: HarborTask, dockerfile: Dockerfile | None) -> None:
    """Refuse a task that processes cannot run, or whose container must be built."""
    if dockerfile is not None and dockerfile.needs_docker:
        raise ConfigError(
            f"{task.folder / 'environment/Dockerfile'}: `{dockerfile.needs_docker}` needs Docker; "
            "runtime=process&skip_build=true runs it with this machine's programs instead"
        )
    for place in (task.directory, *(target for _, target in task.copied)):
        if place.startswith(PROGRAMS) or place == "/":
            raise ConfigError(
                f"{task.folder}: {place} belongs to this machine with runtime=process; the task "
                "needs Docker"
            )
        if place.startswith(_VERIFIER_FOLDERS):
            raise ConfigError(f"{task.folder}: {place} is reserved for its verifier")


def _only_key(numbers: Mapping[str, float]) -> str:
    (name,) = numbers  # raises ValueError if there are several, or none
    return name


def _is_skipped(path: Path) -> bool:
    return len(path.parts) > _MAX_DEPTH or any(part.startswith(".") for part in path.parts)
