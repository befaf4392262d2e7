"""A taskset of verifiers with one turn: sums."""

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        if trace.last_reply == "Ask a judge.":
            raise ConnectionError("the judge is gone")
        return float(trace.last_reply == self.data.answer)


class SumConfig(vf.TasksetConfig):
    size: int = 10
    plus: int = 5


class SumTaskset(vf.Taskset[SumTask, SumConfig]):
    def load(self):
        for i in range(self.config.size):
            data = SumData(
                prompt=f"{i} + {self.config.plus}",
                system_prompt="Add the numbers.",
                answer=str(i + self.config.plus),
            )
            yield SumTask(data, self.config.task)


__all__ = ["SumTaskset"]
