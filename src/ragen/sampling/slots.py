"""Which key–value slot holds which tokens: the local sampler's prefix cache. Loads no torch.

A slot is free (nothing in it is of use), running, or idle: it remembers the tokens of a finished
request. Within an episode the next prompt extends them, so it resumes the slot and reads only what
is new. Slots are known by their first prompt, so that it, or its beginning, can be copied.
"""

from __future__ import annotations

from collections.abc import Collection

Tokens = tuple[int, ...]

TAIL = 8
"""Last tokens by which a remembered sequence is looked up before it is compared in full."""


def common(one: Tokens, other: Tokens) -> int:
    """The number of tokens with which both begin, but for the last of each, which is read anyway.

    Example:
        >>> common((5, 6, 7, 8), (5, 6, 9)), common((5, 6), (5, 6, 7))
        (2, 1)
    """
    pairs = zip(one[:-1], other[:-1], strict=False)
    alike = (count for count, (a, b) in enumerate(pairs) if a != b)
    return next(alike, min(len(one), len(other)) - 1)


class SlotTable:
    """The state of a fixed number of slots.

    Example:
        >>> table = SlotTable(1)
        >>> slot = table.take()
        >>> table.remember(slot, (5, 6, 7))
        >>> table.resume((5, 6, 9)), table.resume((5, 6, 7, 8))
        (None, (0, 3))
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self.clear()

    def clear(self, running: Collection[int] = ()) -> None:
        """Forget all tokens, and free all slots but those that are running."""
        self._free = [slot for slot in range(self._num_slots - 1, -1, -1) if slot not in running]
        self._remembered: dict[int, Tokens] = {}  # idle slots, the longest idle first
        self._by_tail: dict[tuple[int, Tokens], list[int]] = {}
        self._first_prompt: list[Tokens | None] = [None] * self._num_slots
        self._holders: dict[Tokens, int] = {}  # a first prompt -> a slot that begins with it
        self._owned: dict[object, int] = {}  # an owner -> the idle slot that nobody else takes

    def resume(self, tokens: Tokens) -> tuple[int, int] | None:
        """Claim the idle slot with the longest beginning of `tokens`; returns it and the length."""
        best: list[int] = []
        longest = 0
        for (length, tail), slots in self._by_tail.items():
            if (
                longest < length <= len(tokens)
                and tokens[max(0, length - TAIL) : length] == tail
                and self._remembered[slots[0]] == tokens[:length]
            ):
                best, longest = slots, length
        if not best:
            return None
        slot = best[0]
        self._forget(slot)
        return slot, longest

    def resume_own(self, owner: object, tokens: Tokens) -> tuple[int, int] | None:
        """Claim the slot of an owner if `tokens` extend what it remembers; else give it up."""
        slot = self._owned.pop(owner, -1)
        remembered = self._remembered.get(slot, ())
        if not remembered or tokens[: len(remembered)] != remembered:
            return None
        self._forget(slot)
        return slot, len(remembered)

    def disown(self, owner: object) -> None:
        """Let others take the slot of an owner."""
        self._owned.pop(owner, None)

    def take(self) -> int | None:
        """Claim a free slot, else the one that has been idle longest; none if none can be taken."""
        if self._free:
            slot = self._free.pop()
        else:
            owned = {*self._owned.values()}
            slot = next((slot for slot in self._remembered if slot not in owned), -1)
            if slot < 0:
                return None
            self._forget(slot)
        first = self._first_prompt[slot]
        if first is not None and self._holders.get(first) == slot:
            del self._holders[first]
        self._first_prompt[slot] = None
        return slot

    def free(self, slot: int) -> None:
        """Free a running slot without remembering its tokens."""
        self._free.append(slot)

    def remember(self, slot: int, tokens: Tokens, owner: object = None) -> None:
        """Let a running slot idle with its tokens, the last of which was sampled but never read.

        With an `owner`, nobody else takes it.
        """
        self._remembered[slot] = tokens
        if owner is not None:
            self._owned[owner] = slot
        self._by_tail.setdefault((len(tokens), tokens[-TAIL:]), []).append(slot)

    def holder(self, prompt: Tokens) -> int | None:
        """A slot whose cache begins with a first prompt."""
        return self._holders.get(prompt)

    def beginning(self, tokens: Tokens) -> tuple[int, Tokens] | None:
        """A slot that begins with a first prompt that begins with `tokens`, and that prompt."""
        for prompt, slot in self._holders.items():
            if prompt[: len(tokens)] == tokens:
                return slot, prompt
        return None

    def set_first_prompt(self, slot: int, prompt: Tokens) -> None:
        """Record that a slot's cache begins with a first prompt."""
        self._first_prompt[slot] = prompt
        self._holders.setdefault(prompt, slot)

    def _forget(self, slot: int) -> None:
        tokens = self._remembered.pop(slot)
        key = (len(tokens), tokens[-TAIL:])
        self._by_tail[key].remove(slot)
        if not self._by_tail[key]:
            del self._by_tail[key]
