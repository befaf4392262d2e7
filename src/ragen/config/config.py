"""`Config`: the settings of one training run, whose values go together."""

from __future__ import annotations

from pydantic import model_validator

from ragen.config.rules import RULES
from ragen.config.sections import Sections
from ragen.core.errors import RagenError


class Config(Sections):
    """One training run."""

    @property
    def episodes_at_once(self) -> int:
        """Maximum number of episodes played at once: one for each slot of each sampler."""
        engine = self.engine
        return self.rollout.slots * max(engine.samplers, engine.processes)

    def by_env(self) -> dict[str, Config]:
        """The config of each environment, as in a run of this environment alone."""
        if not self.env.mix:
            return {self.env.name: self}
        envs = {}
        for name, each in self.env.mix.items():
            task = {"name": name, "mix": {}} | each.model_dump(exclude={"share"})
            envs[name] = self.model_copy(update={"env": self.env.model_copy(update=task)})
        return envs

    def require_one_env(self) -> None:
        """Refuse several environments where only one can be played."""
        if self.env.mix:
            names = ", ".join(self.env.mix)
            raise RagenError(
                f"env.mix has several environments: name one of them with --env: {names}"
            )

    @model_validator(mode="after")
    def _go_together(self) -> Config:
        for rule in RULES:
            if rule.broken(self):
                raise ValueError(rule.message.format(c=self))
        return self
