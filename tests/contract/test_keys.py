"""Data and control have keys of their own; who has only the one may not do the other."""

from collections.abc import Iterator

import httpx
import pytest
from support.engines import engine_process, make_model
from support.sglang import sglang_process

DATA, ADMIN = "data-key", "admin-key"
KINDS = [
    "embedded",
    pytest.param("sglang", marks=[pytest.mark.slow, pytest.mark.timeout(240)]),
]


@pytest.fixture(scope="module", params=KINDS)
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("keys")
    model = make_model(folder / "model", seed=1)
    keys = {"AGENTRL_API_KEY": DATA, "AGENTRL_ADMIN_KEY": ADMIN}
    flags = ("--api-key", DATA, "--admin-api-key", ADMIN)
    running = (
        engine_process(model, environment=keys)
        if request.param == "embedded"
        else sglang_process(model, folder / "sglang.log", *flags)
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
