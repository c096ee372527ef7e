# SPDX-License-Identifier: Apache-2.0
"""Keys that a person takes for one of our fields and a program does not: they would be ignored without a word.

Every key of every request is looked at in the event loop, and names may be as long as a body. So a character is
normalised once, not wherever it stands, and a name is gone through by ``str.translate`` and one regular expression that
never goes back: the work is linear in the length of all names together, with a small factor. Names are looked at whole,
since the invisible characters ahead of a word have no end.
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

# Invisible, or drawn over a neighbour: controls, formats, halves of surrogate pairs, private and unassigned characters,
# marks.
_UNSEEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Mn", "Me"})

# That one character may become.
_MOST_LETTERS = 8


def reads_as(name: str, word: str) -> bool:
    """Whether somebody could read ``word``, of ASCII letters in lower case, somewhere in ``name``.

    Case, compatibility forms, accents and invisible characters do not count. A letter of another alphabet may stand for
    any letter, in no more than half of the word: which of them look alike depends on the font.
    """
    if name.isascii() and name.isprintable():
        return word in name.lower()
    return _pattern(word).search(name.translate(_SEEN)) is not None


class _Seen(dict[int, str]):
    """By code point, what is seen of a character: no letter, one or several."""

    MOST = 1 << 14
    """How many are kept; the texts of strangers can have more."""

    def __missing__(self, code: int) -> str:
        letters = unicodedata.normalize("NFKD", chr(code)).casefold()
        seen = "".join([letter for letter in letters if unicodedata.category(letter) not in _UNSEEN])
        if len(self) >= self.MOST:
            self.clear()
        # What stands for a whole sentence, as U+FDFA for 18 letters, is seen as one letter of another alphabet.
        self[code] = seen if len(letters) <= _MOST_LETTERS else chr(code)
        return self[code]


_SEEN = _Seen()


@lru_cache
def _pattern(word: str) -> re.Pattern[str]:
    """``word``, with letters that are not ASCII in place of up to half of its own.

    At each letter the next character decides which branch goes on, so that a try ends within the length of the word.
    """

    def rest(at: int, foreign: int) -> str:
        if at == len(word):
            return ""
        own = word[at] + rest(at + 1, foreign)
        return f"(?:{own}|[^\\x00-\\x7f]{rest(at + 1, foreign - 1)})" if foreign else own

    return re.compile(rest(0, len(word) // 2))
