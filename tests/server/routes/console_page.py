"""The console in a browser: finding its parts, waiting for them, giving it a key."""

from collections.abc import Callable

from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait

PATIENCE_S = 120
PHONE = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": False}


def part(browser: Chrome, name: str) -> WebElement:
    return browser.find_element(By.ID, name)


def text(browser: Chrome, name: str) -> str:
    return part(browser, name).text


def until(browser: Chrome, what: Callable[[], bool]) -> None:
    WebDriverWait(browser, PATIENCE_S, poll_frequency=0.05).until(lambda _: what())


def give_key(browser: Chrome, key: str) -> None:
    until(browser, lambda: part(browser, "key-form").is_displayed())
    part(browser, "key").send_keys(key)
    browser.find_element(By.CSS_SELECTOR, "#key-form button").click()


def errors_logged(browser: Chrome) -> list[str]:
    """What the browser's console has got since the last call."""
    lines: list[dict[str, str]] = browser.get_log("browser")  # type: ignore[no-untyped-call]
    return [line["message"] for line in lines]
