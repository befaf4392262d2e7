"""How large a model is, read from the headers of its weights. Loads no torch."""

from __future__ import annotations

from pathlib import Path

from ragen.core.errors import RagenError
from ragen.models.hub import hub_shapes, model_folder
from ragen.models.model_files import read_config, shapes, weight_files
from ragen.networks.sizes import Shape, Sizes, sizes_of


def read_sizes(name: str) -> Sizes:
    """The sizes of a model in a folder or on the Hub, of which no weights are downloaded.

    Raises:
        RagenError: There is no such model, or its files are malformed.
    """
    folder = model_folder(name, weights=False)
    raw = read_config(folder, name)
    try:
        files = weight_files(folder, name)
    except RagenError:
        if Path(name).is_dir():
            raise
        return sizes_of(raw, hub_shapes(name))  # not all of them have been downloaded
    found: dict[str, Shape] = {}
    for file in files:
        found |= {each: tuple(shape) for each, shape in shapes(file).items()}
    return sizes_of(raw, found)
