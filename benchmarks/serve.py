"""What an environment on a server costs: steps a second by one session and by many at once.

    python benchmarks/serve.py [--env sokoban] [--sessions 64] [--seconds 5]

Starts `ragen serve` on this machine. The clients are in this process, say what is the next step as
soon as they have the answer, and share the machine with the server. Also prints the CPU time of the
server for a step. Needs the extra openenv.
"""

import argparse
import asyncio
import json
import re
import subprocess
import sys
import time

import psutil

RESET = json.dumps({"type": "reset", "data": {"seed": 1}})


async def play(address: str, until: float) -> int:
    """Steps of one session."""
    from websockets.asyncio.client import connect

    steps = 0
    async with connect(address, compression=None) as session:
        while time.perf_counter() < until:
            await session.send(RESET)
            answer = json.loads(await session.recv())["data"]
            action = answer["metadata"]["actions"][0]
            step = json.dumps({"type": "step", "data": {"text": action}})
            while not answer["done"] and time.perf_counter() < until:
                await session.send(step)
                answer = json.loads(await session.recv())["data"]
                steps += 1
    return steps


async def measure(address: str, sessions: int, seconds: float) -> int:
    """Steps of all sessions."""
    until = time.perf_counter() + seconds
    return sum(await asyncio.gather(*(play(address, until) for _ in range(sessions))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--env", default="sokoban")
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=5.0)
    options = parser.parse_args()
    command = [sys.executable, "-m", "ragen", "serve", options.env, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            (address,) = re.findall(r"http(://\S+?)/? ", server.stdout.readline())
            process = psutil.Process(server.pid)
            for sessions in (1, options.sessions):
                before = sum(process.cpu_times()[:2])
                steps = asyncio.run(measure(f"ws{address}/ws", sessions, options.seconds))
                used = (sum(process.cpu_times()[:2]) - before) / steps
                rate = steps / options.seconds
                print(f"{sessions} sessions: {rate:,.0f} steps/s, {used * 1e6:.0f} µs of CPU each")
        finally:
            server.terminate()


if __name__ == "__main__":
    main()
