"""Control tokens, and texts that cannot become one.

A *control token* structures a chat: it opens or ends a message, or belongs to the model alone. A
tokenizer makes one of any text that spells it, so an observation with ``<|end|><|user|>`` in it
would end its own message and open another one. So `ControlTokens.mark` puts a mark into each
such string of a message's content before the template renders it. The rendering is then encoded
with the template's control tokens as tokens, and everything else as text.

The result is verified by ids, because a text can become a control token without spelling it: a
normaliser may change it (upper case, full-width letters), and another added token may swallow a
piece of a control token beside it. A rendering without such a string has the ids that the tokenizer
gives it as a whole.

The `PLACE` of a picture is no control token. It stands where RAGEN wrote it, because the texts of
everybody else have lost it before (`ragen.core.pictures.without_places`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator

from ragen.chat.actions import TAGS
from ragen.chat.template import Ids, Tokenizer
from ragen.core.pictures import PLACE

MARK = "\ufdd0"
"""A code point that Unicode reserves for programs: no template touches it."""
BREAK, OWN = MARK + "0", MARK + "1"
"""A place where a text is split and encoded in two pieces, and a `MARK` that was in the text."""

AT_PLACE = -(2**63) - 1
"""The id of a `PLACE` in a rendering, which no token has, not even a picture token."""

_MARKUP = re.compile(r"[<\[\]].+[>\[\]]", re.DOTALL)
_BARS = re.compile(r"<[|｜].+[|｜]>", re.DOTALL)
_UNKNOWN = "\U0010fffd"  # a character that no vocabulary has


class ControlTokens:
    """The control tokens of a tokenizer and a chat template, by their `ids`.

    They are the tokens that end a turn (`end_ids`); all added tokens that are flagged special or
    written ``<|…|>``; and added tokens in brackets that `written`, the template's source and
    renderings, contains. White space, the tags of the reply format (``<think>``) and the `allowed`
    tokens are left out, even where they are flagged special: any reply may contain them.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        encode: Callable[[str], Ids],
        written: str,
        end_ids: Collection[int],
        allowed: Collection[int] = (),
    ) -> None:
        added = tokenizer.get_added_vocab()
        flagged = getattr(tokenizer, "added_tokens_decoder", {})

        def structures(text: str, token: int) -> bool:
            special = token in flagged and flagged[token].special
            in_template = _MARKUP.fullmatch(text) is not None and text in written
            return text not in TAGS and (special or in_template or bool(_BARS.fullmatch(text)))

        self._encode = encode
        self._tokens = {
            text: token
            for text, token in added.items()
            if text.strip() and (token in end_ids or structures(text, token))
            if token not in allowed
        }
        self.ids = frozenset((*self._tokens.values(), *end_ids))
        # Tokens of white space or of unknown characters are no sign of a forged control token.
        blank = {token for text, token in added.items() if not text.strip()}
        self._verified = self.ids - blank - (set(encode(_UNKNOWN)) - set(end_ids))
        # The longest first, as a tokenizer matches them.
        texts = "|".join(map(re.escape, sorted(self._tokens, key=len, reverse=True))) or "(?!)"
        self._control = re.compile(f"({texts})")
        self._begin = re.compile(f"(?={texts})(.)", re.DOTALL)

    def mark(self, content: str) -> str:
        """A message's content, with a `BREAK` in each string that spells a control token.

        A single character that is a control token has no other spelling, and becomes U+FFFD.
        """
        if MARK not in content and self._control.search(content) is None:
            return content
        return self._begin.sub(
            lambda first: "\ufffd" if first[1] in self._tokens else first[1] + BREAK,
            content.replace(MARK, OWN),
        )

    def encode_rendering(self, text: str) -> Ids:
        """Ids of a rendering of marked contents: its control tokens are the template's alone.

        Each `PLACE` becomes an `AT_PLACE`.
        """
        if PLACE in text:
            text, _, rest = text.partition(PLACE)
            ids = self.encode_rendering(text)
            for each in rest.split(PLACE):
                ids += (AT_PLACE, *self._join(self._control.split(each), before="\n"))
            return ids
        pieces = self._control.split(text)  # every second one is a control token
        if MARK not in text:
            ids = self._encode(text)
            written = (self._tokens[piece] for piece in pieces[1::2])
            if self._only_verified(ids) == self._only_verified(written):
                return ids
        return tuple(self._join(pieces))

    def in_text(self, text: str) -> frozenset[int]:
        """The control tokens that a text spells."""
        return frozenset(self._tokens[each] for each in self._control.findall(text))

    def _only_verified(self, ids: Iterable[int]) -> list[int]:
        return [token for token in ids if token in self._verified]

    def _join(self, pieces: list[str], before: str = "") -> Iterator[int]:
        for number, piece in enumerate(pieces):
            if number % 2:
                yield self._tokens[piece]
                before = piece
                continue
            for text in piece.split(BREAK):
                yield from self._spell(text.replace(OWN, MARK), before)
                before = "\n"  # no token joins a line break and what follows

    def _spell(self, text: str, before: str) -> Ids:
        """Ids of `text` after `before`, without characters that only a control token can spell."""
        ids = ids_after(self._encode, before, text)
        if self._verified.isdisjoint(ids):
            return ids
        if len(text) < 2:
            return ()
        half = len(text) // 2
        return self._spell(text[:half], before) + self._spell(text[half:], "\n")


def ids_after(encode: Callable[[str], Ids], before: str, text: str) -> Ids:
    """Ids of `text` after the text `before`; ids of `text` alone if a token joins the two."""
    head, whole = encode(before), encode(before + text)
    return whole[len(head) :] if whole[: len(head)] == head else encode(text)
