# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C in a terminal: SIGINT to every process of an engine that captures to files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.server import environment
from vllm_steer import open_captures

SCRIPT = """
import os, signal, sys, threading, time
from pathlib import Path
from vllm_steer import LLM, SamplingParams

def ignores_interrupts(status):
    mask = next(line for line in status.splitlines() if line.startswith("SigIgn:")).split()[1]
    return bool(int(mask, 16) >> (signal.SIGINT - 1) & 1)

def interrupt(llm):
    states = llm.llm_engine.output_processor.request_states
    while not any(state.detokenizer.output_token_ids for state in list(states.values())):
        time.sleep(0.01)
    os.killpg(os.getpgrp(), signal.SIGINT)

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start background jobs with SIGINT ignored
    model, root = sys.argv[1:]
    consumers = {"filesystem": {"root": root, "layout": "packed"}}
    llm = LLM(model, enable_steering=True, enforce_eager=True, dtype="float32", max_model_len=512,
              skip_tokenizer_init=True, capture_consumers=consumers)
    capture = {"filesystem": {"hooks": {"post_block": [0]}, "positions": "all"}}

    def run(n, tokens):
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False, capture=capture)
        return llm.generate([{"prompt_token_ids": [1, 2, 3]}] * n, params, use_tqdm=False)

    print("stored:", [output.capture_results["filesystem"].status for output in run(3, 2)], flush=True)
    group = [path for path in Path("/proc").glob("[0-9]*/status") if os.getpgid(int(path.parent.name)) == os.getpgrp()]
    statuses = [path.read_text() for path in group]
    print("workers:", [ignores_interrupts(status) for status in statuses if "VLLM::Worker" in status], flush=True)
    threading.Thread(target=interrupt, args=(llm,), daemon=True).start()
    run(5, 500)
"""


@pytest.mark.slow
def test_interrupted_run(tiny_llama: Path, tmp_path: Path) -> None:
    """Catches workers that end before the engine, lost stored requests, and interrupted ones shown as complete.

    A worker that ends first makes the engine report a fatal error.
    """
    script, root = tmp_path / "script.py", tmp_path / "captures"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), str(tiny_llama), str(root)],
        env={**environment(worker_process=True), "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        start_new_session=True,
        timeout=300,
        check=False,
    )
    # Once Ray has been imported, which vLLM does if it is installed, an interrupted script exits with 1.
    assert done.returncode in (-signal.SIGINT, 1) and "KeyboardInterrupt" in done.stderr, done.stderr[-4000:]
    assert "workers: [True]" in done.stdout
    for trouble in ("Exception ignored", "fatal error", "EngineDeadError", "TypeError"):
        assert trouble not in done.stdout + done.stderr, done.stderr[-4000:]
    assert "stored: ['ok', 'ok', 'ok']" in done.stdout
    captures = open_captures(root)
    assert [(request.submission, request.status) for request in captures] == [(i, "ok") for i in range(3)]
    assert [entry.submission for entry in captures.missing()] == [3, 4, 5, 6, 7]
