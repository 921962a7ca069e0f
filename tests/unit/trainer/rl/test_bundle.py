"""Bundles that others made: nothing in them reaches beyond their own folder."""

import io
import tarfile
from pathlib import Path

import pytest

from agentrl.errors import ConfigError
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
        (tarfile.TarInfo("config.yaml"), "which steps"),
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
    with pytest.raises(ConfigError, match=r"b.tar is no bundle"), unpacked(tmp_path / "b.tar"):
        pass


def test_code_beside_a_model_is_not_trusted(tmp_path: Path) -> None:
    config = b"run_name: theirs\ntrust_remote_code: true\noutput_dir: /root\n"
    members = [(tarfile.TarInfo("config.yaml"), config), (tarfile.TarInfo("first_step"), b"3")]
    with unpacked(write_tar(tmp_path / "b.tar", *members)) as bundle:
        assert not bundle.config.model.trust_remote_code
        assert bundle.config.run.output_path.name.startswith("agentrl-bundle-")
        assert bundle.steps == (3, 1)
