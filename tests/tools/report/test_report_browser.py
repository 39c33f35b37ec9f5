"""The report in a real browser: chromium without a window, driven by selenium; skipped where either is missing."""

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks import report_pictures
from moba_train.tools.report.page import write_report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver (Debian: chromium chromium-driver)"
)
SECONDS = 60

Driver = Any


@pytest.fixture(scope="module")
def browser() -> Iterator[Driver]:
    pytest.importorskip("selenium", reason="needs selenium (pip install -e '.[dev]')")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(str(DRIVER)))
    yield driver
    driver.quit()


def wait(browser: Driver, condition: str) -> None:
    """Until an expression of JavaScript is true."""
    deadline = time.monotonic() + SECONDS
    while not browser.execute_script(f"return {condition}"):
        assert time.monotonic() < deadline, condition
        time.sleep(0.05)


def show(browser: Driver, page: Path, width: int = 1600, theme: str = "light") -> None:
    """Open the page as a file, and wait for its charts."""
    look(browser, width, theme)
    browser.get(page.resolve().as_uri())
    wait(browser, "document.documentElement.dataset.ready === 'true' || !document.getElementById('failure').hidden")
    assert browser.execute_script("return document.getElementById('failure').hidden")


def look(browser: Driver, width: int, theme: str) -> None:
    metrics = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    media = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)


CHARTS = """
return JSON.parse(document.getElementById("data").textContent).charts.map((chart) => {
  const drawn = document.getElementById(`chart-${chart.key}`);
  const count = (values) => values === undefined ? 0 : values.flat().filter((value) => value !== null).length;
  return {
    key: chart.key,
    given: chart.traces.map((trace) => count(trace.z || trace.y)),
    taken: drawn.data.map((trace) => count(trace.z || trace.y)),
    places: drawn.data.map((trace) => (trace.x || []).length),
    values: drawn.data.map((trace) => trace.z ? trace.z[0].length : (trace.y || []).length),
    shapes: drawn.querySelectorAll(".scatterlayer .trace, .barlayer .trace, .heatmaplayer .hm").length,
    shown: drawn.data.filter((trace) => trace.visible === undefined || trace.visible === true).length,
    width: [drawn.getBoundingClientRect().width, drawn.querySelector(".main-svg").getBoundingClientRect().width],
    ink: drawn.layout.font.color,
  };
});
"""


def check_charts(browser: Driver) -> list[dict[str, Any]]:
    """Every chart has the points of the page's data, one drawn element for each curve, and the width of its box."""
    charts: list[dict[str, Any]] = browser.execute_script(CHARTS)
    for chart in charts:
        assert chart["taken"] == chart["given"], chart["key"]
        assert all(count > 0 for count in chart["given"]), chart["key"]
        assert chart["places"] == chart["values"], chart["key"]
        assert chart["shapes"] == chart["shown"] > 0, chart["key"]
        assert chart["width"][0] == pytest.approx(chart["width"][1], abs=1), chart["key"]
    return charts


def check_page(browser: Driver) -> None:
    """Nothing in the console, nothing loaded, nothing wider than the window."""
    assert browser.get_log("browser") == []
    assert browser.execute_script("return performance.getEntriesByType('resource').map((entry) => entry.name)") == []
    width, window = browser.execute_script("return [document.documentElement.scrollWidth, window.innerWidth]")
    assert width <= window


def test_a_run_in_both_widths_and_themes(browser: Driver, recorded: Path) -> None:
    page = write_report([recorded]).path
    show(browser, page)
    charts = check_charts(browser)
    assert {chart["key"] for chart in charts} >= {"loss", "lr", "position-wise", "needle-0-0-moba", "data-mix"}
    check_page(browser)
    light = {chart["ink"] for chart in charts}

    look(browser, 1600, "dark")
    wait(browser, f"document.getElementById('chart-{charts[-1]['key']}').layout.font.color !== '{charts[-1]['ink']}'")
    dark = {chart["ink"] for chart in check_charts(browser)}
    assert len(light) == len(dark) == 1
    assert light != dark

    paper = "document.getElementById('chart-loss')._fullLayout.width"
    browser.execute_script("dispatchEvent(new Event('beforeprint'))")
    assert browser.execute_script(f"return {paper}") == 680
    assert browser.execute_script("return document.getElementById('chart-loss').layout.font.color") in light
    browser.execute_script("dispatchEvent(new Event('afterprint'))")
    wait(browser, f"{paper} > 1000")

    look(browser, 400, "dark")
    wait(browser, "document.querySelector('#chart-lr .main-svg').getBoundingClientRect().width < 400")
    assert {chart["ink"] for chart in check_charts(browser)} == dark
    check_page(browser)

    from selenium.webdriver.support.ui import Select

    Select(browser.find_element("id", "progress-axis")).select_by_value("step")
    wait(browser, "document.getElementById('chart-loss').data[0].x.at(-1) === 150")
    browser.execute_script(
        "document.getElementById('recipe').open = true;"
        "const search = document.getElementById('search');"
        "search.value = 'ToPk'; search.dispatchEvent(new Event('input'));"
    )
    rows = [row.text for row in browser.find_elements("css selector", "#recipe tbody tr") if row.is_displayed()]
    assert rows == ["attention.moba.topk 2"]
    assert browser.get_log("browser") == []


def test_hostile_runs_over_each_other(
    browser: Driver, recorded: Path, tmp_path: Path, change_records: Callable[..., None]
) -> None:
    """Names and messages that are markup are shown as they are, and run nothing; a run can be hidden."""
    bad = "<img src=x onerror=window.hacked=1></script><script>window.hacked=1</script>"
    other = tmp_path / "other"
    shutil.copytree(recorded, other)

    def poison(record: dict[str, Any]) -> None:
        record["stage"] = bad if record["stage"] == "long" else record["stage"]
        if "message" in record:
            record["message"] = bad

    change_records(other, poison)
    recipe = yaml.safe_load((other / "config.yaml").read_text())
    recipe["name"] = bad
    (other / "config.yaml").write_text(yaml.safe_dump(recipe))
    show(browser, write_report([recorded, other], tmp_path / "both.html").path)
    check_charts(browser)
    check_page(browser)
    assert browser.execute_script("return window.hacked") is None
    assert bad in browser.find_element("css selector", "h1").text
    assert f"{bad}: Needle, full attention" in [title.text for title in browser.find_elements("css selector", "h3")]
    legend = browser.execute_script("return document.querySelector('#chart-loss .legend').textContent")
    assert f"{bad[:47]}…" in legend

    browser.find_element("css selector", "input[data-run='1']").click()
    loss = "document.getElementById('chart-loss').data"
    hidden = f"{loss}.filter((trace) => trace.visible === false).map((trace) => trace.meta.run)"
    wait(browser, f"new Set({hidden}).has(1)")
    assert set(browser.execute_script(f"return {hidden}")) == {1}


def test_the_picture_of_the_report_is_taken(recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = write_report([recorded]).path
    monkeypatch.setattr("sys.argv", ["report_pictures", str(page), "--output", str(tmp_path)])
    report_pictures.main()
    data = (tmp_path / report_pictures.NAME).read_bytes()
    width, height = (int.from_bytes(data[at : at + 4]) for at in (16, 20))  # of PNG's first chunk
    assert width == 1.5 * report_pictures.WIDTH
    assert 400 < height < width
