"""A real browser, for tests of pages."""

import base64
import shutil

import pytest
from report_runs import METHODS

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@pytest.fixture(scope="session")
def chromium(tmp_path_factory):
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed: pip install selenium")
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not browser or not driver:
        missing = "chromium" if not browser else "chromedriver"
        pytest.skip(f"{missing} is not installed: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chromium = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield chromium
    chromium.quit()


class Page:
    """The page as a reader uses it."""

    def __init__(self, chromium, path):
        self.browser = chromium
        self.path = path

    def open(self, width=1280, *, phone=False, scheme="light"):
        metrics = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": phone}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        self.browser.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": phone})
        self.media(scheme=scheme)
        self.browser.get(self.path.as_uri())
        return self

    def media(self, medium="", scheme="light"):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": medium, "features": features})

    def all(self, selector):
        return self.browser.find_elements("css selector", selector)

    def one(self, selector):
        (element,) = self.all(selector)
        return element

    def click(self, selector):
        self.one(selector).click()

    def keys(self, selector, *names):
        """Focus by keyboard and press arrow keys."""
        from selenium.webdriver.common.keys import Keys

        self.js("document.querySelector(arguments[0]).focus({focusVisible: true})", selector)
        self.one(selector).send_keys(*(getattr(Keys, f"ARROW_{name}") for name in names))

    def js(self, code, *arguments):
        return self.browser.execute_script(code, *arguments)

    def text(self, selector):
        return [element.text for element in self.all(selector)]

    def colour(self, selector, name="background-color"):
        return self.one(selector).value_of_css_property(name)

    def marks(self, chart):
        """What the chart points at: {(method, seed): (epoch, x, value, height in pixels)}."""
        names = ["data-method", "data-seed", "data-epoch", "data-x", "data-value", "cy"]
        read = "return [...document.querySelectorAll(arguments[0])].map(e => arguments[1].map(n => +e.getAttribute(n)))"
        found = self.js(read, f"{chart} .mark", names)
        return {(list(METHODS)[method], seed): tuple(values) for method, seed, *values in found}

    def problems(self):
        return [entry["message"] for entry in self.browser.get_log("browser")]

    def screenshot(self, path):
        """Save the whole page."""
        shot = self.browser.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True})
        path.write_bytes(base64.b64decode(shot["data"]))
        assert path.stat().st_size > 10_000
