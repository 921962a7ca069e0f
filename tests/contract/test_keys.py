"""Data and control have keys of their own; who has only the one may not do the other."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from harness.processes import engine_process
from support.engines import make_model
from support.sglang import sglang_process

DATA, ADMIN = "the-data-key", "the-admin-key"
KINDS = [
    "embedded",
    pytest.param("sglang", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys") / "server.log"


@pytest.fixture(scope="module", params=KINDS)
def url(request: pytest.FixtureRequest, log: Path) -> Iterator[str]:
    model = make_model(log.parent / "model", seed=1)
    keys = {"AGENTRL_API_KEY": DATA, "AGENTRL_ADMIN_KEY": ADMIN}
    running = (
        engine_process(model, environment=keys)
        if request.param == "embedded"
        else sglang_process(model, log, environment=keys)
    )
    with running as address:
        yield address


@pytest.mark.parametrize(
    ("method", "path", "wanted"),
    [
        ("GET", "/model_info", DATA),
        ("GET", "/server_info", DATA),
        ("GET", "/v1/models", DATA),
        ("GET", "/v1/loads", DATA),
        ("POST", "/generate", DATA),
        ("POST", "/continue_generation", ADMIN),
        ("POST", "/flush_cache", ADMIN),
        ("POST", "/abort_request", ADMIN),
        ("POST", "/update_weight_version", ADMIN),
        ("POST", "/end_weight_update", ADMIN),
        ("POST", "/release_memory_occupation", ADMIN),
    ],
)
def test_each_route_takes_its_own_key_and_no_other(
    url: str, method: str, path: str, wanted: str
) -> None:
    bodies = {
        "/generate": {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}},
        "/update_weight_version": {"new_version": "5"},
        "/release_memory_occupation": {"tags": ["kv_cache"]},
    }
    answers = {}
    for key in (DATA, ADMIN, "wrong", None):
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        body = bodies.get(path, {}) if method == "POST" else None
        with httpx.Client(base_url=url, timeout=20, trust_env=False) as http:
            answers[key] = http.request(method, path, json=body, headers=headers).status_code
    accepted = {key for key, status in answers.items() if status not in (401, 403)}
    assert accepted == {wanted}


def test_whoever_comes_may_ask_whether_the_server_is_well(url: str) -> None:
    assert httpx.get(f"{url}/health", timeout=20, trust_env=False).status_code == 200


def test_the_key_for_generation_does_not_give_the_other_away(url: str) -> None:
    headers = {"Authorization": f"Bearer {DATA}"}
    told = httpx.get(f"{url}/server_info", headers=headers, timeout=20, trust_env=False)
    assert told.status_code == 200
    assert ADMIN not in told.text


def test_no_key_is_among_the_arguments_of_a_process_or_in_a_log(url: str, log: Path) -> None:
    httpx.get(f"{url}/health", timeout=20, trust_env=False)
    lines = [
        " ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])
    ]
    assert any(str(log.parent) in line for line in lines), "the server is among them"
    # Test processes are called after their tests, which are called after the keys.
    lines = [line for line in lines if not line.startswith("[pytest-xdist")]
    assert not [line for line in lines if DATA in line or ADMIN in line]
    if log.exists():  # SGLang's, which begins with all of its arguments
        assert "server_args=" in log.read_text()
        assert DATA not in log.read_text()
        assert ADMIN not in log.read_text()
