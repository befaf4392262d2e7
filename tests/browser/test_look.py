"""Layout, contrast and accessible names of every page, on a laptop and a phone."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import expect

from tests.browser.visitor import PHONE, WIDE, Visitor

Visitors = Any

ROUTES = {
    "runs": "#/",
    "run": "#/run/lake",
    "compare": "#/compare/lake?other=lake-again",
    "episodes": "#/episodes/lake",
    "group": "#/group/lake?attempt=0&step=1&phase=train&group=1",
    "episode": "#/episode/lake/40",
    "tokens": "#/episode/lake/40?view=tokens&colour=advantage",
    "prompt": "#/episode/lake/40?view=prompt&turn=1",
    "levels": "#/levels/lake",
    "collapse": "#/collapse/lake",
    "evaluations": "#/evaluations/lake?other=lake-again",
}
LEAST_CONTRAST = 4.5
"""The contrast of text that level AA of the Web Content Accessibility Guidelines requires. Numbers
in the colour of their curve (``ink-…``) are excluded."""

CONTRASTS = """
() => {
  const channel = (c) => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const numbers = (text) => (text.match(/[\\d.]+/g) ?? []).map(Number);
  const behind = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const [r, g, b, a = 1] = numbers(getComputedStyle(at).backgroundColor);
      if (a > 0.99) return [r, g, b];
      if (a > 0) return null; // Mixed colours are not checked.
    }
    return [255, 255, 255];
  };
  const poor = [];
  for (const node of document.querySelectorAll("main *, header *")) {
    const text = (part) => part.nodeType === 3 ? part.textContent.trim() : "";
    const words = [...node.childNodes].map(text).filter(Boolean);
    const style = getComputedStyle(node);
    if (!words.length || node.closest("svg, [disabled], option, [class*=ink-]")) continue;
    if (node.checkVisibility && !node.checkVisibility({ visibilityProperty: true })) continue;
    const [ground, ink] = [behind(node), numbers(style.color)];
    if (!ground || ink.length > 3) continue;
    const [a, b] = [light(ground), light(ink)].sort((x, y) => y - x);
    const contrast = (a + 0.05) / (b + 0.05);
    const line = `${contrast.toFixed(2)} ${node.className}: ${words[0].slice(0, 40)}`;
    if (contrast < LEAST) poor.push(line);
  }
  return [...new Set(poor)];
}
""".replace("LEAST", str(LEAST_CONTRAST))
"""Finds the texts of a page with too little contrast."""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
def test_pages_fit_the_width_and_have_contrast(
    visitors: Visitors, size: tuple[int, int], scheme: str
) -> None:
    visitor: Visitor = visitors(size=size, color_scheme=scheme)
    problems = {}
    for name, route in ROUTES.items():
        page = visitor.visit(route)
        too_wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        low_contrast = page.evaluate(CONTRASTS)
        if too_wide > 0 or low_contrast:
            problems[name] = (too_wide, low_contrast)
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        dark = sum(map(float, background.strip("rgba()").split(",")[:3])) < 3 * 128
        assert dark == (scheme == "dark"), name
    assert not problems, problems


@pytest.mark.parametrize("size", [WIDE, PHONE])
@pytest.mark.parametrize("name", ["run", "evaluations"])
def test_long_names_of_runs_do_not_widen_a_page(
    visitors: Visitors, name: str, size: tuple[int, int]
) -> None:
    page = visitors(size=size).visit(ROUTES[name])
    expect(page.get_by_role("option", name="lake-again").first).to_be_attached()
    page.evaluate(
        """() => document.querySelectorAll("select option, .crumb .text, h1 .text").forEach(
            (node) => (node.textContent = "x".repeat(300)))"""
    )
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0


def test_the_selected_colour_scheme_is_kept_on_reload(visitor: Visitor) -> None:
    page = visitor.visit()
    background = "getComputedStyle(document.body).backgroundColor"
    first = page.evaluate(background)
    for theme in ("light", "dark"):
        page.get_by_role("button", name="Colours").click()
        expect(page.get_by_role("button", name=f"Colours: {theme}")).to_be_visible()
    page.wait_for_function(f"first => {background} !== first", arg=first)
    dark = page.evaluate(background)
    page.reload()
    visitor.wait()
    assert page.evaluate(background) == dark


@pytest.mark.parametrize("name", ROUTES)
def test_each_page_has_one_heading_and_named_controls(visitor: Visitor, name: str) -> None:
    page = visitor.visit(ROUTES[name])
    assert page.locator("h1").count() == 1
    nameless = page.evaluate(
        """() => [...document.querySelectorAll("button, a[href], input, select")]
        .filter((node) => !(node.innerText?.trim() || node.getAttribute("aria-label") ||
            node.title || node.labels?.length || node.placeholder))
        .map((node) => node.outerHTML.slice(0, 100))"""
    )
    assert nameless == []
