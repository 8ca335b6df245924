"""The built documentation in a real browser: errors, links, pictures, widths and the search."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from tests.browser import Browser, served
from tests.processes import bound
from tests.requirements import needs_browser

DOCS = Path(__file__).parents[1] / "docs"
#: What ``make docs`` writes; a page that has not changed since is not read again.
SITE = DOCS / "_build" / "html"
PAGES = [*sorted(path.stem for path in DOCS.glob("*.rst")), "genindex", "search"]
WIDTHS = (360, 1280, 1920)

#: What a page is made of; a link without a fragment has an empty one.
CONTENTS = """({
  ids: [...document.querySelectorAll("[id]")].map(each => each.id),
  links: [...document.querySelectorAll("a[href]")].map(each => each.href),
  pictures: [...document.images].map(each => ({
    source: each.getAttribute("src"), alt: each.alt, drawn: each.naturalWidth > 0,
  })),
})"""

#: What reaches past the right edge, where nothing around it can be scrolled by itself.
OVERFLOW = """(() => {
  const width = document.documentElement.clientWidth;
  const past = [...document.querySelectorAll("article *, footer *, .mobile-header *")].filter(
    each => each.getBoundingClientRect().right > width + 1
      && !each.parentElement.closest("pre, .table-wrapper, .picture"));
  if (document.scrollingElement.scrollWidth > width) past.push(document.body);
  return past.slice(0, 5).map(each => each.outerHTML.slice(0, 120));
})()"""

#: Code and tables that a reader has to scroll from side to side.
SCROLLED = """[...document.querySelectorAll("pre, .table-wrapper")].filter(
  each => each.scrollWidth > each.clientWidth + 1
).map(each => each.textContent.trim().slice(0, 80))"""

#: Whether the list of the page's sections is there and can be seen.
SECTIONS = """(() => {
  const list = document.querySelector(".toc-drawer .toc-tree");
  if (!list || list.querySelectorAll("a").length < 2) return null;
  const box = list.getBoundingClientRect();
  return box.width > 100 && box.right <= document.documentElement.clientWidth;
})()"""

#: The titles that a search finds, once it has looked through all pages.
SEARCH = """new Promise((found, failed) => {
  const until = Date.now() + %d;
  const look = () => {
    const summary = document.querySelector(".search-summary")?.textContent || "";
    const titles = [...document.querySelectorAll("ul.search li > a")].map(a => a.textContent);
    if (/found [0-9]+ page|did not match/.test(summary)) found(titles);
    else if (Date.now() > until) failed(new Error(summary));
    else setTimeout(look, 50);
  };
  look();
})"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    needs_browser()
    command = [sys.executable, "-m", "sphinx", "-W", "-a", "-q", "-b", "html", str(DOCS), str(SITE)]
    made = subprocess.run(command, capture_output=True, text=True, timeout=bound(120))
    assert made.returncode == 0, made.stderr
    with Browser(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture(scope="module")
def address(browser: Browser) -> Iterator[str]:
    with served(SITE) as found:
        yield found


@pytest.fixture(scope="module")
def pages(browser: Browser, address: str) -> dict[str, Any]:
    """Every page, seen once at each width."""
    found = {}
    for name in PAGES:
        browser.resize(WIDTHS[0])
        browser.open(f"{address}{name}.html")
        page = browser.evaluate(CONTENTS)
        page["overflow"], page["scrolled"], page["sections"] = {}, {}, {}
        for width in WIDTHS:
            browser.resize(width)
            page["overflow"][width] = browser.evaluate(OVERFLOW)
            page["scrolled"][width] = browser.evaluate(SCROLLED)
            page["sections"][width] = browser.evaluate(SECTIONS)
        page["errors"] = list(browser.errors)
        found[name] = page
    return found


def test_pages_load_without_errors(pages: dict[str, Any]) -> None:
    assert {name: page["errors"] for name, page in pages.items() if page["errors"]} == {}


def test_links_and_anchors_lead_somewhere(pages: dict[str, Any], address: str) -> None:
    broken, checked = [], 0
    for name, page in pages.items():
        for link in page["links"]:
            if not link.startswith(address):
                assert link.startswith("https://"), f"{name}: {link}"
                continue
            path, _, fragment = link.removeprefix(address).partition("#")
            target = path.partition("?")[0].removesuffix(".html")
            if target in pages:
                known = fragment == "" or unquote(fragment) in pages[target]["ids"]
            else:
                known = not path.endswith(".html") and (SITE / path).is_file()
            checked += 1
            broken += [] if known else [f"{name}: {link}"]
    assert broken == []
    assert checked > 1000


def test_pictures_are_drawn_and_described(pages: dict[str, Any]) -> None:
    pictures = [(name, each) for name, page in pages.items() for each in page["pictures"]]
    assert len(pictures) > 5
    for name, picture in pictures:
        assert picture["drawn"], f"{name}: {picture}"
        # Sphinx writes the file's name where a page gives no text.
        assert len(picture["alt"].split()) > 3, f"{name}: {picture}"


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_overflows(pages: dict[str, Any], width: int) -> None:
    wide = {name: page["overflow"][width] for name, page in pages.items()}
    assert {name: each for name, each in wide.items() if each} == {}


@pytest.mark.parametrize("width", WIDTHS[1:])
def test_code_and_tables_fit_beside_the_contents(pages: dict[str, Any], width: int) -> None:
    wide = {name: page["scrolled"][width] for name, page in pages.items()}
    assert {name: each for name, each in wide.items() if each} == {}


@pytest.mark.parametrize("width", WIDTHS[1:])
def test_the_sections_of_a_page_are_listed_beside_it(pages: dict[str, Any], width: int) -> None:
    seen = {name: page["sections"][width] for name, page in pages.items()}
    assert [name for name, each in seen.items() if each is False] == []
    assert sum(each is True for each in seen.values()) > 15


@pytest.mark.parametrize(
    ("word", "page"), [("NCCL", "GPUs"), ("resume", "Checkpoints"), ("preempt", "Slurm")]
)
def test_the_search_finds(browser: Browser, address: str, word: str, page: str) -> None:
    browser.open(f"{address}search.html?q={word}")
    titles = browser.evaluate(SEARCH % (1000 * bound(10)))
    assert any(page in title for title in titles), json.dumps(titles)
    assert browser.errors == []


def test_a_click_on_a_heading_sorts_its_table(browser: Browser, address: str) -> None:
    column = """[...document.querySelector("table.sortable").tBodies[0].rows].map(
        row => Number(row.cells[%d].textContent))"""
    browser.open(f"{address}benchmarks.html")
    headings = browser.evaluate(
        """[...document.querySelectorAll("table.sortable")[0].tHead.rows[0].cells].map(
            each => each.textContent)"""
    )
    at = headings.index("DDP / ours")
    given = browser.evaluate(column % at)
    for order in (sorted(given), sorted(given, reverse=True)):
        assert given != order
        browser.evaluate(f'document.querySelectorAll("table.sortable th button")[{at}].click()')
        assert browser.evaluate(column % at) == order


def test_mistakes_on_a_page_are_noticed(browser: Browser, tmp_path: Path) -> None:
    """The checks can fail: a page with one mistake of each kind."""
    page = '<article><img src="none.png" alt="none.png"><p style="width:3000px">.</p>'
    page += '<pre style="overflow:auto"><p style="width:3000px">.</p></pre></article>'
    (tmp_path / "index.html").write_text(f"{page}<script>undefined_name</script>")
    with served(tmp_path) as wrong:
        browser.resize(360)
        browser.open(wrong)
        found = browser.evaluate(CONTENTS)
        assert [each["drawn"] for each in found["pictures"]] == [False]
        assert len(browser.evaluate(OVERFLOW)) >= 2
        assert browser.evaluate(SCROLLED) == ["."]
        assert any("undefined_name" in each for each in browser.errors)
        assert any("404" in each for each in browser.errors)
