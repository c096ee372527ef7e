# SPDX-License-Identifier: Apache-2.0
"""The Python client and commands against a real server."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.server.requests import V
from tests.server.server import LAYERS
from vllm_steer import Client, ServerError

PROMPT = "Hello there"
EVERYTHING = {"memory": {"hooks": dict.fromkeys(("pre_attn", "post_attn", "post_block"), "all"), "positions": "all"}}
SMALL = {"memory": {"hooks": {"post_block": [1]}, "positions": "all_prompt"}}


def test_steering_and_captures(url: str) -> None:
    """Catches rows lost or changed between engine and client, in the response or fetched."""
    fields = {"temperature": 0, "max_tokens": 8}
    with Client(url) as client:
        plain = client.complete(PROMPT, **fields)
        inline = client.complete(PROMPT, steering_vectors={"post_block": {1: V}}, capture=SMALL, **fields)
        client.register("calm", base={"post_block": {1: V}})
        steered = client.complete(PROMPT, steering_modules=[("calm", 1.0)], capture=EVERYTHING, **fields)
        assert inline.text == steered.text != plain.text
        assert plain.applied is None
        assert steered.applied is not None and steered.applied.modules[0].name == "calm"
        capture = steered.choices[0].captures["memory"]
        assert capture.status == "ok" and not capture.sites
        rows = client.fetch(capture)
        assert len(rows) == 3 * LAYERS
        assert rows["post_block", 1].positions.tolist() == list(range(len(PROMPT) + 7))
        small = inline.choices[0].captures["memory"].sites["post_block", 1]
        assert small.positions.tolist() == list(range(len(PROMPT)))
        assert small.rows.allclose(rows["post_block", 1].rows[: len(PROMPT)], atol=1e-3)
        with pytest.raises(ServerError) as gone:
            client.fetch("x")
        assert gone.value.status == 404
        client.delete("calm")


def test_the_chat_command(url: str) -> None:
    """Catches a command that works only with a fake server: one turn of both conversations."""
    with Client(url) as client:
        client.register("calm", base={"post_block": {1: V}})
        messages = [{"role": "user", "content": "Hello"}]
        texts = [
            client.chat(messages, temperature=0, max_tokens=6, **fields).text
            for fields in ({}, {"steering_modules": ["calm"]})
        ]
        command = [sys.executable, "-m", "vllm_steer.cli.main", "chat", "calm", "--max-tokens", "6", "--url", url]
        done = subprocess.run(
            command, input="Hello\n", capture_output=True, text=True, env=os.environ, timeout=120, check=True
        )
        client.delete("calm")
    assert texts[0] != texts[1]
    shown = "".join(character for character in done.stdout if character.isalnum())
    for text in texts:
        assert "".join(character for character in text if character.isascii() and character.isalnum()) in shown
