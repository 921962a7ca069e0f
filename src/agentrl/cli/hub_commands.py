"""`agentrl push_to_hub`: upload a checkpoint or an exported dataset to the Hugging Face hub.

The token comes only from the environment (HF_TOKEN); HF_ENDPOINT selects another hub. An upload is
one commit; a missing repository is created.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from agentrl.config.command_line import FlagCommand
from agentrl.config.sections import RootConfig
from agentrl.errors import ConfigError, UploadError

if TYPE_CHECKING:
    from huggingface_hub import HfApi

TOKEN_VARIABLE = "HF_TOKEN"
_CARD = "README.md"


@click.command("push_to_hub", cls=FlagCommand, sections=("run",))
@click.argument("repository")
@click.option(
    "--dataset",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Upload this folder, written by `agentrl store export`, as a dataset.",
)
@click.option("--private", is_flag=True, help="Create the repository as private.")
def push_to_hub(config: RootConfig, repository: str, dataset: Path | None, private: bool) -> int:
    """Upload the run's newest checkpoint to REPOSITORY (owner/name) on the Hugging Face hub.

    With --dataset, upload a folder as a dataset instead. The token is read from HF_TOKEN.
    """
    from agentrl.launcher.evaluation_run import newest_checkpoint

    hub = _hub()
    if dataset is not None:
        folder = dataset
        address = _upload(hub, repository, folder, "dataset", private=private)
    else:
        folder = newest_checkpoint(config.run.output_path)
        card = _model_card(config, repository)
        address = _upload(hub, repository, folder, "model", card, private=private)
    print(f"{folder} is at {address}")
    return 0


def _hub() -> "HfApi":
    """Return the client.

    Raises:
        ConfigError: the token or the client library is missing.
    """
    from agentrl.config.secrets import remember

    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token:
        raise ConfigError(
            f"set {TOKEN_VARIABLE} to a token with write access; create one at "
            "https://huggingface.co/settings/tokens"
        )
    if not re.fullmatch(r"[!-~]+", token):
        raise ConfigError(
            f"{TOKEN_VARIABLE} contains a character that tokens cannot have; copy the token again"
        )
    remember([token])
    try:
        from huggingface_hub import HfApi
        from huggingface_hub.utils.tqdm import disable_progress_bars
    except ModuleNotFoundError:
        raise ConfigError("push_to_hub needs pip install 'agentrl-mongo[hub]'") from None
    disable_progress_bars()
    return HfApi(endpoint=os.environ.get("HF_ENDPOINT"), token=token, library_name="agentrl")


def _upload(
    hub: "HfApi",
    repository: str,
    folder: Path,
    kind: Literal["model", "dataset"],
    card: str = "",
    *,
    private: bool,
) -> str:
    """Upload the files of a folder in one commit; return the repository's address.

    Args:
        hub: the client.
        repository: `owner/name`.
        folder: the files; names that start with a dot are not uploaded.
        kind: kind of the repository.
        card: the text of README.md if the folder has none; empty for no card.
        private: whether a newly created repository is private.

    Raises:
        ConfigError: the folder is empty.
        UploadError: the hub refused, or did not respond.
    """
    from huggingface_hub import CommitOperationAdd

    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    path_by_name = {path.relative_to(folder).as_posix(): path for path in paths}
    path_by_name = {name: path for name, path in path_by_name.items() if not _is_hidden(name)}
    if not path_by_name:
        raise ConfigError(f"{folder} contains no files to upload")
    adds = [CommitOperationAdd(name, path) for name, path in path_by_name.items()]
    if card and _CARD not in path_by_name:
        adds.append(CommitOperationAdd(_CARD, card.encode()))
    with _hub_errors(repository):
        created = hub.create_repo(
            repository, repo_type=kind, private=private or None, exist_ok=True
        )
        hub.create_commit(
            created.repo_id, adds, commit_message=f"{kind} of AgentRL", repo_type=kind
        )
    return str(created)


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))


@contextmanager
def _hub_errors(repository: str) -> Iterator[None]:
    """Translate the client's errors into one line."""
    from huggingface_hub.errors import (  # type: ignore[attr-defined]
        HfHubHTTPError,
        HFValidationError,
        HTTPError,  # of whichever HTTP library the client uses
    )

    try:
        yield
    except HFValidationError as error:
        raise ConfigError(
            f"{repository!r} is not a valid repository name: {_first_line(error)}"
        ) from None
    except HfHubHTTPError as error:
        status: Any = getattr(error.response, "status_code", "?")
        hint = (
            (f"; check that {TOKEN_VARIABLE} has write access to it")
            if status in (401, 403)
            else ""
        )
        raise UploadError(
            f"the hub refused {repository}: {status} {_first_line(error.server_message or error)}{hint}"
        ) from None
    except HTTPError as error:
        raise UploadError(f"no response from the hub: {type(error).__name__}: {error}") from None


def _first_line(text: object) -> str:
    return next((line.strip() for line in str(text).splitlines() if line.strip()), "")


def _model_card(config: RootConfig, repository: str) -> str:
    """Return the card of a trained model: its origin, in the hub's format."""
    name = config.model.model_name_or_path
    is_on_hub = name.count("/") == 1 and not Path(name).exists() and name[:1] not in "./~"
    base = f"base_model: {name}\n" if is_on_hub else ""
    return (
        f"---\nlibrary_name: transformers\n{base}tags:\n- agentrl\n- "
        "reinforcement-learning\n---\n\n"
        f"# {repository.rpartition('/')[2]}\n\nTrained with AgentRL, run {config.run.run_name}.\n"
    )
