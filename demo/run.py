# SPDX-License-Identifier: Apache-2.0
"""``make demo``: steer a small model from prose to code and back, offline and over HTTP, in a few minutes on a CPU."""

from __future__ import annotations

import os
import time
from pathlib import Path

HERE = Path(__file__).parent
MODEL = HERE / "model"
OUT = HERE / "out"


def show(rows: list[tuple[str, str, str, str]], title: str) -> None:
    """Print a table of prompts and their continuations steered towards prose, plain, and steered towards code."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, show_lines=True)
    for name in ("prompt", "towards prose", "plain", "towards code"):
        table.add_column(name, ratio=1, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console(width=150).print(table)


def main() -> None:
    started = time.monotonic()
    # Run the engine in this process, and do not pin threads to cores: the last part runs a server at the same time.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from rich.console import Console

    from demo.gate import run_gate
    from demo.plot import plot
    from demo.server import complete, running_server
    from demo.sweep import PROMPTS, best_layer, gentlest, steering_params, sweep
    from demo.vector import contrast_vectors
    from vllm_steer import LLM

    log = Console(width=150).print
    OUT.mkdir(exist_ok=True)
    log("1. Starting vLLM with steering enabled")
    llm = LLM(model=str(MODEL), enable_steering=True, enforce_eager=True, dtype="float32", max_model_len=512)

    log("2. Computing a vector per layer from captured rows: mean over code minus mean over prose")
    vectors = contrast_vectors(llm)
    log(f"   {len(vectors)} vectors of size {vectors.shape[1]}")

    log("3. Sweeping layer and strength; every cell is a different program in the same batch")
    cells = sweep(llm, vectors)
    layer = best_layer(cells)
    line = {cell.strength: float(cell.scores.mean()) for cell in cells if cell.layer == layer}
    low, high = gentlest(cells, layer, -1), gentlest(cells, layer, 1)
    plain = float(next(cell for cell in cells if cell.layer is None).scores.mean())
    picture = OUT / "style_against_strength.png"
    plot(cells, picture)
    log(f"   layer {layer} has the largest effect: score {line[low]:.2f} at {low:+}, plain {plain:.2f}, ", end="")
    log(f"{line[high]:.2f} at {high:+}. Plot: {picture}")

    prompts = [PROMPTS[i] for i in (0, 2, 4, 6)]
    wanted = [(low, True), (0.0, False), (high, True)]
    columns = [
        [o.outputs[0].text for o in llm.generate(prompts, steering_params(vectors[layer] if on else None, layer, s))]
        for s, on in wanted
    ]
    show([(p, *(c[i] for c in columns)) for i, p in enumerate(prompts)], f"LLM.generate, layer {layer}")  # type: ignore[misc]
    log("4. Gating the edit towards prose: it applies only after tokens that look like code")
    for each in run_gate(llm, prompts, vectors[layer], layer, low):
        log(f"   {each.prompt!r}: open at {each.open:.0%} of the tokens; plain {each.plain[:40]!r}, ", end="")
        log(f"gated {each.text[:40]!r}", markup=False)
    del llm

    log("5. Repeating it over HTTP with vllm-steer serve and the openai client")
    with running_server(MODEL, OUT / "server.log") as url:
        prompt = prompts[0]
        texts = [complete(url, prompt, vectors[layer] if on else None, layer, s) for s, on in wanted]
    show([(prompt, *texts)], f"POST /v1/completions, layer {layer}")  # type: ignore[arg-type]
    log(f"Done in {time.monotonic() - started:.0f} s.")


if __name__ == "__main__":
    main()
