"""The console's playground in a real browser, over answers that a script streams.

Needs Debian's chromium and chromium-driver: `make test-tools`.
"""

import asyncio
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import Chrome, Keys
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

from tests.debian_tools import debian_tool
from tests.server.routes.console_page import PHONE, errors_logged, give_key, part, text, until
from tests.server.scripted import ChatFrontend, Script, ScriptedEngine, ScriptedLauncher, running

pytestmark = pytest.mark.slow

MARKDOWN = """# Title

Some **bold** words, `code` and a [link](https://example.org/a?b=1).

| a | b |
|---|---|
| 1 | 2 |

- [x] done

```python
print("<b>")
```
"""
HOSTILE = [
    "<script>window.broken = 1</script>",
    "<img src=x onerror='window.broken = 1'>",
    "inline <svg onload='window.broken = 1'></svg> <b onclick='window.broken = 1'>b</b>",
    "<iframe src='https://example.org'></iframe><style>body { display: none }</style>",
    "[a](javascript:window.broken=1) [b](JaVaScRiPt&colon;alert(1)) [c](data:text/html,x)",
    "[d](vbscript:x) [e](//example.org/x) [f](/admin/drain) <javascript:window.broken=1>",
    "![x](https://example.org/leak.png) ![](https://example.org/y.png 'onerror=1')",
    '[g](https://example.org/"onmouseover="window.broken=1) [h](https://example.org "t\\"x")',
    "<form action='https://example.org'><input name=key></form><base href='https://example.org'>",
    "<math><mtext><table><mglyph><style><!--</style><img title='--&gt;&lt;img src=x onerror=1>'>",
    '```js"onmouseover="alert(1)\n</code></pre><script>window.broken = 1</script>\n```',
]
WEATHER = [
    {"tool_calls": [{"index": 0, "id": "call_1", "function": {"name": "get_weather"}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": '{"city": '}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": '"Seoul"}'}}]},
]
CUT = [{"tool_calls": [{"index": 1, "id": "call_2", "function": {"name": "t", "arguments": "{"}}]}]


@asynccontextmanager
async def playground(
    tmp_path: Path, scripts: dict[str, Script], **settings: Any
) -> AsyncIterator[tuple[str, ChatFrontend]]:
    """Serve these answers; yields the page's URL and the front end."""
    frontend = ChatFrontend(scripts=scripts)
    launcher = ScriptedLauncher(engine=ScriptedEngine(frontend))
    launcher.launched.set()
    async with running(tmp_path, launcher, **settings) as service:
        yield f"http://127.0.0.1:{service.port}", frontend


def pieces(words: str, length: int) -> list[str]:
    return [words[at : at + length] for at in range(0, len(words), length)]


def opened(browser: Chrome, url: str) -> None:
    browser.get(url)
    until(browser, lambda: "scripted" in text(browser, "chat-model"))
    errors_logged(browser)


def say(browser: Chrome, words: str) -> WebElement:
    """Send a message with Enter; returns its answer, once it is over."""
    part(browser, "chat-text").send_keys(words, Keys.ENTER)
    return answered(browser)


def answered(browser: Chrome) -> WebElement:
    until(browser, lambda: not part(browser, "chat-stop").is_enabled())
    return part(browser, "chat-log").find_elements(By.TAG_NAME, "article")[-1]


def found(element: WebElement, selector: str) -> list[str]:
    return [each.text for each in element.find_elements(By.CSS_SELECTOR, selector)]


async def test_answers_are_markdown_and_reasoning_is_apart(browser: Chrome, tmp_path: Path) -> None:
    thoughts = [{"reasoning": "# <b>First</b>,\n"}, {"reasoning": "**then**"}]
    scripts = {"think": [*thoughts, *({"content": piece} for piece in pieces(MARKDOWN, 20))]}

    def see(url: str) -> None:
        opened(browser, url)
        answer = say(browser, "think")
        assert found(answer, ".content h4") == ["Title"]
        assert found(answer, ".content strong") == ["bold"]
        assert found(answer, ".content td") == ["1", "2"]
        assert found(answer, ".content li") == ["☑ done"]
        assert found(answer, ".content pre code") == ['print("<b>")']
        (link,) = answer.find_elements(By.TAG_NAME, "a")
        assert link.get_attribute("href") == "https://example.org/a?b=1"
        assert link.get_attribute("rel") == "noopener noreferrer nofollow"
        # Folded when the answer began; plain text.
        (summary,) = answer.find_elements(By.CSS_SELECTOR, ".reasoning summary")
        assert found(answer, ".reasoning .plain") == [""]
        summary.click()
        assert found(answer, ".reasoning .plain") == ["# <b>First</b>,\n**then**"]
        assert not found(answer, ".reasoning b, .reasoning strong")

    async with playground(tmp_path, scripts) as (url, _):
        await asyncio.to_thread(see, url)


async def test_wide_answers_scroll_on_a_phone(browser: Chrome, tmp_path: Path) -> None:
    row = "|".join(["column"] * 12)
    wide = f"{row}\n{'|'.join(['-'] * 12)}\n{row}\n\n```\n{'x' * 300}\n```\n\n{'x' * 300}"

    def see(url: str) -> None:
        opened(browser, url)
        answer = say(browser, "wide")
        widths = "return [arguments[0].scrollWidth, arguments[0].clientWidth]"
        for name in ("table", "pre"):
            scrolled = answer.find_element(By.TAG_NAME, name)
            whole, shown = browser.execute_script(widths, scrolled)
            assert whole > 2 * shown, name
        assert answer.find_element(By.TAG_NAME, "td").rect["width"] > 40, "words are whole"
        root = "return document.documentElement.scrollWidth"
        assert browser.execute_script(root) <= PHONE["width"]

    async with playground(tmp_path, {"wide": [{"content": wide}]}) as (url, _):
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", PHONE)
        try:
            await asyncio.to_thread(see, url)
        finally:
            browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


async def test_no_answer_makes_the_page_run_or_load_anything(
    browser: Chrome, tmp_path: Path
) -> None:
    whole = "\n\n".join(HOSTILE)
    huge = "a **b** <script> " * 20_000
    hostile: dict[str, Script] = {
        "whole": [{"content": whole, "reasoning": whole}],
        # What is shown between two pieces is rendered, too.
        "cut": [step for piece in pieces(whole, 7) for step in ({"content": piece}, 0.005)],
        "huge": [{"reasoning": huge}, *({"content": piece} for piece in pieces(huge, 9999))],
        "names": [
            {
                "tool_calls": [
                    {"index": 0, "id": "<i>", "function": {"name": whole, "arguments": whole}}
                ]
            }
        ],
        "deep": [{"content": "> " * 3000 + "[" * 3000 + "*a" * 3000 + "(" * 3000}],
    }

    scripts = hostile | {"long": [{"content": "*a* " * 2000 + "\n\n**b**"}]}

    def see(url: str) -> None:
        opened(browser, url)
        for words in hostile:
            answer = say(browser, words)
            forbidden = "script, img, svg, iframe, style, form, input, base, math, object, link"
            assert not found(answer, forbidden), words
            attributes = browser.execute_script(
                "return [...arguments[0].querySelectorAll('.content *')]"
                ".flatMap((element) => [...element.attributes].map((one) => one.name))",
                answer,
            )
            assert set(attributes) <= {"href", "target", "rel", "start"}, words
            for link in answer.find_elements(By.TAG_NAME, "a"):
                target = link.get_dom_attribute("href")
                assert target is None or target.startswith("https://example.org"), target
            shown = answer.get_attribute("textContent") or ""
            assert "<script>" in shown or words == "deep", "it is text"
        # A paragraph that would take long stays plain, the next one does not.
        answer = say(browser, "long")
        assert not found(answer, "em")
        assert found(answer, "strong") == ["b"]
        assert browser.execute_script("return window.broken") is None
        assert errors_logged(browser) == [], "nothing was blocked: nothing was tried"

    async with playground(tmp_path, scripts) as (url, _):
        await asyncio.to_thread(see, url)


async def test_tool_calls_are_shown_and_their_results_sent(browser: Chrome, tmp_path: Path) -> None:
    scripts: dict[str, Script] = {
        "weather?": [*WEATHER, *CUT],
        '{"rain": true}': [{"content": "Take an umbrella."}],
        "cut": CUT,
        "and?": [{"content": "Yes."}],
    }

    def see(url: str) -> None:
        opened(browser, url)
        part(browser, "chat-options").find_element(By.TAG_NAME, "summary").click()
        part(browser, "tools-example").click()
        answer = say(browser, "weather?")
        assert found(answer, ".call strong") == ["get_weather", "t"]
        assert found(answer, ".call pre") == ['{\n  "city": "Seoul"\n}', "{"]
        assert len(found(answer, ".failed")) == 1
        (field,) = answer.find_elements(By.TAG_NAME, "textarea")
        (button,) = answer.find_elements(By.TAG_NAME, "button")
        field.send_keys('{"rain": true}')
        button.click()
        assert found(answered(browser), ".content") == ["Take an umbrella."]
        assert field.get_attribute("readonly")
        assert not button.is_displayed()
        # A call that was cut off is not part of the conversation.
        assert not say(browser, "cut").find_elements(By.TAG_NAME, "textarea")
        say(browser, "and?")

    async with playground(tmp_path, scripts) as (url, frontend):
        await asyncio.to_thread(see, url)
    first, second, _, last = frontend.bodies
    assert first["tools"][0]["function"]["name"] == "get_weather"
    assert first["tool_choice"] == "auto"
    (call,) = second["messages"][1]["tool_calls"]
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Seoul"}'}
    result = {"role": "tool", "tool_call_id": "call_1", "content": '{"rain": true}'}
    assert second["messages"][2:] == [result]
    assert last["messages"][-3:] == [
        {"role": "user", "content": "cut"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "and?"},
    ]


async def test_enter_sends_and_shift_enter_begins_a_line(browser: Chrome, tmp_path: Path) -> None:
    composed = """arguments[0].dispatchEvent(new KeyboardEvent("keydown", {
        key: "Enter", isComposing: true, bubbles: true, cancelable: true}))"""

    def see(url: str) -> None:
        opened(browser, url)
        field = part(browser, "chat-text")
        field.send_keys("one")
        browser.execute_script(composed, field)
        ActionChains(browser).key_down(Keys.SHIFT).send_keys(Keys.ENTER).key_up(
            Keys.SHIFT
        ).perform()
        field.send_keys("two")
        assert field.get_attribute("value") == "one\ntwo"
        assert text(browser, "chat-log") == ""
        field.send_keys(Keys.ENTER)
        assert found(answered(browser), ".content") == ["Three."]
        assert field.get_attribute("value") == ""
        field.send_keys("  ", Keys.ENTER)
        assert len(found(part(browser, "chat-log"), "article")) == 2, "nothing to send"

    async with playground(tmp_path, {"one\ntwo": [{"content": "Three."}]}) as (url, frontend):
        await asyncio.to_thread(see, url)
    assert [len(body["messages"]) for body in frontend.bodies] == [1]


async def test_the_request_is_copied_as_a_command(browser: Chrome, tmp_path: Path) -> None:
    debian_tool("curl")
    words = """it's "$HOME" `id` \\ !"""
    copies: list[str] = []

    def copied() -> str:
        """Paste the clipboard into the field of the key, which no request reads."""
        field = part(browser, "chat-system")
        field.clear()
        field.send_keys(Keys.CONTROL, "v")
        pasted = field.get_attribute("value") or ""
        field.clear()
        return pasted

    def see(url: str) -> None:
        browser.get(url)
        give_key(browser, "schlüssel")
        until(browser, lambda: "ASCII" in text(browser, "key-note"))
        part(browser, "key").clear()
        give_key(browser, "sesame")
        until(browser, lambda: "scripted" in text(browser, "chat-model"))
        part(browser, "chat-options").find_element(By.TAG_NAME, "summary").click()
        part(browser, "chat-text").send_keys(words)
        part(browser, "chat-curl").click()
        until(browser, lambda: "API key" in text(browser, "chat-figures"))
        copies.append(copied())
        # Over plain HTTP to another host, browsers have no clipboard interface.
        browser.execute_script("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
        part(browser, "base-copy").click()
        until(browser, lambda: text(browser, "base-note") == "Copied.")
        copies.append(copied())

    async with playground(tmp_path, {words: [{"content": "ok"}]}, api_key=["sesame"]) as (
        url,
        chat,
    ):
        await asyncio.to_thread(see, url)
        command, base = copies
        assert base == f"{url}/v1"
        run = ["sh", "-c", command]
        done = await asyncio.to_thread(subprocess.run, run, capture_output=True, check=True)
        assert b"[DONE]" in done.stdout
    (body,) = chat.bodies
    assert body["messages"] == [{"role": "user", "content": words}]
    assert body["stream"]


async def test_a_rate_is_shown_where_there_is_one(browser: Chrome, tmp_path: Path) -> None:
    scripts: dict[str, Script] = {
        "burst": [{"content": "a "}] * 50,
        "paced": [step for _ in range(6) for step in ({"content": "a "}, 0.2)],
    }

    def see(url: str) -> None:
        opened(browser, url)
        say(browser, "burst")
        figures = text(browser, "chat-figures")
        assert "50 tokens" in figures
        assert "tokens/s" not in figures
        assert "finish reason: stop" in figures
        say(browser, "paced")
        rate = float(text(browser, "chat-figures").split(" tokens/s")[0].split()[-1])
        # Five tokens in a second; a browser that was late with the first sees them in less time.
        assert 0 < rate < 20

    async with playground(tmp_path, scripts) as (url, _):
        await asyncio.to_thread(see, url)


async def test_what_fails_can_be_sent_again_and_what_is_stopped_stays(
    browser: Chrome, tmp_path: Path
) -> None:
    scripts: dict[str, Script] = {
        "fail": [{"content": "begun"}, "break"],
        "long": [{"content": "begun"}, 60.0],
        "hello": [{"content": "Hello."}],
    }

    def see(url: str) -> None:
        opened(browser, url)
        answer = say(browser, "fail")
        assert found(answer, ".content") == ["begun"]
        assert "internal_error" in found(answer, ".failed")[0]
        field = part(browser, "chat-text")
        assert field.get_attribute("value") == "fail"
        field.clear()
        _stop(browser, "long")
        assert found(answered(browser), ".failed") == ["Stopped."]
        say(browser, "hello")
        # The answer that still runs does not become a part of the new conversation.
        _begin(browser, "long")
        part(browser, "chat-clear").click()
        until(browser, lambda: part(browser, "chat-send").is_enabled())
        assert text(browser, "chat-log") == ""
        assert field.get_attribute("value") == ""
        assert text(browser, "chat-figures") == ""
        say(browser, "hello")

    async with playground(tmp_path, scripts) as (url, frontend):
        await asyncio.to_thread(see, url)
    sent = [[message["content"] for message in body["messages"]] for body in frontend.bodies]
    assert sent == [
        ["fail"],
        ["long"],
        ["long", "begun", "hello"],
        ["long", "begun", "hello", "Hello.", "long"],
        ["hello"],
    ]


def _begin(browser: Chrome, words: str) -> None:
    part(browser, "chat-text").send_keys(words, Keys.ENTER)
    until(browser, lambda: text(browser, "chat-log").endswith("begun"))


def _stop(browser: Chrome, words: str) -> None:
    _begin(browser, words)
    part(browser, "chat-stop").click()
