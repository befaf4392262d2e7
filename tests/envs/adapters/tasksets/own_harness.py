"""A taskset of verifiers with a harness of its own."""

import httpx
import verifiers.v1 as vf


class GreetingTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def greeted(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == "Hello.")


class GreetingTaskset(vf.Taskset[GreetingTask, vf.TasksetConfig]):
    def load(self):
        return [GreetingTask(vf.TaskData(prompt="Greet."), self.config.task) for _ in range(2)]


class OneCall(vf.Harness[vf.HarnessConfig]):
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        _, prompt = self.resolve_prompt(data)
        body = {"model": ctx.model, "messages": [{"role": "user", "content": prompt}]}
        async with httpx.AsyncClient() as client:
            headers = {"Authorization": f"Bearer {secret}"}
            answer = await client.post(f"{endpoint}/chat/completions", json=body, headers=headers)
        return vf.ProgramResult(exit_code=0, stdout=answer.text, stderr="")


__all__ = ["GreetingTaskset", "OneCall"]
