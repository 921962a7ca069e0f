"""Whatever a user gets wrong is answered in one line, before any process starts."""

import json
import socket
import subprocess
import sys
import threading
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(folder: Path, *flags: str, command: str = "run") -> "subprocess.CompletedProcess[str]":
    words = ["--run_name", "wrong", "--config", str(ROOT / "assets/demo/grpo.yaml")]
    words += ["--output_dir", str(folder / "output"), "--logs_dir", str(folder / "logs")]
    words += ["--mongo_data_dir", str(folder / "mongo"), *flags]
    return subprocess.run(
        [sys.executable, "-m", "agentrl", command, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def assert_one_line(done: "subprocess.CompletedProcess[str]", folder: Path, *parts: str) -> None:
    assert done.returncode in (1, 2), done.stdout + done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    for part in parts:
        assert part in done.stderr
    assert "Traceback" not in done.stderr
    assert list(folder.glob("*/*")) == [], "something was started or written"


def test_an_unknown_flag(tmp_path: Path) -> None:
    done = run(tmp_path, "--learning_rat", "1")
    assert_one_line(done, tmp_path, "--learning_rat", "did you mean --learning_rate?")


def test_a_flag_like_no_other(tmp_path: Path) -> None:
    done = run(tmp_path, "--loss_type", "grpo")
    assert_one_line(done, tmp_path, "--loss_type", "see --help")


def test_no_questions_at_all(tmp_path: Path) -> None:
    done = run(tmp_path, "--train_file", "none")
    assert_one_line(done, tmp_path, "nothing to train on", "--train_file")


def test_a_variable_of_the_shell_that_was_never_set(tmp_path: Path) -> None:
    done = run(tmp_path, "--train_file", "")
    assert_one_line(done, tmp_path, "--train_file is empty")


def test_one_try_a_question(tmp_path: Path) -> None:
    done = run(tmp_path, "--num_generations", "1")
    assert_one_line(done, tmp_path, "--num_generations 1", "give 2 or more")


def test_a_run_name_with_a_slash(tmp_path: Path) -> None:
    done = run(tmp_path, "--run_name", "../other")
    assert_one_line(done, tmp_path, "--run_name", "letters, digits")


def test_a_missing_file_of_servers_beside_a_server_to_be_started(tmp_path: Path) -> None:
    done = run(tmp_path, "--mcp_servers", "nowhere.json")
    assert_one_line(done, tmp_path, "nowhere.json")


def test_a_missing_dataset(tmp_path: Path) -> None:
    done = run(tmp_path, "--train_file", "nowhere.jsonl")
    assert_one_line(done, tmp_path, "nowhere.jsonl", "No such file")


def test_a_malformed_dataset_line_is_named_by_its_number(tmp_path: Path) -> None:
    good = json.dumps({"id": "a", "query": "q", "answer": 1})
    path = tmp_path / "data.jsonl"
    path.write_text(f"{good}\n{{oops\n")
    done = run(tmp_path, "--train_file", str(path))
    assert_one_line(done, tmp_path, "line 2", "not valid JSON")


def test_an_unknown_scorer(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"id": "a", "query": "q", "answer": 1, "scorer": "exakt"}) + "\n")
    done = run(tmp_path, "--train_file", str(path))
    assert_one_line(done, tmp_path, "line 1", "unknown scorer 'exakt'", "exact")


def test_an_adapter_for_experts(tmp_path: Path) -> None:
    model = tmp_path / "mixture"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "qwen3_moe", "num_experts_per_tok": 2}')
    for name in ("tokenizer.json", "model.safetensors"):
        (model / name).touch()
    folder = tmp_path / "run"
    done = run(folder, "--model_name_or_path", str(model), "--lora_rank", "4")
    assert_one_line(done, folder, "--lora_target_modules gate_proj", "give q_proj,k_proj")


def test_questions_with_images_are_not_trained_on(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    entry = {
        "id": "a",
        "query": "q",
        "answer": 1,
        "scorer": "exact",
        "images": "http://x.org/a.png",
    }
    path.write_text(json.dumps(entry) + "\n")
    done = run(tmp_path, "--train_file", str(path))
    assert_one_line(done, tmp_path, "data.jsonl has images", "not trained on yet")


def test_a_judge_without_its_configuration(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"id": "a", "query": "q", "answer": 1, "scorer": "agentcpm"}) + "\n")
    done = run(tmp_path, "--train_file", str(path))
    assert_one_line(done, tmp_path, "agentcpm", "agent_config_path")


def test_a_wrong_model_path(tmp_path: Path) -> None:
    done = run(tmp_path, "--model_name_or_path", "./no/model/here")
    assert_one_line(done, tmp_path, "no/model/here", "no such directory")


def test_an_unreachable_database_is_named_without_its_password(tmp_path: Path) -> None:
    port = closed_port()
    uri = f"mongodb://user:s3cret@127.0.0.1:{port}/?serverSelectionTimeoutMS=500"
    done = run(tmp_path, "--db_connection_string", uri)
    assert_one_line(done, tmp_path, f"127.0.0.1:{port}")
    assert "s3cret" not in done.stderr + done.stdout


def test_an_unreachable_mcp_server(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{closed_port()}/mcp"
    done = run(tmp_path, "--tool_server_command", "none", "--mcp_manager_url", url)
    assert_one_line(done, tmp_path, url)


def test_an_unreachable_inference_server(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{closed_port()}"
    done = run(tmp_path, "--inference_urls", url)
    assert_one_line(done, tmp_path, url, "no server answers there")


def test_an_inference_server_that_is_none(tmp_path: Path) -> None:
    with HTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as other:
        serving = threading.Thread(target=other.serve_forever)
        serving.start()
        try:
            url = f"http://127.0.0.1:{other.server_port}"
            done = run(tmp_path, "--inference_urls", url)
        finally:
            other.shutdown()
            serving.join()
    assert_one_line(done, tmp_path, url, "is not an inference server", "--inference_gateway")


def test_a_gateway_without_its_servers(tmp_path: Path) -> None:
    done = run(tmp_path, "--inference_gateway", "http://127.0.0.1:1")
    assert_one_line(done, tmp_path, "--inference_gateway needs --inference_urls")


@pytest.mark.parametrize("command", ["sample", "train", "serve"])
def test_a_process_without_a_database(tmp_path: Path, command: str) -> None:
    done = run(tmp_path, command=command)
    assert_one_line(done, tmp_path, "--db_connection_string")


@pytest.mark.parametrize("name", ["grpo", "minirl", "eval"])
def test_an_example_script_without_a_run_name_says_how_it_is_used(name: str) -> None:
    done = subprocess.run(
        [ROOT / f"{name}_example.sh"], capture_output=True, text=True, timeout=10, check=False
    )
    assert done.returncode == 2
    assert done.stderr == f"usage: {ROOT}/{name}_example.sh RUN_NAME [--flag value ...]\n"
