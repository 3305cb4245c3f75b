"""What a person does and sees in Prefect's pages: a campaign's form, the run that fills its pages, the schedule."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import pytest
from playwright.sync_api import Locator, Page, expect

from precision_time.storage.timings import TimingsDataset
from precision_time.tests.processes import wait_for
from precision_time.tests.ui.conftest import TIMEZONE, Stack

pytestmark = [pytest.mark.ui, pytest.mark.timeout(600)]

#: A run waits for its worker, starts Python, and measures four or eight cells on cores that others may want too.
RUN_S = 420.0
PAGE_S = 30.0
CAMPAIGN = "profiling-campaign"

expect.set_options(timeout=1000 * PAGE_S)


def find_field(page: Page, title: str) -> Locator:
    """The field of the form with this title."""
    titled = f".schema-form-property__label:text-matches('^{title}( \\\\(Optional\\\\))?$')"
    return page.locator(f".p-label:has(> .p-label__header {titled})")


def read_chips(page: Page, title: str) -> list[str]:
    return find_field(page, title).locator(".p-tag:visible").all_inner_texts()


def open_tab(page: Page, name: str) -> Locator:
    """Click a tab of the page; returns what is under it."""
    page.locator(".p-tab:visible").get_by_text(name, exact=True).click()
    content = page.locator(f"#{name.lower()}-content")
    expect(content).to_be_visible()
    return content


def open_new_run(page: Page, stack: Stack, *, known: set[str]) -> str:
    """Go from the list of the campaign's runs to the page of the run that is not ``known``; returns its address."""
    page.goto(stack.deployment_page(CAMPAIGN))
    runs = open_tab(page, "Runs").locator("a[href^='/runs/flow-run/']")

    def find_new() -> str | None:
        listed = runs.evaluate_all("links => links.map(link => link.pathname)")
        return next((path for path in listed if path not in known), None)

    path = wait_for(find_new, seconds=RUN_S, what="a new run in the list")
    page.goto(f"{stack.ui}{path}")
    return str(path)


def find_badge(page: Page) -> Locator:
    return page.locator(".page-heading-flow-run__meta .state-badge:visible")


def wait_for_completion(page: Page) -> None:
    """Stay on the page of a run until it ends, and see that it is Completed."""
    badge = find_badge(page)
    expect(badge).to_have_class(re.compile("state--(completed|failed|crashed|cancelled)"), timeout=1000 * RUN_S)
    expect(badge).to_have_text("Completed")


def open_artifact(page: Page, run: str, kind: str) -> None:
    """From the page of ``run`` to its artifact of this kind, as soon as there is one."""
    page.goto(run)
    card = open_tab(page, "Artifacts").locator("a[href^='/artifacts/artifact/']", has_text=kind)
    expect(card).to_be_visible(timeout=1000 * RUN_S)
    card.click()
    page.wait_for_url("**/artifacts/artifact/*")


def read_table(page: Page) -> list[dict[str, str]]:
    """The rows of the table on the page, by their headings."""
    lines = page.locator("table tr")

    def read_all() -> list[list[str]] | None:
        read: list[list[str]] = lines.evaluate_all(
            "lines => lines.map(line => [...line.children].map(cell => cell.innerText.trim()))"
        )
        # Numbers appear before texts, which the page renders as markdown.
        return read if len(read) > 1 and all(line[0] for line in read) else None

    headings, *rows = wait_for(read_all, seconds=PAGE_S, what="the texts of the table")
    return [dict(zip(headings, row, strict=True)) for row in rows]


def watch_table(page: Page, done: Callable[[list[dict[str, str]]], bool]) -> list[dict[str, str]]:
    """Reload the table until its rows are as wanted."""

    def look() -> list[dict[str, str]] | None:
        page.reload()
        rows = read_table(page)
        return rows if done(rows) else None

    wanted: list[dict[str, str]] = wait_for(look, seconds=RUN_S, what="rows of the table")
    return wanted


def is_half_full(rows: list[dict[str, str]]) -> bool:
    """Whether a cell has its time while another is still to come."""
    return any(row["iteration"] for row in rows) and any(row["state"] in {"waiting", "measuring"} for row in rows)


def assert_pictures_show(page: Page) -> None:
    """The report on the page has its three pictures, and each of them is drawn."""
    pictures = page.locator("article img")
    expect(pictures).to_have_count(3)
    for picture in pictures.all():
        assert picture.evaluate("async image => { await image.decode(); return image.naturalWidth }") > 0
        assert picture.get_attribute("alt")


def take_picture(page: Page, path: Path, *, height: int) -> None:
    """What a window of this height shows."""
    before = page.viewport_size
    assert before is not None
    page.set_viewport_size({"width": before["width"], "height": height})
    page.screenshot(path=path, animations="disabled")
    page.set_viewport_size(before)


def test_a_campaign_of_the_prefilled_form_fills_its_pages_and_ends_with_a_report(
    stack: Stack, page: Page, screenshots: Path
) -> None:
    assert "Warning" not in stack.log.read_text()
    page.goto(stack.ui)
    page.wait_for_url(f"{stack.ui}/dashboard*")
    expect(page.get_by_role("button", name="Deployments")).to_be_visible()

    data = str(stack.home / "first-look")
    spec = {
        "name": "first-look",
        "models": ["mlp"],
        "precisions": ["fp32"],
        "gpus": [1, 2],
        "batch_sizes": [4],
        # Each cell takes some seconds, so that the test can see half-full pages.
        "measured_steps": 5000,
        "seconds_per_cell": 12,
        "cluster": stack.found["scheduler"],
        "data": data,
    }
    parameters = quote(quote(json.dumps({"spec": spec}), safe=""), safe="")
    page.goto(f"{stack.deployment_page(CAMPAIGN)}/run?parameters={parameters}")
    expect(find_field(page, "Models")).to_be_visible()
    assert read_chips(page, "Models") == ["mlp"]
    assert read_chips(page, "Precisions") == ["fp32"]
    gpus = find_field(page, "GPUs").locator("input[type=number]")
    assert [field.input_value() for field in gpus.all()] == ["1", "2"]

    find_field(page, "Precisions").locator(".p-select-button__icon").click()
    page.get_by_role("option", name="amp_bf16", exact=True).click()
    page.get_by_text("Run Name").click()
    expect(page.get_by_role("option")).to_have_count(0)
    assert read_chips(page, "Precisions") == ["fp32", "amp_bf16"]
    take_picture(page, screenshots / "form.png", height=1150)
    find_field(page, "Attempts").locator("input").fill("3")
    with page.expect_response("**/create_flow_run") as answered:
        page.get_by_role("button", name="Submit").click()
    assert answered.value.ok, answered.value.text()

    run = f"{stack.ui}{open_new_run(page, stack, known=set())}"
    open_artifact(page, run, "TABLE")
    rows = watch_table(page, is_half_full)
    assert len(rows) == 4
    assert all(row["state"] == "recorded" for row in rows if row["iteration"])
    take_picture(page, screenshots / "table.png", height=500)
    page.goto(run)
    expect(find_badge(page)).to_have_text("Running")
    expect(page.get_by_text(re.compile(r"mlp \w+ x[12] b4: recorded, \d+ rows")).first).to_be_visible()
    take_picture(page, screenshots / "running.png", height=800)
    wait_for_completion(page)
    expect(page.locator(".page-heading-flow-run")).to_contain_text("first-look: 4 cells of mlp, up to 2 ranks")

    arrived = json.loads(open_tab(page, "Parameters").inner_text())["spec"]
    assert (arrived["precisions"], arrived["max_attempts"]) == (["fp32", "amp_bf16"], 3)

    open_artifact(page, run, "TABLE")
    rows = read_table(page)
    cells = {(row["model"], row["precision"], row["GPUs"], row["batch"]) for row in rows}
    assert cells == {("mlp", precision, gpus, "4") for precision in ("fp32", "amp_bf16") for gpus in ("1", "2")}
    assert all(row["state"] == "recorded" and re.fullmatch(r"[\d.]+ m?s", row["iteration"]) for row in rows)
    assert all(re.fullmatch(r"\d+\.\d\dx", row["over fp32"]) and not row["cause"] for row in rows)

    open_artifact(page, run, "PROGRESS")
    expect(page.get_by_text("Progress: 100%")).to_be_visible()

    open_artifact(page, run, "MARKDOWN")
    assert_pictures_show(page)

    measurements = TimingsDataset(data).measurements()
    assert {(row.model, row.precision, row.world_size) for row in measurements} == {
        ("mlp", precision, gpus) for precision in ("fp32", "amp_bf16") for gpus in (1, 2)
    }


def test_the_page_of_the_nightly_retraining_shows_its_schedule(stack: Stack, page: Page) -> None:
    page.goto(f"{stack.ui}/deployments")
    page.get_by_role("link", name="nightly-retrain").first.click()
    page.wait_for_url(stack.deployment_page("nightly-retrain"))
    schedule = page.locator(".deployment-schedule-card__content:visible")
    expect(schedule).to_have_text("At 02:15 AM every day")
    schedule.hover()
    expect(page.get_by_text(f"At 02:15 AM every day ({TIMEZONE})").first).to_be_visible()
    # The window of the test is in the time zone of the schedule.
    expect(open_tab(page, "Upcoming")).to_contain_text(re.compile(r"Scheduled for \d{4}/\d\d/\d\d 02:15:00 AM"))


def test_quick_run_measures_a_small_grid(stack: Stack, page: Page, screenshots: Path) -> None:
    page.goto(stack.deployment_page(CAMPAIGN))
    runs = open_tab(page, "Runs").locator("a[href^='/runs/flow-run/']")
    page.wait_for_load_state("networkidle")
    known = set(runs.evaluate_all("links => links.map(link => link.pathname)"))
    page.get_by_role("button", name="Run", exact=True).click()
    page.get_by_role("button", name="Quick run").click()
    dialog = page.locator(".p-modal")
    expect(dialog.get_by_text("Run Deployment")).to_be_visible()
    with page.expect_response("**/create_flow_run"):
        dialog.get_by_role("button", name="Run", exact=True).click()
    run = f"{stack.ui}{open_new_run(page, stack, known=known)}"
    wait_for_completion(page)
    expect(page.locator(".page-heading-flow-run")).to_contain_text(
        "quick-run: 8 cells of mlp, gpt2_mini, up to 2 ranks"
    )

    open_artifact(page, run, "TABLE")
    rows = read_table(page)
    assert {(row["model"], row["precision"], row["GPUs"]) for row in rows} == {
        (model, precision, gpus)
        for model in ("mlp", "gpt2_mini")
        for precision in ("fp32", "amp_bf16")
        for gpus in ("1", "2")
    }
    assert all(row["state"] == "recorded" and row["iteration"] for row in rows)
    assert len(TimingsDataset(str(stack.data)).recorded_cells()) == 8

    open_artifact(page, run, "MARKDOWN")
    assert_pictures_show(page)
    take_picture(page, screenshots / "report.png", height=1300)
