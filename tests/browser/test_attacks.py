"""Texts of a model, an environment or a folder name are shown and never executed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from playwright.sync_api import expect
from viewer import serve

from ragen.viewer.share import share
from tests.browser.hostile import ATTACKS, MANY, make_hostile
from tests.browser.visitor import Visitor

NAME = "<img src=x onerror=alert(1)>"
RUN = quote(NAME, safe="")
"""The name of the run's folder, an attack too, and as quoted in an address."""

GROUPS = len(ATTACKS) + 3
PATIENCE_MS = 3_000
"""How long a page with megabytes of text may take to respond, in milliseconds."""

FOREIGN = """
() => {
  const found = [];
  for (const node of document.querySelectorAll("body *")) {
    const name = node.localName;
    if (["script", "iframe", "object", "embed", "base", "meta", "style", "img"].includes(name)) {
      found.push(node.outerHTML.slice(0, 100));
    }
    for (const { name: attribute, value } of node.attributes) {
      const isUrl = ["href", "src", "action", "formaction", "xlink:href"].includes(attribute);
      if (/^on/.test(attribute) || (isUrl && !/^(#|data:)/.test(value))) {
        found.push(`${name} ${attribute}=${value.slice(0, 100)}`);
      }
    }
  }
  return found;
}
"""
"""Finds elements and attributes that the viewer itself never creates."""

RAW = r"""
() => {
  const control = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f]/;
  const turning = /[\u061c\u200b-\u200f\u2028-\u202e\u2066-\u2069]/;
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const found = new Set();
  while (walk.nextNode()) {
    const { data, parentElement: parent } = walk.currentNode;
    if (control.test(data) || turning.test(data)) found.add(parent.outerHTML.slice(0, 100));
  }
  return [...found];
}
"""
"""Finds elements with a control character other than tab and newline, or a bidi character."""


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The address of a viewer of the hostile run, and the run."""
    folder = tmp_path_factory.mktemp("attack")
    make_hostile(folder / NAME)
    with serve(folder) as address:
        yield address, folder / NAME


@pytest.fixture
def victim(visitors: Any, attacked: tuple[str, Path]) -> Visitor:
    """A visitor of the hostile run."""
    return visitors(address=attacked[0])


def assert_unharmed(page: Any) -> None:
    """Assert that nothing was executed and that every text stayed text."""
    assert page.evaluate("window.hit") is None
    assert page.evaluate(FOREIGN) == []
    assert page.title().isprintable()
    assert page.evaluate(RAW) == [], "a control or bidi character is shown unescaped"


def episode_number(group: int, step: int = 0) -> int:
    """The id of a group's episode; a step has evaluation episodes first, then training episodes."""
    return 1 + group + step * (2 * GROUPS - 1)


def test_the_episode_page_shows_attacks_as_text(victim: Visitor) -> None:
    """Each turn of the first episode is one attack."""
    page = victim.visit(f"#/episode/{RUN}/{episode_number(0)}")
    turns = page.get_by_test_id("turn")
    expect(turns).to_have_count(len(ATTACKS))
    for place, text in enumerate(ATTACKS.values()):
        if text[:20].isprintable() and text[:20].isascii():
            expect(turns.nth(place)).to_contain_text(text[:20])
    for summary in page.locator("summary").all():
        summary.click()
    for view in ("turn", "token", "prompt"):
        expect(page.get_by_test_id(view).first).to_be_visible()
        for key in ("Home", *["ArrowRight"] * len(ATTACKS)):
            page.keyboard.press(key)
        assert_unharmed(page)
        page.keyboard.press("t")  # The next view.


@pytest.mark.parametrize(
    "route",
    [
        "#/",
        f"#/run/{RUN}",
        f"#/run/{RUN}?settings=all",
        f"#/compare/{RUN}?other={RUN}",
        f"#/episodes/{RUN}?phase=all",
        f"#/episodes/{RUN}?q={quote(ATTACKS['script'])}",
        f"#/group/{RUN}?attempt=0&step=0&phase=train&group=0",
        f"#/levels/{RUN}?words=3",
        f"#/collapse/{RUN}?step=1&path=first",
        f"#/evaluations/{RUN}",
    ],
)
def test_every_page_shows_attacks_as_text(victim: Visitor, route: str) -> None:
    page = victim.visit(route)
    if "collapse" in route:
        heat = page.get_by_test_id("matrix")
        heat.scroll_into_view_if_needed()
        heat.click(position={"x": 3, "y": 3})
    page.mouse.move(400, 300)
    page.keyboard.press("j")
    page.keyboard.press("?")
    assert_unharmed(page)


def test_a_hostile_link_executes_nothing(victim: Visitor) -> None:
    """Others send links; a page reports that it finds nothing, or shows what exists."""
    for route in (
        f"#/{quote('<script>window.hit=1</script>')}",
        "#/run/%00%0a..%2f..%2fetc",
        "#/run/%",
        "#/episode/x/javascript:window.hit=1",
        f"#/run/{RUN}?axis=__proto__&m=constructor&large=<svg onload=window.hit=1>",
        f"#/episode/{RUN}/1?turn=1e99&view=constructor&colour=__proto__",
        f"#/levels/{RUN}?phase=__proto__&fate=constructor&order=toString",
        f"#/collapse/{RUN}?path=__proto__&step=NaN",
    ):
        page = victim.visit(route)
        assert_unharmed(page)
        expect(page.locator("main h1")).to_be_visible()
    complaints = [each for each in victim.complaints if "status of 4" not in each]
    assert complaints == []
    victim.complaints.clear()


def test_a_chart_shows_alarms_as_text(victim: Visitor) -> None:
    """Over the steps 0 and 1 of an axis that ends at 2."""
    page = victim.visit(f"#/run/{RUN}?m=success/mean")
    chart = page.locator(".u-over").first
    for place, marked in ((0, False), (0.5, True)):
        chart.hover(position={"x": place * chart.bounding_box()["width"], "y": 30})
        tip = page.locator(".curve-tip")
        expect(tip.locator("p")).to_have_count(6)
        assert (tip.locator(".mark").count() > 0) == marked  # Marks of invisible characters.
        assert_unharmed(page)


def test_a_page_with_a_line_of_a_megabyte_responds_quickly(victim: Visitor) -> None:
    for view in ("turns", "tokens", "prompt"):
        page = victim.visit(f"#/episode/{RUN}/{episode_number(len(ATTACKS) + 1)}?view={view}")
        assert_quick(page)
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0


def test_a_page_with_tens_of_thousands_of_tokens_responds_quickly(victim: Visitor) -> None:
    page = victim.visit(f"#/episode/{RUN}/{episode_number(GROUPS - 1)}?view=tokens")
    expect(page.get_by_test_id("token").first).to_be_visible(timeout=20_000)
    assert page.get_by_test_id("token").count() >= MANY
    assert_quick(page)


def assert_quick(page: Any) -> None:
    """Assert that the page soon responds to a key and a scroll."""
    duration_ms = page.evaluate(
        """async () => {
          const start = performance.now();
          document.dispatchEvent(new KeyboardEvent("keydown", { key: "?", bubbles: true }));
          scrollBy(0, 400);
          await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
          return performance.now() - start;
        }"""
    )
    assert duration_ms < PATIENCE_MS


def test_shared_files_show_attacks_as_text(
    visitors: Any, attacked: tuple[str, Path], tmp_path: Path
) -> None:
    for kind, selection in {"episode": {"episode": episode_number(0)}, "run": {}}.items():
        file = share(attacked[1], tmp_path / f"{kind}.html", **selection)
        victim = visitors(address=file.as_uri())
        victim.page.goto(file.as_uri())
        victim.wait()
        assert victim.page.evaluate("window.hit") is None
        assert [each for each in victim.page.evaluate(FOREIGN) if "<script" not in each] == []
