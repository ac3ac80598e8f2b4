"""Pages in a real browser: no errors, nothing cut off, and words beside the pointer."""

from __future__ import annotations

import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest
from logs import Made, write_log

from chimera_mpi.cli import main

webdriver = pytest.importorskip("selenium.webdriver")
DRIVER, BROWSER = shutil.which("chromedriver"), shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(
    not (DRIVER and BROWSER), reason="no Chromium: apt-get install chromium chromium-driver"
)

FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
)  # fmt: skip


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('browser')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.set_page_load_timeout(30)
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A schedule's, a run's and a study's."""
    folder = tmp_path_factory.mktemp("pages")
    run = write_log(folder / "run.h5", Made(steps=60, ranks=16), micro_batches=8, depth=8)
    study = [
        write_log(folder / f"a-study-with-a-long-name-{scheme}-{ranks}.h5", Made(ranks=ranks), scheme=scheme)
        for scheme in ("1f1b", "gpipe", "chimera", "zb_h1")
        for ranks in (4, 8)
    ]
    pages = {name: folder / f"{name}.html" for name in ("schedule", "run", "study")}
    show = ["show", "chimera", "--depth", "8", "--micro-batches", "16", "--html", str(pages["schedule"])]
    assert main(show) == 0
    assert main(["report", str(run), "--html", str(pages["run"])]) == 0
    assert main(["report", *map(str, study), "--html", str(pages["study"])]) == 0
    return pages


@contextmanager
def shown(browser, page: Path, width: int, scheme: str = "light"):
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    )
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )
    browser.get(page.as_uri())
    yield browser.execute_script
    assert browser.get_log("browser") == []


WHERE = """const box = document.querySelectorAll(arguments[0])[arguments[1]];
box.scrollIntoView({block: 'center', inline: 'center'});
const place = box.getBoundingClientRect();
return [place.x + Math.min(place.width / 2, 3), place.y + Math.min(place.height / 2, 3)];"""


def point(browser, selector: str, number: int) -> str:
    """Move the pointer onto an element; what is then said beside it."""
    x, y = browser.execute_script(WHERE, selector, number)
    browser.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": "mouseMoved", "x": x, "y": y})
    return browser.execute_script("return getComputedStyle(tip).display === 'block' ? tip.innerText : ''")


@pytest.mark.parametrize("width", [400, 1600])
@pytest.mark.parametrize("name", ["schedule", "run", "study"])
def test_a_page_fits_its_window_and_loads_nothing(browser, pages, name, width):
    with shown(browser, pages[name], width) as ask:
        assert ask("return document.documentElement.scrollWidth") <= width
        assert ask("return document.title")
        assert ask("return performance.getEntriesByType('resource').length") == 0
        assert ask("return [...document.querySelectorAll('.op')].length") > 0
        smallest = ask(
            "return Math.min(...[...document.querySelectorAll('#charts text')]"
            ".map(t => t.getBoundingClientRect().height))"
        )
        assert smallest is None or smallest > 8
        outside = ask(
            "return [...document.querySelectorAll('#charts text, h1, dd, p')].filter(e => {"
            "const box = e.getBoundingClientRect(); return box.left < -1 || box.right > innerWidth + 1})"
            ".map(e => e.textContent)"
        )
        assert outside == []


@pytest.mark.parametrize("width", [400, 1600])
def test_pointing_at_ops_points_and_bars_says_what_they_are(browser, pages, width):
    with shown(browser, pages["run"], width) as ask:
        said = point(browser, ".op:not(.thin)", 9)
        assert "micro-batch" in said and "worker P" in said and "waits for" in said
        assert "samples/s:" in point(browser, "#charts svg:nth-of-type(2) circle", 45)
        assert "training:" in point(browser, "#charts circle", 5)
        assert "P0, compute:" in point(browser, "#charts .bar", 0)
        box = ask("const box = tip.getBoundingClientRect(); return [box.left, box.right, box.top, box.bottom]")
        assert box[0] >= 0 and box[1] <= width and box[2] >= 0 and box[3] <= 800
        assert point(browser, "h1", 0) == ""
        assert ask("return document.querySelectorAll('#charts title').length") == 0


def test_the_keys_and_buttons_of_a_schedule_work(browser, pages):
    with shown(browser, pages["schedule"], 1600) as ask:
        across = "return document.getElementById('chart').width.baseVal.value"
        before = ask(across)
        ask("document.getElementById('in').click()")
        assert ask(across) == pytest.approx(1.5 * before)
        ask("dispatchEvent(new KeyboardEvent('keydown', {key: '0'}))")
        assert ask(across) < before
        ask("document.getElementById('critical').click()")
        assert ask("return document.querySelectorAll('.show-critical .critical').length") > 8


CONTRAST = """const light = colour => {
  const parts = colour.match(/[\\d.]+/g).slice(0, 3).map(part => (part / 255) ** 2.2);
  return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
};
const paper = light(getComputedStyle(document.body).backgroundColor);
return [...document.querySelectorAll(arguments[0])].map(each => {
  const ink = light(getComputedStyle(each)[arguments[1]]);
  return (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
});"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["run", "study"])
def test_words_and_curves_stand_out_in_light_and_dark(browser, pages, name, scheme):
    with shown(browser, pages[name], 1600, scheme) as ask:
        background = ask("return getComputedStyle(document.body).backgroundColor")
        assert (background == "rgb(255, 255, 255)") is (scheme == "light")
        for selector, colour, least in (
            ("h1, dt, dd, td, th, .note, figcaption", "color", 4.5),
            ("#charts text, #drawing .title, #drawing .time", "fill", 4.5),
            ("#charts polyline", "stroke", 2.5),
            ("#charts .bar", "fill", 2.5),
        ):
            assert min(ask(CONTRAST, selector, colour)) >= least, selector


PAPER = 718  # pixels of A4 between its margins


@pytest.mark.parametrize("name", ["schedule", "run", "study"])
def test_a_page_prints_on_white_paper_with_nothing_cut_off(browser, pages, name):
    """What a browser does before it prints, without a printer."""
    with shown(browser, pages[name], PAPER, "dark") as ask:
        browser.execute_cdp_cmd(
            "Emulation.setEmulatedMedia",
            {"media": "print", "features": [{"name": "prefers-color-scheme", "value": "dark"}]},
        )
        across = "return document.getElementById('chart').width.baseVal.value"
        before = ask(across)
        ask("dispatchEvent(new Event('beforeprint'))")
        assert ask("return getComputedStyle(document.body).color") == "rgb(17, 17, 17)"
        assert ask("return document.documentElement.scrollWidth") <= PAPER
        assert ask("return document.getElementById('chart').getBoundingClientRect().right") <= PAPER
        assert not ask("return document.getElementById('controls').offsetHeight")
        ask("dispatchEvent(new Event('afterprint'))")
        assert ask(across) == before
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "screen"})
