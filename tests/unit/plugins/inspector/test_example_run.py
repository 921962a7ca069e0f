"""`agentrl ui --example`: a run to look at, of which nothing stays."""

import lzma
import re
from pathlib import Path
from urllib.parse import unquote

import httpx
import pytest
from playwright.sync_api import Browser, expect
from unit.plugins.inspector.conftest import opened_inspector

from agentrl.cli.main import main
from agentrl.config.named_files import shipped_file
from agentrl.plugins.inspector.example_run import ARCHIVE, EXAMPLE_RUN

MAX_BYTES = 3_000_000


def test_the_archive_is_small_and_names_no_machine() -> None:
    path = shipped_file(ARCHIVE)
    assert path.stat().st_size <= MAX_BYTES
    text = lzma.decompress(path.read_bytes()).decode()
    assert not re.search(r'"/(tmp|home|root|work)/', text)
    assert set(re.findall(r'"host": "([^"]*)"', text)) == {"machine"}


def test_it_shows_its_run_and_leaves_nothing(tmp_path: Path) -> None:
    work, scratch = tmp_path / "work", tmp_path / "scratch"
    work.mkdir()
    scratch.mkdir()
    # The database of the environment is neither read nor written.
    elsewhere = {"MONGODB_URI": "mongodb://127.0.0.1:1/other", "TMPDIR": str(scratch)}
    with opened_inspector(work, "--example", **elsewhere) as address:
        page, _, token = address.partition("?token=")
        assert page.endswith(f"/runs/{EXAMPLE_RUN}")
        assert list(scratch.iterdir())
        origin = page.removesuffix(f"/runs/{EXAMPLE_RUN}")
        head = {"Authorization": f"Bearer {unquote(token)}"}
        with httpx.Client(base_url=origin, headers=head) as client:
            session = client.get("/api/session").raise_for_status().json()
            assert not session["may_control"]
            api = f"/api/runs/{EXAMPLE_RUN}"
            assert client.get(f"{api}/overview").raise_for_status().json()["status"] == "completed"
            record = client.get(f"{api}/record", params={"id": session["tour"]["loser"]})
            assert session["tour"]["turn"] in [one["index"] for one in record.json()["turns"]]
    assert list(scratch.iterdir()) == []
    assert [path.name for path in work.iterdir()] == ["ui.log"]


def test_it_is_read_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ui", "--example", "--allow_control"]) == 2
    assert "--example is read-only" in capsys.readouterr().err


def test_the_path_leads_to_the_turn_that_lost_it(browser: Browser, tmp_path: Path) -> None:
    with opened_inspector(tmp_path, "--example") as address:
        page = browser.new_page()
        page.goto(address)
        for name, heading in {
            r"^Step \d+$": r"Step \d+",
            "^A group of that step$": "train/",
            "^The turn that lost it$": "train/",
            "^Both attempts$": "Two rollouts",
        }.items():
            page.get_by_role("link", name=re.compile(name)).click()
            expect(page.get_by_role("heading", level=1)).to_have_text(re.compile(heading))
            page.go_back()
        curve = page.get_by_role("figure").filter(has_text="Entropy")
        curve.locator(".u-over").hover()
        expect(curve.locator(".pointed")).to_have_text(re.compile(r"step \d+.*Entropy [\d.]+"))
        expect(curve.get_by_text("Entropy").first).to_have_attribute(
            "title", re.compile("Mean uncertainty .*--temperature")
        )
        page.close()
