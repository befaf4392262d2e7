"""The environment of verifiers of `benchmarks/waiting.py`: it waits after each reply."""

import asyncio

import verifiers.v1 as vf

TURNS = 3


class WaitConfig(vf.TasksetConfig):
    delay: float = 0.0


class WaitData(vf.TaskData):
    delay: float


class WaitTask(vf.Task[WaitData]):
    pass


class WaitTaskset(vf.Taskset[WaitTask, WaitConfig]):
    def load(self):
        data = WaitData(prompt="Bandit", delay=self.config.delay)
        return [WaitTask(data, self.config.task) for _ in range(20)]


class WaitEnv(vf.SingleAgentEnv):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as chat:
            await chat.turn()
            for _ in range(TURNS - 1):
                await asyncio.sleep(task.data.delay)
                await chat.turn("on")
            await asyncio.sleep(task.data.delay)


__all__ = ["WaitEnv", "WaitTaskset"]
