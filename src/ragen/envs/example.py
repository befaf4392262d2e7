"""A small environment to begin from: ``ragen new-world NAME`` writes a copy of this file."""

from __future__ import annotations

from ragen.envs.contract import Env, Info, Options, State, generators


class Corridor(Env):
    """Cells in a row: the goal is at one end, a hole at the other, and the player between them.

    Observation:
        One symbol a cell: ``P`` player, ``G`` goal, ``H`` hole, ``_`` floor.

    Actions:
        ``Left`` and ``Right`` move one cell.

    Reward:
        1 for the goal, otherwise 0.

    Ends when:
        The player is in the goal (success) or in the hole.

    Parameters:
        cells: The number of cells.
        slip: The probability that a step does not move.

    Example:
        >>> env = Corridor(slip=0.0)
        >>> env.reset(seed=0)[0]
        'H _ P _ _ G'
        >>> env.step("Left")
        ('H P _ _ _ G', 0.0, False, False, {'success': False, 'effective': True})
    """

    name = "corridor"
    goal = "Corridor"
    rules = "You are P in a row of cells. Reach the goal G and keep out of the hole H. _ is floor."
    actions = ("Left", "Right")
    max_turns, actions_per_turn, max_actions = 3, 3, 9  # the budgets of an episode

    def __init__(self, cells: int = 6, slip: float = 0.1) -> None:
        self.cells, self.slip = cells, slip
        self.reset(seed=0)

    def reset(self, *, seed: int | None = None, options: Options = None) -> tuple[str, Info]:
        # The level follows from the seed, and random events follow from the noise seed.
        level, self.noise = generators(seed, options)
        self.goal_cell = 0 if level.random() < 0.5 else self.cells - 1
        self.player = 1 + int(level.random() * (self.cells - 2))
        return self.show(), {}

    def show(self) -> str:
        """What the agent sees."""
        return " ".join(self.symbols())

    def symbols(self) -> list[str]:
        """The cells."""
        symbols = ["_"] * self.cells
        symbols[0] = symbols[-1] = "H"
        symbols[self.goal_cell] = "G"
        symbols[self.player] = "P"
        return symbols

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        move = (-1, 1)[self.action_index(action)]  # raises ValueError for an unknown action
        before = self.player
        if self.noise.random() >= self.slip:
            self.player = min(max(self.player + move, 0), self.cells - 1)
        success = self.player == self.goal_cell
        terminated = self.player in (0, self.cells - 1)
        info = {"success": success, "effective": self.player != before}
        return self.show(), float(success), terminated, False, info

    # The state: a snapshot restores all of it, and states that look equal have equal keys.

    def get_state(self) -> State:
        noise = self.noise.bit_generator.state
        return {"goal": self.goal_cell, "player": self.player, "noise": noise}

    def set_state(self, state: State) -> None:
        self.goal_cell, self.player = state["goal"], state["player"]
        self.noise.bit_generator.state = state["noise"]

    def state_key(self) -> str:
        return " ".join(self.symbols())

    # Optimal play is the baseline beside random play. Leave it out where none is known.

    def solve(self, turns_left: int, actions_left: int, actions_per_turn: int) -> list[str]:
        towards = "Left" if self.goal_cell == 0 else "Right"
        return [towards] * min(actions_left, actions_per_turn)

    # A drawing for `ragen view`, one character a cell. The agent never sees it.

    def drawing(self) -> list[str]:
        return ["".join(self.symbols())]
