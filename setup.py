"""Puts the software bill of materials into the wheel's metadata (PEP 770).

Everything else is in pyproject.toml. What setuptools finds in the egg-info goes into the dist-info.
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.egg_info import egg_info


class WithMaterials(egg_info):
    """Adds the folder ``sboms``."""

    def run(self) -> None:
        """Write the metadata, and the folder beside it."""
        super().run()
        shutil.copytree("sboms", Path(self.egg_info) / "sboms", dirs_exist_ok=True)


setup(cmdclass={"egg_info": WithMaterials})
