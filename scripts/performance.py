# SPDX-License-Identifier: Apache-2.0
"""The page docs/reference/performance.md."""

from __future__ import annotations

from aims import table_of_aims

HEAD = """# Performance

Each row shows its newest measurement: each value with its batch or concurrency in brackets, the result in `benchmarks/results` with its
GPU and date, and whether code that the figure depends on has changed since. Figures without a unit are ratios to stock vLLM in the
same run. A target holds for every batch shown, and its bounds are compared with the last measurement, also where the machine's noise is larger than the
bound (see "two stock engines"). Results with torch 2.11 are from GPU hosts with a torch of their own; vLLM 0.32 pins 2.13.

"""

METHOD = """
## How costs are measured

A stock engine and a steered engine run side by side on one GPU and take turns (`python -m benchmarks.cost`;
`benchmarks/results` has all raw times).

* *Per token*: ratio of the times per output token in the fastest repetition of each engine, because other work on the host only adds
  time; in brackets the median, minimum and maximum of the ratios of single repetitions, which the first ratio can be outside of.
  *By pair*: the median for each pair of engines, if there were several.
* *First token*: time of the whole batch with one token each. Each repetition is combined with the next one, in which the engines
  run in the opposite order, because the engine that waited starts more slowly. For small batches this figure has little meaning:
  a run takes one or two model steps, depending on whether requests arrive before or after the first step starts.
* *Throughput*: tokens per second of the whole run, including admission.
* *Stock again*: a second stock engine instead of the steered one, which shows the noise of the method.

A wide spread indicates an uneven machine. If all requests are steered by the same vector and the vector
changes their tokens, they do different work from stock vLLM's requests, and far less in a mixture of experts, presumably because
equal tokens select the same experts. The vectors are therefore so small (about 1e-9 per element) that bfloat16 rounds nearly all
of them away; the notes of results name exceptions.
"""

REMAINING = """
## Known costs

* With `--no-steering-plain-code`, idle steps run one kernel more than stock vLLM: the embedding is written
  before the first layer, where it can be edited and captured, instead of being fused into the first norm. In layers with
  a single tensor (Granite, GPT-2) the compiler no longer fuses an addition with the following norm.
* The host limits models whose GPU steps are shorter than their Python code, such as a 0.6 B model at batch 1.
* A step that edits or captures at one site runs a graph with more taps than it needs: in steps of up to 64 tokens the taps of a
  quarter of the layers, in larger steps those between layers, or all.
* Requests with new vectors carry them to the engine, which delays their first token.
* Captured rows of many requests (2 MiB per step for one layer at batch 256) are copied once in the engine process and sent to the
  front end over a socket.
* A captured request adds its consumer's thread and the encoding of its results to the API server's CPU time: at least the
  receiving, copying and writing of its rows. On hosts with slow cores the API server's process, which stock vLLM almost fills at concurrency 256, limits the throughput of
  captures and of own vectors; `--api-server-count` spreads the work over several processes.
* Graphs with taps take longer to capture than stock vLLM's. With filled compile caches they are the largest part of what steering
  adds to the start of a server (its log has the seconds and MiB of each set); with empty caches, compiling the model a second
  time for steps without steering takes about as long.
"""


def page() -> str:
    """Return the page: each aim beside its newest measurement, and the method."""
    return HEAD + table_of_aims() + METHOD + REMAINING
