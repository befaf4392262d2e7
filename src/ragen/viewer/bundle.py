"""The front end as one page without a server: modules, styles and data in a single HTML file.

A page that is opened as a file cannot import modules. Therefore all modules become one script: each
one becomes a function that is called once, in the order of the imports, and returns an object with
the exports. The front end uses only a few forms of ``import`` and ``export``; any other is an error
here.

The page has a content security policy with the hashes of its scripts and styles: nothing else is
executed, and nothing is fetched, whatever the data contain.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

STATIC = Path(__file__).parent / "static"
"""The front end, as `ragen view` serves it."""

_COMMENT = re.compile(r"(^/\*.*?\*/)", re.MULTILINE | re.DOTALL)
_IMPORT = re.compile(r'^import\s+(?P<names>\{[^}]*\})\s+from\s+"(?P<source>[^"]+)";', re.MULTILINE)
_EXPORT = re.compile(
    r"^export\s+(?P<kind>async\s+function|function|const)\s+(?P<name>\w+)", re.MULTILINE
)
_EXPORTED = re.compile(r"(?:^|(?<=;))export\s*\{(?P<names>[^}]*)\};?\s*$", re.MULTILINE)
_LATER = re.compile(r'\bimport\("(?P<source>[^"]+)"\)')
_LEFT = re.compile(r"^\s*(?:import|export)\b|\bimport\s*\(|\bimport\.meta\b", re.MULTILINE)
_LINK = re.compile(r'[ \t]*<link\b[^>]*\brel="stylesheet"[^>]*\bhref="(?P<source>[^"]+)"[^>]*>')
_SCRIPT = re.compile(r'[ \t]*<script\b(?P<kind>[^>]*)\bsrc="(?P<source>[^"]+)"[^>]*></script>')


def page(title: str, data: Mapping[str, Any], start: str, pages: str) -> str:
    """The whole front end with `data`: answers of the API by key (`ragen.viewer.share.key_of`).

    `start` is the address (hash) of the first page, and `pages` those that `data` supports,
    separated by spaces.
    """
    hashes: dict[str, list[str]] = {"script": [], "style": []}

    def inlined(kind: str, text: str, attributes: str = "") -> str:
        assert f"</{kind}" not in text.lower(), f"a {kind} of ours would end too early"
        assert "<!--" not in text, f"a {kind} of ours would hide what follows"
        text = f"\n{text}\n"
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        hashes[kind].append(f"'sha256-{digest}'")
        return f"<{kind}{attributes}>{text}</{kind}>"

    def script(found: re.Match[str]) -> str:
        file = STATIC / _relative(found["source"])
        if "module" in found["kind"]:
            return inlined("script", bundle(file), ' type="module"')
        return inlined("script", file.read_text("utf-8"))

    def style(found: re.Match[str]) -> str:
        return inlined("style", _sheet(STATIC / _relative(found["source"])))

    text = (STATIC / "index.html").read_text("utf-8")
    # Before the scripts, which write titles of their own.
    text = re.sub(r"<title>.*?</title>", lambda _: f"<title>{html.escape(title)}</title>", text)
    text = _SCRIPT.sub(script, _LINK.sub(style, text))
    policy = (
        f"default-src 'none'; script-src {' '.join(hashes['script'])}; "
        f"style-src {' '.join(hashes['style'])}; img-src data:; base-uri 'none'; form-action 'none'"
    )
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="referrer" content="no-referrer">'
    )
    body = (
        f'<script type="application/json" id="ragen-data" data-start="{html.escape(start)}" '
        f'data-pages="{html.escape(pages)}">{embedded(data)}</script>\n'
        f'<script type="text/plain" id="licences">\n{_licences()}</script>'
    )
    charset = '<meta charset="utf-8">'
    assert text.count(charset) == 1 and text.count("</body>") == 1, "index.html lost its frame"
    return text.replace(charset, f"{charset}\n{head}").replace("</body>", f"{body}\n</body>")


def embedded(data: Any) -> str:
    r"""JSON that is safe inside an HTML script element, whatever texts it contains."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))  # ASCII: no U+2028, no bidi
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def bundle(entry: Path) -> str:
    """A module and all that it imports as one script."""
    order: dict[Path, str] = {}
    _order(entry.resolve(), (), order)
    parts = [f"// {file.name}\n{_function(file, order)}" for file in order]
    return '"use strict";\n' + "\n".join(parts)


def _order(file: Path, above: tuple[Path, ...], order: dict[Path, str]) -> None:
    """Name the modules in the order of their calls: imported ones come first."""
    assert file not in above, f"{file.name} imports itself by way of {above[-1].name}"
    if file in order:
        return
    code = _COMMENT.sub("", file.read_text("utf-8"))
    for found in (*_IMPORT.finditer(code), *_LATER.finditer(code)):
        _order((file.parent / found["source"]).resolve(), (*above, file), order)
    order[file] = f"module_{len(order)}"


def _function(file: Path, names: Mapping[Path, str]) -> str:
    exported: dict[str, str] = {}

    def module(found: re.Match[str]) -> str:
        return names[(file.parent / found["source"]).resolve()]

    def imports(found: re.Match[str]) -> str:
        return f"const {found['names'].replace(' as ', ': ')} = {module(found)};"

    def later(found: re.Match[str]) -> str:
        return f"Promise.resolve({module(found)})"

    def declared(found: re.Match[str]) -> str:
        exported[found["name"]] = found["name"]
        return f"{found['kind']} {found['name']}"

    def listed(found: re.Match[str]) -> str:
        for item in filter(None, map(str.strip, found["names"].split(","))):
            local, _, public = item.partition(" as ")
            exported[public.strip() or local] = local.strip()
        return ""

    forms = ((_IMPORT, imports), (_LATER, later), (_EXPORT, declared), (_EXPORTED, listed))
    parts = _COMMENT.split(file.read_text("utf-8"))
    for place in range(0, len(parts), 2):  # odd places are comments, such as licences: they stay
        for form, rewritten in forms:
            parts[place] = form.sub(rewritten, parts[place])
        left = _LEFT.search(parts[place])
        assert left is None, f"{file.name}: {left[0]!r} has a form that a shared file cannot have"
    result = ", ".join(f"{public}: {local}" for public, local in exported.items())
    body = "".join(parts).strip()
    return f"const {names[file]} = (() => {{\n{body}\nreturn {{ {result} }};\n}})();"


def _sheet(file: Path) -> str:
    text = file.read_text("utf-8")
    assert "@import" not in text, f"{file.name}: a shared file cannot import a sheet"
    assert not re.search(r"url\((?!\s*['\"]?data:)", text), f"{file.name}: it would fetch an image"
    return text.strip()


def _relative(source: str) -> str:
    """The path of a file of the front end, from its address on the server."""
    return source.removeprefix("/").removeprefix("static/").removeprefix("./")


def _licences() -> str:
    """The licences of third-party code, which every copy has to include."""
    texts = [
        f"{file.name}\n\n{file.read_text('utf-8').strip()}\n"
        for file in sorted((STATIC / "vendor").glob("*.LICENSE"))
    ]
    return html.escape("\n\n".join(texts), quote=False)
