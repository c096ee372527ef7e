# SPDX-License-Identifier: Apache-2.0
"""Keys that a person takes for one of our fields and a program does not: they would be ignored without a word."""

from __future__ import annotations

import unicodedata

# Invisible, or drawn over a neighbour: controls, formats, halves of surrogate pairs, private and unassigned characters,
# marks.
_UNSEEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Mn", "Me"})


def reads_as(name: str, word: str) -> bool:
    """Whether somebody could read ``word``, of ASCII letters in lower case, somewhere in ``name``.

    Case, compatibility forms, accents and invisible characters do not count. A letter of another alphabet may stand for
    any letter, in no more than half of the word: which of them look alike depends on the font.
    """
    text = name.lower() if name.isascii() and name.isprintable() else _seen(name)
    if word in text or text.isascii():
        return word in text
    return any(_stands_for(text[at : at + len(word)], word) for at in range(len(text) - len(word) + 1))


def _seen(name: str) -> str:
    folded = unicodedata.normalize("NFKD", name).casefold()
    return "".join(letter for letter in folded if unicodedata.category(letter) not in _UNSEEN)


def _stands_for(part: str, word: str) -> bool:
    foreign = sum(not letter.isascii() for letter in part)
    return 2 * foreign <= len(word) and all(a == b or not a.isascii() for a, b in zip(part, word, strict=True))
