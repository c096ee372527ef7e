# SPDX-License-Identifier: Apache-2.0
"""Steering expressions: ``0.7 calm@answer - 0.3 formal + ablate refusal when suspicion > 0.5``.

A server reads one as the field ``steering`` of a request; its names are registered modules then.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vllm_steer.errors import SteeringError
from vllm_steer.limits import MAX_EXPRESSION_CHARS, MAX_EXPRESSION_EDITS
from vllm_steer.registry.directions import Directions
from vllm_steer.request import Edit
from vllm_steer.request.scalars import shown

# An exponent is never read as the beginning of a name.
_NUMBER = r"(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+|(?![eE][+-]?\d))"
_NAME = r"(?!(?:when|ablate)\b)[A-Za-z][\w.-]*"
# White space stands behind what is required before it: of a run that several parts can match, a client's text would be
# searched in cubic time.
_TERM = re.compile(
    rf"\s*(?:(?P<sign>[+-])\s*)?(?:(?P<dose>{_NUMBER})\s*)?(?:(?P<kind>ablate)\s+)?(?P<name>{_NAME})"
    rf"(?:@(?P<part>[a-z_]+)(?::(?P<count>\d+))?)?"
    rf"(?:\s+when\s+(?P<readout>{_NAME})\s*(?P<side>[<>])\s*(?P<bound>-?{_NUMBER}))?(?=\s|$)"
)
_COUNTED: Mapping[str, Any] = {"first": lambda count: [[0, count]], "after": lambda count: [[count, None]]}
"""Parts with a number: generated tokens up to it, and from it on."""
_SIGN_IN_NAME = re.compile(r"(?<![\w.@:-])[A-Za-z][\w.@:-]*(?:\+|-[\d.])")
_EXAMPLE = "0.7 calm@answer - 0.3 formal + ablate refusal when suspicion > 0.5"


@dataclass(frozen=True)
class Term:
    """One vector of an expression."""

    name: str
    dose: float = 1.0
    """Dose, negative after a minus; for ``ablate`` the share of the component that is removed."""
    ablate: bool = False
    part: str | None = None
    """Tokens as in `Edit`, such as ``answer``, or ``first:20`` and ``after:20``; None for all."""
    when: tuple[str, str, float] | None = None
    """Readout, ``>`` or ``<``, and bound."""

    def __str__(self) -> str:
        number = "" if self.ablate and self.dose == 1 else f"{_number(abs(self.dose))} "
        text = f"{number}{'ablate ' if self.ablate else ''}{self.name}"
        text += f"@{self.part}" if self.part else ""
        return text + (f" when {self.when[0]} {self.when[1]} {_number(self.when[2])}" if self.when else "")

    def fields(self) -> dict[str, Any]:
        """Return the arguments of `Edit` for tokens and condition."""
        found: dict[str, Any] = {}
        if self.part is not None:
            kind, _, count = self.part.partition(":")
            found["tokens"] = {"generated": _COUNTED[kind](int(count))} if count else kind
        if self.when is not None:
            readout, side, bound = self.when
            found["when"] = {"readout": readout, "above" if side == ">" else "below": bound}
        return found


@dataclass(frozen=True)
class Expression:
    """A sum of vectors, each with a dose, the tokens that it steers, and a condition."""

    terms: tuple[Term, ...]

    @classmethod
    def parse(cls, text: str) -> Expression:
        """Read an expression; ``str`` of the result is an equal expression.

        Raises:
            SteeringError: The text is too long or has another form; the error shows the place.
        """
        if len(text) > MAX_EXPRESSION_CHARS:
            problem = f"has {len(text)} characters; at most {MAX_EXPRESSION_CHARS} are read"
            raise SteeringError("expression", problem)
        terms: list[Term] = []
        start = end = 0
        while text[end:].strip():
            match = _TERM.match(text, end)
            if match is None or (terms and not match["sign"]):
                problem = f"cannot be read from {shown(text[end:])} on{_misspelt(text[start:], text[end:])}"
                raise SteeringError("expression", f"{problem}; write it as {_EXAMPLE}")
            terms.append(_term(match))
            start, end = end, match.end()
        if not terms:
            raise SteeringError("expression", f"is empty; write it as {_EXAMPLE}")
        return cls(tuple(terms))

    def __str__(self) -> str:
        text = "".join(f" {'-' if np.signbit(term.dose) else '+'} {term}" for term in self.terms)
        return text.removeprefix(" + ").strip()

    def check_count(self, layers: Mapping[str, int]) -> None:
        """Raise SteeringError if the expression means too many edits; ``layers`` counts those of each name."""
        if (count := sum(layers[term.name] for term in self.terms)) > MAX_EXPRESSION_EDITS:
            problem = f"means {count} edits, one for each term and layer; at most {MAX_EXPRESSION_EDITS} are allowed"
            raise SteeringError("expression", problem)

    def edits(self, vectors: Mapping[str, Directions | str | Path]) -> list[Edit]:
        """Return the edits, for `SamplingParams.steering`.

        Args:
            vectors: Directions, or files of them, by the names of the expression. All of their layers are steered.

        Raises:
            SteeringError: A name has no vectors, or a file does not tell the length of the stream, so that a dose has
                no meaning.
        """
        loaded: dict[str, Directions] = {}
        for term in self.terms:
            if term.name not in vectors:
                known = ", ".join(vectors) or "none"
                raise SteeringError("expression", f"names {term.name}, which is not among the vectors: {known}")
            given = vectors[term.name]
            loaded[term.name] = given if isinstance(given, Directions) else Directions.load(given)
        self.check_count({name: len(each) for name, each in loaded.items()})
        edits = []
        for term in self.terms:
            for layer, direction in loaded[term.name].items():
                if term.ablate:
                    where: dict[str, Any] = {"point": direction.point, "layers": layer, "vector": direction.unit}
                    edits.append(Edit("ablate", strength=term.dose, **where, **term.fields()))
                elif direction.stream > 0:
                    edits.append(direction.add(term.dose, **term.fields()))
                else:
                    problem = f"gives a dose of {term.name}, which does not tell the length of the stream at layer"
                    remedy = f'give it in the provenance as "stream": {{"{layer}": ...}}, or use edits with a strength'
                    raise SteeringError("expression", f"{problem} {layer}; {remedy}")
        return edits


def _misspelt(term: str, rest: str) -> str:
    """Return what is probably wrong in ``rest``, or in the last term before it, with which ``term`` begins."""
    if "*" in rest:
        return ": write a number and a name with a space between them, without *"
    return ": a plus or minus needs a space before it" if _SIGN_IN_NAME.search(term) else ""


def _number(value: float) -> str:
    """Return a number as an expression has it: exact, without an exponent."""
    return np.format_float_positional(value, trim="-")


def _term(match: re.Match[str]) -> Term:
    part, count = match["part"], match["count"]
    if (part in _COUNTED) != (count is not None):
        problem = f"has @{part}{'' if count is None else ':' + count}; a number is for {' and '.join(_COUNTED)} only"
        raise SteeringError("expression", problem)
    dose = float(match["dose"] or 1) * (-1 if match["sign"] == "-" else 1)
    if match["kind"] and not 0 < dose <= 1:
        raise SteeringError("expression", f"ablates {dose:g} of {match['name']}; the share is above 0 and at most 1")
    when = None if match["readout"] is None else (match["readout"], match["side"], float(match["bound"]))
    return Term(match["name"], dose, bool(match["kind"]), part if count is None else f"{part}:{count}", when)
