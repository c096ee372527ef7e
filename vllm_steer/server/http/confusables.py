# SPDX-License-Identifier: Apache-2.0
"""Detection of keys that look like one of our fields but are not, and so would be ignored.

The names of all keys of every request are checked in the event loop, and a name can be as long as the body. The work is
therefore linear in the length of the names, with a small factor: each distinct character is normalised once, and a name
is processed by ``str.translate`` and one regular expression without backtracking. Names are not truncated, because any
number of invisible characters can precede a word.
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

# Invisible or combining characters: controls, formats, surrogates, private use, unassigned, marks.
_INVISIBLE = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Mn", "Me"})

# Longest expansion of one character.
_MAX_EXPANSION = 8


def resembles(name: str, word: str) -> bool:
    """Return whether a reader could take a part of ``name`` for ``word``.

    Case, compatibility forms, accents and invisible characters are ignored. Letters of other alphabets may replace up
    to half of the word, because which letters look alike depends on the font.

    Args:
        name: Any text, of any length.
        word: ASCII letters in lower case.
    """
    if name.isascii() and name.isprintable():
        return word in name.lower()
    return _pattern(word).search(name.translate(_SKELETONS)) is not None


class _SkeletonCache(dict[int, str]):
    """Visible letters of each character, by code point: none, one or several."""

    MAX_SIZE = 1 << 14

    def __missing__(self, code: int) -> str:
        letters = unicodedata.normalize("NFKD", chr(code)).casefold()
        visible = "".join([letter for letter in letters if unicodedata.category(letter) not in _INVISIBLE])
        if len(self) >= self.MAX_SIZE:
            self.clear()
        # A ligature of a whole phrase, such as U+FDFA (18 letters), counts as one foreign letter.
        self[code] = visible if len(letters) <= _MAX_EXPANSION else chr(code)
        return self[code]


_SKELETONS = _SkeletonCache()


@lru_cache
def _pattern(word: str) -> re.Pattern[str]:
    """Return a pattern of ``word`` in which non-ASCII characters replace up to half of the letters.

    At each letter the next character selects the branch, so an attempt ends within the length of the word.
    """

    def build(at: int, foreign: int) -> str:
        if at == len(word):
            return ""
        own = word[at] + build(at + 1, foreign)
        return f"(?:{own}|[^\\x00-\\x7f]{build(at + 1, foreign - 1)})" if foreign else own

    return re.compile(build(0, len(word) // 2))
