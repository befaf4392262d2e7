"""Run each notebook of `docs/notebooks` from a fresh kernel, and compare what it prints and draws.

    .venv/bin/python -m pip install -r scripts/requirements-notebooks.txt
    .venv/bin/python scripts/notebooks.py            # --keep writes the new outputs

An error ends it, and so do other words, or a picture more or less. Numbers may differ, for the last
bits of another processor lead to other draws, and so may all that a cell tagged `draws` prints.
"""

import os
import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
from nbclient import NotebookClient


def outputs(cell):
    """What may not change of a cell's outputs: words, and kinds of pictures."""
    if "draws" in cell.metadata.get("tags", ()):
        return None
    text = "".join(each.get("text") or each.data["text/plain"] for each in cell.outputs)
    kinds = [sorted(each.get("data", ())) for each in cell.outputs]
    return re.sub(r"[-+]?\d[\d.]*", "0", text), kinds


os.environ["PYTHONWARNINGS"] = "ignore:IProgress"  # about a progress bar that nobody looks at
for path in sorted(Path(__file__).parents[1].glob("docs/notebooks/*.ipynb")):
    book = nbformat.read(path, as_version=4)
    cells = [cell for cell in book.cells if cell.cell_type == "code"]
    before = [outputs(cell) for cell in cells]
    with TemporaryDirectory() as folder:
        client = NotebookClient(book, resources={"metadata": {"path": folder}})
        client.coalesce_streams, client.record_timing = True, False
        client.execute()
    if "--keep" in sys.argv:
        nbformat.write(book, path)
    elif before != [outputs(cell) for cell in cells]:
        sys.exit(f"{path.name} prints or draws something else than before; --keep writes it")
