"""scripts/gpu_kit packs in parts that appear one by one, and goes on where it was interrupted."""

import os
import signal
import subprocess
import time
from pathlib import Path

ROOT = Path(__file__).parents[3]
SMALL_PARTS = os.environ | {"PART_BYTES": "2M"}


def kit(*args: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    argv = [str(ROOT / "scripts/gpu_kit"), *map(str, args)]
    return subprocess.run(argv, capture_output=True, text=True, check=check, env=SMALL_PARTS)


def test_an_interrupted_piece_is_completed_and_its_parts_are_kept(tmp_path: Path) -> None:
    folder, target = tmp_path / "kit", tmp_path / "target"
    argv = [str(ROOT / "scripts/gpu_kit"), "make", str(folder), "source"]
    first = subprocess.Popen(argv, env=SMALL_PARTS, process_group=0, stdout=subprocess.DEVNULL)
    while not (kept := [*folder.glob("source.tar.xz.[0-9][0-9][0-9]")]) and first.poll() is None:
        time.sleep(0.01)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    made_at = {part: part.stat().st_mtime_ns for part in kept}
    assert kept
    assert not (folder / "source.tar.xz.sha256").exists()

    assert "gpu_kit: source: complete" in kit("make", folder, "source").stdout
    assert {part: part.stat().st_mtime_ns for part in kept} == made_at
    kit("unpack", folder, target)

    listed = ["git", "-C", str(ROOT), "ls-tree", "-r", "--name-only", "HEAD"]
    packed = subprocess.run(listed, capture_output=True, text=True, check=True).stdout.splitlines()
    assert packed
    assert all((target / "source" / name).exists() for name in packed)
    assert (target / "env").exists()


def test_a_damaged_part_is_not_unpacked(tmp_path: Path) -> None:
    folder = tmp_path / "kit"
    kit("make", folder, "source")
    part = sorted(folder.glob("source.tar.xz.[0-9]*"))[-1]
    part.write_bytes(part.read_bytes()[:-100])

    refused = kit("unpack", folder, tmp_path / "target", check=False)

    assert refused.returncode
    assert part.name in refused.stderr + refused.stdout
