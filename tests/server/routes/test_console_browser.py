"""The console in a real browser: a cold start, a key, a streamed chat, a schema, an engine's death.

Needs Debian's chromium and chromium-driver: deploy/scripts/install_test_tools.sh.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

from rbln_backend.bucketing.usage import Usage, UsageFile, about_engine
from tests.checkpoints import CheckpointCache
from tests.server.real_server import RealServer

pytestmark = [pytest.mark.engine, pytest.mark.slow]

# The closed network of a test machine refuses Chromium's own connections, many at a time.
_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--window-size=1200,1600",
)
_PATIENCE_S = 120


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Chrome]:
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    assert chromium and driver, "chromium is missing: run deploy/scripts/install_test_tools.sh"
    options = ChromeOptions()
    options.binary_location = chromium
    for flag in (*_FLAGS, f"--user-data-dir={tmp_path / 'profile'}"):
        options.add_argument(flag)
    chrome = Chrome(options=options, service=Service(driver))
    yield chrome
    chrome.quit()


def text(browser: Chrome, name: str) -> str:
    return browser.find_element(By.ID, name).text


def until(browser: Chrome, what: Callable[[], bool]) -> None:
    WebDriverWait(browser, _PATIENCE_S, poll_frequency=0.1).until(lambda _: what())


def progress(browser: Chrome) -> tuple[int, int]:
    bar = browser.find_element(By.ID, "graphs-progress")
    return int(bar.get_attribute("value") or 0), int(bar.get_attribute("max") or 0)


def test_the_console_from_a_cold_start_to_the_engines_death(
    checkpoints: CheckpointCache, tmp_path: Path, browser: Chrome
) -> None:
    cold = ("--additional-config", '{"rbln": {"disable_compile_cache": true}}')
    with RealServer(checkpoints("llama"), tmp_path, "--api-key", "sesame", *cold) as server:
        browser.get(server.url)
        until(browser, lambda: text(browser, "phase") == "starting")

        # It asks for the key, and says so when it is wrong.
        until(browser, lambda: browser.find_element(By.ID, "key-form").is_displayed())
        give_key(browser, "wrong")
        until(browser, lambda: "invalid_api_key" in text(browser, "key-note"))
        give_key(browser, "sesame")

        # A cold start goes on for seconds: some of its graphs are seen done before all are.
        until(browser, lambda: 0 < progress(browser)[0] < progress(browser)[1])
        until(browser, lambda: text(browser, "phase") == "ready")
        done, total = progress(browser)
        assert done == total > 3
        assert "no NPU" in text(browser, "device")

        advice(browser, server)
        chat(browser)
        schema(browser)

        os.kill(server.engine_pid(), signal.SIGKILL)
        until(browser, lambda: text(browser, "phase") in ("dead", "no answer"))
        assert "engine" in text(browser, "alert") or "does not answer" in text(browser, "alert")
        server.process.wait(30)
        until(browser, lambda: text(browser, "phase") == "no answer")
        assert "from then" in text(browser, "alert")


def give_key(browser: Chrome, key: str) -> None:
    until(browser, lambda: browser.find_element(By.ID, "key-form").is_displayed())
    browser.find_element(By.ID, "key").send_keys(key)
    browser.find_element(By.CSS_SELECTOR, "#key-form button").click()


def advice(browser: Chrome, server: RealServer) -> None:
    """What earlier runs have left is advised on; the engine itself writes once a minute."""
    headers = {"authorization": "Bearer sesame"}
    buckets = server.client.get("/v1/server_info", headers=headers).json()["buckets"]
    sizes = buckets["decode"]
    earlier = Usage(about=about_engine("m", "cpu", decode_buckets=sizes, prefill_buckets=[64]))
    for _ in range(200):
        earlier.phases["decode"].note(3, sizes[-1], 0.004)
        earlier.phases["decode"].note(1, sizes[0], 0.001)
    UsageFile(Path(buckets["usage_file"])).add(earlier)
    browser.refresh()
    until(browser, lambda: "decode" in text(browser, "advice"))
    assert "of step time" in text(browser, "advice") or "as now" in text(browser, "advice")


def chat(browser: Chrome) -> None:
    until(browser, lambda: "tiny" in text(browser, "chat-model"))
    browser.find_element(By.ID, "chat-text").send_keys("hello")
    browser.find_element(By.ID, "chat-send").click()
    until(browser, lambda: "tokens/s" in text(browser, "chat-figures"))
    assert "ended by" in text(browser, "chat-figures")
    assert len(text(browser, "chat-log").splitlines()) >= 4
    # The live panels follow from the metrics.
    until(browser, lambda: "decode" in text(browser, "buckets"))


def schema(browser: Chrome) -> None:
    browser.find_element(By.CSS_SELECTOR, "#chat-form summary").click()
    field = browser.find_element(By.ID, "chat-schema")
    field.send_keys('{"type": "integer", "pattern": ')
    browser.find_element(By.ID, "schema-check").click()
    until(browser, lambda: "not JSON" in text(browser, "schema-note"))
    field.clear()
    field.send_keys('{"enum": ["yes", "no"]}')
    browser.find_element(By.ID, "schema-check").click()
    until(browser, lambda: "fits" in text(browser, "schema-note"))
    # The conversation so far would not leave room for another answer.
    browser.find_element(By.ID, "chat-clear").click()
    browser.find_element(By.ID, "chat-text").send_keys("well?")
    browser.find_element(By.ID, "chat-send").click()
    until(browser, lambda: text(browser, "chat-log").rstrip().endswith(('"yes"', '"no"')))
