"""The report page in a browser: tables, themes, layout and accessibility."""

import shutil

import numpy as np
import pytest
from PIL import Image

from tests.helpers.browser import missing
from tests.helpers.launching import wait_for
from tests.helpers.report import unfold


@pytest.mark.browser
def test_page_opens_without_console_errors(window):
    assert window.console() == []
    assert "Effective degree" in window.script("return document.title")
    assert window.script("return document.querySelectorAll('.panel svg').length") == 4


@pytest.mark.browser
def test_external_requests_are_blocked_and_logged(window):
    """Shows that the previous test would detect a blocked request."""
    window.script("const image = new Image(); image.src = 'http://127.0.0.1:9/x.png'")
    messages = wait_for(window.console, "a message")
    assert "Content Security Policy" in messages[0]


def column(window, place: int) -> list[str]:
    script = (
        "return [...document.querySelectorAll('#experiment-table1 > .wide tbody tr')]"
        ".map(row => row.cells[arguments[0]].textContent.trim())"
    )
    return window.script(script, place)


@pytest.mark.browser
def test_tables_can_be_sorted_by_mouse_and_keyboard(window):
    before = column(window, 1)
    head = "#experiment-table1 > .wide thead th:nth-child(2)"
    window.click(f"{head} button")
    assert column(window, 1) == sorted(before, key=lambda text: float(text.split()[0]))
    window.keys(f"{head} button", "\ue007")  # the Enter key
    means = [float(text.split()[0]) for text in column(window, 1)]
    assert means == sorted(means, reverse=True)
    sort = f"return document.querySelector('{head}').getAttribute('aria-sort')"
    assert window.script(sort) == "descending"
    window.keys(f"{head} button", "\ue007")
    assert column(window, 1) == before


@pytest.mark.browser
def test_empty_cells_sort_last_in_both_directions(window):
    head = "#experiment-table1 > .wide thead th:nth-child(3) button"
    for _ in range(2):
        window.click(head)
        empty = [text == "" for text in column(window, 2)]
        assert any(empty)
        assert empty == sorted(empty)
    window.click(head)


@pytest.mark.browser
def test_the_theme_follows_the_system_until_it_is_switched(window):
    script = "return getComputedStyle(document.body).backgroundColor"

    def system(value: str) -> None:
        feature = {"name": "prefers-color-scheme", "value": value}
        window.devtools("Emulation.setEmulatedMedia", {"features": [feature]})

    system("light")
    light = window.script(script)
    system("dark")
    dark = window.script(script)
    assert light != dark
    window.click("#theme input[value=light]")
    assert window.script(script) == light
    system("light")
    window.click("#theme input[value=dark]")
    assert window.script(script) == dark
    window.click("#theme input[value=auto]")
    assert window.script(script) == light


@pytest.mark.browser
@pytest.mark.parametrize(("theme", "tone"), [("light", (255, 255)), ("dark", (200, 240))])
def test_figures_have_the_background_of_their_card(window, tmp_path, theme, tone):
    """The background is light enough for dark text, but not white in the dark theme."""
    window.click(f"#theme input[value={theme}]")
    try:
        place = window.script(
            "const card = document.querySelector('.card'), image = card.querySelector('img');"
            "card.scrollIntoView({block: 'center', behavior: 'instant'});"
            "const [outer, inner] = [card, image].map(e => e.getBoundingClientRect());"
            "return [outer.x, inner.x, inner.y, inner.height]"
        )
        window.screenshot(tmp_path / "page.png")
    finally:
        window.click("#theme input[value=auto]")
        # resets the view for the next test
        window.script("scrollTo({top: 0, behavior: 'instant'})")
    outer, inner, top, height = map(round, place)
    pixels = np.asarray(Image.open(tmp_path / "page.png").convert("RGB"))
    card, image = pixels[top + height // 2, outer + 5], pixels[top + 3, inner + 3]
    assert (card == image).all()
    assert (card >= tone[0]).all()
    assert (card <= tone[1]).all()


@pytest.mark.browser
def test_clicking_a_cell_shows_its_runs(window):
    script = "return document.getElementById('table1--baseline').checkVisibility()"
    assert not window.script(script)
    window.click("#experiment-table1 > .wide tbody a[href='#table1--baseline']")
    wait_for(lambda: window.script(script), "the runs to be shown")
    assert window.script("return document.getElementById('table1--baseline').open")


@pytest.mark.browser
def test_an_opened_cell_draws_its_curves_once(window):
    window.script("location.hash = '#table1_100--ed'")
    script = "return document.querySelectorAll('#table1_100--ed .charts svg').length"
    wait_for(lambda: window.script(script), "the curves")
    assert window.script(script) == 3
    window.script("document.getElementById('table1_100--ed').open = false; location.hash = ''")


@pytest.mark.browser
def test_the_table_of_contents_highlights_the_visible_section(window):
    script = "return document.querySelector('.contents a[aria-current]').textContent"
    for target, expected in (("#explorer", "Explorer"), ("#waiting", "Not run yet")):
        window.script("document.querySelector(arguments[0]).scrollIntoView()", target)
        wait_for(lambda e=expected: window.script(script) == e, f"{expected} to be highlighted")
    window.script("scrollTo(0, 0)")


@pytest.mark.browser
def test_details_are_collapsed_until_opened(window):
    unfold(window, False)
    notes = "#experiment-table1 details.notes"
    script = f"return document.querySelector('{notes} ul').checkVisibility()"
    assert not window.script(script)
    window.click(f"{notes} summary")
    assert window.script(script)


@pytest.mark.browser
def test_a_skip_link_leads_to_the_results(window):
    """The first link on the page skips the table of contents."""
    window.script("scrollTo(0, 0); document.activeElement.blur()")
    first = "return document.querySelector('a, button, input, summary, [tabindex]').className"
    assert window.script(first) == "skip"
    window.keys(".skip", "\ue007")
    assert window.script("return document.activeElement.id") == "main"


@pytest.mark.browser
def test_a_figure_can_be_enlarged_and_closed(window):
    window.script("document.querySelector('#experiment-table1_100 .enlarge').click()")
    opened = "return document.getElementById('enlarged').open"
    assert window.script(opened)
    assert window.script("return document.querySelector('#enlarged img').alt.length") > 3
    window.click("#enlarged button")
    assert not window.script(opened)


CONTRAST = """
    const READ = { willReadFrequently: true };
    const parse = (text) => {
      const canvas = document.createElement("canvas").getContext("2d", READ);
      canvas.fillStyle = text; canvas.fillRect(0, 0, 1, 1);
      return [...canvas.getImageData(0, 0, 1, 1).data];
    };
    const colours = new Map();
    const rgba = (text) => colours.get(text) || colours.set(text, parse(text)).get(text);
    const light = (rgb) => rgb.slice(0, 3).map((c) => c / 255)
      .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
      .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
    const ground = (e) => {
      for (; e; e = e.parentElement) {
        const colour = rgba(getComputedStyle(e).backgroundColor);
        if (colour[3] === 255) return colour;
      }
      return [255, 255, 255, 255];
    };
    const low = [];
    for (const e of document.querySelectorAll("body *")) {
      const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
      if (!own || !e.checkVisibility() || /SCRIPT|STYLE|OPTION/.test(e.tagName)) continue;
      const style = getComputedStyle(e);
      const [x, y] = [rgba(e.ownerSVGElement ? style.fill : style.color), ground(e)].map(light);
      const ratio = (Math.max(x, y) + 0.05) / (Math.min(x, y) + 0.05);
      if (ratio < 4.5) low.push(`${e.tagName} ${e.textContent.slice(0, 30)} ${ratio.toFixed(2)}`);
    }
    return [...new Set(low)].slice(0, 10);
"""


@pytest.mark.browser
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_all_text_has_enough_contrast(window, theme):
    window.click(f"#theme input[value={theme}]")
    unfold(window, True)
    try:
        assert window.script(CONTRAST) == []
    finally:
        unfold(window, False)
        window.click("#theme input[value=auto]")


@pytest.mark.browser
def test_phones_get_stacked_tables_and_collapsed_contents(window):
    window.resize(390, 844)
    try:
        window.script("scrollTo(0, 0)")
        assert not window.script("return document.querySelector('.contents details').open")
        head = "return document.querySelector('#claims thead').checkVisibility()"
        assert not window.script(head)
        wide = "return document.querySelector('.ranking .strip').getBoundingClientRect().width"
        assert window.script(wide) > 250
    finally:
        window.resize(1280, 1000)


@pytest.mark.browser
def test_sliders_have_labels(window):
    labels = "return ['alpha', 'degree'].map((id) => document.getElementById(id).labels.length)"
    assert window.script(labels) == [1, 1]


@pytest.mark.browser
def test_tables_fit_on_printed_pages(window):
    script = """
        const wide = (table) => table.getBoundingClientRect().right > innerWidth;
        const tables = [...document.querySelectorAll("table")];
        return tables.filter((table) => table.checkVisibility() && wide(table)).length;
    """
    window.resize(794, 1123)  # A4
    window.devtools("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        assert window.script(script) == 0
    finally:
        window.devtools("Emulation.setEmulatedMedia", {"media": ""})
        window.resize(1280, 1000)


@pytest.mark.browser
def test_contents_do_not_cover_the_page_without_javascript(window):
    window.resize(390, 844)
    window.devtools("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        window.call("POST", "/refresh", {})
        place = "return getComputedStyle(document.querySelector('.contents')).position"
        assert window.script(place) == "static"
        assert not window.script("return document.getElementById('theme').checkVisibility()")
    finally:
        window.devtools("Emulation.setScriptExecutionDisabled", {"value": False})
        window.call("POST", "/refresh", {})
        window.resize(1280, 1000)


@pytest.mark.browser
@pytest.mark.parametrize("width", [390, 768, 1280])
def test_the_page_never_scrolls_horizontally(window, width):
    window.resize(width, 844)
    unfold(window, True)
    script = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
    try:
        assert window.script(script) <= 0
    finally:
        unfold(window, False)
        window.resize(1280, 1000)


def test_the_browser_and_its_driver_are_searched_on_the_path():
    assert (missing() is None) == all(map(shutil.which, ("chromium", "chromedriver")))
