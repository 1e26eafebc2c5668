"""The report in a real browser: nothing from outside, nothing executed, every control works."""

import csv
import io
import json
import re
import shutil

import numpy as np
import pytest

import equipool as ep
from equipool.data import PooledDataset, check
from equipool.files import write_whole
from equipool.judge.statmaps import stat_map
from equipool.report.account import account_of
from equipool.report.page import report_page
from equipool.report.statmap_figures import statmap_pictures

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine (`make browser` tries)")

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()
NASTY = "\"'</script><img src=x onerror=window.hacked=1>"


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


def brain_pictures():
    rng = np.random.default_rng(0)
    mask = np.zeros((14, 16, 12), dtype=bool)
    mask[2:-2, 2:-2, 2:-2] = True
    dx = np.resize(["AD", "CN"], 60)
    values = rng.normal(10, 1, size=(60, mask.sum()))
    values[dx == "AD", :40] -= 4
    maps = {
        "as measured": stat_map(values + rng.normal(0, 2, size=values.shape), dx),
        "harmonized": stat_map(values, dx),
    }
    return statmap_pictures(maps, mask, np.diag([8.0, 8, 8, 1]), mask * 5.0, "dx"), maps, mask


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A hostile table's account with a t-map, and its page."""
    frame = ep.simulate_table(people=30, features=6).pool.to_frame()
    names = {"site": "site" + NASTY, "age": "age" + NASTY, "dx": "dx" + NASTY, "hippocampus": "=1+1"}
    frame = frame.rename(columns=names)
    frame[names["site"]] = frame[names["site"]].replace({"GE": NASTY, "Philips": "=HYPERLINK(1)"})
    roles = {"site": names["site"], "covariates": names["age"], "target": names["dx"], "id": "id"}
    pool = PooledDataset.from_frame(frame, **roles)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("equipool.judge.classifiers.EXTRA_TREES", 3)
        clean = ep.SiteHarmonizer().fit_transform(pool.X, site=pool.site_labels, covariates=pool.C)
        account = account_of(pool, clean, None, check(frame, **roles))
    object.__setattr__(account, "statmap", brain_pictures()[0])
    path = write_whole(tmp_path_factory.mktemp("page") / "report.html", report_page(account))
    return account, path


@pytest.fixture
def page(browser, made):
    """The page, opened; anything wrong that it says or asks for fails the test."""
    wrong = []
    context = browser.new_context(viewport={"width": 1100, "height": 900}, color_scheme="light")
    page = context.new_page()
    page.on("console", lambda message: wrong.append(message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda r: wrong.append(r.url) if not re.match("file:|data:|blob:", r.url) else None)
    page.goto(made[1].as_uri())
    yield page
    context.close()
    assert wrong == []


def test_it_opens_and_every_figure_is_seen(page):
    page.evaluate("document.querySelectorAll('.choice').forEach(d => { d.open = true; })")
    figures = page.locator("figure")
    assert figures.count() >= 12
    for k in range(figures.count()):
        assert figures.nth(k).is_visible()
        assert figures.nth(k).bounding_box()["height"] > 60
    assert page.evaluate("window.hacked") is None
    assert page.locator("img[src=x]").count() == 0


def test_a_mark_says_its_site(page):
    titles = page.evaluate(
        "[...document.querySelectorAll('#maps g[data-k] > title')].map(t => t.textContent)"
    )
    assert set(titles) == {NASTY, "=HYPERLINK(1)", "Siemens"}


def test_a_table_is_sorted_by_the_column_that_is_pressed(page):
    page.locator("#shares summary").click()
    head = page.locator("#shares thead th").nth(1)

    def values():
        cells = page.locator("#shares tbody tr td:nth-child(2)").all_inner_texts()
        return [float(cell) for cell in cells]

    assert len(values()) == 6
    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "ascending"
    assert values() == sorted(values())
    head.locator("button").click()
    assert values() == sorted(values(), reverse=True)


def download(page, key):
    with page.expect_download() as waiting:
        page.locator(f'a.csv[download="{key}.csv"]').click()
    assert waiting.value.suggested_filename == f"{key}.csv"
    text = waiting.value.path().read_text(encoding="utf-8")
    return list(csv.DictReader(io.StringIO(text)))


def test_the_csv_has_the_account_s_numbers(page, made):
    rows = download(page, "site")
    assert [float(row["mean"]) for row in rows] == pytest.approx(made[0].held_out["site_scores"]["mean"])


def test_no_cell_of_a_csv_is_a_formula(page):
    sites = {row["site"] for row in download(page, "sizes")}
    assert "'=HYPERLINK(1)" in sites
    assert NASTY in sites
    features = {row["feature"] for row in download(page, "shares")}
    assert "'=1+1" in features


def test_every_figure_has_numbers_to_download(page):
    rows = page.evaluate(
        "[...document.querySelectorAll('figure .numbers')].map(d => d.querySelectorAll('tbody tr').length)"
    )
    assert len(rows) == page.locator("figure").count() - 1  # the diagram has no numbers
    assert min(rows) > 0


def test_it_works_without_javascript(browser, made):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(made[1].as_uri())
    assert page.locator("#shares svg").is_visible()
    page.locator("#shares summary").click()
    assert page.locator("#shares table").is_visible()
    assert len(download(page, "shares")) == 6
    context.close()


def test_the_theme_can_be_changed(page):
    def paper():
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    light = paper()
    page.locator("#theme").click()
    assert paper() != light
    page.locator("#theme").click()
    assert paper() == light
    page.emulate_media(color_scheme="dark")
    assert paper() == light  # what was chosen stays


def test_the_system_s_theme_is_followed(browser, made):
    context = browser.new_context(color_scheme="dark")
    page = context.new_page()
    page.goto(made[1].as_uri())
    colours = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert max(map(int, re.findall(r"\d+", colours)[:3])) < 60
    context.close()


def test_another_feature_can_be_chosen(page):
    choices = page.locator("details.choice")
    figure = choices.nth(1).locator("figure").first
    assert choices.nth(0).locator("figure").first.is_visible()
    assert not figure.is_visible()
    choices.nth(1).locator("> summary").click()
    assert figure.is_visible()


def test_a_site_can_be_seen_alone(page):
    button = page.locator("#maps .legend button").nth(1)
    button.click()
    assert button.get_attribute("aria-pressed") == "true"
    shown = page.evaluate(
        "[...document.querySelectorAll('#maps g[data-k]')]"
        ".map(g => [g.dataset.k, +getComputedStyle(g).opacity])"
    )
    assert {k for k, opacity in shown if opacity == 1} == {"1"}
    button.click()
    assert page.locator("body.only").count() == 0


def test_slices_follow_the_slider(page, made):
    canvas = page.locator("#viewer canvas").nth(1)
    canvas.wait_for(state="visible")

    def pixels():
        return page.evaluate("document.querySelectorAll('#viewer canvas')[1].toDataURL()")

    first = pixels()
    page.locator("#slice").fill("3")
    assert pixels() != first
    heights = made[0].statmap["viewer"]["heights"]
    assert page.locator("#slice-out").inner_text() == f"{heights[3]} mm"
    everything = pixels()
    page.locator("#least").fill(str(made[0].statmap["top"]))
    assert pixels() != everything


def test_a_voxel_tells_its_t(page, made):
    _, maps, mask = brain_pictures()
    canvas = page.locator("#viewer canvas").nth(1)
    canvas.wait_for(state="visible")
    canvas.scroll_into_view_if_needed()
    viewer = made[0].statmap["viewer"]
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    told = page.locator("#voxel").inner_text().replace("−", "-")
    place = [float(value) for value in re.findall(r"[xy] (-?\d+) mm", told)]
    t = np.zeros(mask.shape)
    t[mask] = maps["harmonized"].t
    z = viewer["heights"][viewer["start"]]
    true = t[round(place[0] / 8), round(place[1] / 8), round(z / 8)]
    found = float(re.search(r"(\S+) harmonized", told)[1])
    assert found == pytest.approx(true, abs=viewer["step"] + 0.06)


@pytest.mark.parametrize("width", [390, 320, 768, 1400])
def test_nothing_makes_the_page_wider_than_a_phone(page, width):
    page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    page.set_viewport_size({"width": width, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("document.body.scrollWidth") <= width


def test_it_can_be_printed_whole(page, made):
    page.emulate_media(media="print")
    assert page.locator("nav").is_hidden()
    assert page.locator("#theme").is_hidden()
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert all(figure.is_visible() for figure in page.locator("details.choice figure").all())
    assert page.pdf(format="A4").startswith(b"%PDF")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_serious(page, theme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed")
    page.emulate_media(color_scheme=theme)
    page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    found = axe.Axe().run(page).response["violations"]
    serious = [one for one in found if one["impact"] in ("serious", "critical")]
    assert [(one["id"], [node["target"] for node in one["nodes"][:3]]) for one in serious] == []
    assert json.dumps(found).count('"impact": "moderate"') == 0
