"""Bandit: two arms known by name only, one pull (arXiv:2504.20073, section 3.1)."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from ragen.core.errors import RagenError
from ragen.envs.contract import Baselines, Env, Info, Options, Probability, State, generators, pick


class Pair(NamedTuple):
    """The names of a level's two arms: `low` sounds safe, `high` sounds risky."""

    low: str
    high: str


def _pairs(text: str) -> tuple[Pair, ...]:
    return tuple(Pair(*names.split("/")) for names in text.split())


NAMES: dict[str, dict[str, tuple[Pair, ...]]] = {
    "dragon_phoenix": {"train": _pairs("Phoenix/Dragon"), "test": _pairs("Phoenix/Dragon")},
    "professions": {"train": _pairs("Teacher/Engineer"), "test": _pairs("Librarian/Trader")},
    "pairs": {
        "train": _pairs(
            "Teacher/Trader Nurse/StartupFounder Librarian/Investor Accountant/StockBroker "
            "Engineer/RealEstateAgent Pharmacist/Musician Clerk/Freelancer Technician/Youtuber "
            "Planner/Artist Postman/Pilot Banker/VentureCapitalist Gardener/Cryptominer"
        ),
        "test": _pairs(
            "Receptionist/Explorer Archivist/Filmmaker Bookkeeper/Consultant "
            "SocialWorker/Photographer Mechanic/GameDesigner Secretary/Entrepreneur "
            "Cashier/DataScientist CivilServant/StartupAccelerator"
        ),
    },
}
"""The papers' arm names, by set and split."""


class Bandit(Env):
    """Two named arms, one pull. The names hint at how each arm pays.

    Observation:
        The two names, in an order drawn from the level seed.

    Actions:
        The two names.

    Reward:
        The safe arm always pays `safe_reward`. The risky arm pays 1 with probability
        `risky_probability`, otherwise 0.

    Ends when:
        An arm is pulled. The episode is a success if that arm has the higher mean, whatever it
        paid: chance decides the reward, not the success.

    Parameters:
        name_set, split: The names of the arms (`NAMES`).
        safe_reward: The reward of the safe arm: 0.15 in the paper, 0.1 in its code.
        risky_probability: The probability that the risky arm pays.
        reverse: Swap the arms behind the names (BanditRev).

    Example:
        >>> env = Bandit()
        >>> env.reset(seed=123, options={"noise_seed": 0})[0]
        'Arms: Dragon, Phoenix'
        >>> env.step("Phoenix")
        ('Phoenix paid 0.15.', 0.15, True, False, {'success': False, 'effective': True})
    """

    goal = "Bandit"
    max_turns = actions_per_turn = max_actions = 1

    def __init__(
        self,
        name_set: Literal["dragon_phoenix", "professions", "pairs"] = "dragon_phoenix",
        split: Literal["train", "test"] = "train",
        safe_reward: Annotated[float, Field(ge=-1000, le=1000)] = 0.15,
        risky_probability: Probability = 0.25,
        reverse: bool = False,
    ) -> None:
        if safe_reward == risky_probability:
            raise RagenError("safe_reward equals risky_probability: no arm would be the better one")
        self.name = "bandit-rev" if reverse else "bandit"
        self._pairs = NAMES[name_set][split]
        self._safe_reward = safe_reward
        self._risky_probability = risky_probability
        self._reverse = reverse
        self.reset(seed=0)

    @property
    def rules(self) -> str:
        return (
            "You are playing a bandit game. Goal: maximise your reward by choosing which of two "
            "arms to pull. You pull once.\n"
            "Each arm has its own reward distribution, related to the meaning of its name. Reason "
            "about what the names suggest about how each arm pays, on average, and answer with "
            "the name of the arm that you choose."
        )

    @property
    def actions(self) -> tuple[str, ...]:
        return self._arms

    def sounds_risky(self, arm: str) -> bool:
        """True for the name of its pair that sounds risky, however the arm pays."""
        return any(arm == pair.high for pair in self._pairs)

    def reset(self, *, seed: int | None = None, options: Options = None) -> tuple[str, Info]:
        level, self._noise = generators(seed, options)
        pair = pick(level, self._pairs)
        self._safe, self._risky = (pair.high, pair.low) if self._reverse else pair
        self._arms = (pair.low, pair.high) if level.random() < 0.5 else (pair.high, pair.low)
        self._pulled: str | None = None
        self._paid = 0.0
        return self.state_key(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        self.action_index(action)
        # Drawn for the safe arm too, so that the noise does not depend on the choice.
        wins = self._noise.random() < self._risky_probability
        self._pulled = action
        self._paid = self._safe_reward if action == self._safe else float(wins)
        info = {"success": action == self._better, "effective": True}
        return self.state_key(), self._paid, True, False, info

    def get_state(self) -> State:
        return {
            "arms": list(self._arms),
            "safe": self._safe,
            "pulled": self._pulled,
            "paid": self._paid,
            "noise": self._noise.bit_generator.state,
        }

    def set_state(self, state: State) -> None:
        first, second = state["arms"]
        self._arms = (first, second)
        self._safe = state["safe"]
        self._risky = second if self._safe == first else first
        self._pulled, self._paid = state["pulled"], state["paid"]
        self._noise.bit_generator.state = state["noise"]

    def solve(self, turns_left: int, actions_left: int, actions_per_turn: int) -> list[str]:
        return [self._better]

    def baselines(self, turns: int, actions_per_turn: int, actions: int) -> Baselines:
        means = (self._safe_reward, self._risky_probability)
        return Baselines(0.5, 1.0, sum(means) / 2, max(means))

    @property
    def _better(self) -> str:
        return self._risky if self._risky_probability > self._safe_reward else self._safe

    def state_key(self) -> str:
        if self._pulled is None:
            return f"Arms: {', '.join(self._arms)}"
        return f"{self._pulled} paid {self._paid:g}."
