# SPDX-License-Identifier: Apache-2.0
"""Prompts, answers and foils of a study, as tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from vllm_steer.errors import SteeringError
from vllm_steer.limits import MAX_STUDY_PAIRS
from vllm_steer.patching.metrics import Targets
from vllm_steer.patching.runner import Runner
from vllm_steer.request.scalars import is_integer, shown

Text: TypeAlias = "str | Sequence[int]"
"""Text, or a list of token ids."""


@dataclass(frozen=True)
class Pair:
    """One clean prompt with the prompt that it is compared with."""

    clean: tuple[int, ...]
    corrupt: tuple[int, ...]
    """Empty if the clean prompt is corrupted by noise or ablated."""
    targets: Targets


def read_tokens(value: object, runner: Runner, field: str, *, special: bool) -> tuple[int, ...]:
    """Return a prompt or an answer as tokens.

    Args:
        value: Text or token ids; an answer may be one id.
        runner: Engine whose tokenizer is used.
        field: Path of the value, for errors.
        special: Whether a text gets the tokenizer's special tokens, as prompts do.

    Raises:
        SteeringError: The value has another form, is empty, or has a token that the model lacks.
    """
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            problem = f"{shown(value)} has half of a surrogate pair at character {error.start}, which is not text"
            raise SteeringError(field, problem) from None
        try:
            tokens = tuple(runner.encode(value, special))
        except SteeringError as error:  # the engine has no tokenizer
            raise SteeringError(field, error.problem) from None
        if not tokens:
            raise SteeringError(field, f"{shown(value)} has no tokens")
        return tokens
    if hasattr(value, "tolist"):
        value = value.tolist()
    if is_integer(value) and not special:
        value = [value]
    if not isinstance(value, (list, tuple)) or not all(map(is_integer, value)):
        raise SteeringError(
            field, f"must be a text or a list of token ids{'' if special else ', or one id'}, not {shown(value)}"
        )
    if not value:
        raise SteeringError(field, "is empty; give at least one token")
    vocab = runner.facts.vocab_size
    for i, token in enumerate(value):
        if not 0 <= token < vocab:
            raise SteeringError(f"{field}[{i}]", f"token {token} is not below the vocabulary's size, {vocab}")
    return tuple(int(token) for token in value)


def read_pair(
    runner: Runner, clean: object, corrupt: object | None, answer: object, foil: object | None, field: str = ""
) -> Pair:
    """Return one pair; ``field`` is the path of its parts, with a dot at the end.

    Raises:
        SteeringError: A part is invalid, or answer and foil are the same or begin with one another.
    """
    targets = Targets(
        read_tokens(answer, runner, f"{field}answer", special=False),
        () if foil is None else read_tokens(foil, runner, f"{field}foil", special=False),
    )
    shorter = min(len(targets.answer), len(targets.foil))
    if shorter and targets.answer[:shorter] == targets.foil[:shorter]:
        raise SteeringError(
            f"{field}foil",
            f"has the tokens {list(targets.foil)}, and the answer {list(targets.answer)}: one begins with the other, "
            "so they do not exclude each other",
        )
    pair = Pair(
        read_tokens(clean, runner, f"{field}clean", special=True),
        () if corrupt is None else read_tokens(corrupt, runner, f"{field}corrupt", special=True),
        targets,
    )
    longest, most = max(len(targets.answer), len(targets.foil)), runner.facts.max_model_len
    for name, tokens in (("clean", pair.clean), ("corrupt", pair.corrupt)):
        if most is not None and len(tokens) + longest > most:
            raise SteeringError(
                f"{field}{name}",
                f"has {len(tokens)} tokens, and answer or foil {longest}; together they exceed max_model_len, {most}",
            )
    return pair


def read_pairs(value: object, runner: Runner, *, with_corrupt: bool) -> tuple[Pair, ...]:
    """Return pairs that are given as ``(clean, corrupt, answer, foil)``; the foil may be None or omitted.

    Without ``with_corrupt``, pairs are ``(clean, answer, foil)``.

    Raises:
        SteeringError: The list is empty, or a pair is invalid or lacks its corrupt prompt.
    """
    form = "(clean, corrupt, answer, foil)" if with_corrupt else "(clean, answer, foil)"
    full = 4 if with_corrupt else 3
    if not isinstance(value, (list, tuple)) or not value:
        raise SteeringError("pairs", f"must be a list of {form}, not {shown(value)}")
    if len(value) > MAX_STUDY_PAIRS:
        raise SteeringError("pairs", f"has {len(value)} pairs; a study has at most {MAX_STUDY_PAIRS}")
    pairs = []
    for i, item in enumerate(value):
        if not isinstance(item, (list, tuple)) or len(item) not in (full, full - 1):
            raise SteeringError(f"pairs[{i}]", f"must be {form}; the foil may be left out. Got {shown(item)}")
        parts = [*item, None] if len(item) < full else list(item)
        clean, corrupt, answer, foil = parts if with_corrupt else (parts[0], None, *parts[1:])
        if with_corrupt and corrupt is None:
            raise SteeringError(
                f"pairs[{i}].corrupt", "is missing; give a prompt, or noise or ablate instead of all corrupt prompts"
            )
        pairs.append(read_pair(runner, clean, corrupt, answer, foil, f"pairs[{i}]."))
    if len({bool(pair.targets.foil) for pair in pairs}) > 1:
        raise SteeringError("pairs", "some pairs have a foil and others have none; give all or none")
    return tuple(pairs)
