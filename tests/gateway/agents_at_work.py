"""An agent that does what its task says, by chat completions; it has no word of RAGEN."""

import asyncio
import json
import time
import urllib.request

NAMES = [
    "talk",
    "raise late",
    "raise early",
    "silent",
    "hang",
    "too many",
    "no completion",
    "parallel",
]
TASKS = [{"do": "held out"}, *({"do": name} for name in NAMES[:4])]
TASKS += [{"do": "held out, too"}, *({"do": name} for name in NAMES[4:8])]
"""Every fifth of them is for evaluation."""


def main(task, base_url, api_key):
    def ask(messages):
        body = json.dumps({"model": "policy", "messages": messages}).encode()
        request = urllib.request.Request(
            f"{base_url}/chat/completions", body, {"Authorization": f"Bearer {api_key}"}
        )
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)["choices"][0]["message"]

    do = task["do"]
    messages = [{"role": "user", "content": "Hello."}]
    if do == "raise early":
        raise ValueError("it cannot begin")
    if do == "silent":
        return 1.0
    if do == "no completion":
        messages[0]["content"] = "Fail."
    if do == "parallel":
        return asyncio.run(side_by_side(ask))
    reply = ask(messages)
    if do == "raise late":
        raise ValueError("it lost its way")
    if do == "hang":
        time.sleep(60)
    for _ in range(3 if do == "too many" else 1):
        messages += [reply, {"role": "user", "content": "And?"}]
        reply = ask(messages)
    return True


async def side_by_side(ask):
    async def one(name):
        message = {"role": "user", "content": f"Hello from {name}."}
        reply = await asyncio.to_thread(ask, [message])
        return reply["content"]

    said = await asyncio.gather(*[one(name) for name in "abc"])
    return len(set(said)) == 3


def verify(task, answer):
    return answer == "right"
