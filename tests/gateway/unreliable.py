"""An agent whose connections drop, which asks again, forks, raises and is killed; as its task says.

Its faults are drawn from the task's seed. It has two forms: coroutine and command.
"""

import asyncio
import contextlib
import http.client
import json
import os
import random
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

CALLS = 12
"""Replies that an episode asks for."""


class Dropped(Exception):
    """The agent has closed the connection before it read the reply."""


def ask(base_url, key, messages, *, retry=0, drop=""):
    """The reply to a conversation; `retry` counts the requests before this one with its body."""
    where = urlsplit(base_url)
    body = json.dumps({"model": "policy", "messages": messages})
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    headers["x-stainless-retry-count"] = str(retry)
    connection = http.client.HTTPConnection(where.hostname, where.port, timeout=60)
    try:
        connection.request("POST", f"{where.path}/chat/completions", body, headers)
        if drop == "while it waits":
            time.sleep(0.002)
        if drop == "at once" or drop == "while it waits":
            raise Dropped
        answer = connection.getresponse()
        if drop == "before it is read":
            raise Dropped
        read = json.load(answer)
        if answer.status != 200:
            raise RuntimeError(f"{answer.status}: {read}")
        return read["choices"][0]["message"]
    finally:
        connection.close()


def insist(base_url, key, messages, dice):
    """Ask until a reply was read, as clients do, and perhaps once more."""
    retry = 0
    while dice.random() < 0.25:
        drop = dice.choice(["at once", "while it waits", "before it is read"])
        try:
            ask(base_url, key, messages, retry=retry, drop=drop)
        except Dropped:
            retry += 1
    reply = ask(base_url, key, messages, retry=retry)
    if dice.random() < 0.1:
        assert ask(base_url, key, messages, retry=retry + 1) == reply, "a retry got another reply"
    return reply


def plain(task, base_url, api_key):
    dice, name = random.Random(task["seed"]), task["seed"]
    history = []
    for number in range(CALLS):
        if dice.random() < 0.15 and len(history) > 2:
            history = history[: 2 * dice.randrange(len(history) // 2)]  # it forks, or begins anew
        history.append({"role": "user", "content": f"Question {number} of {name}."})
        if dice.random() < 0.1:  # two sub-agents beside it
            sides = [random.Random(dice.random()) for _ in range(2)]
            asked = [
                [{"role": "user", "content": f"Side {n}, {number} of {name}."}] for n in (0, 1)
            ]
            with ThreadPoolExecutor(2) as pool:
                made = [
                    pool.submit(insist, base_url, api_key, *each)
                    for each in zip(asked, sides, strict=True)
                ]
            assert len({each.result()["content"] for each in made}) == 2
        history.append(insist(base_url, api_key, history, dice))
        if number == CALLS // 2 and task["end"] == "raise":
            raise ValueError("it lost its way")
        if number == CALLS // 2 and task["end"] == "die":
            os.kill(os.getpid(), signal.SIGKILL)
    if task["end"] == "leave":  # with an open call
        with contextlib.suppress(Dropped):
            ask(base_url, api_key, [*history, {"role": "user", "content": "?"}], drop="at once")
    return 1.0


async def main(task, base_url, api_key):
    return await asyncio.to_thread(plain, task, base_url, api_key)


if __name__ == "__main__":
    sys.stdout.write(
        json.dumps(
            plain(
                json.loads(sys.stdin.readline()),
                os.environ["OPENAI_BASE_URL"],
                os.environ["OPENAI_API_KEY"],
            )
        )
    )
