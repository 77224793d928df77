"""A headless Chromium that looks at the page, and what it is asked of it."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.running import wait_until

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

WIDE, PHONE = (1180, 900), (390, 844)
SECONDS = 60


class Browser:
    """`driver` is selenium's own."""

    def __init__(self, driver: "Chrome") -> None:
        self.driver = driver

    def open(self, address: str, size: tuple[int, int] = WIDE, *, is_dark: bool = False) -> None:
        """Open the page of a listener in a window of this size, and wait for the first state."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        self.resize(size)
        self.requests()  # of the page before
        self.log()
        self.driver.get(f"http://{address}/")
        self.until(lambda: self.text("#about"), "the first state")

    def resize(self, size: tuple[int, int]) -> None:
        width, height = size
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def run(self, script: str, *given: Any) -> Any:
        return self.driver.execute_script(script, *given)

    def text(self, selector: str) -> str:
        """What the first such element says, as it is shown; nothing where it is not."""
        script = """
          const found = document.querySelector(arguments[0]);
          return found && !found.closest("[hidden]") ? found.innerText : ''"""
        return self.run(script, selector)

    def rows(self) -> dict[str, str]:
        """The rows of the models by their names."""
        script = """
          return [...document.querySelectorAll("#models tr")].map(
            (row) => [row.querySelector(".name").textContent, row.innerText])"""
        return {name: " ".join(said.split()) for name, said in self.run(script)}

    def events(self) -> list[str]:
        """What happened, newest first."""
        script = "return [...document.querySelectorAll('#events li')].map((one) => one.innerText)"
        return [" ".join(said.split()) for said in self.run(script)]

    def until(self, condition: Callable[[], Any], what: str) -> None:
        wait_until(lambda: bool(condition()), SECONDS, what)

    def log(self) -> list[dict[str, Any]]:
        """What the browser has written to its console, and violations of the policy, since the
        last such call; without its advice on forms.
        """
        return [each for each in self.driver.get_log("browser") if each["level"] != "DEBUG"]

    def requests(self) -> list[str]:
        """The URLs that were asked for since the last such call."""
        return [request["url"] for request in self._read_requests()]

    def methods(self) -> list[str]:
        """The methods of the requests since the last such call."""
        return [request["method"] for request in self._read_requests()]

    def _read_requests(self) -> Iterator[dict[str, Any]]:
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                yield message["params"]["request"]

    def picture(self, path: Path, height: int) -> None:
        """Save what is at the top of the page."""
        width = WIDE[0]
        self.resize((width, height))
        path.parent.mkdir(parents=True, exist_ok=True)
        assert self.driver.save_screenshot(str(path))


@contextmanager
def chromium(folder: Path) -> Iterator[Browser]:
    """Debian's browser and driver, by their paths, so that selenium fetches none."""
    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("no Chromium: apt-get install chromium chromium-driver")
    # here, as they cost each process of tests a second
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    options = ChromeOptions()
    options.binary_location = binary
    for each in (
        *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
        *("--no-first-run", "--disable-extensions", "--disable-background-networking"),
        *("--disable-component-update", "--no-proxy-server", "--hide-scrollbars"),
        f"--user-data-dir={folder}",
    ):
        options.add_argument(each)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    started = Chrome(options, Service(driver))
    try:
        yield Browser(started)
    finally:
        started.quit()
