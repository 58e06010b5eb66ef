"""The console in a real browser: a start, a key, charts, a chat, batches, an engine's death.

Needs Debian's chromium and chromium-driver: `make test-tools`.
"""

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from selenium.webdriver import Chrome, Keys
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

from rbln_backend.reports.progress import ProgressWriter
from rbln_backend.usage import Usage, UsageFile, about_engine
from server.frontend import LaunchError
from tests.checkpoints import CheckpointCache
from tests.server.real_server import RealServer
from tests.server.routes.console_page import PHONE, errors_logged, give_key, part, text, until
from tests.server.scripted import ScriptedLauncher, running

pytestmark = [pytest.mark.engine, pytest.mark.slow]

_KEY = {"authorization": "Bearer sesame"}


@pytest.fixture(scope="module", autouse=True)
def starting(
    checkpoints: CheckpointCache, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Future[RealServer]]:
    """The server that most tests share: it starts while the first ones run."""
    folder = tmp_path_factory.mktemp("server")
    with ThreadPoolExecutor(1) as pool:
        flags = ("--api-key", "sesame", "--data-dir", str(folder / "data"), "--min-free-bytes", "0")
        server = pool.submit(RealServer, checkpoints("llama"), folder, *flags)
        yield server
        with server.result():
            pass


@pytest.fixture
def server(starting: Future[RealServer]) -> RealServer:
    return starting.result()


@pytest.fixture
def page(server: RealServer, browser: Chrome) -> Chrome:
    """The browser at the shared server, ready, with its key."""
    server.until_ready()
    if not browser.current_url.startswith(server.url):
        browser.get(server.url)
        give_key(browser, "sesame")
    until(browser, lambda: text(browser, "phase") == "ready")
    until(browser, lambda: "tiny" in text(browser, "chat-model"))
    return browser


async def test_a_start_is_what_one_sees_until_it_is_over(browser: Chrome, tmp_path: Path) -> None:
    launcher = ScriptedLauncher()
    async with running(tmp_path, launcher) as service:
        engine = ProgressWriter(tmp_path, 0, None)
        await asyncio.to_thread(_see_kernels, browser, service.port, engine)
        await asyncio.to_thread(_see_graphs, browser, engine)
        engine.phase("ready")
        launcher.launched.set()
        await asyncio.to_thread(_see_the_end_of_it, browser)


def _see_kernels(browser: Chrome, port: int, engine: ProgressWriter) -> None:
    engine.phase("init", "kernels")
    browser.get(f"http://127.0.0.1:{port}")
    until(browser, lambda: text(browser, "headline") == "Building kernels")
    assert text(browser, "phase") == "starting"
    has_value = "return document.getElementById('graphs-progress').hasAttribute('value')"
    assert not browser.execute_script(has_value), "progress is unknown at first"
    assert not part(browser, "serving").is_displayed()
    assert not part(browser, "playground").is_displayed()
    assert "–" not in browser.find_element(By.TAG_NAME, "body").text


def _see_graphs(browser: Chrome, engine: ProgressWriter) -> None:
    engine.phase("load", "org/model")
    until(browser, lambda: text(browser, "headline") == "Loading weights: org/model")
    graphs = [f"decode[{size}]" for size in (1, 2, 4, 8)]
    engine.plan(graphs)
    engine.phase("compile", "capturing")
    for graph in graphs[:2]:
        engine.graph_started(graph)
        engine.graph_done(graph, "compiled", 4.0)
    until(browser, lambda: "Graphs: 2 of 4" in text(browser, "progress-label"))
    assert " left" in text(browser, "progress-label")
    bar = part(browser, "graphs-progress")
    assert (bar.get_attribute("value"), bar.get_attribute("max")) == ("2", "4")
    current = part(browser, "steps").find_element(By.CSS_SELECTOR, "[aria-current=step]")
    assert current.text == "Compiling graphs"
    until(browser, lambda: "compiled" in text(browser, "graphs"))


def _see_the_end_of_it(browser: Chrome) -> None:
    until(browser, lambda: text(browser, "phase") == "ready")
    until(browser, lambda: part(browser, "serving").is_displayed())
    assert text(browser, "headline").startswith("Ready after")
    first = part(browser, "main").find_element(By.TAG_NAME, "section")
    assert first.get_attribute("id") == "playground"
    assert first.is_displayed()
    assert not part(browser, "graphs-progress").is_displayed()
    _see_no_store(browser)


def _see_no_store(browser: Chrome) -> None:
    """Without --data-dir the page neither reads nor shows stored objects."""
    errors_logged(browser)
    browser.refresh()
    until(browser, lambda: "--enable-lora" in text(browser, "adapters-note"))
    assert not part(browser, "stored").is_displayed()
    assert errors_logged(browser) == []


async def test_a_start_that_fails_says_why(browser: Chrome, tmp_path: Path) -> None:
    launcher = ScriptedLauncher(error=LaunchError("no such model"))
    async with running(tmp_path, launcher, death_linger_s=3.0) as service:
        ProgressWriter(tmp_path, 0, None).phase("load", "org/model")

        def see(name: str, words: str) -> None:
            browser.get(f"http://127.0.0.1:{service.port}")
            until(browser, lambda: words in text(browser, name))

        await asyncio.to_thread(see, "headline", "Loading weights")
        launcher.launched.set()
        await asyncio.to_thread(see, "alert", "no such model")
        assert not part(browser, "serving").is_displayed()
        assert not part(browser, "graphs-progress").is_displayed()


def test_it_asks_for_the_key_and_says_when_it_is_wrong(server: RealServer, browser: Chrome) -> None:
    browser.get(server.url)
    give_key(browser, "wrong")
    until(browser, lambda: "invalid_api_key" in text(browser, "key-note"))
    give_key(browser, "sesame")
    until(browser, lambda: "no NPU" in text(browser, "device"))
    until(browser, lambda: text(browser, "phase") == "ready")
    # What a client needs to know.
    until(browser, lambda: text(browser, "served") == "tiny")
    assert text(browser, "context") == "256 tokens"
    assert text(browser, "base-url") == f"{server.url}/v1"


def test_a_page_just_opened_shows_what_ran_before(server: RealServer, page: Chrome) -> None:
    # The page is closed while a burst of 800 tokens is made.
    page.get("about:blank")
    body = {"model": "tiny", "prompt": "hi", "max_tokens": 200, "ignore_eos": True, "n": 4}
    server.client.post("/v1/completions", json=body, headers=_KEY).raise_for_status()
    give_up = time.monotonic() + 60
    while highest_rate(server) == 0:
        assert time.monotonic() < give_up
        time.sleep(0.1)
    page.get(server.url)
    until(page, lambda: text(page, "phase") == "ready")
    chart = part(page, "chart-speed").find_element(By.TAG_NAME, "svg")
    until(page, lambda: highest(chart) > 0 and abs(highest(chart) - highest_rate(server)) < 1)
    # 800 tokens in less than a second are a rate over the whole interval of 5 s.
    assert highest(chart) < 250


def highest_rate(server: RealServer) -> float:
    samples = server.client.get("/v1/server_info/history", headers=_KEY).json()["samples"]
    made = [max(each["output_tokens"], each["prompt_tokens"]) / each["seconds"] for each in samples]
    return max(made, default=0)


def test_a_chat_moves_the_figures_and_the_pictures(page: Chrome) -> None:
    part(page, "chat-text").send_keys("hello", Keys.ENTER)
    until(page, lambda: "finish reason: " in text(page, "chat-figures"))
    assert len(text(page, "chat-log").splitlines()) >= 3
    until(page, lambda: "decode" in text(page, "buckets"))
    # Of each chart some line is drawn, and its highest value is in its description.
    for name in ("speed", "padding"):
        chart = part(page, f"chart-{name}").find_element(By.TAG_NAME, "svg")
        until(page, lambda chart=chart: highest(chart) > 0)
        lines = chart.find_elements(By.CSS_SELECTOR, "path.line")
        assert len(lines) == 2
        assert any("L" in (line.get_attribute("d") or "") for line in lines)
    for name in ("queue", "kv"):
        chart = part(page, f"chart-{name}").find_element(By.TAG_NAME, "svg")
        assert "now" in [label.text for label in chart.find_elements(By.TAG_NAME, "text")]


def highest(chart: WebElement) -> float:
    values = (chart.get_attribute("aria-label") or "").partition("at most ")[2]
    return max(map(float, re.findall(r"\d+(?:\.\d+)?", values)), default=0)


def test_values_follow_the_pointer_and_the_keys(page: Chrome) -> None:
    figure = part(page, "chart-queue")
    chart, readout = (
        figure.find_element(By.TAG_NAME, "svg"),
        figure.find_element(By.TAG_NAME, "output"),
    )
    page.execute_script("arguments[0].scrollIntoView({block: 'center'})", chart)
    until(page, lambda: readout.text.endswith("now"))
    chart.send_keys(Keys.HOME)
    until(page, lambda: readout.text.endswith("ago"))
    assert chart.find_elements(By.CSS_SELECTOR, "line.cursor")
    chart.send_keys(Keys.ESCAPE)
    until(page, lambda: readout.text.endswith("now"))
    pointer = ActionChains(page).move_to_element(chart)
    pointer.perform()
    until(page, lambda: readout.text.endswith("ago"))
    assert "running" in readout.text
    pointer.move_to_element(part(page, "h-live")).perform()
    until(page, lambda: readout.text.endswith("now"))


def test_advice_is_shown_where_something_is_gained_alone(server: RealServer, page: Chrome) -> None:
    buckets = server.client.get("/v1/server_info", headers=_KEY).json()["buckets"]
    sizes, file = buckets["decode"], Path(buckets["usage_file"])

    def ran(*steps: tuple[int, int, float]) -> None:
        """The record of earlier runs; the engine itself writes once a minute."""
        earlier = Usage(about=about_engine("m", "cpu", decode_buckets=sizes, prefill_buckets=[64]))
        for size, bucket, seconds in steps:
            earlier.phases["decode"].note(size, bucket, 1000 * seconds, 1000)
        file.unlink(missing_ok=True)
        UsageFile(file).add(earlier)
        page.refresh()

    # Bucket 1 was a little slower than 2 while something else ran.
    ran((1, 1, 0.0021), (2, 2, 0.0020), (4, 4, 0.0030))
    until(page, lambda: "would change no size" in text(page, "advice-note"))
    assert not part(page, "advice-table").is_displayed()
    ran((1, 1, 0.001), (3, sizes[-1], 0.004))
    until(page, lambda: "of step time" in text(page, "advice"))
    file.unlink()


CELLS = """return [...arguments[0].querySelectorAll('tr:first-child td')].map(cell => ({
    ...cell.getBoundingClientRect().toJSON(), name: cell.dataset.name,
    before: getComputedStyle(cell, '::before').content}))"""


def test_nothing_leaves_its_panel_on_a_narrow_screen(page: Chrome) -> None:
    try:
        page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", PHONE)
        until(page, lambda: page.execute_script("return innerWidth") == PHONE["width"])
        part(page, "startup-details").find_element(By.TAG_NAME, "summary").click()
        root = "return document.documentElement.scrollWidth"
        until(page, lambda: page.execute_script(root) <= PHONE["width"])
        tables = page.find_elements(By.TAG_NAME, "table")
        assert len(tables) == 7
        for table in tables:
            holder = table.find_element(By.XPATH, "..")
            assert holder.get_attribute("tabindex") == "0", "for the keys"
            wide = "return arguments[0].scrollWidth - arguments[0].clientWidth"
            assert page.execute_script(wide, holder) <= 0, "nothing is hidden at the side"
        # A row is a card, each value beside the name of its column.
        # Read at once: the page replaces its rows.
        cells = page.execute_script(CELLS, part(page, "buckets"))
        names = ["Phase", "Size", "Steps", "Share", "Padding", "Mean step"]
        assert [(cell["name"], cell["before"]) for cell in cells] == [(x, f'"{x}"') for x in names]
        assert len({cell["left"] for cell in cells}) == 1
        tops = [cell["top"] for cell in cells]
        assert sorted({*tops}) == tops
        assert all(cell["right"] <= PHONE["width"] for cell in cells)
    finally:
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_a_server_without_adapters_says_so_and_no_request_fails(page: Chrome) -> None:
    errors_logged(page)
    page.refresh()
    until(page, lambda: "--enable-lora" in text(page, "adapters-note"))
    # As a word: the port of the page may hold these figures.
    assert not re.search(r"\b400\b", page.find_element(By.TAG_NAME, "body").text)
    assert not part(page, "adapters-table").is_displayed()
    assert errors_logged(page) == []


def test_batches_and_stored_responses_are_seen(server: RealServer, page: Chrome) -> None:
    assert part(page, "stored").is_displayed()
    assert text(page, "batches") == "none"
    good, bad = {"temperature": 0}, {"temperature": -1}
    _batch(server, [*([good] * 9), bad])
    until(page, lambda: "9 of 10, 1 failed" in text(page, "batches"))
    until(page, lambda: "completed" in text(page, "batches"))
    row = part(page, "batches").find_element(By.TAG_NAME, "tr")
    ends = [box.get_attribute("width") for box in row.find_elements(By.TAG_NAME, "rect")]
    assert ends == ["100", "100", "90"], "all of it, what failed behind what is done"
    earned = ("Padding rows earned", "Rows in own steps")
    until(page, lambda: sum(int(tile(page, name)) for name in earned) > 0)
    _batch(server, [])
    until(page, lambda: "failed: empty_file" in text(page, "batches"))
    assert text(page, "responses").endswith("none")
    ask = {"model": "tiny", "input": "hi", "max_output_tokens": 4, "store": True}
    server.client.post("/v1/responses", json=ask, headers=_KEY).raise_for_status()
    until(page, lambda: ": 1 incomplete" in text(page, "responses"))


def _batch(server: RealServer, requests: list[dict[str, float]]) -> None:
    """Start a batch of a line for each of these."""
    lines = [
        {
            "custom_id": str(number),
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "tiny", "prompt": "hi", "max_tokens": 200, "ignore_eos": True} | wish,
        }
        for number, wish in enumerate(requests)
    ]
    content = "".join(json.dumps(line) + "\n" for line in lines)
    files = {"file": ("in.jsonl", content.encode()), "purpose": (None, "batch")}
    file = server.client.post("/v1/files", files=files, headers=_KEY).raise_for_status().json()
    ask = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    server.client.post("/v1/batches", json=ask, headers=_KEY).raise_for_status()


def tile(browser: Chrome, name: str) -> str:
    """The value below a word of the tiles of background work."""
    words = text(browser, "background").splitlines()
    return words[words.index(name) + 1]


def test_an_answer_fits_a_schema(page: Chrome) -> None:
    page.find_element(By.CSS_SELECTOR, "#chat-form summary").click()
    field = part(page, "chat-schema")
    field.send_keys('{"type": "integer", "pattern": ')
    part(page, "schema-check").click()
    until(page, lambda: "not JSON" in text(page, "schema-note"))
    field.clear()
    field.send_keys('{"enum": ["yes", "no"]}')
    part(page, "schema-check").click()
    until(page, lambda: "valid" in text(page, "schema-note"))
    part(page, "chat-text").send_keys("well?", Keys.ENTER)
    until(page, lambda: text(page, "chat-log").rstrip().endswith(('"yes"', '"no"')))


def test_the_engines_death_and_the_servers_end_are_said(server: RealServer, page: Chrome) -> None:
    engine = server.engine_pid()
    os.kill(engine, signal.SIGSTOP)
    page.refresh()
    until(page, lambda: "tiny" in text(page, "chat-model"))
    part(page, "chat-text").send_keys("are you there?", Keys.ENTER)
    until(page, lambda: part(page, "chat-stop").is_enabled())
    os.kill(engine, signal.SIGKILL)
    # The message can be sent again.
    until(page, lambda: part(page, "chat-send").is_enabled())
    assert part(page, "chat-log").find_elements(By.CLASS_NAME, "failed")
    assert part(page, "chat-text").get_attribute("value") == "are you there?"
    until(page, lambda: text(page, "phase") in ("dead", "no answer"))
    until(page, lambda: "engine" in text(page, "alert") or "answer" in text(page, "alert"))
    server.process.wait(30)
    until(page, lambda: text(page, "phase") == "no answer")
    until(page, lambda: "last figures" in text(page, "alert"))
