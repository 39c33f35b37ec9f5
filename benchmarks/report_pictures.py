"""Picture of a run's report: its head with the loss.

    bash launch/quickstart.sh
    python -m benchmarks.report_pictures runs/quickstart/report.html

Needs selenium, chromium and chromedriver (Debian: chromium chromium-driver).
"""

import argparse
import base64
import shutil
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.support.ui import WebDriverWait

from benchmarks.pictures import FOLDER

WIDTH = 1260
"""Pixels of the window, in which the tiles stand in one row; the picture has half as many again."""
NAME = "report-loss.png"
AREA = """
const card = document.getElementById("chart-loss").closest("figure").getBoundingClientRect();
return {x: 0, y: window.scrollY, width: document.body.clientWidth, height: card.bottom + 12};
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, help="report.html")
    parser.add_argument("--output", type=Path, default=FOLDER, help="folder of the picture")
    given = parser.parse_args()
    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--hide-scrollbars", f"--window-size={WIDTH},1200"):
        options.add_argument(argument)
    with webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver"))) as browser:
        browser.get(given.report.resolve().as_uri())
        ready = "return document.documentElement.dataset.ready === 'true'"
        WebDriverWait(browser, 60).until(lambda shown: shown.execute_script(ready))
        clip = {**browser.execute_script(AREA), "scale": 1.5}
        found = browser.execute_cdp_cmd("Page.captureScreenshot", {"clip": clip, "captureBeyondViewport": True})
        (given.output / NAME).write_bytes(base64.b64decode(found["data"]))


if __name__ == "__main__":
    main()
