"""`Config`: the settings of one training run, whose values go together.

Values are settled in the order defaults < algorithm preset < recipe < command line (`reading`).
"""

from __future__ import annotations

from pydantic import model_validator

from ragen.config.rules import RULES
from ragen.config.sections import Sections


class Config(Sections):
    """One training run."""

    @property
    def episodes_at_once(self) -> int:
        """Maximum number of episodes played at once: one for each slot of each sampler.

        Example:
            >>> Config().episodes_at_once
            64
        """
        return self.rollout.slots * self.engine.samplers

    @model_validator(mode="after")
    def _go_together(self) -> Config:
        for rule in RULES:
            if rule.broken(self):
                raise ValueError(rule.message.format(c=self))
        return self
