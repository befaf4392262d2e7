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
    "evaluations": "#/evaluations/lake",
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


NAMELESS = """
() => [...document.querySelectorAll("button, a[href], input, select")]
  .filter((node) => !(node.innerText?.trim() || node.getAttribute("aria-label") ||
      node.title || node.labels?.length || node.placeholder))
  .map((node) => node.outerHTML.slice(0, 100))
"""
"""Finds the controls without a name."""

TOO_WIDE = "document.documentElement.scrollWidth - innerWidth"


@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
def test_pages_fit_the_width_have_contrast_one_heading_and_named_controls(
    visitors: Visitors, size: tuple[int, int]
) -> None:
    """In both colour schemes, and with long names of runs."""
    visitor: Visitor = visitors(size=size)
    problems = {}
    for name, route in ROUTES.items():
        page = visitor.visit(route)
        found: dict[str, Any] = {"nameless": page.evaluate(NAMELESS)}
        found["headings"] = page.locator("h1").count() - 1
        found["too wide"] = max(0, page.evaluate(TOO_WIDE))
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            found[f"contrast, {scheme}"] = page.evaluate(CONTRASTS)
            background = page.evaluate("getComputedStyle(document.body).backgroundColor")
            dark = sum(map(float, background.strip("rgba()").split(",")[:3])) < 3 * 128
            assert dark == (scheme == "dark"), name
        if name == "run":
            expect(page.get_by_role("option", name="lake-again").first).to_be_attached()
            page.evaluate(
                """() => document.querySelectorAll("select option, .crumb .text, h1 .text").forEach(
                    (node) => (node.textContent = "x".repeat(300)))"""
            )
            found["too wide with long names"] = max(0, page.evaluate(TOO_WIDE))
        problems |= {f"{name}: {what}": each for what, each in found.items() if each}
    assert not problems, problems


def test_the_selected_colour_scheme_is_kept_on_reload(visitors: Visitors) -> None:
    visitor: Visitor = visitors(locale="en-GB")  # It has storage of its own.
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
