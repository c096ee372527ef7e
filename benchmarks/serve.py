# SPDX-License-Identifier: Apache-2.0
"""Measure a steering server beside stock vLLM's with the client of ``vllm bench serve``.

    python -m benchmarks.serve --seconds 560 --out "benchmarks/results/gpu-serve-{shape}.json"
    python -m benchmarks.serve --tiny --seconds 240 --out "/tmp/serve-{shape}.json"      # on the CPU, to try the script

Stock ``vllm serve`` starts first, then a steering server beside it on the same GPU, each with its share of the memory.
The start time ends with the first successful health check. With ``--kv-gib``, caches have a fixed size, so the servers
start at the same time, and their start times are not recorded. Both start with empty compile caches unless ``--caches``
names a folder. In each round and at each concurrency the client drives stock vLLM and the steering server in each way
(`WAYS`), in rotating order and one at a time, with new prompts in each cell. A round covers each concurrency, the
highest first. A ratio compares two cells of the same round. CPU seconds of each server process cover a whole cell. The
file is written after each cell. A cell that probably would not end within ``--seconds`` does not start, and a cell that
reaches the limit is dropped.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from benchmarks.server_process import ServerProcess, cpu_seconds
from benchmarks.shapes import SHAPES, environment, save_shape

PROBES = 16
MODULE = "probes"


class Load(NamedTuple):
    """Requests of the cells: prompt and output length, and the number of requests for each concurrency.

    Requests of one length that start together also end together, so that prompts arrive in waves, and the steps between
    them only decode. With ``spread``, each length is drawn from a range of this part of it on either side.
    """

    prompt: int
    output: int
    requests: dict[int, int]
    spread: float = 0.0


LOAD = Load(128, 128, {256: 1024, 32: 320, 1: 16})
TINY_LOAD = Load(16, 8, {8: 32, 1: 4})


def make_ways(hidden: int, layer: int) -> dict[str, dict[str, Any]]:
    """Return the additional fields of each request by way; a vector so small that tokens rarely change."""
    import numpy as np

    from vllm_steer.request import pack_vector

    vector = 1e-9 * np.random.default_rng(0).standard_normal(hidden).astype("f4")
    hooks = {"hooks": {"post_block": [layer]}, "positions": "all_generated"}
    probes = [f"{MODULE}/p{i}" for i in range(PROBES)]
    packed = pack_vector(vector)
    gated = {"kind": "add", "point": "post_block", "layers": layer, "vector": packed}
    return {
        "stock": {},
        "idle": {},
        "vector": {"steering_vectors": {"post_block": {str(layer): {"vector": packed}}}},
        "probes": {"capture": {"memory": {**hooks, "reduce": {"probes": probes}}}},
        "readouts": {
            "readouts": {
                f"r{i}": {"probe": probe, "point": "post_block", "layer": layer} for i, probe in enumerate(probes)
            }
        },
        "gate": {
            "readouts": {"r": {"probe": probes[0], "point": "post_block", "layer": layer - 1}},
            "steering": [{**gated, "when": {"readout": "r", "above": 0.0, "window": "previous"}}],
        },
        "capture": {"capture": {"filesystem": hooks}},
    }


WAYS = tuple(make_ways(1, 1))


def make_module(hidden: int, layer: int) -> dict[str, Any]:
    """Return the body that registers the probes."""
    import numpy as np

    rows = np.random.default_rng(1).standard_normal((PROBES + 1, hidden)).astype("f4").tolist()
    probes = {f"p{i}": rows[i] for i in range(PROBES)}
    return {"name": MODULE, "base": {"post_block": {str(layer): rows[PROBES]}}, "probes": probes}


def save_model(shape: str, folder: Path) -> dict[str, Any]:
    """Write a model without weights and a tokenizer with one word per token; return the model's config."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    save_shape(shape, folder)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    words = {f"w{token}": token for token in range(config["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": config["max_position_embeddings"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return config


class TimeUpError(BaseException):
    """Raised at the time limit. The client's handlers of failed requests catch only ``Exception``, so not this."""


@contextlib.contextmanager
def time_limit(end: float) -> Iterator[None]:
    """Raise `TimeUpError` when the monotonic clock reaches ``end``."""

    def raise_time_up(_number: int, _frame: FrameType | None) -> None:
        raise TimeUpError

    previous = signal.signal(signal.SIGALRM, raise_time_up)
    # Repeated, because a background task of the client may swallow the first one.
    signal.setitimer(signal.ITIMER_REAL, max(end - time.monotonic(), 0.01), 2)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def client_options(load: Load, concurrency: int, seed: int) -> list[str]:
    """Return the options of vLLM's client that describe the requests of a cell."""
    options: list[object] = [
        "--dataset-name", "random", "--random-input-len", load.prompt, "--random-output-len", load.output,
        "--random-range-ratio", load.spread, "--num-prompts", load.requests[concurrency],
        "--max-concurrency", concurrency, "--ignore-eos", "--temperature", 0, "--seed", seed,
    ]  # fmt: skip
    return [str(option) for option in options]


def run_client(
    server: ServerProcess, model: Path, body: Mapping[str, Any], load: Load, concurrency: int, seed: int
) -> dict[str, Any]:
    """Run vLLM's client against a server and return what it measured, with the CPU seconds of each server process."""
    from vllm.benchmarks.serve import add_cli_args
    from vllm.benchmarks.serve import main as bench
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    options = [
        "--backend", "vllm", "--base-url", server.url, "--endpoint", "/v1/completions", "--model", server.model_name,
        "--tokenizer", str(model), "--disable-tqdm", "--percentile-metrics", "ttft,tpot,itl",
        *client_options(load, concurrency, seed),
    ]  # fmt: skip
    if body:
        options += ["--extra-body", json.dumps(body)]
    arguments = parser.parse_args(options)
    before, client = cpu_seconds(server.process.pid), time.process_time()
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        found = bench(arguments)
    after = cpu_seconds(server.process.pid)
    if found["completed"] != load.requests[concurrency]:
        raise RuntimeError(f"{found['failed']} of {load.requests[concurrency]} requests failed: {server.log_tail()}")
    return {
        "tokens_per_second": round(found["output_throughput"], 1),
        "first_token_ms": round(found["median_ttft_ms"], 3),
        "token_ms": round(found["median_tpot_ms"], 4),
        "p99_between_tokens_ms": round(found["p99_itl_ms"], 2),
        "seconds": round(found["duration"], 2),
        "cpu_seconds": {name: round(spent - before.get(name, 0.0), 2) for name, spent in after.items()},
        "client_cpu_seconds": round(time.process_time() - client, 2),
    }


RATIOS = ("tokens_per_second", "first_token_ms", "token_ms", "p99_between_tokens_ms")


def summarize(cells: Sequence[Mapping[str, Any]], load: Load) -> list[dict[str, Any]]:
    """Return the ratios to stock vLLM (median, minimum, maximum of the rounds) and the CPU time added to a request."""
    by_place = {(cell["concurrency"], cell["way"], cell["round"]): cell for cell in cells}
    figures = []
    for concurrency in load.requests:
        for way in WAYS[1:]:
            rounds = [
                (by_place[place], by_place[concurrency, "stock", place[2]])
                for place in by_place
                if place[:2] == (concurrency, way) and (concurrency, "stock", place[2]) in by_place
            ]
            if not rounds:
                continue
            figure: dict[str, Any] = {"concurrency": concurrency, "way": way, "rounds": len(rounds)}
            for name in RATIOS:
                each = [ours[name] / stock[name] for ours, stock in rounds if stock[name]]
                if each:
                    figure[name] = [round(x, 4) for x in (statistics.median(each), min(each), max(each))]
            figure["added_cpu_ms"] = {
                process: round(
                    1000 / load.requests[concurrency]
                    * statistics.median(ours["cpu_seconds"].get(process, 0) - stock["cpu_seconds"].get(process, 0)
                                        for ours, stock in rounds), 3)
                for process in ("api server", "engine core")
            }  # fmt: skip
            figures.append(figure)
    return figures


def rounds_of(load: Load, rounds: int) -> list[tuple[int, int]]:
    """Return rounds and their concurrencies in order, so that a time limit leaves whole rounds of each concurrency."""
    return [(number, each) for number in range(rounds) for each in sorted(load.requests, reverse=True)]


def measure(result: dict[str, Any], out: Path, folder: Path, arguments: argparse.Namespace) -> None:
    """Start both servers and fill ``result`` cell by cell, writing the file after each of them."""
    import vllm.benchmarks.serve  # noqa: F401  # before the servers start, so that both find its files in memory

    load = TINY_LOAD if arguments.tiny else LOAD
    chosen = {each: load.requests[each] for each in arguments.concurrency or load.requests}
    load = load._replace(spread=arguments.spread, requests=chosen)
    end = arguments.begin + arguments.seconds
    model = folder / "model"
    config = save_model(result["shape"], model)
    layer = config["num_hidden_layers"] // 2
    ways = make_ways(config["hidden_size"], layer)
    caches = arguments.caches or folder / "caches"
    options = ["--load-format", "dummy", "--max-model-len", str(min(1024, 2 * (load.prompt + load.output)))]
    if arguments.kv_gib is not None:
        # With a fixed cache size, vLLM does not measure the free memory, so both servers can start at once.
        memory = {"gpu-memory-utilization": 0.1, "kv-cache-memory-bytes": int(arguments.kv_gib * 2**30)}
    else:
        memory = {} if arguments.tiny else {"gpu-memory-utilization": arguments.share}
    options += [f"--{name}={value}" for name, value in memory.items()]
    options += ["--enforce-eager", "--dtype", "float32"] if arguments.tiny else []
    options += ["--api-server-count", str(arguments.api)] if arguments.api > 1 else []
    consumers = [f"filesystem:root={folder / 'rows'},layout=packed", "memory"]
    steering = ["--enable-steering", *(part for each in consumers for part in ("--capture-consumers", each))]
    with contextlib.ExitStack() as stack:
        servers: dict[str, ServerProcess] = {}
        for kind, more in (("stock", []), ("steering", steering)):
            log = out.with_name(f"{out.stem}-{kind}.log")
            server = ServerProcess(model, [*options, *more], log, caches / kind, plugin=kind != "stock")
            servers[kind] = stack.enter_context(server)
            if arguments.kv_gib is None:
                result["servers"][kind] = server.wait_until_ready()
                print(kind, result["servers"][kind], flush=True)
        if arguments.kv_gib is not None:
            for kind, server in servers.items():
                server.wait_until_ready()
                print(kind, "started", flush=True)
        servers["steering"].post("/v1/steering/modules", make_module(config["hidden_size"], layer))
        seconds: dict[tuple[int, str], float] = {}
        seed = 0

        def run(concurrency: int, way: str, load: Load) -> tuple[dict[str, Any], float]:
            nonlocal seed
            seed += 1
            started = time.monotonic()
            server = servers["stock" if way == "stock" else "steering"]
            cell = run_client(server, model, ways[way], load, concurrency, seed)
            return cell, time.monotonic() - started

        widest = max(load.requests)
        for way in arguments.ways:
            run(widest, way, load._replace(requests={widest: widest}))  # warm-up
        for number, concurrency in rounds_of(load, arguments.rounds):
            shift = number % len(arguments.ways)
            for way in (*arguments.ways[shift:], *arguments.ways[:shift]):
                expected = seconds.get((concurrency, way), seconds.get((concurrency, "stock"), 0.0))
                if time.monotonic() + 1.1 * expected > end:
                    result["stopped"] = "at the time limit"
                    return
                cell, seconds[concurrency, way] = run(concurrency, way, load)
                result["cells"].append({"round": number, "concurrency": concurrency, "way": way, **cell})
                result["figures"] = summarize(result["cells"], load)
                write(result, out)
                print(json.dumps(result["cells"][-1]), flush=True)


def write(result: Mapping[str, Any], out: Path) -> None:
    out.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="file for the result; {shape} is replaced")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-8b")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and load, on the CPU")
    parser.add_argument("--seconds", type=float, default=560, help="time limit of the whole command")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--spread", type=float, default=0.5, help="part by which the lengths of requests vary, below 1")
    parser.add_argument("--concurrency", nargs="+", type=int, help="default: all of the load")
    parser.add_argument("--api", type=int, default=1, help="API server processes of each server")
    parser.add_argument("--ways", nargs="+", choices=WAYS[1:], default=list(WAYS[1:]))
    parser.add_argument("--share", type=float, default=0.42, help="GPU memory of each server, as a part of the whole")
    parser.add_argument("--kv-gib", type=float, help="key-value cache of each server, in GiB, instead of --share")
    parser.add_argument("--caches", type=Path, help="folder of the compile caches, to keep them; default: empty ones")
    parser.add_argument("--note", default="", help="other work on the machine, as a sentence for the page")
    arguments = parser.parse_args()
    arguments.begin = time.monotonic()
    arguments.ways = ["stock", *arguments.ways]
    shape = "tiny" if arguments.tiny else arguments.shape
    out = Path(arguments.out.format(shape=shape))
    load = TINY_LOAD if arguments.tiny else LOAD
    result: dict[str, Any] = {
        "shape": shape,
        "environment": environment(),
        "setup": {"prompt": load.prompt, "output": load.output, "spread": arguments.spread, "requests": load.requests,
                  "share": arguments.share, "kv_gib": arguments.kv_gib,
                  "caches": "kept" if arguments.caches else "empty", "api_servers": arguments.api},
        "note": arguments.note,
        "servers": {}, "figures": [], "cells": [],
    }  # fmt: skip
    reserve = 5  # seconds for ending the servers
    arguments.seconds -= reserve
    with tempfile.TemporaryDirectory() as name:
        try:
            with time_limit(arguments.begin + arguments.seconds):
                measure(result, out, Path(name), arguments)
        except TimeUpError:
            result["stopped"] = "at the time limit"
        except (RuntimeError, OSError) as error:
            result["stopped"] = str(error)
            write(result, out)
            sys.exit(f"benchmarks.serve: {error}")
        write(result, out)
    for figure in result["figures"]:
        print(json.dumps(figure))


if __name__ == "__main__":
    main()
