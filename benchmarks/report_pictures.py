"""Pictures of a run's report: its head with the loss, and the loss by position.

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
"""Pixels of the window, in which the tiles stand in one row; pictures have half as many again."""
CHARTS = {"report-loss": ("loss",), "report-position": ("position-wise", "position-gap")}
"""Charts of each picture. That of the loss has all that is above."""
AREA = """
const charts = [...arguments].map((key) => document.getElementById(`chart-${key}`));
const cards = charts.map((chart) => chart.closest("figure").getBoundingClientRect());
const top = arguments.length > 1 ? Math.min(...cards.map((card) => card.top)) - 12 : 0;
const bottom = Math.max(...cards.map((card) => card.bottom)) + 12;
return {x: 0, y: top + window.scrollY, width: document.body.clientWidth, height: bottom - top};
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, help="report.html")
    parser.add_argument("--output", type=Path, default=FOLDER, help="folder of the pictures")
    given = parser.parse_args()
    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--hide-scrollbars", f"--window-size={WIDTH},1200"):
        options.add_argument(argument)
    with webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver"))) as browser:
        browser.get(given.report.resolve().as_uri())
        ready = "return document.documentElement.dataset.ready === 'true'"
        WebDriverWait(browser, 60).until(lambda shown: shown.execute_script(ready))
        for name, charts in CHARTS.items():
            clip = {**browser.execute_script(AREA, *charts), "scale": 1.5}
            found = browser.execute_cdp_cmd("Page.captureScreenshot", {"clip": clip, "captureBeyondViewport": True})
            (given.output / f"{name}.png").write_bytes(base64.b64decode(found["data"]))


if __name__ == "__main__":
    main()
