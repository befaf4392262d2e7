"""Evaluations in the background: a second process plays with the weights that a run has saved.

Only the run writes its database. It takes an answer at a fixed step, even if the answer comes much
earlier (`training.loop`), so that timing decides nothing.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import shlex
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

from ragen.config.sources import refuse_changed
from ragen.core.errors import RagenError, UnplayableError
from ragen.core.stopping import run_async
from ragen.core.types import Episode, Group
from ragen.engines.factory import make_policy
from ragen.engines.machine import use_threads
from ragen.evaluation.evaluation import evaluate_envs
from ragen.evaluation.results import Evaluation
from ragen.rollout.setup import open_setups
from ragen.storage.checkpoint import sound
from ragen.storage.database import CHECKPOINTS
from ragen.storage.settings import run_config

Evaluated = tuple[Evaluation, list[Group]]
"""An evaluation and its episodes."""

Answer = Evaluated | UnplayableError | str
"""What the process answers: an evaluation, or why there is none; the text is of any other error."""

EPISODE, ANSWER = b".", b"\n"
"""What the process sends after each episode, and before a pickled answer."""

PROGRAM = (
    "from ragen.core.imports import load_for_good; load_for_good('ragen.training.background'); "
    "from ragen.training.background import serve; serve()"
)


class Background:
    """A process that evaluates a run's checkpoints, one at a time.

    The process starts with the first one. It ends with `end`, or when this process is killed.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._reader = ThreadPoolExecutor(1, "evaluation")
        self._answer: Future[Answer] | None = None

    def ask(self, folder: Path, step: int, beat: Callable[[], None]) -> None:
        """Begin to evaluate a run's checkpoint of `step`; `beat` is called after each episode."""
        process = self._process
        if process is None or process.poll() is not None:
            # In a session of its own, so that Ctrl-C reaches only the run, which ends it.
            process = self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", PROGRAM],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # the process has just died; `_read` reports it
            os.write(process.stdin.fileno(), json.dumps([step, str(folder)]).encode() + b"\n")
        self._answer = self._reader.submit(_read, process, folder, step, beat)

    async def answer(self) -> Evaluated:
        """The evaluation that `ask` has begun; a cancelled call can be repeated.

        Raises:
            UnplayableError: Every episode failed.
            RagenError: The policy could not be evaluated, or the process was killed.
        """
        assert self._answer is not None
        answer = await asyncio.wrap_future(self._answer)
        if isinstance(answer, UnplayableError):
            raise answer
        if isinstance(answer, str):
            raise RagenError(answer)
        return answer

    def end(self) -> None:
        """End the process, even in the middle of an evaluation."""
        if self._process is not None:
            self._process.kill()
            self._reader.shutdown()
            with self._process:  # closes the pipes
                pass


def _read(
    process: subprocess.Popen[bytes], folder: Path, step: int, beat: Callable[[], None]
) -> Answer:
    """An answer of the process, or the text of its error."""
    assert process.stdout is not None
    try:
        while process.stdout.read(1) == EPISODE:
            beat()
        answer: Answer = pickle.load(process.stdout)
    except (EOFError, pickle.UnpicklingError):
        run = shlex.quote(str(folder))
        return (
            f"the process that evaluates step {step} ended with code {process.wait()}; resume "
            f"with: ragen resume {run} (--eval.background false leaves this evaluation out)"
        )
    return answer


def serve() -> None:
    """Evaluate the checkpoints that are named on standard input, until it ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what an environment prints goes to standard error
    asked = SimpleQueue[tuple[int, Path]]()
    Thread(target=_listen, args=(asked,), daemon=True).start()

    def tell(_: Episode) -> None:
        answers.write(EPISODE)
        answers.flush()

    while True:
        step, folder = asked.get()
        try:
            answer: Answer = run_async(evaluate_checkpoint(folder, step, tell))
        except UnplayableError as error:
            answer = error
        except RagenError as error:
            answer = str(error)
        answers.write(ANSWER)
        pickle.dump(answer, answers)
        answers.flush()


def _listen(asked: SimpleQueue[tuple[int, Path]]) -> None:
    for line in sys.stdin:
        step, folder = json.loads(line)
        asked.put((step, Path(folder)))
    os._exit(0)  # the run has ended


async def evaluate_checkpoint(
    folder: Path, step: int, on_episode: Callable[[Episode], None]
) -> Evaluated:
    """Evaluate the checkpoint of a step exactly as the run itself would have, bit for bit.

    Raises:
        RagenError: The checkpoint is damaged, the environment's code has changed, or every episode
            failed.
    """
    checkpoint = folder / CHECKPOINTS / f"step-{step}"
    saved, config = sound(checkpoint, ()), run_config(folder)
    refuse_changed(config)
    use_threads(int(saved["loop"]["threads"]))
    policy, chat = make_policy(config, str(checkpoint))
    policy.version = int(saved["engine"]["version"])
    # This process has one sampler, however many the run has.
    alone = config.engine.model_copy(update={"samplers": 1, "most_samplers": 0})
    config = config.model_copy(update={"engine": alone})
    try:
        with ExitStack() as stack:
            target, seed, temperature = str(folder), config.seed, config.eval.temperature
            setups = {
                name: replace(each, temperature=temperature)
                for name, each in open_setups(config, chat, stack).items()
            }
            return await evaluate_envs(policy, setups, config, target, seed, on_episode)
    finally:
        await policy.close()
