"""What is said of a process that is lost: one line, made from the pages that Ray writes of it."""

from __future__ import annotations

import re

ADDRESS = re.compile(r"\bip(?:v4)?: ?(\d+\.\d+\.\d+\.\d+)", re.IGNORECASE)

CAUSES: tuple[tuple[str, str], ...] = (
    ("running low on memory", "was killed by Ray, for its machine runs out of memory"),
    ("node has died", "is gone with its machine, or cut off from it"),
    ("creation task", "could not be started"),
    ("`ray.kill`", "was ended"),
    ("worker process has died", "was killed, perhaps for lack of memory, or has crashed"),
    ("unavailable", "does not answer: it was killed, or its machine or the network to it is gone"),
)
"""What Ray's text of each cause has in it, and what happened, in the order of the search: a text on
a process that was killed also speaks of memory."""


def what_happened(name: str, address: str, text: str) -> str:
    """The process of this name, its machine, and what happened to it according to Ray's `text`.

    `address` is the machine's; where it is not known yet, it is the first one in the text.

    Example:
        >>> what_happened("learner 0", "", "ip: 10.0.0.2 The actor is dead, killed by `ray.kill`")
        'learner 0 on 10.0.0.2 was ended'
    """
    found = ADDRESS.search(text)
    where = address or (found.group(1) if found else "")
    lines = text.split("\n")
    first = next((" ".join(line.split()) for line in lines if line.strip()), "")
    unknown = f"was lost: {first[:200]}" if first else "was lost"
    what = next((words for sign, words in CAUSES if sign in text), unknown)
    return f"{name} on {where} {what}" if where else f"{name} {what}"
