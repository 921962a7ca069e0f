"""A few steps of a run as one file, from which another machine can replay them.

    first_step           number of the first step to replay
    config.yaml          flags of the run, the model, the algorithm and the trainer
    metrics.jsonl        what was recorded of the steps
    checkpoints/         the last one before the steps, and the weights of those that were kept
    model/, reference/   the first weights where no checkpoint comes before; the reference model
    store/               the groups of the steps, as `agentrl store export` writes them

The contents of a file are untrusted: it unpacks to plain files of its own folder, its flags name
nothing beyond them, and code next to a model is not run. What a run was trained with beyond that, such as a
loss of the user's, is given again by whoever replays the file.
"""

import asyncio
import gzip
import io
import shutil
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import yaml

from agentrl.config.atomic_file import atomic_file
from agentrl.config.flags import SETTINGS
from agentrl.config.loading import check_foreign, flat_values, load_config
from agentrl.config.named_files import YamlAsTyped
from agentrl.config.sections import RootConfig
from agentrl.errors import ConfigError, WriteError
from agentrl.models.checkpoints.resolve import resolve_model
from agentrl.runtime.tar_files import unpack_files
from agentrl.store import TrajectoryStore
from agentrl.store.private_mongod import EmbeddedMongo
from agentrl.trainer.checkpoint import checkpoints_root, latest_checkpoint
from agentrl.trainer.metrics.metrics_file import METRICS_FILE, read_metrics, recorded_steps
from agentrl.trainer.rl.replay import STEP_FLAGS
from agentrl.trainer.rl.run_start import reference_path

CONFIG_FILE = "config.yaml"
STORE_DIR = "store"
_FIRST_STEP_FILE = "first_step"
_MODEL_DIR, _REFERENCE_DIR, _CHECKPOINTS_DIR = "model", "reference", "checkpoints"
_SECTIONS = ("model", "algorithm", "trainer")
_RUN_FLAGS = ("run_name", "seed")
_CONTENTS = {
    *(_FIRST_STEP_FILE, CONFIG_FILE, METRICS_FILE, _CHECKPOINTS_DIR),
    *(_MODEL_DIR, _REFERENCE_DIR, STORE_DIR),
}
_MAX_EXPANSION = 50
_MAX_FILES = 10_000
_MAX_READ_BYTES = 1 << 20
_GZIP_START = b"\x1f\x8b"
_MAX_CONFIG_BYTES = 1 << 16
_MAX_STEP_DIGITS = 12


async def write_bundle(
    config: RootConfig, store: TrajectoryStore, first: int, last: int, target: Path
) -> None:
    """Write steps `first` to `last` of a run to a file, compressed if its name ends in `.gz`.

    Args:
        config: of the run, as it was trained.
        store: of the run.
        first: first step to replay.
        last: last step.
        target: the file, which must not exist.

    Raises:
        ConfigError: the file exists, or a step was not trained.
        WriteError: the file cannot be written.
    """
    output = config.run.output_path
    recorded = recorded_steps(config, first, last)
    checkpoint = latest_checkpoint(output, at_most=first - 1)
    checkpoint_step = 0 if checkpoint is None else checkpoint.step
    groups = await store.ledger.trained_tasks(config.trainer.consumer, checkpoint_step + 1, last)
    lines = [recorded[s].model_dump_json(exclude_none=True) for s in sorted(recorded) if s <= last]
    with (
        tempfile.TemporaryDirectory(prefix="agentrl-bundle-") as folder,
        _new_file(target) as tar,
    ):
        exported = Path(folder, STORE_DIR)
        await store.transfer.export_run(exported, groups=groups)
        tar.add(exported, STORE_DIR)
        _add_text(tar, _FIRST_STEP_FILE, str(first))
        _add_text(tar, CONFIG_FILE, yaml.safe_dump(_portable(config), sort_keys=False))
        _add_text(tar, METRICS_FILE, "".join(f"{line}\n" for line in lines))
        if checkpoint is not None:
            tar.add(checkpoint.path, f"{_CHECKPOINTS_DIR}/{checkpoint.path.name}")
        if checkpoint is None or config.model.lora_rank:
            tar.add(resolve_model(config.model.model_name_or_path), _MODEL_DIR)
        reference = reference_path(config.model, config.algorithm)
        if reference is not None:
            tar.add(reference, _REFERENCE_DIR)
        for path in _kept_weights(output, first, last):
            tar.add(path, f"{_CHECKPOINTS_DIR}/{path.name}", filter=_without_state)


@contextmanager
def _new_file(target: Path) -> Iterator[tarfile.TarFile]:
    """Yield an archive that becomes `target` when the block ends without error."""
    if target.exists():
        raise ConfigError(f"{target} already exists; choose another file")
    try:
        with (
            atomic_file(target) as staging,
            # Files of the hub's cache are links.
            tarfile.open(
                staging, "w:gz" if target.suffix == ".gz" else "w", dereference=True
            ) as tar,
        ):
            yield tar
    except OSError as error:
        raise WriteError(f"cannot write {target}: {error.strerror or error}") from error


@dataclass(frozen=True)
class Bundle:
    """An unpacked bundle."""

    config: RootConfig
    """Configuration for the replay; its output directory is the bundle's folder."""
    steps: tuple[int, int]
    """The first and the last step."""


@contextmanager
def unpacked(file: Path, typed: Mapping[str, str]) -> Iterator[Bundle]:
    """Unpack a bundle for the duration of the block.

    Args:
        file: of `write_bundle`, by anybody.
        typed: flags of the command line, which override the file's.

    Raises:
        ConfigError: the file is not a bundle, or its contents exceed the limits.
    """
    with tempfile.TemporaryDirectory(prefix="agentrl-bundle-") as name:
        folder = Path(name)
        try:
            _extract(file, folder)
        except (tarfile.TarError, EOFError, OSError, ValueError, RecursionError) as error:
            reason = str(error).partition(":\n")[0]
            raise ConfigError(f"{file} is not a bundle: {reason}") from None
        values = {
            **_flags(file, folder / CONFIG_FILE, typed),
            "output_dir": name,
            "mongo_data_dir": str(folder / "mongo"),
            "eval_strategy": "no",  # a bundle has no questions for evaluations
            "model_name_or_path": str(folder / _MODEL_DIR),
        }
        if (folder / _REFERENCE_DIR).is_dir():
            values["reference_model"] = str(folder / _REFERENCE_DIR)
        yield Bundle(load_config(values), _steps(file, folder))


@contextmanager
def bundled_store(config: RootConfig) -> Iterator[str]:
    """Serve the database of a bundle; yields its URI. Enter this in the main thread."""
    with EmbeddedMongo(config.private_mongo_dir) as mongo:
        uri = mongo.uri()
        asyncio.run(_import(uri, config))
        yield uri


async def _import(uri: str, config: RootConfig) -> None:
    async with TrajectoryStore.connect(uri, config.run.run_name) as store:
        await store.transfer.import_run(config.run.output_path / STORE_DIR)
        await store.ensure_schema()


def _steps(file: Path, folder: Path) -> tuple[int, int]:
    """Return the first and the last step; a replay visits all steps up to the last one."""
    first, num_steps = _first_step(file, folder), _num_steps(file, folder)
    if not 1 <= first <= num_steps:
        raise ConfigError(
            f"{file} is not a bundle: it starts at step {first}, and its {METRICS_FILE} has steps 1 "
            f"to {num_steps}"
        )
    return first, num_steps


def _first_step(file: Path, folder: Path) -> int:
    path = folder / _FIRST_STEP_FILE
    text = path.read_bytes()[: _MAX_STEP_DIGITS + 1] if path.is_file() else b""
    if not text.isdigit() or len(text) > _MAX_STEP_DIGITS:
        raise ConfigError(f"{file} is not a bundle: it does not state which steps it holds")
    return int(text)


def _num_steps(file: Path, folder: Path) -> int:
    try:
        recorded = sorted(read_metrics(folder))
        if recorded != [*range(1, len(recorded) + 1)]:
            raise ValueError("it leaves steps out")
    except ValueError as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"{file} is not a bundle: its {METRICS_FILE} cannot be read: {reason}"
        ) from None
    return len(recorded)


def _flags(file: Path, path: Path, typed: Mapping[str, str]) -> dict[str, Any]:
    """Return the flags of a bundle, with those of the command line.

    Raises:
        ConfigError: it holds what `write_bundle` never writes, such as YAML that expands when read, or
            names what only the user can name.
    """
    if not path.is_file():
        raise ConfigError(f"{file} is not a bundle: it has no {CONFIG_FILE}")
    try:
        text = path.read_bytes()[: _MAX_CONFIG_BYTES + 1]
        if len(text) > _MAX_CONFIG_BYTES:
            raise ValueError("it is too long")
        if any(getattr(event, "anchor", None) for event in yaml.parse(text, yaml.SafeLoader)):
            raise ValueError("it contains anchors")
        flags = yaml.load(text, YamlAsTyped)
        if not isinstance(flags, dict):
            raise ValueError("it holds no flags")
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"{file} is not a bundle: its {CONFIG_FILE} cannot be read: {reason}"
        ) from None
    unexpected = [name for name in flags if not _is_of_step(name)]
    if unexpected:
        raise ConfigError(
            f"{file} is not a bundle: it sets {unexpected[0]!s:.40}, which a bundle cannot set"
        )
    left = {name: value for name, value in flags.items() if name not in typed}
    check_foreign(left, {}, str(file))
    return {**left, **typed}


def _portable(config: RootConfig) -> dict[str, Any]:
    """Return the set flags that a replay needs: plain values, and the names of own functions."""
    return {
        name: value
        for name, value in flat_values(config).items()
        if _is_of_step(name)
        and value not in (None, "", [])
        and (SETTINGS[name].is_plain(value) or name in STEP_FLAGS)
    }


def _is_of_step(name: object) -> bool:
    return name in _RUN_FLAGS or (name in SETTINGS and SETTINGS[name].section in _SECTIONS)


def _kept_weights(output: Path, first: int, last: int) -> Iterator[Path]:
    root = checkpoints_root(output)
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        if path.name.isdigit() and first <= int(path.name) <= last:
            yield path


def _without_state(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Omit the optimizer's state: these weights are only compared."""
    return None if "state" in Path(member.name).parts else member


def _add_text(tar: tarfile.TarFile, name: str, text: str) -> None:
    content = text.encode()
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


class _SmallReads:
    """A file of which no more is read at once than a header or a part of a member takes.

    `tarfile` reads the extended header of a member at once, however long it says it is.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self.seek, self.tell, self._read = file.seek, file.tell, file.read

    def read(self, size: int) -> bytes:
        if not 0 <= size <= _MAX_READ_BYTES:
            raise tarfile.ReadError(f"a header is larger than {_MAX_READ_BYTES >> 20} MiB")
        return self._read(size)


@contextmanager
def _archive(file: Path) -> Iterator[tarfile.TarFile]:
    """Open an archive of the kinds that `write_bundle` writes; others unpack to far more."""
    with file.open("rb") as raw:
        is_compressed = raw.read(len(_GZIP_START)) == _GZIP_START
        raw.seek(0)
        unpacked_file: Any = gzip.GzipFile(fileobj=raw) if is_compressed else raw
        with tarfile.open(fileobj=_SmallReads(unpacked_file), mode="r:") as tar:  # type: ignore[call-overload]
            yield tar


def _extract(file: Path, folder: Path) -> None:
    max_bytes = min(
        shutil.disk_usage(folder).free // 2, _MAX_EXPANSION * max(file.stat().st_size, 1 << 20)
    )
    with _archive(file) as archive:
        unpack_files(archive, folder, max_files=_MAX_FILES, max_bytes=max_bytes)
    foreign = sorted(path.name for path in folder.iterdir() if path.name not in _CONTENTS)
    if foreign:
        raise ValueError(f"it holds {foreign[0][:100]!r}, which no bundle contains")
