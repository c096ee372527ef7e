# SPDX-License-Identifier: Apache-2.0
"""A tiny model with a tokenizer, and a real server process over it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import torch

from benchmarks.server_process import free_port
from tests.warm import WarmProcess, start_warm

HIDDEN, LAYERS = 64, 4
MODEL = "tiny"
START_TIMEOUT = 180.0
VLLM_COMMAND = [sys.executable, "-m", "vllm.entrypoints.cli.main"]

_CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"


def save_model(folder: Path) -> Path:
    """A random float32 Llama with one token per byte: `config.json`, weights and tokenizer in `folder`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.chat_template = _CHAT_TEMPLATE
    fast.save_pretrained(folder)

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(alphabet),
        hidden_size=HIDDEN,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        # Large enough for every sublayer to matter: with the usual 0.02 an edit hardly changes the output.
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).float().save_pretrained(folder)
    return folder


def run_server(
    model: Path, flags: Sequence[str], log: Path, *, worker_process: bool = False, warm: bool = False
) -> Iterator[str]:
    """Start ``vllm serve``, yield its base URL once it is healthy, and end its whole process group.

    Args:
        model: Folder of the model.
        flags: Arguments after the common ones.
        log: File for the output of all processes.
        worker_process: See :func:`environment`.
        warm: Start all processes of the server with vLLM imported. They share the memory of what is imported, and read
            no variables that only an import or the C library reads.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    settings = ["--enforce-eager", "--dtype", "float32", "--max-model-len", "256", "--max-logprobs", "20"]
    where = ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", MODEL]
    arguments = ["serve", str(model), *where, *settings, *flags]
    variables = environment(worker_process=worker_process)
    process: subprocess.Popen[bytes] | WarmProcess
    if warm:
        process = start_warm(VLLM, ["vllm", *arguments], variables, Path.cwd(), [log, log, Path(os.devnull)])
    else:
        with log.open("w") as output:
            process = subprocess.Popen(
                [*VLLM_COMMAND, *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=variables,
                start_new_session=True,
            )
    try:
        _wait_until_healthy(process, url, log)
        yield url
    finally:
        _end(process)


VLLM = """\
import multiprocessing
from multiprocessing import get_context
multiprocessing.get_context = lambda method=None: get_context("fork")
from vllm.entrypoints.cli.main import main
main()
"""
"""The command ``vllm`` for a warm process, with forks of it as API servers and engine, where vLLM would spawn them."""


def environment(*, worker_process: bool = False) -> dict[str, str]:
    """Return the environment of a server process: small caches, both cores shared, no network.

    Args:
        worker_process: Whether the worker has a process of its own, as vLLM's default is on a CPU. Otherwise it runs in
            the engine's process, as on one GPU. A process of its own takes ten seconds to import vLLM.
    """
    return {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(worker_process)),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }


def _wait_until_healthy(process: subprocess.Popen[bytes] | WarmProcess, url: str, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT
    with httpx.Client(timeout=5) as client:  # one for all attempts: a new one loads all certificates
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise RuntimeError(f"the server ended with {process.poll()}:\n{_errors(log)}")
            with contextlib.suppress(httpx.TransportError):
                if client.get(f"{url}/health").status_code == 200:
                    return
            time.sleep(0.3)
    raise RuntimeError(f"no server after {START_TIMEOUT:.0f} s:\n{_errors(log)}")


def _errors(log: Path) -> str:
    """Return a log from shortly before its first error on. The engine's error is written before the API server's."""
    text = log.read_text()
    errors = [found for word in ("ERROR", "Traceback") if (found := text.find(word)) >= 0]
    start = max(min(errors, default=len(text) - 4000) - 1000, 0)
    return text[start : start + 8000]


def _end(process: subprocess.Popen[bytes] | WarmProcess) -> None:
    """SIGTERM to the server, then SIGKILL to what is left of its group: the engine is a child of its own."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(15)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # type: ignore[arg-type]
    process.wait(15)
