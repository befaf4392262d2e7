"""Finding a model, a folder or the id of one on the Hub, and its sizes. Loads no torch.

An id is resolved to its folder in the local cache; after that, no request goes to the network.
"""

from __future__ import annotations

from pathlib import Path

from ragen.core.errors import RagenError
from ragen.core.files import cannot
from ragen.models.model_files import read_config, shapes, weight_files
from ragen.networks.sizes import Shape, Sizes, sizes_of

WORDS = ("*.json", "*.txt", "*.model", "*.jinja")
"""Files of a model on the Hub that are read: config, tokenizer, chat template."""
OTHERS = ("*/*", "consolidated*")
"""Files that hold the same weights in other layouts."""


def model_folder(name: str | Path, weights: bool = True) -> Path:
    """The folder of a model: `name` itself, or the place of a Hub id in the local cache.

    Missing files are downloaded, the weights only if `weights`.

    Raises:
        RagenError: There is no such model, access is denied, the local cache cannot be written, or
            the Hub cannot be reached and the cache does not have the model.
    """
    if Path(name).exists():
        return Path(name)
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (  # type: ignore[attr-defined]
        GatedRepoError,
        HFValidationError,
        HTTPError,  # of its client, httpx or httpx2
        RepositoryNotFoundError,
    )

    wanted = [*WORDS, "*.safetensors"] if weights else [*WORDS]
    try:
        found = snapshot_download(str(name), allow_patterns=wanted, ignore_patterns=[*OTHERS])
    except GatedRepoError as error:
        raise RagenError(
            f"the model '{name}' is gated: accept its terms on its page of the Hub, then log in "
            "with `hf auth login`"
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise RagenError(
            f"there is no model '{name}' that may be read from here: name a folder that exists, or "
            "an id of the Hub; for a private one log in with `hf auth login`"
        ) from error
    except (OSError, HTTPError, ImportError, ValueError) as error:  # the last two: an odd proxy
        if getattr(error, "errno", None):  # the disk's; errors of the network have no number here
            remedy = f"free space in {constants.HF_HUB_CACHE}, or set HF_HOME to another place"
            raise cannot("store", f"the model '{name}'", error, remedy) from error
        raise RagenError(
            f"the model '{name}' is not in the local cache (not all of it), and the Hub did "
            "not send it: check the name and the network, or name a local folder"
        ) from error
    return Path(found)


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
        return sizes_of(raw, _hub_shapes(name))  # not all of them have been downloaded
    found: dict[str, Shape] = {}
    for file in files:
        found |= {each: tuple(shape) for each, shape in shapes(file).items()}
    return sizes_of(raw, found)


def _hub_shapes(name: str) -> dict[str, Shape]:
    """The shapes of a model's weights on the Hub, by name; only the files' headers are fetched.

    Raises:
        RagenError: It has no safetensors, or the Hub does not answer.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (  # type: ignore[attr-defined]
        HTTPError,  # of its client, httpx or httpx2
        NotASafetensorsRepoError,
        SafetensorsParsingError,
    )

    try:
        files = HfApi().get_safetensors_metadata(name).files_metadata.values()
    except (NotASafetensorsRepoError, SafetensorsParsingError, OSError, HTTPError) as error:
        raise RagenError(
            f"the model '{name}' has no weights as safetensors on the Hub, or the network fails: "
            "use a model that has, or name a local folder"
        ) from error
    return {each: tuple(info.shape) for file in files for each, info in file.tensors.items()}
