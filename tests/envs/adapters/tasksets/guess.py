"""An environment of verifiers with several turns: find a number from 1 to 7."""

import verifiers.v1 as vf


class GuessData(vf.TaskData):
    number: int


class GuessTask(vf.Task[GuessData]):
    pass


class GuessTaskset(vf.Taskset[GuessTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        number = 0
        while True:
            number = number % 7 + 1
            yield GuessTask(GuessData(prompt="Find my number.", number=number), self.config.task)


class GuessConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig(max_turns=4)


class GuessEnv(vf.Env[GuessConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as chat:
            said = await chat.turn()
            while not said.terminated:
                guess = int(said.last_reply)
                if guess == task.data.number:
                    chat.trace.record_reward("found", 1 / chat.trace.num_turns)
                    break
                said = await chat.turn("Higher." if guess < task.data.number else "Lower.")


__all__ = ["GuessEnv", "GuessTaskset"]
