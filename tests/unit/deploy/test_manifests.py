"""Deployment files are valid by their own schemas, hold no secret, and open nothing by default.

Nothing is deployed here: there is no Docker engine and no cluster.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack
from itertools import product
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from compose_spec import PyCompose
from pymongo import AsyncMongoClient, MongoClient
from pymongo.errors import OperationFailure
from support.stored import make_task

from agentrl.config.command_line import parse_flags
from agentrl.runtime.ports import free_port
from agentrl.schema import Run
from agentrl.store import TrajectoryStore
from agentrl.store.private_mongod import EmbeddedMongo, find_mongod
from agentrl.tools import load_mcp_servers

DEPLOY = Path(__file__).parents[3] / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
LOCKED = DEPLOY.parent / "scripts/locked"
MANIFESTS = sorted(path for path in KUBERNETES.glob("*.yaml") if path.name != "run.yaml")
KEDA_KINDS = ("ScaledObject", "TriggerAuthentication")


def documents() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in MANIFESTS:
        if path.name != "kustomization.yaml":
            for document in yaml.safe_load_all(path.read_text()):
                yield path.name, document


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    for _, document in documents():
        if "template" in document.get("spec", {}):
            yield document["metadata"]["name"], document["spec"]["template"]["spec"]


def test_every_manifest_is_valid_and_part_of_the_kustomization() -> None:
    kustomization = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())
    assert set(kustomization["resources"]) == {
        path.name for path in MANIFESTS if path.name != "kustomization.yaml"
    }
    for generator in kustomization["configMapGenerator"]:
        for name in generator["files"]:
            assert (KUBERNETES / name).is_file()
    checked = 0
    for _, document in documents():
        if document["kind"] in KEDA_KINDS:
            assert document["apiVersion"] == "keda.sh/v1alpha1"
            continue
        kubernetes_validate.validate(document, "1.33", strict=True)
        checked += 1
    assert checked > 10


def test_a_wrong_manifest_would_be_noticed() -> None:
    wrong = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "x"}, "spec": {"prot": 1}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, "1.33", strict=True)


def test_every_container_has_bounds_and_every_service_a_probe() -> None:
    probed = set()
    for name, spec in pods():
        for container in spec["containers"]:
            assert container["resources"], f"{name}/{container['name']}"
            if "readinessProbe" in container or "livenessProbe" in container:
                probed.add(name)
    assert {"mongo", "environment", "inference"} <= probed


def test_secrets_are_referred_to_and_nowhere_written() -> None:
    for name, spec in pods():
        for container in spec["containers"]:
            for variable in container.get("env", []):
                is_secret = re.search(r"(URI|TOKEN|KEY|PASSWORD)$", variable["name"])
                assert not (is_secret and "value" in variable), f"{name}: {variable['name']}"
    assert not [document for _, document in documents() if document["kind"] == "Secret"]
    looks_secret = re.compile(r"(?:sk-|ghp_|hf_|eyJ)[A-Za-z0-9_-]{8,}|BEGIN [A-Z ]*PRIVATE KEY")
    for path in DEPLOY.rglob("*"):
        if path.is_file():
            assert not looks_secret.search(path.read_text()), path


def test_nothing_is_reachable_from_outside_by_default() -> None:
    for _, document in documents():
        if document["kind"] == "Service":
            assert document["spec"].get("type", "ClusterIP") == "ClusterIP"
        assert document["kind"] != "Ingress"
    policies = [document for _, document in documents() if document["kind"] == "NetworkPolicy"]
    everyone = next(policy for policy in policies if policy["spec"]["podSelector"] == {})
    assert "ingress" not in everyone["spec"]
    for service in compose()["services"].values():
        for port in service.get("ports", []):
            assert str(port).startswith("127.0.0.1:"), port


NEEDED_FLOWS = {
    *(("sampler", "mongo", 27017), ("trainer", "mongo", 27017), ("inference", "mongo", 27017)),
    *(("mongo-init", "mongo", 27017), ("keda", "mongo", 27017)),
    *(("sampler", "inference", 30000), ("trainer", "inference", 30000)),
    (
        "inference",
        "inference",
        30000,
    ),  # a supervisor asks its server by the name that all know it by
    ("sampler", "environment", 8000),
}


def lets_in(peer: dict[str, Any], source: str) -> bool:
    """Whether a peer of a network policy means the pods of this kind."""
    if source == "keda":
        namespace = peer.get("namespaceSelector", {}).get("matchLabels", {})
        return bool(namespace == {"kubernetes.io/metadata.name": "keda"})
    if "podSelector" not in peer:
        return False
    (labels,) = (
        document["spec"]["template"]["metadata"]["labels"]
        for _, document in documents()
        if "template" in document.get("spec", {}) and document["metadata"]["name"] == source
    )
    return bool(peer["podSelector"]["matchLabels"].items() <= labels.items())


def test_the_network_lets_pass_what_is_needed_and_nothing_else() -> None:
    policies = [d["spec"] for _, d in documents() if d["kind"] == "NetworkPolicy"]
    rules = [
        (spec["podSelector"]["matchLabels"]["app"], rule)
        for spec in policies
        for rule in spec.get("ingress", [])
    ]
    open_flows = {
        (source, target, port["port"])
        for source, (target, rule) in product([*dict(pods()), "keda"], rules)
        for port in rule["ports"]
        if any(lets_in(peer, source) for peer in rule["from"])
    }
    assert open_flows == NEEDED_FLOWS
    ports = {
        (name, port["containerPort"])
        for name, spec in pods()
        for container in spec["containers"]
        for port in container.get("ports", [])
    }
    assert {(target, port) for _, target, port in NEEDED_FLOWS} == ports


def test_the_namespace_enforces_what_every_pod_keeps() -> None:
    """The `restricted` pod security standard, as its own document lists it."""
    (namespace,) = (document for _, document in documents() if document["kind"] == "Namespace")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    checked = 0
    for name, spec in pods():
        pod = spec["securityContext"]
        assert pod["runAsNonRoot"] is True, name
        assert pod["runAsUser"] != 0, name
        assert pod["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys(), name
        assert spec["automountServiceAccountToken"] is False, name
        volumes = {"configMap", "emptyDir", "secret", "persistentVolumeClaim"}
        for volume in spec.get("volumes", []):
            assert volume.keys() - {"name"} <= volumes, name
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False, name
            assert context["capabilities"] == {"drop": ["ALL"]}, name
            checked += 1
    assert checked >= 7


def test_each_component_has_a_user_of_its_own_and_none_is_root() -> None:
    users: dict[str, set[str]] = {}
    for name, spec in pods():
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            for variable in container.get("env", []):
                key = variable.get("valueFrom", {}).get("secretKeyRef", {}).get("key", "")
                if variable["name"] == "MONGODB_URI":
                    users.setdefault(key, set()).add(name)
                if key == "mongo_password":
                    assert name == "mongo-init"
    assert users == {
        "trainer_mongodb_uri": {"trainer"},
        "sampler_mongodb_uri": {"sampler"},
        "server_mongodb_uri": {"inference"},
    }
    services = compose()["services"]
    assert "../kubernetes/users.js:/etc/agentrl/users.js:ro" in services["mongo-init"]["volumes"]
    logins = {
        name: re.findall(r"mongodb://(\w+):", service.get("environment", {}).get("MONGODB_URI", ""))
        for name, service in services.items()
    }
    assert {name: found for name, found in logins.items() if found} == {
        "supervisor": ["server"],
        "sampler": ["sampler"],
        "trainer": ["trainer"],
    }


def test_no_password_is_among_arguments() -> None:
    words = []
    for _, spec in pods():
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            words += [*container.get("command", []), *container.get("args", [])]
    for service in compose()["services"].values():
        for part in ("command", "entrypoint"):
            given = service.get(part, [])
            words += [given] if isinstance(given, str) else given
    text = " ".join(words)
    assert not re.search(r"--password|PASSWORD|filled-in|_KEY\b|TOKEN", text)


def test_nothing_gets_out_to_private_networks_or_the_metadata_service() -> None:
    policies = [d["spec"] for _, d in documents() if d["kind"] == "NetworkPolicy"]
    everyone = next(one for one in policies if one["podSelector"] == {} and "egress" not in one)
    assert set(everyone["policyTypes"]) == {"Ingress", "Egress"}
    for spec in policies:
        for rule in spec.get("egress", []):
            assert rule["to"], "a rule without a peer lets everything pass"
            for peer in rule["to"]:
                block = peer.get("ipBlock")
                assert block is None or {"169.254.0.0/16", "10.0.0.0/8"} <= set(block["except"])


def mongod_script(kind: str) -> tuple[str, str]:
    """The shell script that starts mongod, and the folder in which it finds its secrets."""
    if kind == "compose":
        (script,) = compose()["services"]["mongo"]["command"]
        return script, "/run/secrets"
    (container,) = dict(pods())["mongo"]["containers"]
    (script,) = container["args"]
    return script, "/etc/mongo"


@pytest.mark.parametrize("kind", ["compose", "kubernetes"])
def test_the_database_starts_as_a_replica_set_with_a_key_file_that_others_may_read(
    kind: str, tmp_path: Path
) -> None:
    """What the containers run, with a stand-in for the image's entrypoint, which makes the user."""
    script, secrets = mongod_script(kind)
    (tmp_path / "bin").mkdir()
    (tmp_path / "given").mkdir()
    (tmp_path / "db").mkdir()
    port = free_port()
    entrypoint = tmp_path / "bin/docker-entrypoint.sh"
    entrypoint.write_text(f'#!/bin/sh\nexec "$@" --dbpath {tmp_path}/db --port {port}\n')
    entrypoint.chmod(0o755)
    (tmp_path / "bin/mongod").symlink_to(find_mongod())
    for name in ("mongo_keyfile", "mongo_password", "keyfile"):
        (tmp_path / "given" / name).write_text("c2VjcmV0" * 20)
        (tmp_path / "given" / name).chmod(0o444)
    script = script.replace(secrets, f"{tmp_path}/given").replace("/run/mongo", f"{tmp_path}/own")
    script = script.replace("-o mongodb -g mongodb", "").replace("--bind_ip_all", "")
    environment = os.environ | {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    with (
        (tmp_path / "log").open("wb") as log,
        subprocess.Popen(
            ["/bin/sh", "-ec", script], env=environment, stdout=log, stderr=log
        ) as mongod,
        MongoClient[Any](
            "127.0.0.1", port, directConnection=True, serverSelectionTimeoutMS=20_000
        ) as client,
    ):
        try:
            assert client.admin.command("ping")["ok"] == 1, (tmp_path / "log").read_text()
            with pytest.raises(OperationFailure, match="no replset config"):
                client.admin.command("replSetGetStatus")
        finally:
            mongod.kill()


def test_a_trainer_may_write_to_its_volume() -> None:
    """It runs as nobody in particular, and a fresh volume belongs to root."""
    recipe = (DEPLOY / "images/agentrl.Dockerfile").read_text()
    assert "install -d -o agentrl -g agentrl output logs" in recipe
    (user,) = re.findall(r"^USER (\d+)$", recipe, re.MULTILINE)
    security = dict(pods())["trainer"]["securityContext"]
    assert security["fsGroup"] == security["runAsUser"] == int(user)
    writers = [
        name
        for name, service in compose()["services"].items()
        if "output:/opt/agentrl/output" in service.get("volumes", [])
    ]
    assert writers == ["supervisor", "sampler", "trainer"]


def test_a_pause_does_not_make_a_server_look_ill() -> None:
    (container, _) = dict(pods())["inference"]["containers"]
    given = {variable["name"]: variable.get("value") for variable in container["env"]}
    named = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false"}
    assert given.items() >= named.items()
    assert compose()["services"]["inference"]["environment"].items() >= named.items()
    service = next(
        document
        for _, document in documents()
        if document["kind"] == "Service" and document["metadata"]["name"] == "inference"
    )
    assert service["spec"]["publishNotReadyAddresses"] is True


def test_the_tools_environment_reaches_neither_the_database_nor_the_cluster() -> None:
    spec = dict(pods())["environment"]
    assert spec["automountServiceAccountToken"] is False
    variables = {variable["name"] for variable in spec["containers"][0]["env"]}
    assert variables == {"MCP_SERVER_TOKEN"}
    services = compose()["services"]
    assert services["environment"]["networks"] == ["tools"]
    assert "MONGODB_URI" not in services["environment"]["environment"]


def test_only_those_who_exchange_weights_have_the_key_for_it() -> None:
    holders = {
        container["name"]
        for _, spec in pods()
        for container in [*spec.get("initContainers", []), *spec["containers"]]
        if any(variable["name"] == "AGENTRL_ADMIN_KEY" for variable in container.get("env", []))
    }
    assert holders == {"sglang", "supervisor", "trainer"}
    services = compose()["services"]
    holders = {
        name for name, one in services.items() if "AGENTRL_ADMIN_KEY" in one.get("environment", {})
    }
    assert holders == {"inference", "supervisor", "trainer"}


def test_sglang_is_started_without_a_key_among_its_arguments() -> None:
    spec = dict(pods())["inference"]
    scripts = [*spec["containers"][0]["args"], *compose()["services"]["inference"]["command"]]
    for script in scripts:
        assert "python3 /opt/starters/sglang_starter.py" in script
        assert "KEY" not in script
    (starter,) = spec["initContainers"]
    assert "sglang_starter" in starter["command"][-1]


def compose_text() -> str:
    """The compose file with its variables filled in, as Docker does before it parses."""
    text = (DEPLOY / "compose/compose.yaml").read_text()
    text = re.sub(r"(?<!\$)\$\{\w+:-([^}]*)\}", r"\1", text)
    text = re.sub(r"(?<!\$)\$\{\w+:\?[^}]*\}", "filled-in", text)
    assert not re.search(r"(?<!\$)\$\{", text), "a variable without a default or a remedy"
    return text.replace("$$", "$")


def compose() -> dict[str, Any]:
    parsed: dict[str, Any] = yaml.safe_load(compose_text())
    return parsed


def test_the_compose_file_is_valid_and_each_service_has_what_it_waits_for() -> None:
    merged = {key: value for key, value in compose().items() if not key.startswith("x-")}
    parsed = PyCompose.from_yaml(yaml.safe_dump(merged))
    names = set(parsed.service_names())
    assert names == {
        *("mongo", "mongo-init", "inference", "supervisor", "environment", "sampler", "trainer")
    }
    for service in compose()["services"].values():
        assert set(service.get("depends_on", {})) <= names


def test_compose_is_prepared_with_secrets_of_its_own(tmp_path: Path) -> None:
    shutil.copy(DEPLOY / "compose/prepare.sh", tmp_path)
    subprocess.run([str(tmp_path / "prepare.sh")], check=True, capture_output=True, timeout=30)
    first = (tmp_path / ".env").read_text()
    needed = set(re.findall(r"\$\{(\w+):\?", (DEPLOY / "compose/compose.yaml").read_text()))
    assert needed == set(re.findall(r"^(\w+)=.{24,}$", first, re.MULTILINE))
    for path in (".env", "secrets/mongo_keyfile", "secrets/mongo_password"):
        assert (tmp_path / path).stat().st_mode & 0o077 == 0
    subprocess.run([str(tmp_path / "prepare.sh")], check=True, capture_output=True, timeout=30)
    assert (tmp_path / ".env").read_text() == first


@pytest.mark.parametrize(
    "path", sorted(DEPLOY.glob("images/*.Dockerfile")), ids=lambda path: path.name
)
def test_image_recipes_pass_the_linter_and_copy_what_exists(path: Path) -> None:
    linter = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([str(linter), str(path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
    for line in path.read_text().splitlines():
        if line.startswith("COPY ") and "--from" not in line:
            for source in line.split()[1:-1]:
                assert (DEPLOY.parent / source).exists(), source


def pip_commands(recipe: Path) -> list[str]:
    """The commands of an image's recipe that install or build something."""
    text = recipe.read_text().replace("\\\n", " ")
    return [" ".join(found.split()) for found in re.findall(r"python -m (pip [^&\n]*)", text)]


def test_images_install_nothing_without_a_hash() -> None:
    for path in DEPLOY.glob("images/*.Dockerfile"):
        commands = pip_commands(path)
        # The desktop adds packages of Debian's, and research servers apart from ours, to an image of these.
        assert len(commands) == (0 if path.stem == "desktop" else 4), path
        for command in commands:
            words = set(command.split())
            assert "--require-hashes" in words or "--no-deps" in words, command
            assert words & {"--require-hashes", "--no-index", "--no-build-isolation"}, command
    for path in LOCKED.glob("*.txt"):
        pins = re.split(r"^(?=[a-z])", path.read_text(), flags=re.MULTILINE)[1:]
        assert pins, path
        for pin in pins:
            assert re.match(r"[\w.-]+==[\w.]+ .*\n? +--hash=sha256:[0-9a-f]{64}", pin), pin[:99]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_an_image_installs_is_a_command_that_runs(tmp_path: Path) -> None:
    """The recipe's own commands in an empty environment, where they would run in the image."""
    recipe = DEPLOY / "images/agentrl.Dockerfile"
    for copied in re.findall(r"^COPY (?!--)(.*) \S+$", recipe.read_text(), re.MULTILINE):
        for name in copied.split():
            there, here = DEPLOY.parent / name, tmp_path / name
            here.parent.mkdir(parents=True, exist_ok=True)
            if there.is_dir():
                shutil.copytree(there, here, dirs_exist_ok=True)
            else:
                shutil.copy(there, here)
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "env")], check=True)
    python = str(tmp_path / "env/bin/python")
    for command in pip_commands(recipe):
        line = f"{shlex.quote(python)} -m {command}".replace("${EXTRAS:-base}", "base")
        subprocess.run(["sh", "-ec", line], cwd=tmp_path, check=True, timeout=300)
    said = subprocess.run(
        [str(tmp_path / "env/bin/agentrl"), "sample", "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "--run_name" in said.stdout


@pytest.mark.parametrize("folder", ["compose", "kubernetes"])
def test_the_runs_settings_are_ones_that_exist(folder: str) -> None:
    config = parse_flags(["--config", str(DEPLOY / folder / "run.yaml")])
    assert str(config.tools.mcp_manager_url) == "http://environment:8000/mcp"
    assert set(load_mcp_servers(DEPLOY / folder / "servers.json")) == {"shop"}
    trigger = next(d for _, d in documents() if d["kind"] == "ScaledObject")["spec"]["triggers"][0]
    assert trigger["metadata"]["dbName"] == config.run.run_name
    if folder == "kubernetes":
        per_process = config.rollout.max_concurrent_samples_per_process
        assert trigger["metadata"]["queryValue"] == str(per_process)


async def test_samplers_are_scaled_by_the_slots_that_they_play_or_could_claim(
    mongod: EmbeddedMongo,
) -> None:
    trigger = next(d for _, d in documents() if d["kind"] == "ScaledObject")["spec"]["triggers"][0]
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(
            TrajectoryStore.connect(mongod.uri("scaled"), "scaled")
        )
        await store.ensure_schema()
        await store.runs.create(Run(name="scaled", status="training", admitted_groups=2))
        await store.tasks.add(make_task(n, num_generations=4) for n in range(5))
        # As KEDA counts: the collection, the query, nothing else.
        client: AsyncMongoClient[Any] = await stack.enter_async_context(
            AsyncMongoClient(mongod.uri("scaled"))
        )
        work = client["scaled"][trigger["metadata"]["collection"]]
        query = json.loads(trigger["metadata"]["query"])
        assert await work.count_documents(query) == 8
        claimed = await store.records.claim(
            "sampler", lease_seconds=60, admitted_groups=2, max_attempts=3
        )
        assert claimed is not None
        assert await work.count_documents(query) == 8
        record, _ = claimed
        await store.records.finish(
            record.id, record.fence, outcome="answered", final_answer="1", lease_seconds=60
        )
        assert await work.count_documents(query) == 7


@pytest.mark.parametrize("path", sorted(DEPLOY.glob("slurm/*")), ids=lambda path: path.name)
def test_a_batch_script_says_what_it_needs(path: Path) -> None:
    done = subprocess.run(
        ["bash", str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": "/usr/bin:/bin"},
    )
    assert done.returncode != 0
    assert "RUN_NAME" in done.stderr


@pytest.mark.parametrize(
    ("path", "command"),
    [("train.sbatch", "train"), ("serve.sbatch", "serve"), ("sample.sbatch", "sample")],
)
def test_a_batch_script_starts_a_command_that_the_program_takes(
    path: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm and the launchers are stand-ins that write down what they were told."""
    heard = tmp_path / "heard"
    tools = {
        "scontrol": "printf 'node7\\nnode8\\n'",
        "srun": 'while [[ "$1" == --* ]]; do shift; done; exec "$@"',
        ".venv/bin/agentrl": f'printf "%s\\n" agentrl "$@" > {heard}',
        ".venv/bin/torchrun": f'printf "%s\\n" torchrun "$@" > {heard}',
    }
    for name, body in tools.items():
        tool = tmp_path / name
        tool.parent.mkdir(parents=True, exist_ok=True)
        tool.write_text(f"#!/usr/bin/env bash\n{body}\n")
        tool.chmod(0o755)
    (tmp_path / "run.yaml").write_text("groups_per_step: 16\n")
    told = {"RUN_NAME": "big", "CONFIG": "run.yaml", "MONGODB_URI": "mongodb://db/big"}
    slurm = {"SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "11"}
    subprocess.run(
        ["bash", str(DEPLOY / "slurm" / path)],
        check=True,
        timeout=60,
        cwd=tmp_path,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_LOCALID": "3", **told, **slurm},
    )
    program, *words = heard.read_text().splitlines()
    if command == "train":
        assert program == "torchrun"
        launcher = shlex.join(words[: words.index("-m")])
        assert launcher == (
            "--nnodes 2 --nproc_per_node 8 --rdzv_id 11 --rdzv_backend c10d "
            "--rdzv_endpoint node7:29500"
        )
        words = words[words.index("-m") + 2 :]
    assert words[0] == command
    monkeypatch.setenv("AGENTRL_API_KEY", "key")
    monkeypatch.chdir(tmp_path)
    config = parse_flags(words[1:])
    assert (config.run.run_name, config.trainer.groups_per_step) == ("big", 16)
    if command == "serve":
        assert config.inference.inference_port == 30030


def test_the_documented_commands_are_ones_that_the_program_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AGENTRL_API_KEY", "AGENTRL_ADMIN_KEY"):
        monkeypatch.setenv(name, f"the key of {name}")
    page = (DEPLOY.parent / "docs/deploy.md").read_text().replace("\\\n", " ")
    (tmp_path / "run.yaml").write_text("run_name: big\ngroups_per_step: 16\n")
    commands = re.findall(r"agentrl (serve|sample|train)( --[^\n`]*)$", page, re.MULTILINE)
    assert [command for command, _ in commands] == ["serve", "sample", *["train"] * 3]
    for _, flags in commands:
        words = flags.replace("run.yaml", str(tmp_path / "run.yaml")).split()
        assert parse_flags(words).run.run_name == "big"
