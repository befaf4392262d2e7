"""Writes the software bill of materials: what is in the wheel and was made by others.

    python scripts/sbom.py          write sboms/ragen-rl.cdx.json
    python scripts/sbom.py --check  fail if that file is not what would be written

It is in the format CycloneDX, and goes into the wheel (PEP 770, `setup.py`). The packages that
RAGEN needs are no part of the wheel: its metadata names them. Needs `requirements-audit.txt`.
"""

import hashlib
import sys
import tomllib
import uuid
from pathlib import Path

from cyclonedx.model import (
    ExternalReference,
    ExternalReferenceType,
    HashAlgorithm,
    HashType,
    XsUri,
)
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import DisjunctiveLicense
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL

ROOT = Path(__file__).parents[1]
SBOM = ROOT / "sboms" / "ragen-rl.cdx.json"
SOURCE = ROOT / "src"
VENDOR = SOURCE / "ragen" / "viewer" / "static" / "vendor"


def file(name: str) -> Component:
    """A file of the wheel, by its path in it."""
    path = VENDOR / name
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return Component(
        type=ComponentType.FILE,
        name=path.relative_to(SOURCE).as_posix(),
        bom_ref=f"file:{name}",
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=digest)],
    )


def library(
    name: str, version: str | None, licence: str, url: str, *inside: Component, about: str
) -> Component:
    """A JavaScript library as it was published on npm."""
    return Component(
        type=ComponentType.LIBRARY,
        name=name,
        version=version,
        description=about,
        licenses=[DisjunctiveLicense(id=licence)],
        purl=PackageURL("npm", None, name, version),
        bom_ref=name,
        external_references=[ExternalReference(type=ExternalReferenceType.VCS, url=XsUri(url))],
        components=inside,
    )


def materials() -> Bom:
    """The bill; the same files and version give the same bill."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    preact = library(
        "preact",
        None,
        "MIT",
        "https://github.com/preactjs/preact",
        file("preact.LICENSE"),
        about="in htm's standalone build, which does not say which release of Preact 10 it is",
    )
    htm = library(
        "htm",
        "3.1.1",
        "Apache-2.0",
        "https://github.com/developit/htm",
        file("preact-htm.js"),
        file("htm.LICENSE"),
        preact,
        about="preact/standalone.module.js, unchanged",
    )
    uplot = library(
        "uplot",
        "1.6.32",
        "MIT",
        "https://github.com/leeoniya/uPlot",
        file("uplot.js"),
        file("uplot.css"),
        file("uplot.LICENSE"),
        about="dist/uPlot.iife.min.js and dist/uPlot.min.css, unchanged",
    )
    bom = Bom(
        components=[htm, uplot],
        serial_number=uuid.uuid5(uuid.NAMESPACE_URL, f"pypi:{project['name']}"),
    )
    bom.metadata.timestamp = None  # type: ignore[assignment]  # so that it can be compared
    root = Component(
        type=ComponentType.APPLICATION,
        name=project["name"],
        version=project["version"],
        licenses=[DisjunctiveLicense(id="Apache-2.0")],
        purl=PackageURL("pypi", None, project["name"], project["version"]),
        bom_ref=project["name"],
    )
    bom.metadata.component = root
    bom.register_dependency(root, [htm, uplot])
    bom.register_dependency(htm, [preact])
    return bom


def main() -> None:
    """Write the bill, or compare it."""
    text = JsonV1Dot6(materials()).output_as_string(indent=2) + "\n"
    if error := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text):
        sys.exit(f"this is no CycloneDX: {error}")
    if "--check" not in sys.argv[1:]:
        SBOM.parent.mkdir(exist_ok=True)
        SBOM.write_text(text, "utf-8")
    elif SBOM.read_text("utf-8") != text:
        sys.exit(f"{SBOM} is not up to date: run scripts/sbom.py")
    else:
        print("the software bill of materials is valid and up to date")  # noqa: T201


if __name__ == "__main__":
    main()
