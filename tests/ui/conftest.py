"""Fixtures of the browser tests: one ``precision-time up``, one browser, and a picture and logs of a failed test."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, Request, sync_playwright

from precision_time.tests.processes import free_port, wait_for

START_S = 180.0
#: The schedule that `up` gets for the nightly retraining; the tests look for it on its page.
CRON, TIMEZONE = "15 2 * * *", "Europe/Berlin"
#: A folder to keep the pictures in; without it they go to the temporary folder of their test.
SCREENSHOTS = "PRECISION_TIME_SCREENSHOTS"

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    # A request to another host fails the test; this also keeps it from leaving the machine.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
]

_failed = pytest.StashKey[bool]()


@dataclass(frozen=True, slots=True)
class Stack:
    """A running ``precision-time up``: its home, its log and the addresses that it printed."""

    home: Path
    log: Path
    found: dict[str, Any]

    @property
    def ui(self) -> str:
        return str(self.found["ui"])

    @property
    def data(self) -> Path:
        return self.home / "precision-time-data"

    def deployment_page(self, name: str) -> str:
        """Address of the page of deployment ``name``."""
        return f"{self.ui}/deployments/deployment/{self.found['deployments'][f'{name}/{name}']}"

    def last_words(self) -> str:
        """The ends of the logs of `up` and its services."""
        logs = [self.log, *sorted((self.home / "logs").glob("*.log"))]
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-1500:]}" for log in logs)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """``precision-time up`` with two CPU workers and a nightly schedule, in an empty home and on free ports."""
    folder = tmp_path_factory.mktemp("up")
    home, out, log = folder / "home", folder / "up.json", folder / "up.log"
    command = [sys.executable, "-m", "precision_time", "up", "--json", "--home", str(home), "--port", str(free_port())]
    command += ["--cluster", "local", "--workers", "2", "--nightly", CRON, "--timezone", TIMEZONE]
    with out.open("wb") as stdout, log.open("wb") as stderr:
        process = subprocess.Popen(command, stdout=stdout, stderr=stderr, start_new_session=True)
    try:

        def is_up() -> bool:
            assert process.poll() is None, f"up ended: {log.read_text()}"
            return out.read_text().endswith("\n")

        wait_for(is_up, seconds=START_S, what="the start of up")
        yield Stack(home, log, json.loads(out.read_text()))
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=90)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


# Not for the whole session: while it is open, this thread has a running event loop, and other tests need their own.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Debian's chromium with an empty profile."""
    chromium = shutil.which("chromium")
    assert chromium is not None, "no chromium on PATH: apt-get install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield browser
        browser.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Tell the fixtures of a test whether it failed."""
    report = yield
    item.stash[_failed] = item.stash.get(_failed, False) or report.failed
    return report


@pytest.fixture
def page(browser: Browser, stack: Stack, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Page]:
    """A new window; a request to another host than 127.0.0.1 fails the test; a failed test leaves picture and logs."""
    context = browser.new_context(viewport={"width": 1200, "height": 800}, locale="en-GB", timezone_id=TIMEZONE)
    requested: list[str] = []

    def note(request: Request) -> None:
        requested.append(request.url)

    context.on("request", note)
    page = context.new_page()
    page.on("websocket", lambda socket: requested.append(socket.url))
    yield page
    if request.node.stash.get(_failed, False):
        page.screenshot(path=tmp_path / "failed.png")
        (tmp_path / "up.txt").write_text(stack.last_words())
        print(f"{page.url}\nscreenshot and logs: {tmp_path}\n{stack.last_words()}")
    context.close()
    foreign = [url for url in requested if urlsplit(url).hostname not in {"127.0.0.1", None}]
    assert not foreign, f"the pages asked other hosts: {foreign[:5]}"


@pytest.fixture
def screenshots(tmp_path: Path) -> Path:
    """The folder for pictures to keep."""
    folder = Path(os.environ.get(SCREENSHOTS) or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    return folder
