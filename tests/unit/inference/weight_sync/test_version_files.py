import hashlib
from pathlib import Path

from agentrl.inference.weight_sync.version_files import (
    checksum,
    remove_old_versions,
    version_dir,
    weight_bytes,
)


def test_checksum_runs_over_the_weight_files_in_name_order(tmp_path: Path) -> None:
    (tmp_path / "b.safetensors").write_bytes(b"two")
    (tmp_path / "a.safetensors").write_bytes(b"one")
    (tmp_path / "config.json").write_bytes(b"{}")
    assert checksum(tmp_path) == hashlib.sha256(b"onetwo").hexdigest()
    assert weight_bytes(tmp_path) == 6


def test_old_versions_go_except_the_newest_and_those_in_use(tmp_path: Path) -> None:
    for version in range(6):
        version_dir(tmp_path, version).mkdir()
    (tmp_path / "notes").mkdir()
    assert remove_old_versions(tmp_path, keep=2, in_use={1}) == [0, 2, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "000001",
        "000004",
        "000005",
        "notes",
    ]


def test_the_latest_version_is_never_removed(tmp_path: Path) -> None:
    for version in range(3):
        version_dir(tmp_path, version).mkdir()
    remove_old_versions(tmp_path, keep=0, in_use=())
    assert [path.name for path in tmp_path.iterdir()] == ["000002"]
