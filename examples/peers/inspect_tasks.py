# SPDX-License-Identifier: Apache-2.0
"""Tasks for Inspect AI: score answers by a probe, steer them, and ask an activation oracle what they mean.

inspect eval examples/peers/inspect_tasks.py@probed -T probe=probe.safetensors \
    --model vllm-steer/demo --model-base-url http://localhost:8000
"""

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig
from inspect_ai.scorer import includes
from inspect_ai.solver import generate

from vllm_steer.peers.inspect import ask_oracle, probe_scorer, steer

SAMPLES = [
    Sample(input="What a lovely day", target="1"),
    Sample(input="This is terrible", target="0"),
    Sample(input="I am so happy", target="1"),
    Sample(input="Nothing works", target="0"),
]


def config(layer: int) -> GenerateConfig:
    """Return greedy sampling, with the stream after one layer."""
    extra = {"output_residual_stream": [layer]}
    return GenerateConfig(max_tokens=4, temperature=0, extra_body={"extra_args": extra})


@task
def probed(probe: str, layer: int = 1) -> Task:
    """Score each answer by the probe in a file, and report the AUROC over the labels."""
    return Task(dataset=SAMPLES, solver=generate(), config=config(layer), scorer=probe_scorer(probe, layer))


@task
def steered(module: str, strength: float = 1.0, probe: str = "", layer: int = 1) -> Task:
    """Score answers that a registered module steers."""
    solver = steer(modules={module: strength})
    return Task(dataset=SAMPLES, solver=solver, config=config(layer), scorer=probe_scorer(probe, layer))


@task
def asked(adapter: str, layer: int = 1, placeholder: str = " ?") -> Task:
    """Ask the oracle about the mean over each answer's tokens, and look for the label in its reply."""
    oracle = ask_oracle("Is this positive?", adapter, layer, placeholder=placeholder, max_tokens=4, as_output=True)
    return Task(dataset=SAMPLES, solver=[generate(), oracle], config=config(layer), scorer=includes())
