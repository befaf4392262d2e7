"""The engine on Ray: learners and samplers in processes of their own, on one machine or many.

Ray is an extra, so it is imported here and nowhere else.
"""

from __future__ import annotations

from ragen.config.config import Config
from ragen.core.errors import RagenError
from ragen.engines.engine import Engine


def RayEngine(config: Config, path: str) -> Engine:  # noqa: N802
    """Refuse."""
    raise RagenError('engine.name = "ray" is being built')
