"""The pictures of the docs and of the report: those of their result files, in one style, readable on any page."""

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import pictures
from benchmarks.attention_table import RESULT
from benchmarks.pictures import FOLDER, PICTURES
from benchmarks.plotting import BLUE, FULL, GREEN, INK, MOBA, PURPLE, TORCHTITAN, WIDTH, stamp
from experiments import page
from experiments.registry import FIGURES

DRAWN = [*FOLDER.glob("*.svg"), *(page.FOLDER / "plots").glob("*.svg")]
SUPERSCRIPT = 6.3
"""Points of the exponents on logarithmic axes."""


def words(picture: Path) -> list[str]:
    """The texts of an SVG, in order."""
    texts = ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}text")
    return ["".join(text.itertext()) for text in texts]


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_of_the_docs_is_the_one_of_its_results(name: str, tmp_path: Path) -> None:
    pictures.draw(name, output=tmp_path / "drawn.svg")
    kept = FOLDER / f"{name}.svg"
    assert stamp("".join(file.read_text() for file in PICTURES[name].files)) in kept.read_text()
    assert words(tmp_path / "drawn.svg") == words(kept), f"run python -m benchmarks.pictures {name}"


@pytest.mark.parametrize("name", [name for name, figure in FIGURES.items() if page.result_file(figure).exists()])
def test_a_figure_of_the_report_is_the_one_of_its_results(name: str, tmp_path: Path) -> None:
    source, kept = page.result_file(FIGURES[name]), page.plot_file(FIGURES[name])
    page.draw(FIGURES[name], source, tmp_path / "drawn.svg")
    assert stamp(source.read_text()) in kept.read_text()
    assert words(tmp_path / "drawn.svg") == words(kept), f"run python -m experiments {name} --plot"


def test_without_matplotlib_the_programs_say_what_to_install() -> None:
    code = "import sys; sys.modules['matplotlib'] = None; import experiments.page"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=page.FOLDER.parent, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (
        2,
        "error: pictures and experiments need matplotlib; type: pip install -e '.[figures]'\n",
    )


def test_equal_results_give_equal_bytes(tmp_path: Path) -> None:
    for name in ("one", "other"):
        pictures.draw("attention", [RESULT], tmp_path / f"{name}.svg")
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "other.svg").read_bytes()


@pytest.mark.parametrize("picture", DRAWN, ids=lambda picture: picture.stem)
def test_a_picture_has_the_style(picture: Path) -> None:
    """White behind everything, so that a dark page does not show through, and texts of 8 points or more in a picture
    that is shown as wide as it is drawn."""
    text = picture.read_text()
    background = re.search(r'id="patch_1">\s*<path d="M 0 \S+ \s*L (\S+) .*?style="fill: (\S+)"', text, re.DOTALL)
    assert background is not None
    assert (float(background[1]), background[2]) == (72 * WIDTH, "#ffffff")
    sizes = {float(size) for size in re.findall(r"font(?:-size)?: (?:bold )?([0-9.]+)px", text)}
    assert min(sizes - {SUPERSCRIPT}) >= 8


def luminance(colour: str) -> float:
    """WCAG 2's relative luminance of #rrggbb."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("colour", [INK, FULL, MOBA, TORCHTITAN, BLUE, GREEN, PURPLE])
def test_colours_stand_out_from_the_background(colour: str) -> None:
    assert 1.05 / (luminance(colour) + 0.05) >= 3


def test_a_picture_can_be_drawn_from_other_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = tmp_path / "new" / "loss.svg"
    results = str(pictures.RESULTS / "float8-loss-continued-h200.json")
    monkeypatch.setattr("sys.argv", ["pictures", "float8-loss", "--results", results, "--output", str(drawn)])
    pictures.main()
    assert words(drawn) == words(FOLDER / "float8-loss-continued.svg")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["trainings"], "given trainings; allowed: training, "), (["--output", "a.svg"], "one picture; given 0 names")],
)
def test_what_cannot_be_drawn_is_refused(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["pictures", *arguments])
    with pytest.raises(SystemExit):
        pictures.main()
    assert message in capsys.readouterr().err
