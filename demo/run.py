# SPDX-License-Identifier: Apache-2.0
"""``make demo``: steer a chat model from sad to happy, offline and over HTTP, in a few minutes on a CPU.

    python -m demo.run              writes texts and numbers to demo/out/demo.json
    python -m demo.run --record     also to benchmarks/results/demo.json, from which the README derives

The demo fails if an effect is missing or within that of random directions, or if steered text is incoherent.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / ".models" / "SmolLM2-135M-Instruct"
OUT = ROOT / "demo" / "out"
RECORD = ROOT / "benchmarks" / "results" / "demo.json"
PICTURE = ROOT / "docs" / "assets" / "mood-against-perplexity.png"
ENGINE = {"enforce_eager": True, "dtype": "float32", "max_model_len": 512}


def offline(llm: Any, results: dict[str, Any]) -> tuple[Any, Any, tuple[float, float]]:
    """Run the steps without a server. Return the probe's direction, the steered direction and its doses."""
    from demo import report, study
    from demo.checks import checks
    from demo.texts import MOOD, TRAITS

    report.headline(f"2. A direction per layer: the difference of the means over {len(MOOD.pairs)} pairs of sentences")
    directions = [study.find_directions(llm, trait) for trait in TRAITS]
    layers = directions[0]
    results["traits"] = study.try_traits(llm, list(zip(TRAITS, directions, strict=True)))
    report.CONSOLE.print(f"   Traits tried, with a dose of {study.TRIED_DOSE}: change of the next word's log-odds")
    names = ("trait", "layer", "minus", "plus")
    report.print_table(names, [[row[name] for name in names] for row in results["traits"]])

    report.headline("3. Layer and dose: mood of the text against its perplexity under the model without steering")
    results["doses"] = study.try_doses(llm, layers)
    results["chosen"] = study.choose(results["doses"])
    names = ("layer", "dose", "mood", "perplexity")
    report.print_table(names, [[row[name] for name in names] for row in results["doses"]])
    direction = layers[results["chosen"]["layer"]]
    doses = (results["chosen"]["minus"], results["chosen"]["plus"])
    report.CONSOLE.print(f"   Chosen: layer {direction.layer}, doses {doses[0]:+} and {doses[1]:+}")
    report.print_checks(checks(results), "dose")

    report.headline("4. The control: random directions of the same length")
    results["control"] = study.control(llm, direction, doses)
    report.print_checks(checks(results), "control")

    report.headline("5. Answers to questions that nothing was chosen on")
    results["shown"] = study.show(llm, direction, doses)
    report.print_answers(results["shown"]["rows"])
    report.print_checks(checks(results), "shown")

    report.headline("6. A probe: the same direction, read instead of written")
    results["probe"] = study.try_probes(llm, layers)
    probe = layers[results["probe"]["layer"]]
    report.print_checks(checks(results), "probe")

    report.headline("7. A gate: cheer up the user, but only a user whom the probe finds sad")
    results["gate"] = study.gate(llm, probe, direction, doses[1])
    names = ("prompt", "score", "steered", "plain", "gated")
    report.print_table(names, [[row[name] for name in names] for row in results["gate"]["rows"]])
    report.print_checks(checks(results), "gate")

    report.headline("8. An ablation: the direction's component held at its mean, at every layer")
    results["ablation"] = study.ablate(llm, layers)
    report.print_checks(checks(results), "ablation")
    return probe, direction, doses


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name} for the README as well")
    arguments = parser.parse_args()
    started = time.monotonic()
    # Run the engine in this process, and do not pin threads to cores: the last step runs a server at the same time.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch's, about vLLM
    if not (MODEL / "config.json").exists():
        sys.exit(f"{MODEL} is missing: run `make model`.")
    from benchmarks.build import identity
    from demo import report
    from demo.checks import checks
    from demo.plot import plot
    from demo.server import over_http, running_server
    from vllm_steer import LLM

    OUT.mkdir(exist_ok=True)
    results: dict[str, Any] = {"model": MODEL.name}
    report.headline(f"1. Starting vLLM with steering: {MODEL.name}")
    llm = LLM(model=str(MODEL), enable_steering=True, use_tqdm_on_load=False, **ENGINE)
    probe, direction, doses = offline(llm, results)
    del llm

    report.headline("9. The same over HTTP: vllm serve --enable-steering, and the openai client")
    with running_server(MODEL, OUT / "server.log") as url:
        results["http"] = over_http(url, probe, direction, doses, report.print_scored)
    report.CONSOLE.print()
    report.print_answers([results["http"]])
    judged = checks(results)
    report.print_checks(judged, "http")

    results["seconds"] = round(time.monotonic() - started)
    results["environment"] = {**identity(), "cpus": os.cpu_count(), "engine": ENGINE}
    (OUT / "demo.json").write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    plot(results, OUT / PICTURE.name)
    failed = [check.claim for check in judged if not check.holds]
    if arguments.record and not failed:
        shutil.copy(OUT / "demo.json", RECORD)
        shutil.copy(OUT / PICTURE.name, PICTURE)
    report.headline(f"{len(judged) - len(failed)} of {len(judged)} checks hold; {results['seconds']} s; texts in {OUT}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
