"""A taskset of verifiers with a tool that all tasks share."""

import verifiers.v1 as vf

PRICES = {"apples": 250, "pears": 310}


class Shop(vf.Toolset[vf.SharedToolsetConfig]):
    TOOL_PREFIX = None

    @vf.tool
    def price(self, fruit: str) -> int:
        """The price of one kilo of a fruit in cents."""
        return PRICES[fruit]


class FruitData(vf.TaskData):
    answer: str


class FruitTask(vf.Task[FruitData]):
    @vf.reward(weight=0.5)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.5)
    async def asked(self, trace: vf.Trace) -> float:
        return float(trace.num_turns > 1)


class FruitConfig(vf.TasksetConfig):
    shop: vf.SharedToolsetConfig = vf.SharedToolsetConfig()


class FruitTaskset(vf.Taskset[FruitTask, FruitConfig]):
    def load(self):
        for kilos in range(1, 11):
            data = FruitData(
                prompt=[{"role": "user", "content": f"{kilos} kg of apples?"}],
                answer=str(250 * kilos),
            )
            yield FruitTask(data, self.config.task)

    @classmethod
    def toolsets(cls, config):
        return [Shop(config.shop)]


__all__ = ["FruitTaskset"]

if __name__ == "__main__":
    Shop.run()
