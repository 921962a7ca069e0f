"""Bundles that others made: nothing in them reaches beyond their own folder."""

import gzip
import io
import json
import lzma
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl.errors import ConfigError
from agentrl.trainer.rl import bundle as bundle_file
from agentrl.trainer.rl.bundle import unpacked


def write_tar(
    path: Path, *members: tuple[tarfile.TarInfo, bytes], compressed: bool = False
) -> Path:
    with tarfile.open(path, "w:gz" if compressed else "w") as tar:
        for member, content in members:
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def link(name: str, target: str, kind: bytes) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member


@pytest.mark.parametrize(
    ("member", "why"),
    [
        (tarfile.TarInfo("../outside"), "outside"),
        (tarfile.TarInfo("/etc/agentrl-bundle"), "config.yaml"),
        (link("checkpoints", "/etc", tarfile.SYMTYPE), "neither a file nor a folder"),
        (link("passwd", "/etc/passwd", tarfile.LNKTYPE), "neither a file nor a folder"),
        (link("device", "", tarfile.CHRTYPE), "neither a file nor a folder"),
        (tarfile.TarInfo("config.yaml"), "holds no flags"),
    ],
)
def test_members_that_are_no_plain_files_of_the_folder_are_refused(
    tmp_path: Path, member: tarfile.TarInfo, why: str
) -> None:
    path = write_tar(tmp_path / "b.tar", (member, b""))
    with pytest.raises(ConfigError, match=why) as refused, unpacked(path):
        pass
    assert "\n" not in str(refused.value)
    assert not Path("/etc/agentrl-bundle").exists()


def test_a_file_that_is_much_larger_inside_is_not_unpacked(tmp_path: Path) -> None:
    zeros = (tarfile.TarInfo("model/model.safetensors"), bytes(60 << 20))
    path = write_tar(tmp_path / "b.tar.gz", zeros, compressed=True)
    with pytest.raises(ConfigError, match="more than 50 MiB"), unpacked(path):
        pass


def test_a_file_that_is_no_archive_is_named(tmp_path: Path) -> None:
    (tmp_path / "b.tar").write_bytes(b"nothing of the kind")
    with (
        pytest.raises(ConfigError, match=r"b.tar is not a bundle: .*[a-z]$"),
        unpacked(tmp_path / "b.tar"),
    ):
        pass


def metrics_of(*steps: int) -> bytes:
    """Figures of these steps as a run records them."""
    figures = {"reward_mean": 0, "num_groups": 1, "num_records": 1, "num_trained_records": 1}
    figures |= {"loss": 0, "grad_norm": 0, "learning_rate": 0}
    return b"".join(json.dumps({"step": step, **figures}).encode() + b"\n" for step in steps)


def bundle_of(path: Path, **files: bytes) -> Path:
    """A bundle with these files beside what every bundle has."""
    whole = {
        "config.yaml": b"run_name: theirs\nseed: 3\n",
        "first_step": b"3",
        "metrics.jsonl": metrics_of(1, 2, 3, 4),
    }
    whole |= {name.replace("__", "."): content for name, content in files.items()}
    return write_tar(path, *((tarfile.TarInfo(name), content) for name, content in whole.items()))


def test_a_bundle_is_replayed_from_its_own_folder(tmp_path: Path) -> None:
    # The demo's flags: its bundles have no questions for the evaluations.
    config = b"run_name: theirs\nseed: 3\neval_strategy: ends\n"
    with unpacked(bundle_of(tmp_path / "b.tar", config__yaml=config)) as bundle:
        assert not bundle.config.model.trust_remote_code
        assert bundle.config.run.output_path.name.startswith("agentrl-bundle-")
        assert bundle.steps == (3, 4)


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({"config__yaml": b"trust_remote_code: true"}, "sets trust_remote_code"),
        ({"config__yaml": b"agent: theirs.py"}, "sets agent"),
        ({"config__yaml": b"db_connection_string: mongodb://them/x"}, "sets db_connection_string"),
        ({"config__yaml": b"[1"}, "config.yaml cannot be read"),
        ({"config__yaml": b"7"}, "config.yaml cannot be read"),
        ({"config__yaml": b"[" * 100_000}, "config.yaml cannot be read"),
        ({"config__yaml": b"\xff\xfe\x00"}, "config.yaml cannot be read"),
        ({"config__yaml": b"seed: &a [1]\nrun_name: [*a, *a]"}, "config.yaml cannot be read"),
        ({"config__yaml": b"seed: 1\n" * 200_000}, "config.yaml cannot be read"),
        ({"config__yaml": b"seed: [[1]]"}, "seed"),
        ({"first_step": b"9" * 5000}, "which steps"),
        ({"first_step": b"\xff"}, "which steps"),
        ({"first_step": b"-1"}, "which steps"),
        ({"first_step": b"0"}, "it starts at step 0, and its metrics.jsonl has steps 1 to 4"),
        ({"first_step": b"9" * 12}, "it starts at step 999999999999, and its metrics.jsonl has"),
        ({"metrics__jsonl": b""}, "it starts at step 3, and its metrics.jsonl has steps 1 to 0"),
        (
            {"metrics__jsonl": metrics_of(1, 2, 3, 10**12)},
            "metrics.jsonl cannot be read: it leaves",
        ),
        ({"metrics__jsonl": metrics_of(-(10**12), 1, 2, 3)}, "it leaves steps out"),
        ({"metrics__jsonl": b"hm"}, "metrics.jsonl cannot be read"),
        ({"metrics__jsonl": b"\xff"}, "metrics.jsonl cannot be read"),
        ({"metrics__jsonl": b'{"step": ' + b"9" * 5000}, "metrics.jsonl cannot be read"),
    ],
)
def test_what_a_stranger_wrote_into_a_bundle_is_refused_in_one_line(
    tmp_path: Path, files: dict[str, bytes], why: str
) -> None:
    with (
        pytest.raises(ConfigError, match=why) as refused,
        unpacked(bundle_of(tmp_path / "b.tar", **files)),
    ):
        pass
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 1000


def test_a_file_of_countless_files_is_not_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle_file, "_MAX_FILES", 20)
    empty = ((tarfile.TarInfo(f"model/{number}"), b"") for number in range(21))
    path = write_tar(tmp_path / "b.tar.gz", *empty, compressed=True)
    with pytest.raises(ConfigError, match="more than 20 files"), unpacked(path):
        pass


def long_header() -> bytes:
    """The start of an archive whose extended header is as long as the zeros that follow."""
    header = tarfile.TarInfo("pax")
    header.type, header.size = tarfile.XHDTYPE, 1 << 32
    return header.tobuf()


def chain_of_headers() -> bytes:
    header = tarfile.TarInfo("pax")
    header.type = tarfile.XHDTYPE
    return header.tobuf() * 20_000


def sparse_map() -> bytes:
    """A member of a sparse format, whose map says that it has a billion parts."""
    headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "a"}
    headers["GNU.sparse.realsize"] = "9" * 12
    member = tarfile.TarInfo("model/weights")
    member.size, member.pax_headers = 512, headers
    return member.tobuf(tarfile.PAX_FORMAT) + b"1000000000\n0\n".ljust(512, b"1")


def sparse_member() -> bytes:
    headers = {"GNU.sparse.major": "0", "GNU.sparse.minor": "1", "GNU.sparse.map": "0,1"}
    member = tarfile.TarInfo("model/weights")
    member.pax_headers = headers
    return member.tobuf(tarfile.PAX_FORMAT)


HOSTILE: dict[str, tuple[Callable[[], bytes], str]] = {
    "long header": (lambda: gzip.compress(long_header() + bytes(100 << 20), 1), "header is larger"),
    "chain": (lambda: gzip.compress(chain_of_headers(), 1), "recursion"),
    "sparse map": (sparse_map, "."),
    "sparse": (sparse_member, "neither a file nor a folder"),
    "xz": (lambda: lzma.compress(bytes(1 << 20)), "."),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", HOSTILE)
def test_an_archive_that_takes_time_or_memory_without_end_is_refused(
    tmp_path: Path, kind: str
) -> None:
    make, why = HOSTILE[kind]
    (tmp_path / "b.tar").write_bytes(make())
    with pytest.raises(ConfigError, match=why) as refused, unpacked(tmp_path / "b.tar"):
        pass
    assert "\n" not in str(refused.value)
