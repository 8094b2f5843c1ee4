"""A day in Prefect's UI, in headless Chromium: fill the form, watch, see why a shard failed, press Retry."""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect, sync_playwright

from layertap import HiddenStates
from tests.runs import save_rows, some_rows
from tests.system.stacks import RealStack, damaged_shard, run_of, wait_for

pytestmark = [pytest.mark.system, pytest.mark.debian, pytest.mark.timeout(600)]

PATIENCE_MS = 120_000
"""For a page to show what it should; the machine may be busy."""

SCREENSHOTS = os.environ.get("LAYERTAP_SCREENSHOTS")
"""Folder for pictures of the pages, for a person to look at."""

QUIET = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]


@pytest.fixture
def page() -> Iterator[Page]:
    """A page of Debian's Chromium; Playwright's own browsers aren't needed."""
    chromium = shutil.which("chromium")
    assert chromium, "chromium isn't installed, and this test may not be skipped: apt-get install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=QUIET)
        page = browser.new_page(viewport={"width": 1200, "height": 900})
        page.set_default_timeout(PATIENCE_MS)
        expect.set_options(timeout=PATIENCE_MS)
        yield page
        browser.close()


def shoot(page: Page, name: str) -> None:
    """Take a picture, if somebody wants some."""
    if SCREENSHOTS:
        page.wait_for_timeout(2000)
        page.screenshot(path=f"{SCREENSHOTS}/{name}.png")


def deployment(stack: RealStack, name: str) -> str:
    (found,) = stack.ask("deployments", deployments={"name": {"any_": [name]}})
    return str(found["id"])


def fill(page: Page, **values: str) -> None:
    for label, value in values.items():
        page.get_by_label(re.compile(rf"^{label.replace('_', ' ')}( \(Optional\))?$")).first.fill(value)


def submit_again(page: Page) -> None:
    """Submit a corrected form: V2 of the UI may still go by the errors before, and then wants it twice."""
    with page.expect_response("**/ui/schemas/validate"):
        page.get_by_role("button", name="Submit").click()
    page.wait_for_timeout(3000)  # for the page to take the answer in
    if page.get_by_role("button", name="Submit").is_visible():
        page.get_by_role("button", name="Submit").click()
    page.wait_for_url(re.compile(r"(?<!/run)$"))


def open_artifacts(page: Page, run: str) -> None:
    page.goto(run)
    page.get_by_role("tab", name="Artifacts").click()


def open_artifacts_until(page: Page, run: str, text: str) -> None:
    """Load the artifacts again and again, for the page doesn't renew them by itself."""

    def is_shown() -> bool:
        open_artifacts(page, run)
        page.wait_for_timeout(3000)
        return page.get_by_text(re.compile(text)).first.is_visible()

    wait_for(is_shown)


@pytest.mark.parametrize("stack", ["postgres"], indirect=True)
def test_a_day_in_the_browser(stack: RealStack, target: str, tmp_path: Path, page: Page) -> None:
    rows = some_rows(300, seed=6)
    dataset = save_rows(rows, tmp_path / "rows")
    assert stack.stack.daemon("lanes").end(90)
    ui = f"{stack.stack.ui_url}/v2"

    page.goto(f"{ui}/deployments/deployment/{deployment(stack, 'extract-hidden-states')}/run")
    fill(page, Target=target, Dataset=dataset, Root="/not/relative", Max_Length="64", Num_Lanes="2")
    page.get_by_role("button", name="Submit").click()
    expect(page.get_by_text("does not match").first).to_be_visible()
    expect(page.get_by_text("should be non-empty").first).to_be_visible()
    shoot(page, "refused")
    assert not stack.runs_of("extract_hidden_states", "/not/relative")

    fill(page, Root="browser")
    page.get_by_role("button", name="Add item").click()
    page.locator("input[type=number]").first.fill("1")  # of the numbers, the layers come first
    shoot(page, "form")
    page.get_by_role("tab", name="Advanced").click()
    fill(page, Shard_Tokens="600", Max_Batch_Tokens="256")
    submit_again(page)
    (run,) = wait_for(lambda: stack.runs_of("extract_hidden_states", "browser"))

    url = f"{ui}/runs/flow-run/{run['id']}"
    with damaged_shard(stack, "browser"):
        open_artifacts_until(page, url, r"[1-9]\d* of 300 rows, .* tokens/s, ETA")
        expect(page.get_by_text("browser from rows").first).to_be_visible()
        shoot(page, "progress")
        expect(page.get_by_text("Failed").first).to_be_visible(timeout=2 * PATIENCE_MS)
        open_artifacts(page, url)
        page.get_by_text("layertap-failures").first.click()
        expect(page.get_by_text("shard-00001.arrow has the checksum").first).to_be_visible()
        expect(page.get_by_text("layertap void").first).to_be_visible()
        shoot(page, "failures")
        page.get_by_role("link", name=re.compile("^lane-")).first.click()
        expect(page.get_by_text("extraction_lane").first).to_be_visible()
        shoot(page, "lane")

    page.goto(url)
    page.get_by_role("button", name="Open menu").click()
    page.get_by_role("menuitem", name="Retry").click()
    page.get_by_role("button", name="Retry").last.click()
    done = run_of(stack, "extract_hidden_states", "browser", "COMPLETED")
    assert "300 of 300 rows are stored" in done["state"]["message"]
    expect(page.get_by_text("Completed", exact=True).first).to_be_visible()
    shoot(page, "completed")
    assert len(HiddenStates(stack.store("browser"))) == len(rows)
