"""``ragen new-world``: a file with a small environment that a user changes into another one."""

from __future__ import annotations

import keyword
from pathlib import Path

from ragen.core.errors import RagenError
from ragen.core.files import file_errors
from ragen.envs import example, example_pictures


def write_new_world(name: str, folder: Path, picture: bool = False) -> tuple[Path, str]:
    """Write the environment of `ragen.envs.example` as ``NAME.py``; returns file and class name.

    With `picture`, the file also has the class of `ragen.envs.example_pictures`, which is returned.

    Raises:
        RagenError: `name` cannot name a module, or the file exists or cannot be written.
    """
    if not (name.isascii() and name.isidentifier()) or keyword.iskeyword(name):
        raise RagenError(
            f"{name!r} cannot name a Python file: use letters, digits and _, as in my_world"
        )
    title = "".join(part[:1].upper() + part[1:] for part in name.split("_")) or "World"
    file = folder / f"{name}.py"
    first, rest = Path(example.__file__).read_text(encoding="utf-8").split("\n", 1)
    assert first == f'"""{example.__doc__}"""'
    if picture:
        seen = Path(example_pictures.__file__).read_text(encoding="utf-8").partition("\n\n\n")[2]
        rest = rest.replace("\nfrom ragen", "\nimport numpy as np\n\nfrom ragen", 1)
        rest = f"{rest}\n\n{seen}"
    rest = rest.replace("Corridor", title).replace('corridor"', f'{name}"')
    title = f"Seen{title}" if picture else title
    if file.exists():
        raise RagenError(f"{file} exists already; choose another name")
    about = f"The environment {name}; `ragen check {file.name}:{title}` checks it."
    with file_errors("write", file), file.open("x", encoding="utf-8") as new:
        new.write(f'"""{about}"""\n{rest}')
    return file, title
