"""Bundles that others made: nothing in them reaches beyond their own folder."""

import gzip
import io
import json
import lzma
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from agentrl.cli.main import main
from agentrl.config.loading import build_config
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
        (tarfile.TarInfo("../outside"), "outside of its folder"),
        (tarfile.TarInfo("model/../../outside"), "outside of its folder"),
        (tarfile.TarInfo("/etc/agentrl-bundle"), "outside of its folder"),
        (tarfile.TarInfo("model/" + "d/" * 40 + "config.json"), "deeper than 32 folders"),
        (tarfile.TarInfo("model/" + "n" * 300), "File name too long"),
        (link("checkpoints/../../x", "", tarfile.DIRTYPE), "outside of its folder"),
        (link("checkpoints", "/etc", tarfile.SYMTYPE), "neither a file nor a folder"),
        (link("passwd", "/etc/passwd", tarfile.LNKTYPE), "neither a file nor a folder"),
        (link("model", "..", tarfile.SYMTYPE), "neither a file nor a folder"),
        (link("device", "", tarfile.CHRTYPE), "neither a file nor a folder"),
        (link("disk", "", tarfile.BLKTYPE), "neither a file nor a folder"),
        (link("pipe", "", tarfile.FIFOTYPE), "neither a file nor a folder"),
        (link("model/weights", "", tarfile.CONTTYPE), "neither a file nor a folder"),
        (link("model/weights", "", b"Z"), "neither a file nor a folder"),
        # Files that AgentRL would read of a run's own folders.
        (tarfile.TarInfo("config.secrets.yaml"), "holds 'config.secrets.yaml', which no bundle"),
        (tarfile.TarInfo("mongo/mongod.json"), "holds 'mongo', which no bundle"),
        (tarfile.TarInfo("config.yaml"), "holds no flags"),
    ],
)
def test_members_that_are_no_plain_files_of_the_folder_are_refused(
    tmp_path: Path, member: tarfile.TarInfo, why: str
) -> None:
    path = write_tar(tmp_path / "b.tar", (member, b""))
    with pytest.raises(ConfigError, match=why) as refused, unpacked(path, {}):
        pass
    assert "\n" not in str(refused.value)
    assert not Path("/etc/agentrl-bundle").exists()
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize(
    "names", [("first_step", "first_step"), ("model", "model/x"), ("model/x", "./model//x")]
)
def test_a_member_that_is_given_twice_is_refused(tmp_path: Path, names: tuple[str, ...]) -> None:
    path = write_tar(tmp_path / "b.tar", *((tarfile.TarInfo(name), b"") for name in names))
    with pytest.raises(ConfigError, match="occurs twice"), unpacked(path, {}):
        pass


def test_a_file_that_is_much_larger_inside_is_not_unpacked(tmp_path: Path) -> None:
    zeros = (tarfile.TarInfo("model/model.safetensors"), bytes(60 << 20))
    path = write_tar(tmp_path / "b.tar.gz", zeros, compressed=True)
    with pytest.raises(ConfigError, match="more than 50 MiB"), unpacked(path, {}):
        pass


def test_a_file_that_is_no_archive_is_named(tmp_path: Path) -> None:
    (tmp_path / "b.tar").write_bytes(b"nothing of the kind")
    with (
        pytest.raises(ConfigError, match=r"b.tar is not a bundle: .*[a-z]$"),
        unpacked(tmp_path / "b.tar", {}),
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
    with unpacked(bundle_of(tmp_path / "b.tar", config__yaml=config), {}) as bundle:
        assert not bundle.config.model.trust_remote_code
        assert bundle.config.run.output_path.name.startswith("agentrl-bundle-")
        assert bundle.steps == (3, 4)


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({"config__yaml": b"trust_remote_code: true"}, "sets --trust_remote_code"),
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
        unpacked(bundle_of(tmp_path / "b.tar", **files), {}),
    ):
        pass
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 1000


NAMES_CODE = {
    "a loss of the standard library": "loss_calculator: pydoc:pipepager\nloss_args: {cmd: touch PWNED}",
    "its arguments": "loss_args: {cmd: touch PWNED}",
    "arguments in arguments": "loss_args: {a: {b: [{cmd: touch PWNED}]}}",
    "a file": "loss_calculator: /tmp/theirs.py:loss",
    "a file of the bundle": "advantage_estimator: model/theirs.py:advantage",
    "a filter": "group_filter: os:system",
    "a dotted path": "lr_scheduler_type: os.path:join",
    "a hook": "on_step: builtins:exec",
    "a name without a function": "group_filter: antigravity",
    "text as an object": "loss_calculator: {pydoc: pipepager}",
    "text as a list": "loss_calculator: ['pydoc:pipepager']",
    "a recipe beside it": "recipe: dapo\nloss_calculator: pydoc:pipepager",
    "an alias": "loss_calculater: pydoc:pipepager",
    "an alias of an object": "lr_scheduler: os.path:join",
    "hyphens": "loss-calculator: pydoc:pipepager",
    "dashes": "--loss_calculator: pydoc:pipepager",
    "a section": "algorithm: {loss_calculator: 'pydoc:pipepager'}",
    "the same flag twice": "loss_calculator: GRPO\nloss_calculator: pydoc:pipepager",
    "a tag": "loss_calculator: !!python/name:os.system ''",
    "a tag that calls": "seed: !!python/object/apply:os.system ['touch PWNED']",
    "a merged mapping": "<<: {loss_calculator: 'pydoc:pipepager'}",
    "code of a model": "trust_remote_code: true",
    "code of a model, as text": "trust_remote_code: 'yes'",
    "another model": "model_name_or_path: /home/them/model",
    "another reference": "reference_model: /home/them/model",
    "a template's file": "chat_template: /etc/passwd",
    "a tracker": "report_to: [wandb]",
    "an address": "weight_sync_host: 10.0.0.1",
    "another file": "config: /home/them/config.yaml",
    "a command": "agent_command: touch PWNED",
    "tools": "mcp_servers: '{\"mcpServers\": {}}'",
    "a scorer": "scorer_module: theirs.py",
    "an environment": "env: verifiers:theirs",
}


@pytest.mark.parametrize("way", NAMES_CODE)
def test_a_bundle_names_no_code_no_path_and_no_address(tmp_path: Path, way: str) -> None:
    path = bundle_of(tmp_path / "b.tar", config__yaml=NAMES_CODE[way].encode())
    with pytest.raises(ConfigError) as refused, unpacked(path, {}):
        pass
    assert "\n" not in str(refused.value)
    assert str(refused.value).startswith(str(path))


def test_the_attack_of_a_rewritten_bundle_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    config = b"loss_calculator: pydoc:pipepager\nloss_args: {cmd: 'touch PWNED; cat >/dev/null'}\n"
    bundle_of(tmp_path / "evil.tar", config__yaml=config)
    assert main(["replay", "evil.tar"]) == 2
    assert capsys.readouterr().err == (
        "agentrl replay: evil.tar sets --loss_calculator to 'pydoc:pipepager', and only you can name "
        "code: if you trust it, give --loss_calculator yourself\n"
    )
    assert not (tmp_path / "PWNED").exists()


def test_the_users_own_function_is_used_in_place_of_the_files(tmp_path: Path) -> None:
    config = (
        b"loss_calculator: /home/them/theirs.py:loss\nloss_args: {cmd: x}\nlearning_rate: 0.5\n"
    )
    path = bundle_of(tmp_path / "b.tar", config__yaml=config)
    typed = {"loss_calculator": "/home/me/mine.py:loss"}
    with pytest.raises(ConfigError, match="give --loss_args yourself"), unpacked(path, typed):
        pass
    with unpacked(path, {**typed, "loss_args": '{"own": 1}'}) as bundle:
        assert bundle.config.algorithm.loss_calculator == "/home/me/mine.py:loss"
        assert bundle.config.algorithm.loss_args == {"own": 1}
        assert bundle.config.trainer.learning_rate == 0.5


def test_a_bundle_of_every_plain_flag_is_accepted(tmp_path: Path) -> None:
    values = {"run_name": "theirs", "seed": 3, "chat_template": "{{ messages }}"}
    config = build_config({**values, "report_to": "tensorboard", "loss_calculator": "gspo"})
    portable = bundle_file._portable(config)
    assert portable.items() >= {**values, "loss_calculator": "GSPO"}.items()
    assert "report_to" not in portable
    path = bundle_of(tmp_path / "b.tar", config__yaml=yaml.safe_dump(portable).encode())
    with unpacked(path, {}) as bundle:
        assert bundle.config.algorithm.loss_calculator == "GSPO"


def test_a_file_of_countless_files_is_not_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle_file, "_MAX_FILES", 20)
    empty = ((tarfile.TarInfo(f"model/{number}"), b"") for number in range(21))
    path = write_tar(tmp_path / "b.tar.gz", *empty, compressed=True)
    with pytest.raises(ConfigError, match="more than 20 files"), unpacked(path, {}):
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
    with pytest.raises(ConfigError, match=why) as refused, unpacked(tmp_path / "b.tar", {}):
        pass
    assert "\n" not in str(refused.value)
