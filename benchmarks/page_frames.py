# SPDX-License-Identifier: Apache-2.0
"""Measure how long the studio's page blocks the browser while it shows a stream of 2,000 tokens with readouts.

    python -m benchmarks.page_frames --out benchmarks/results/page-frames.json
    python -m benchmarks.page_frames --server http://127.0.0.1:8000 --out benchmarks/results/page-frames.json

A server without a model serves the page and an answer of which each event is one token with five alternatives, a lens
over ten layers, and a probe's value that colours it. Chromium without a display shows it in each view, at `RATES`
tokens per second; rate 0 sends all tokens at once, as a proxy that buffers does. A frame's length is the time between
two calls of ``requestAnimationFrame``; a long task is one of more than 50 ms in which the page answers no key and no
mouse. The aim is that no frame is longer than :data:`AIM_MS` on an idle machine. The figure of a view and rate is the
round with the median longest frame; other work on the machine makes frames longer. CPU seconds count the page's thread,
with scripts and layout; they depend less on other work.

With the address of a running ``make studio``, it also measures the time from pressing Enter in Chat to the first token
on the page, in turns with a client that sends the page's body with another message and reads the first event.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shutil
import statistics
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, Request
from starlette.responses import StreamingResponse

from benchmarks.build import identity
from vllm_steer.studio.routes import add_studio_routes

AIM_MS = 100
TOKENS = 2000
RATES = (100, 400, 0)
VIEWS = {"chat": "Send", "probes": "Run", "steer": "Run both"}
"""Views that show a stream, with the button that starts it."""
LAYERS, PER_LAYER, PROMPT = 30, 4, 12
WORDS = (" the", " storm", " came", " over", " a", " small", " town", ",", " and", " it", " rained", ".", "\n")
MODULE = {"name": "mood", "description": "", "probes": ["happy"], "content": {"tiers": {}, "edits": []},
          "digest": "sha256:0", "versions": ["sha256:0"]}  # fmt: skip
REPORT = {"num_layers": LAYERS, "hidden_size": 8, "limits": {"record_columns": 400},
          "points": [{"name": "post_block", "on": True}]}  # fmt: skip

WATCH = """async () => {
  window.seen = { frames: [], tasks: [], elements: 0, renders: 0 };
  const { options } = await import("./vendor/preact.js");
  options.vnode = () => { seen.elements++; };
  new PerformanceObserver((list) => seen.tasks.push(...list.getEntries().map((each) => each.duration)))
    .observe({ type: "longtask" });
  let last = performance.now(), made = 0;
  const tick = (now) => {
    seen.frames.push(now - last);
    seen.renders += seen.elements > made;
    [last, made] = [now, seen.elements];
    requestAnimationFrame(tick);
  };
  requestAnimationFrame(tick);
}"""
"""Begins to note the lengths of frames and of long tasks, and to count the elements that the views make and the frames
in which they make some."""


def event(n: int, body: dict[str, Any]) -> str:
    """Return token ``n`` of an answer as an event of the API, with the readouts that the request has named."""
    word = WORDS[n * 7 % len(WORDS)]
    top = [{"token": WORDS[(n + k) % len(WORDS)], "logprob": -0.5 * k - 0.1, "bytes": []} for k in range(5)]
    item = {"token": word, "logprob": -0.1 - n % 5, "bytes": [], "top_logprobs": top}
    readouts: dict[str, Any] = {}
    for name, asked in body.get("readouts", {}).items():
        if "lens" in asked:
            ids = [[(n + layer + k) % len(WORDS) for k in range(PER_LAYER)] for layer in asked["layers"]]
            logprobs = [[-0.5 * k for k in range(PER_LAYER)] for _ in asked["layers"]]
            readouts[name] = {"positions": [PROMPT + n - 1], "token_ids": [ids], "logprobs": [logprobs]}
        else:
            readouts[name] = {"positions": [PROMPT + n], "values": [(n * 37 % 101) / 101]}
    choice = {"index": 0, "delta": {"content": word}, "logprobs": {"content": [item]},
              "token_ids": [n * 7 % len(WORDS)], "readouts": readouts}  # fmt: skip
    if n == TOKENS - 1:
        choice["finish_reason"] = "length"
    made: dict[str, Any] = {"id": "chatcmpl-x", "choices": [choice]}
    if n == 0:
        made["prompt_token_ids"] = [0] * PROMPT
    return f"data: {json.dumps(made)}\n\n"


def make_app(rate: float) -> FastAPI:
    """Return the page's server. It streams ``rate`` tokens per second, or all at once if it is 0."""
    app = FastAPI()
    add_studio_routes(app)
    for path, answer in (
        ("/v1/models", {"data": [{"id": "stream"}]}),
        ("/v1/steering/capabilities", REPORT),
        ("/v1/steering/set", {"digest": None, "modules": []}),
        ("/v1/steering/modules", {"data": [MODULE]}),
    ):
        app.add_api_route(path, lambda answer=answer: answer)

    async def complete(request: Request) -> StreamingResponse:
        body = await request.json()

        async def events() -> AsyncIterator[str]:
            started = time.monotonic()
            for n in range(TOKENS):
                yield event(n, body)
                if rate:
                    await asyncio.sleep(max(0.0, started + (n + 1) / rate - time.monotonic()))
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    app.add_api_route("/v1/chat/completions", complete, methods=["POST"])
    app.add_api_route("/tokenize", lambda: {"tokens": [0]}, methods=["POST"])
    app.add_api_route("/detokenize", lambda: {"prompt": "x"}, methods=["POST"])
    return app


@contextmanager
def serving(rate: float) -> Iterator[str]:
    """Serve the page in a thread and yield its address."""
    server = uvicorn.Server(uvicorn.Config(make_app(rate), port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def measure(browser: Any, view: str, rate: float) -> dict[str, Any]:
    """Show one stream in a view. Returns the longest frame and task, and the CPU time of the page."""
    with serving(rate) as url:
        page = browser.new_page(viewport={"width": 1280, "height": 860})
        page.set_default_timeout(300_000)
        page.goto(f"{url}/studio/#{view}?maxTokens={TOKENS}")
        page.get_by_text("stream", exact=True).wait_for()
        page.wait_for_load_state("networkidle")
        if view == "chat":
            page.get_by_label("Message", exact=True).fill("Tell me a story.")
        if view == "probes":
            page.get_by_role("button", name="Add probe").click()
        page.evaluate(WATCH)
        session = page.context.new_cdp_session(page)
        session.send("Performance.enable", {"timeDomain": "threadTicks"})
        page.get_by_role("button", name=VIEWS[view], exact=True).click()
        for number in range(1 + (view == "steer")):
            page.locator(".status", has_text="done").nth(number).wait_for()
        seen = page.evaluate("seen")
        shown = page.locator(".token").count()
        spent = {each["name"]: each["value"] for each in session.send("Performance.getMetrics")["metrics"]}
        page.close()
    return {
        "view": view,
        "tokens_per_second": rate,
        "tokens": shown,
        "elements": seen["elements"],
        "renders": seen["renders"],
        "longest_frame_ms": round(max(seen["frames"])),
        "longest_task_ms": round(max(seen["tasks"], default=0)),
        "long_tasks": len(seen["tasks"]),
        "cpu_seconds": round(spent["TaskDuration"], 2),
    }


FIRST_TOKEN = """() => new Promise((resolve) => {
  let pressed;
  addEventListener("keydown", () => { pressed ??= performance.now(); }, { capture: true });
  new MutationObserver((_, watching) => {
    if (pressed && document.querySelector(".token")) {
      watching.disconnect();
      resolve(performance.now() - pressed);
    }
  }).observe(document.body, { childList: true, subtree: true });
})"""
"""Returns the milliseconds from the first key to the first token on the page."""


def first_tokens(browser: Any, server: str, rounds: int) -> dict[str, list[float]]:
    """Return the milliseconds to the first token, on the page and for a client, of each round."""
    found: dict[str, list[float]] = {"page": [], "client": []}
    client = httpx.Client(base_url=server, timeout=60)
    for n in range(rounds + 1):  # the first one warms up
        page = browser.new_page()
        bodies: list[dict[str, Any]] = []
        page.on("request", lambda each, bodies=bodies: each.method == "POST" and bodies.append(each.post_data_json))
        page.goto(f"{server}/studio/#chat?maxTokens=8")
        page.wait_for_load_state("networkidle")
        page.get_by_label("Message", exact=True).fill(f"Question {n}: what is in a bakery?")
        waiting = page.evaluate_handle(f"() => {{ const found = ({FIRST_TOKEN})(); return {{ found }}; }}")
        page.get_by_label("Message", exact=True).press("Enter")
        found["page"].append(round(page.evaluate("(handle) => handle.found", waiting), 1))
        page.locator(".status", has_text="done").wait_for()
        body = next(each for each in bodies if each.get("stream"))
        page.close()
        body["messages"][-1]["content"] = f"Inquiry {n}: what is in a bakery?"
        started = time.perf_counter()
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            for line in response.iter_lines():
                event = json.loads(line[6:]) if line.startswith("data: {") else {"choices": []}
                if any(choice["delta"].get("content") for choice in event["choices"]):
                    found["client"].append(round(1000 * (time.perf_counter() - started), 1))
                    break
    return {way: each[1:] for way, each in found.items()}


def main() -> None:
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--views", nargs="*", choices=list(VIEWS), default=list(VIEWS))
    parser.add_argument("--server", help="address of a running `make studio`")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    figures = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for view in arguments.views:
            for rate in RATES:
                rounds = [measure(browser, view, rate) for _ in range(arguments.rounds)]
                figures.append(sorted(rounds, key=lambda each: each["longest_frame_ms"])[len(rounds) // 2])
                print(json.dumps(figures[-1]), flush=True)
        first = first_tokens(browser, arguments.server, 10) if arguments.server else None
        chromium = browser.version
        browser.close()
    environment = {
        "cpus": os.cpu_count(), "load_average": os.getloadavg(), "machine": platform.machine(), "chromium": chromium,
        **identity(),
    }  # fmt: skip
    result = {"environment": environment, "aim_ms": AIM_MS, "rounds": arguments.rounds, "figures": figures}
    if first:
        result["first_token_ms"] = {**{way: statistics.median(each) for way, each in first.items()}, "rounds": first}
        print(json.dumps(result["first_token_ms"]))
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
