# SPDX-License-Identifier: Apache-2.0
"""Measure cells per second of a patching sweep, beside loops of hooks in HF Transformers and one request per cell.

    python -m benchmarks.patching --group cpu --out benchmarks/results/patching.json

All ways patch the stream after each block at each position of a random prompt, on the same weights, and score two
tokens. They take turns on one machine, in several rounds, in another order each round. Each way and round has prompts
of its own, so that no cached block of an earlier round is used. After the timing, a part of each grid is compared with
the hooks. Clients, servers and loops share the machine, so only ratios within a round are meaningful.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.build import identity
from benchmarks.server_process import ServerProcess
from benchmarks.shapes import SHAPES
from vllm_steer.testing.fuzz.model import prepare_environment

MODEL, LETTERS, SCORED = ServerProcess.model_name, 256, (7, 11)
BATCH = 32
"""Cells per forward pass of the batched loop of hooks."""
CHECKED = 24
"""Cells of each grid that are compared with the hooks."""


class PatchingGroup(NamedTuple):
    """A model shape with the size of its sweeps."""

    shape: Mapping[str, Any]
    dtype: str
    prompt_tokens: int
    rounds: int
    engine: Mapping[str, Any]
    """Further arguments of the engines, offline and as flags of the server."""
    rounding: float
    """Largest distance between the cells of the two loops of hooks, in nats."""


GROUPS: dict[str, PatchingGroup] = {
    "cpu": PatchingGroup(
        {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 704,
            "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": LETTERS,
            "max_position_embeddings": 512, "tie_word_embeddings": False,
        },
        "float32", 96, 4, {"max_model_len": 512, "enforce_eager": True, "block_size": 32}, 1e-4,
    ),
    # Needs one GPU with 80 GiB: three copies of 16 GiB of weights and two caches.
    "llama-8b": PatchingGroup(
        SHAPES["llama-8b"], "bfloat16", 64, 5,
        {"max_model_len": 2048, "kv_cache_memory_bytes": 6 << 30, "gpu_memory_utilization": 0.3},
        0.6,  # 0.45 on an H200
    ),
}  # fmt: skip

Grid = np.ndarray[Any, Any]
Prompts = tuple[list[int], list[int]]
"""Clean and corrupt prompt."""


def prompts_of(round_number: int, way: int, length: int) -> Prompts:
    """Return prompts that no other round or way uses."""
    random = np.random.default_rng((round_number, way))
    clean = random.integers(1, LETTERS, length).tolist()
    corrupt = [*random.integers(1, LETTERS, 8).tolist(), *clean[8:]]
    return clean, corrupt


class Hooks:
    """The sweep as a loop of forward hooks in HF Transformers."""

    def __init__(self, folder: Path, dtype: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval().to(self.device)
        self.layers = self.model.model.layers
        self._kept: tuple[list[int], list[Any]] = [], []

    def rows(self, tokens: list[int]) -> list[Any]:
        """Return the stream after each block, ``[tokens, hidden]``."""
        found: list[Any] = []
        handles = [
            layer.register_forward_hook(lambda _module, _args, output: found.append(_stream(output)[0].clone()))
            for layer in self.layers
        ]
        self._logprobs([tokens])
        for handle in handles:
            handle.remove()
        return found

    def _rows_of(self, tokens: list[int]) -> list[Any]:
        if self._kept[0] != tokens:
            self._kept = tokens, self.rows(tokens)
        return self._kept[1]

    def cells(self, prompts: Prompts, cells: list[tuple[int, int]], batch: int) -> list[float]:
        """Return the metric of some cells, ``batch`` of one layer per forward pass."""
        import torch

        clean, corrupt = prompts
        rows, values = self._rows_of(clean), []
        for start in range(0, len(cells), batch):
            part = cells[start : start + batch]
            layer, positions = part[0][0], [position for _, position in part]

            def patch(_module: Any, _args: Any, output: Any, layer: int = layer, at: list[int] = positions) -> None:
                _stream(output)[torch.arange(len(at)), at] = rows[layer][at]

            handle = self.layers[layer].register_forward_hook(patch)
            logprobs = self._logprobs([corrupt] * len(part))
            handle.remove()
            values += (logprobs[:, SCORED[0]] - logprobs[:, SCORED[1]]).tolist()
        return values

    def grid(self, prompts: Prompts, batch: int) -> Grid:
        """Return the whole grid, ``[layers, positions]``."""
        positions = range(len(prompts[1]))
        return np.array(
            [self.cells(prompts, [(layer, i) for i in positions], batch) for layer in range(len(self.layers))]
        )

    def _logprobs(self, tokens: list[list[int]]) -> Any:
        import torch

        with torch.inference_mode():
            given = torch.tensor(tokens, device=self.device)
            return self.model(given, use_cache=False, logits_to_keep=1).logits[:, -1].float().log_softmax(-1)


def _stream(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else output


def one_request_per_cell(client: Any, prompts: Prompts, layers: int) -> Grid:
    """Return the grid by one completion request after another; each carries the row of its cell."""
    clean, corrupt = prompts
    spec = {"hooks": {"post_block": list(range(layers))}, "positions": "all_prompt"}
    report = client.complete(clean, max_tokens=1, temperature=0, capture={"memory": spec}).capture_results["memory"]
    sites = report.sites or client.fetch(report)
    grid = np.empty((layers, len(corrupt)))
    for layer, position in np.ndindex(grid.shape):
        row = sites["post_block", layer].rows[position].float().numpy()
        edit = {"kind": "replace", "point": "post_block", "layers": layer, "vector": row, "tokens": [position]}
        answer = client.complete(
            corrupt, max_tokens=1, temperature=0, steering=[edit], logprobs=1, logprob_token_ids=list(SCORED),
            return_tokens_as_token_ids=True,
        )  # fmt: skip
        found = answer.document["choices"][0]["logprobs"]["top_logprobs"][0]
        grid[layer, position] = found[f"token_id:{SCORED[0]}"] - found[f"token_id:{SCORED[1]}"]
    return grid


def study_of(prompts: Prompts) -> dict[str, Any]:
    """Return the study's fields."""
    return {"clean": prompts[0], "corrupt": prompts[1], "answer": [SCORED[0]], "foil": [SCORED[1]]}


def save_model(group: PatchingGroup, folder: Path) -> Path:
    """Write a random model of the group's shape, with one token per byte."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    torch.manual_seed(0)
    # Large enough for every block to matter: with the usual 0.02, a patch hardly changes the output.
    deviation = 2.0 / group.shape["hidden_size"] ** 0.5
    config = AutoConfig.for_model(**{**group.shape, "initializer_range": deviation, "dtype": group.dtype})
    config.bos_token_id = config.eos_token_id = None
    # Numbers of billions of weights take minutes on a CPU.
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config).to(getattr(torch, group.dtype))
    model.save_pretrained(folder)
    del model
    torch.cuda.empty_cache()
    return folder


@contextlib.contextmanager
def server(group: PatchingGroup, folder: Path) -> Iterator[str]:
    """Run ``vllm serve`` and yield its URL."""
    options = ["--dtype", group.dtype, "--enable-steering", "--uvicorn-log-level", "warning"]
    for name, value in group.engine.items():
        options += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    log = folder.with_suffix(".log")
    with ServerProcess(folder, options, log, folder / "caches", plugin=True, env=env) as process:
        process.wait_until_ready()
        yield process.url


def summarise(rounds: list[dict[str, float]], reference: str) -> dict[str, Any]:
    """Return the median cells per second of each way, and its ratio to ``reference``: median, minimum, maximum."""
    found = {}
    for way in rounds[0]:
        speeds = [each[way] for each in rounds]
        ratios = [each[way] / each[reference] for each in rounds]
        found[way] = {
            "cells_per_second": round(statistics.median(speeds), 1),
            "ratio": [round(x, 2) for x in (statistics.median(ratios), min(ratios), max(ratios))],
        }
    return found


def too_far(worst: Mapping[str, float], batched: str, rounding: float) -> dict[str, float]:
    """Return the ways whose distance from the hooks is not explained by rounding; NaN is not.

    The two loops of hooks compute the same values with other batch sizes, so their distance shows the rounding.

    Args:
        worst: Largest distance of each way from the loop with one cell per pass, in nats.
        batched: Name of the loop with several cells per pass.
        rounding: Largest distance of that loop.
    """
    allowed = max(rounding, 3 * worst[batched])
    return {way: far for way, far in worst.items() if not far <= (rounding if way == batched else allowed)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--group", choices=list(GROUPS), default="cpu")
    parser.add_argument("--beside", default="nothing", help="other work that ran on the machine")
    parser.add_argument("--rounds", type=int, help="number of rounds; default: the group's")
    arguments = parser.parse_args()
    group = GROUPS[arguments.group]
    if arguments.rounds:
        group = group._replace(rounds=arguments.rounds)
    prepare_environment()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"  # vLLM's default: requests are added while the engine runs
    import torch
    import vllm

    from vllm_steer import LLM, Client
    from vllm_steer.patching import PatchingStudy

    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = save_model(group, Path(name) / MODEL)
        hooks, layers = Hooks(folder, group.dtype), int(group.shape["num_hidden_layers"])
        client = stack.enter_context(Client(stack.enter_context(server(group, folder)), timeout=3600))
        llm = LLM(
            model=str(folder), dtype=group.dtype, enable_steering=True, disable_log_stats=True, seed=0, **group.engine
        )
        hit_rates: list[float] = []

        def offline(prompts: Prompts) -> Grid:
            result = PatchingStudy(llm, **study_of(prompts)).sweep(progress=False)
            hit_rates.append(result.cache_hit_rate)
            return result.grid("post_block")

        ways: dict[str, Callable[[Prompts], Grid]] = {
            "loop of hooks, one cell per pass": lambda prompts: hooks.grid(prompts, 1),
            f"loop of hooks, {BATCH} cells per pass": lambda prompts: hooks.grid(prompts, BATCH),
            "one HTTP request per cell": lambda prompts: one_request_per_cell(client, prompts, layers),
            "study over HTTP": lambda prompts: client.patch(**study_of(prompts)).grid("post_block"),
            "study offline": offline,
        }
        for number, measure in enumerate(ways.values()):  # warm up
            measure(prompts_of(1000, number, 16))
        hit_rates.clear()
        random = np.random.default_rng(0)
        cells = layers * group.prompt_tokens
        rounds: list[dict[str, float]] = []
        loads, spreads, worst = [], [], dict.fromkeys(ways, 0.0)

        def result() -> dict[str, Any]:
            return {
                "environment": {
                    "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
                    "cpus": os.cpu_count(), "machine": platform.machine(), "threads": torch.get_num_threads(),
                    "torch": torch.__version__, "vllm": vllm.__version__, "beside": arguments.beside, **identity(),
                },
                "setup": {
                    "group": arguments.group, "dtype": group.dtype, "layers": layers,
                    "prompt_tokens": group.prompt_tokens, "hidden_size": group.shape["hidden_size"],
                    "cells": cells, "rounds": len(rounds),
                },
                "ways": summarise(rounds, next(iter(ways))),
                "largest_distance_from_hooks": {way: float(f"{error:.2g}") for way, error in worst.items()},
                "deviation_of_cells": round(statistics.median(spreads), 3),
                "hit_rate_offline": round(statistics.median(hit_rates), 3),
                "load_average": loads,
                "rounds": rounds,
            }  # fmt: skip

        for number in range(group.rounds):
            speeds: dict[str, float] = {}
            loads.append(round(os.getloadavg()[0], 2))
            for index in random.permutation(len(ways)).tolist():
                way = list(ways)[index]
                prompts = prompts_of(number, index, group.prompt_tokens)
                started = time.perf_counter()
                grid = ways[way](prompts)
                speeds[way] = cells / (time.perf_counter() - started)
                flat = random.choice(cells, CHECKED, replace=False)
                checked = [(int(i) // group.prompt_tokens, int(i) % group.prompt_tokens) for i in flat]
                away = [abs(grid[cell] - hooks.cells(prompts, [cell], 1)[0]) for cell in checked]
                spreads.append(float(np.std(grid)))
                worst[way] = max(worst[way], float(np.max(away)))
            rounds.append({way: speeds[way] for way in ways})
            print(json.dumps(rounds[-1]), flush=True)
            # After each round, so that a run that is stopped keeps its first ones.
            arguments.out.write_text(json.dumps(result(), indent=1) + "\n")
    print(json.dumps(summarise(rounds, next(iter(ways))), indent=1))
    if wrong := too_far(worst, list(ways)[1], group.rounding):
        raise SystemExit(f"grids and hooks differ: {wrong}")


if __name__ == "__main__":
    main()
