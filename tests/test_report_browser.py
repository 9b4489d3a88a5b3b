"""The report in a real browser: Debian's chromium, driven by selenium. `make test-browser` insists on it."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from simulated import PAGE_TOKENS, SHAPE, with_pages
from test_report import Simulate, simulate  # noqa: F401  (a fixture)

from flexfloor.cli import main
from flexfloor.fleets.simulation import SimulatedFleet
from flexfloor.ledger.accounting import summarize
from flexfloor.ledger.events import read_ledger
from flexfloor.report.html import write_report
from flexfloor.requests import Request, SamplingParams
from flexfloor.rollout import rollout

MISSING = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
pytestmark = pytest.mark.skipif(
    bool(MISSING), reason=f"{' and '.join(MISSING)} missing; install chromium and chromium-driver"
)
webdriver = pytest.importorskip("selenium.webdriver")

FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-background-networking --disable-component-update "
    "--disable-sync --no-first-run --disable-dev-shm-usage"
)
OPENED_S = 5.0  # of the page's main thread, until everything is drawn
MOST_BYTES = 15e6
SIDEWAYS = "return [document.documentElement.scrollWidth, document.body.scrollWidth, window.innerWidth]"


class Browser:
    """One tab, and what it takes to look at a page in it."""

    def __init__(self, profile: Path) -> None:
        options = webdriver.ChromeOptions()
        options.binary_location = shutil.which("chromium")
        for flag in (*FLAGS.split(), f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        service = webdriver.ChromeService(shutil.which("chromedriver"))
        self.driver = webdriver.Chrome(options=options, service=service)

    def look(self, width: int, dark: bool) -> None:
        """How wide the window is, and which theme its owner likes."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [theme]})

    def open(self, page: Path) -> None:
        """Until all charts are drawn."""
        self.driver.get_log("browser")
        self.driver.get(page.resolve().as_uri())
        until = time.monotonic() + 60
        while not self.ask("return document.body.dataset.drawn"):
            assert time.monotonic() < until, f"charts are not drawn; console: {self.driver.get_log('browser')}"
            time.sleep(0.05)

    def ask(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def figures(self, section: str) -> dict[str, float]:
        """data-key → data-value of the key numbers in a section."""
        script = "return [...arguments[0].querySelectorAll('dl.figures dd')].map(e => [e.dataset.key, e.dataset.value])"
        element = self.driver.find_element("css selector", section)
        return {key: float(value) for key, value in self.ask(script, element)}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    made = Browser(tmp_path_factory.mktemp("profile"))
    yield made
    made.driver.quit()


@pytest.fixture(scope="module")
def pages(simulate: Simulate, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:  # noqa: F811
    folder = tmp_path_factory.mktemp("pages")
    cut = folder / "cut.jsonl"
    cut.write_bytes(simulate("flexfloor").read_bytes()[:-700])
    begun = folder / "begun.jsonl"
    begun.write_bytes(simulate("flexfloor").read_bytes().splitlines(keepends=True)[0])
    invalid = folder / "invalid.jsonl"
    records = read_ledger(simulate("flexfloor"))
    records[0]["fleet"] |= {"pace": 1.0}
    for entry in (e for r in records if r["type"] == "chunk" for e in r["workers"]):
        entry["overran"] = [1] * len(entry["overran"])
    invalid.write_text("".join(json.dumps(r) + "\n" for r in records[:-2]))
    ledgers = {
        "badges": [simulate("static"), invalid],
        "one": [simulate("flexfloor")],
        "three": [simulate(policy, "oracle") for policy in ("static", "release", "flexfloor")],
        "crowd": [simulate("release", "history", 80)],
        "cut": [cut],
        "begun": [begun],
        "five": [simulate("flexfloor")] * 5,
        "nine": [simulate("flexfloor")] * 9,
    }
    made = {name: folder / f"{name}.html" for name in ledgers}
    for name, paths in ledgers.items():
        write_report(made[name], paths)
    return made


def check(browser: Browser) -> None:
    """What holds of every open page."""
    assert browser.driver.get_log("browser") == [], "the console is not empty"
    assert browser.ask("return performance.getEntriesByType('resource').map(e => e.name)") == []
    document, body, window = browser.ask(SIDEWAYS)
    assert max(document, body) <= window, "the page scrolls sideways"
    charts = browser.ask(
        """return [...document.querySelectorAll('.chart')].filter(e => !e.closest('details:not([open])')).map(e => {
             const box = e.getBoundingClientRect(), svg = e.querySelector('svg.main-svg');
             return [e.id, svg ? svg.getBoundingClientRect().width : 0, box.width, box.height,
                     e.querySelectorAll('.trace, .hm, .bars, .scatterlayer path').length, e.scrollWidth];})"""
    )
    assert bool(charts) != ("No iteration yet" in browser.ask("return document.body.textContent"))
    assert int(browser.ask("return document.body.dataset.drawn")) == len(charts)
    for name, drawn, width, height, marks, scrolled in charts:
        assert height >= 90, name
        assert drawn == pytest.approx(width, abs=1), f"{name} is not as wide as its place"
        assert scrolled <= width + 1, name
        assert marks > 0, f"{name} has nothing in it"


@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("name", ["one", "three", "five", "nine", "crowd", "cut", "begun"])
def test_pages_open_without_errors_and_fit(browser: Browser, pages: dict[str, Path], name: str, width: int):
    browser.look(width, dark=width == 400)
    browser.open(pages[name])
    check(browser)
    assert bool(browser.driver.find_elements("css selector", ".chip.bad")) == (name in ("cut", "begun"))


def test_badges_leave_room_for_the_numbers(browser: Browser, pages: dict[str, Path]):
    """On a phone: below the name, so that the first columns of numbers are in sight."""
    browser.look(400, dark=False)
    browser.open(pages["badges"])
    rows = browser.ask(
        """return [...document.querySelectorAll('[data-table=comparison] tbody tr')].map(row => {
             const name = row.querySelector('th a').getBoundingClientRect();
             return [row.querySelector('th').getBoundingClientRect().right,
                     [...row.querySelectorAll('.chip.bad')].map(e => e.getBoundingClientRect().top - name.bottom),
                     [...row.querySelectorAll('td')].map(e => e.getBoundingClientRect().right)];})"""
    )
    assert [len(badges) for _, badges, _ in rows] == [0, 2]
    for first, badges, numbers in rows:
        assert first <= 0.4 * 400
        assert all(gap >= 0 for gap in badges)
        assert sum(right <= 400 for right in numbers) >= 2


def test_what_is_folded_is_drawn_when_it_is_opened(browser: Browser, pages: dict[str, Path]):
    browser.look(400, dark=False)
    browser.open(pages["nine"])
    before = browser.ask("return Number(document.body.dataset.drawn)")
    browser.driver.find_elements("css selector", "tbody th a")[2].click()
    until = time.monotonic() + 20
    while browser.ask("return Number(document.body.dataset.drawn)") == before:
        assert time.monotonic() < until, "nothing more is drawn"
        time.sleep(0.05)
    assert browser.ask("return [...document.querySelectorAll('.fold')].map(e => e.open)").index(True) == 2
    check(browser)


def test_numbers_are_those_of_the_summary(browser: Browser, pages: dict[str, Path], simulate: Simulate):  # noqa: F811
    browser.look(1280, dark=False)
    browser.open(pages["three"])
    for index, policy in enumerate(("static", "release", "flexfloor"), 1):
        told = json.loads(json.dumps(summarize(read_ledger(simulate(policy, "oracle"))).to_json()))
        shown = browser.figures(f"#run-{index}")
        assert len(shown) >= 12
        assert shown == {key: told[key] for key in shown}


def test_the_gantt_chart_tells_what_a_worker_did(browser: Browser, pages: dict[str, Path]):
    from selenium.webdriver.common.action_chains import ActionChains

    browser.look(1280, dark=False)
    browser.open(pages["one"])
    plot = browser.driver.find_element("css selector", ".chart .nsewdrag")
    ActionChains(browser.driver).move_to_element_with_offset(plot, -200, 20).perform()
    until = time.monotonic() + 10
    while "live requests" not in (told := browser.ask("return document.querySelector('.hoverlayer').textContent")):
        assert time.monotonic() < until, told
        time.sleep(0.05)
    assert any(state in told for state in ("decode", "prefill", "idle", "released"))
    assert "worker" in told
    marks = browser.ask("return document.querySelector('.chart').data.filter(t => t.mode === 'markers')")
    assert any("left at" in text.replace("<br>", " ") for trace in marks for text in trace["text"])


def test_the_theme_changes_with_the_readers(browser: Browser, pages: dict[str, Path]):
    ink = "return getComputedStyle(document.querySelector('.xtick text')).fill"
    paper = "return getComputedStyle(document.body).backgroundColor"
    browser.look(1280, dark=False)
    browser.open(pages["one"])
    light = browser.ask(ink), browser.ask(paper)
    browser.look(1280, dark=True)
    until = time.monotonic() + 10
    while browser.ask(ink) == light[0]:
        assert time.monotonic() < until, "the charts keep the colours of the light theme"
        time.sleep(0.05)
    for text, ground in (light, (browser.ask(ink), browser.ask(paper))):
        assert abs(_brightness(text) - _brightness(ground)) > 128
    check(browser)


def _brightness(colour: str) -> float:
    return sum(float(part) for part in colour[colour.index("(") + 1 : -1].split(",")[:3]) / 3


def test_a_thousand_workers_open_soon(browser: Browser, tmp_path: Path):
    """Of 100,000 requests. Time is what the page's main thread computes, so that others on the machine do not count."""
    workers, count = 1000, 100_000
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(3.8, 1, count), 1, 300).astype(int)
    shared = SamplingParams(max_tokens=300)
    requests = [Request(f"p{i // 8}#0/{i % 8}", f"p{i // 8}", i % 8, (1,) * 8, shared) for i in range(count)]
    by_id = dict(zip((r.request_id for r in requests), lengths.tolist(), strict=True))
    device = with_pages(40_000, workers)
    fleet = SimulatedFleet(SHAPE, device, workers, lengths=by_id, page_tokens=PAGE_TOKENS)
    rollout(fleet, requests, policy="release", profile=device, ledger=tmp_path / "ledger.jsonl")
    out = tmp_path / "report.html"
    write_report(out, [tmp_path / "ledger.jsonl"])
    assert out.stat().st_size < MOST_BYTES
    browser.look(1280, dark=False)
    browser.driver.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
    try:
        browser.open(out)
        metrics = browser.driver.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
    finally:
        browser.driver.execute_cdp_cmd("Performance.disable", {})
    assert next(m["value"] for m in metrics if m["name"] == "TaskDuration") < OPENED_S
    check(browser)


def test_the_report_of_a_real_comparison(browser: Browser, tmp_path: Path, checkpoint: Callable[[str], Path]):
    rows = [{"prompt_tokens": [5 + i] * (3 + 9 * i), "max_tokens": 10 + 15 * i} for i in range(4)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = ["--model", str(checkpoint("tiny")), "--prompts", str(tmp_path / "p.jsonl"), "--out-dir", str(tmp_path)]
    options = ["--samples", "2", "--force-lengths", "prompts", "--workers", "2", "--chunk", "4", "--quiet"]
    assert main(["compare", *files, *options, "--policies", "static,fixed:1"]) == 0
    browser.look(400, dark=True)
    browser.open(tmp_path / "report.html")
    check(browser)
    assert "real time" in browser.ask("return document.querySelector('header').textContent")
    for index, folder in enumerate(("static", "fixed-1"), 1):
        told = json.loads((tmp_path / folder / "summary.json").read_text())
        shown = browser.figures(f"#run-{index}")
        assert shown.pop("peak_kv_bytes") == max(w["peak_kv_bytes"] for w in told["workers_detail"])
        assert shown == {key: told[key] for key in shown}
        charts = browser.ask(f"return [...document.querySelectorAll('#run-{index} h4')].map(e => e.textContent)")
        assert {"Worker 0", "Worker 1", "Response lengths", "Throughput"} <= set(charts)
