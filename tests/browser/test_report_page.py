"""report.html in a real browser: figures are drawn, numbers are the exported ones, it fits a phone, no complaints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser

from layerskip import DecodeConfig
from search.reporting.figures.pictures import PICTURES
from search.reporting.record import MissingData, read_record
from tests.browser.conftest import Visit, visiting
from tests.search.helpers.fakes import Bench

pytestmark = [pytest.mark.browser, pytest.mark.slow]
MARKS = ".cartesianlayer :is(.point, .js-line, image)"
"""What Plotly draws data with: markers and bars, lines, heatmaps; the legend's own are not among them."""
TEXTS = ".plot :is(.xtitle, .ytitle, .annotation-text, .legendtext, .xtick, .ytick)"
"""A figure's words: where they do not fit they are cut, and nothing scrolls."""
LAST = PICTURES[-1].key


def open_report(visit: Visit, study: Path) -> None:
    """Until the last figure is drawn. The page's own policy forbids eval, so nothing polls it with a script."""
    visit.page.goto((study / "report.html").as_uri(), wait_until="commit")
    visit.page.locator(f"#{LAST} .main-svg, #{LAST} .missing").first.wait_for()


@pytest.fixture(scope="module")
def shown(browser: Browser, study: Path) -> Iterator[Visit]:
    """The study's report on a desk; tests only look at it."""
    with visiting(browser) as visit:
        open_report(visit, study)
        yield visit


def keys_drawn(study: Path) -> list[str]:
    """Figures that the study has data for: a config that never came to draft has no acceptance."""
    record = read_record(Bench(study, in_sqlite=True).study())
    keys = []
    for picture in PICTURES:
        with suppress(MissingData):
            picture.draw(record)
            keys.append(picture.key)
    return keys


def assert_fits(visit: Visit, width: int) -> None:
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= width
    for drawn in visit.page.locator(".plot").all():
        box = drawn.locator(".main-svg").first.bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width
    for text in visit.page.locator(TEXTS).all():
        box = text.bounding_box()
        assert box is None or (box["x"] >= -1 and box["x"] + box["width"] <= width + 1), text.text_content()
    for table in visit.page.locator(".scroll").all():
        assert table.evaluate("box => box.scrollWidth <= box.clientWidth"), table.inner_text()[:80]


def test_every_figure_is_drawn_with_its_data(shown: Visit, study: Path) -> None:
    keys = keys_drawn(study)
    assert len(keys) >= len(PICTURES) - 2
    for picture in PICTURES:
        figure = shown.page.locator(f"#{picture.key}")
        is_drawn = picture.key in keys
        assert (figure.locator(".missing").count() == 0) is is_drawn, picture.key
        assert (figure.locator(MARKS).count() > 0) is is_drawn, picture.key
        assert (figure.locator(".xtick, .ytick").count() > 0) is is_drawn, picture.key
    assert shown.complaints == []
    assert shown.requests == [(study / "report.html").as_uri()]
    assert_fits(shown, 1280)


def test_as_many_points_are_drawn_as_there_are_prompts_and_trials(shown: Visit, study: Path) -> None:
    summary = json.loads((study / "summary.json").read_text(encoding="utf-8"))
    prompts = shown.page.locator("#held-out-prompts .point")
    assert prompts.count() == 2 * summary["confirmed"]["num_prompts"]
    measured = summary["trials"]["measured"] + summary["trials"]["stopped_early"]
    assert shown.page.locator("#speedup-by-trial .point").count() >= measured
    # The mask's cells are an image; the crosses in it are text that can be counted.
    texts = shown.page.locator("#mask .heatmap-label").all_text_contents()
    assert texts.count("×") == shown.page.locator("#mask-text").inner_text().count("x")


def test_the_numbers_shown_are_the_exported_ones(shown: Visit, study: Path) -> None:
    summary = json.loads((study / "summary.json").read_text(encoding="utf-8"))
    best = DecodeConfig.load(study / "best.json")
    confirmed = best.confirmed.model_dump() if best.confirmed else summary["confirmed"]
    values: dict[str, Any] = {}
    for element in shown.page.locator("data").all():
        name = str(element.get_attribute("id")).removeprefix("number-")
        values[name] = float(str(element.get_attribute("value")))
        text = element.inner_text()
        unit = 0.01 if text.endswith("%") else 1.0
        text = text.rstrip("×%").strip()
        step = unit * 10 ** -len(text.partition(".")[2])
        assert unit * float(text) == pytest.approx(values[name], abs=0.51 * step)
    assert {"speedup", "tokens_per_s", "plain_tokens_per_s"} <= values.keys()
    assert values == {name: confirmed[name] for name in values}
    verdict = shown.page.locator("#verdict").inner_text()
    if best.speculates:
        assert f"decodes greedy text {confirmed['speedup']:.2f} times as fast as plain decoding" in verdict
        assert shown.page.locator("#mask-text").inner_text().split() == best.skip_mask.picture().split()
    else:
        assert "plain decoding is the answer" in verdict


def test_it_prints(shown: Visit) -> None:
    pdf = shown.page.pdf(format="A4")
    assert pdf.startswith(b"%PDF")
    assert len(pdf) > 50_000  # with figures, not text alone


def test_it_fits_a_phone_and_follows_a_turn_of_it(browser: Browser, study: Path) -> None:
    with visiting(browser, 390) as visit:
        open_report(visit, study)
        assert_fits(visit, 390)
        visit.page.set_viewport_size({"width": 844, "height": 390})
        drawn = visit.page.locator(f"#{LAST} .main-svg").first
        for _ in range(1800):
            if (box := drawn.bounding_box()) is not None and box["width"] > 390:
                break
            visit.page.wait_for_timeout(100)
        else:
            pytest.fail("the figures did not grow with the screen")
        assert visit.page.evaluate("document.documentElement.scrollWidth") <= 844
        assert visit.complaints == []
