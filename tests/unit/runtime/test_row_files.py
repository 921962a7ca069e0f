"""Files that rows name: those of the question file's folder, and nothing of the rest of the machine."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl.config.sections import DataSection
from agentrl.datasets.entries import folder_of
from agentrl.datasets.question_files import load_questions
from agentrl.errors import DatasetError
from agentrl.plugins.sft.demonstrations.demonstration import read_demonstrations
from agentrl.runtime.row_files import open_row_file

SECRET = "the key of the user"
PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108000000003a7e9b55"
    "0000000a49444154789c6360000000020001e221bc330000000049454e44ae426082"
)
WAYS_OUT = {
    "absolute": "{outside}/key.txt",
    "a parent": "../outside/key.txt",
    "a parent of a folder": "images/../../outside/key.txt",
    "many parents": "../" * 60 + "etc/passwd",
    "a link to a file": "file-link.txt",
    "a link in a folder": "images/file-link.txt",
    "a link to a folder": "folder-link/key.txt",
    "a chain of links": "chain.txt",
    "a link to a device": "device.txt",
    "a link through the process": "cwd-link/outside/key.txt",
    "through /proc": "/proc/self/environ",
    "a device": "/dev/zero",
    "a folder beside it": "../data-of-others/key.txt",
}
NO_FILES = {
    "a loop of links": "loop.txt",
    "a link to nothing": "dangling.txt",
    "a pipe": "pipe.txt",
    "a folder": "images",
    "the folder itself": ".",
    "a name with NUL": "q.txt\0../outside/key.txt",
    "a long name": "n" * 5000,
    "a long path": "images/" + "x/" * 2000 + "key.txt",
    "half a character": "\udc80.txt",
    "a file's address": "file://{outside}/key.txt",
    "a file's address without a host": "file:{outside}/key.txt",
    "an address in capitals": "FILE://{outside}/key.txt",
    "another address": "ftp://127.0.0.1/key.txt",
    "percents": "..%2foutside%2fkey.txt",
    "percents of dots": "%2e%2e/outside/key.txt",
    "the home": "~/key.txt",
    "a variable": "$HOME/key.txt",
    "a variable in braces": "${HOME}/key.txt",
    "backslashes": "..\\outside\\key.txt",
    "a user": "~root/.bashrc",
}


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of questions, from which links lead to a key of the user."""
    for name in ("outside", "data-of-others", "data/images"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("outside", "data-of-others"):
        (tmp_path / name / "key.txt").write_text(SECRET)
        (tmp_path / name / "key.png").write_bytes(PNG)
    monkeypatch.setenv("HOME", str(tmp_path / "outside"))
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "data"
    (folder / "q.txt").write_text("own")
    (folder / "images/one.png").write_bytes(PNG)
    links: dict[str, str | Path] = {
        "file-link.txt": "../outside/key.txt",
        "images/file-link.txt": "../../outside/key.txt",
        "folder-link": tmp_path / "outside",
        "chain.txt": "images/file-link.txt",
        "device.txt": "/dev/zero",
        "cwd-link": "/proc/self/cwd",
        "loop.txt": "loop.txt",
        "dangling.txt": "nothing.txt",
        "own-link.txt": "q.txt",
    }
    for name, target in links.items():
        (folder / name).symlink_to(target)
    os.mkfifo(folder / "pipe.txt")
    return folder


def refusal(act: Callable[[], Any]) -> str:
    """Return the message with which a file of rows is refused."""
    with pytest.raises(DatasetError) as refused:
        act()
    return str(refused.value)


def written(folder: Path, row: dict[str, Any]) -> Path:
    """A file whose second line is the row."""
    path = folder / "q.jsonl"
    first = {"question": "x", "answer": "y", "messages": [{"role": "user", "content": "x"}]}
    first["messages"].append({"role": "assistant", "content": "y"})  # type: ignore[attr-defined]
    path.write_text(json.dumps(first) + "\n" + json.dumps(row) + "\n")
    return path


@pytest.mark.timeout(20)
@pytest.mark.parametrize("way", WAYS_OUT | NO_FILES)
def test_a_row_leaves_the_folder_of_its_file_in_no_way(data: Path, way: str) -> None:
    name = (WAYS_OUT | NO_FILES)[way].replace("{outside}", str(data.parent / "outside"))
    picture = name.replace("key.txt", "key.png")
    part = {"type": "image_url", "image_url": {"url": picture}}
    messages = [{"role": "user", "content": [part]}, {"role": "assistant", "content": "y"}]
    gaia = {"Question": "Q", "Final answer": "8", "file_name": name}
    for row in (
        gaia,
        {**gaia, "file_name": "q.txt", "file_path": name} if way in WAYS_OUT else gaia,
        {"question": "Q", "answer": "y", "images": [picture]},
        {"question": "Q", "answer": "y", "messages": messages},
    ):
        path = written(data, row)
        said = refusal(lambda path=path: load_questions(path, DataSection()))  # type: ignore[misc]
        check_line(said, path, way)
    path = written(data, {"messages": messages})
    check_line(refusal(lambda: list(read_demonstrations(path))), path, way)


def check_line(said: str, path: Path, way: str) -> None:
    """Check that a message names file and line, and says what to do, in one line."""
    assert said.startswith(f"{path}: line 2: ")
    assert "put it beside the questions, or leave the row out" in said
    assert SECRET not in said
    assert "\n" not in said
    assert len(said) < 500
    if way in WAYS_OUT:
        assert f"leads out of {path.parent}" in said


@pytest.mark.parametrize(
    "name", ["q.txt", "./q.txt", "images/../q.txt", "own-link.txt", "{folder}/q.txt"]
)
def test_what_lies_in_the_folder_is_read(data: Path, name: str) -> None:
    with open_row_file(data, name.replace("{folder}", str(data))) as file:
        assert file.read() == b"own"


def test_a_folder_and_a_file_may_be_links_themselves(data: Path) -> None:
    data.with_name("linked").symlink_to(data)
    with open_row_file(data.with_name("linked"), "q.txt") as file:
        assert file.read() == b"own"
    path = written(data, {"question": "Q", "answer": "y", "images": ["images/one.png"]})
    assert load_questions(data.with_name("linked") / path.name, DataSection())[1].images
    # The folder is that of the link, as the user gave it.
    link = data.with_name("q.jsonl")
    link.symlink_to(path)
    said = refusal(lambda: load_questions(link, DataSection()))
    assert "image 'images/one.png': No such file" in said


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """A data set as the hub's cache keeps it: every file of a snapshot is a link to a blob."""
    repository = tmp_path / "hub/datasets--owner--name"
    folder = repository / "snapshots/0123abc"
    (folder / "2023").mkdir(parents=True)
    (repository / "blobs").mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/key.txt").write_text(SECRET)
    for name, content in (("2023/one.png", PNG), ("2023/q.txt", b"own")):
        blob = repository / "blobs" / f"hash-{Path(name).name.partition('.')[0]}"
        blob.write_bytes(content)
        (folder / name).symlink_to(f"../../../blobs/{blob.name}")
    return folder


def test_a_data_set_in_the_hubs_cache_is_read_with_its_files(snapshot: Path) -> None:
    gaia = {"Question": "Q", "Final answer": "8", "file_path": "2023/one.png", "file_name": "x"}
    rows = [gaia, {**gaia, "file_path": "2023/q.txt", "file_name": "q.txt"}]
    blob = snapshot.parents[1] / "blobs/hash-rows"
    blob.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (snapshot / "rows.jsonl").symlink_to("../../blobs/hash-rows")
    first, second = load_questions(snapshot / "rows.jsonl", DataSection())
    assert first.images[0].startswith("data:image/png")
    assert "Content of q.txt:\nown" in second.query
    with open_row_file(snapshot / "2023", "q.txt") as file:
        assert file.read() == b"own"


def test_only_the_hubs_own_layout_leads_to_blobs(snapshot: Path, tmp_path: Path) -> None:
    repository = snapshot.parents[1]
    (snapshot / "key.txt").symlink_to(tmp_path / "outside/key.txt")
    (repository / "blobs/linked").symlink_to(tmp_path / "outside/key.txt")
    (snapshot / "chain.txt").symlink_to("../../blobs/linked")
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(SECRET)
    (snapshot / "ref.txt").symlink_to("../../refs/main")
    (repository / "blobs/deep").mkdir()
    (repository / "blobs/deep/key.txt").write_text(SECRET)
    (snapshot / "deep.txt").symlink_to("../../blobs/deep/key.txt")
    names = ["key.txt", "chain.txt", "ref.txt", "deep.txt", "../../blobs/hash-q"]
    for name in names:
        with pytest.raises(DatasetError, match="leads out of"):
            open_row_file(snapshot, name)
    # A folder that only looks like one of the cache.
    repository.rename(tmp_path / "moved")
    with pytest.raises(DatasetError, match="leads out of"):
        open_row_file(tmp_path / "moved/snapshots/0123abc", "2023/q.txt")
    repository.mkdir()
    (repository / "blobs").symlink_to(tmp_path / "outside")
    snapshot.mkdir(parents=True)
    (snapshot / "q.txt").symlink_to("../../blobs/key.txt")
    with pytest.raises(DatasetError, match="leads out of"):
        open_row_file(snapshot, "q.txt")


def test_a_data_set_without_a_folder_names_no_files(data: Path) -> None:
    (data.parent / "owner").mkdir()
    assert folder_of(Path("owner/name@main:train")) is None
    assert folder_of(data) == data
    assert folder_of(data / "q.txt") == data
    assert folder_of(Path("missing.jsonl")) == Path()
    with pytest.raises(DatasetError, match="only the rows of a file or a folder name files"):
        open_row_file(None, "data/q.txt")


def test_a_link_that_is_put_in_place_meanwhile_is_not_followed(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve = Path.resolve

    def swapping(path: Path, strict: bool = False) -> Path:
        found = resolve(path, strict)
        if path.name == "one.png":
            images = data / "images"
            images.rename(data / "before")
            images.symlink_to(data.parent / "outside")
        return found

    (data.parent / "outside/one.png").write_text(SECRET)
    monkeypatch.setattr(Path, "resolve", swapping)
    with pytest.raises(DatasetError, match="Not a directory"):
        open_row_file(data, "images/one.png")
