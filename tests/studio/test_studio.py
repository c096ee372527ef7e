# SPDX-License-Identifier: Apache-2.0
"""The studio's views in Chromium against a real server with the chat model.

The fixture `opened` also catches, in each test, a script that fails or is refused by the policy, a request to another
host, and text that is taken for HTML.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from playwright.sync_api import expect
from safetensors.numpy import save_file

from tests.studio.browser import (
    CHAT_ROUTE,
    MARKUP,
    PATCH_ROUTE,
    TIMEOUT_MS,
    Opened,
    say,
)

pytestmark = pytest.mark.slow
expect.set_options(timeout=TIMEOUT_MS)


def test_chat_shows_a_lens_and_forks(opened: Opened, pictures: Path) -> None:
    """Catches tokens without their lens, a lens of the wrong token, and a fork that loses what was before it."""
    page = opened.open()
    say(page, "What is the capital of France?", 20)
    tokens = page.locator(".token")
    texts = tokens.all_inner_texts()
    assert "Paris" in "".join(texts)
    at = next(n for n, text in enumerate(texts) if "Paris" in text)
    page.get_by_role("listbox").focus()
    for _ in range(at + 1):
        page.keyboard.press("ArrowRight")
    last = page.locator(".lens tbody tr").first  # the last layer is what the sampler has
    expect(last.locator("th")).to_have_text("29")
    expect(last.locator(".same")).to_contain_text("Paris")
    expect(page.locator(".inspector")).to_contain_text(re.compile(r"On top from .*layer .*\d+ on"))
    expect(page.locator(".lens")).not_to_contain_text("…")
    page.screenshot(path=pictures / "studio-chat.png")
    page.keyboard.press("Enter")  # to the first alternative
    alternative = page.locator(":focus code").inner_text().replace("␣", " ")
    page.keyboard.press("Enter")
    expect(page.locator(".forks")).to_contain_text("fork 2 of 2")
    expect(page.locator(".status")).to_contain_text("done")
    forked = tokens.all_inner_texts()
    assert forked[: at + 1] == [*texts[:at], alternative]
    expect(page.locator(".forked")).to_have_text(alternative, use_inner_text=True)
    page.get_by_role("button", name="Previous fork").click()
    expect(page.locator(".forks")).to_contain_text("fork 1 of 2")
    assert tokens.all_inner_texts() == texts
    say(page, "And of Italy?", 4)
    expect(page.locator(".message")).to_have_count(4)


def test_steer_marks_the_difference_and_moves_in_the_stream(opened: Opened, pictures: Path) -> None:
    """Catches answers that are mixed up, a slider that does not reach the stream, and a header without strengths."""
    page = opened.open("steer")
    page.get_by_label("Module", exact=True).select_option("mood")
    page.get_by_role("button", name="Add module").click()
    page.get_by_label("Most tokens").fill("8")
    slider = page.get_by_role("slider", name="mood")
    slider.fill("0")
    page.get_by_role("button", name="Run both").click()
    expect(page.get_by_text("Both answers are the same.")).to_be_visible()
    expect(page.get_by_role("heading", name=re.compile("^Steered: mood . 0$"))).to_be_visible()
    page.get_by_label("Most tokens").fill("120")
    with page.expect_request(CHAT_ROUTE):
        page.get_by_role("button", name="Run both").click()
    sides = page.locator(".side-by-side")
    expect(sides.last.locator(".token")).to_have_count(0)  # those of the run before are gone
    expect(sides.last.locator(".token").nth(4)).to_be_attached()
    slider.fill("2.5")  # from 0 within the stream
    expect(page.locator(".changes li").first).to_contain_text(re.compile(r"mood: 2.5 from token \d+ on"))
    expect(page.get_by_role("heading", name=re.compile("^Steered: mood . 0 → 2.5$"))).to_be_visible()
    expect(page.get_by_text("First difference at token")).to_be_visible()
    expect(page.locator(".status").first).to_contain_text("done")
    expect(page.locator(".status").last).to_contain_text("done")
    plain, steered = (side.locator(".token").all_inner_texts() for side in sides.all())
    first = next(n for n, (one, other) in enumerate(zip(plain, steered, strict=False)) if one != other)
    assert first > 4
    expect(page.locator(".differs")).to_have_count(2)
    assert page.locator(".differs").all_inner_texts() == [plain[first], steered[first]]
    marked = int(page.locator(".marked").first.get_attribute("data-index") or -1)
    assert 4 < marked <= first
    page.screenshot(path=pictures / "studio-steer.png", full_page=True)


def test_a_strength_is_sent_that_moved_before_the_stream_began(opened: Opened) -> None:
    """Catches a slider that never reaches the stream: the answer has no id yet, or was asked for without its edits."""
    page = opened.open("steer")
    page.get_by_label("Module", exact=True).select_option("mood")
    page.get_by_role("button", name="Add module").click()
    page.get_by_label("Most tokens").fill("60")
    slider = page.get_by_role("slider", name="mood").first
    slider.fill("0")
    held: list[Any] = []
    page.route(CHAT_ROUTE, lambda route: held.append(route))
    page.get_by_role("button", name="Run both").click()
    while len(held) < 2:
        page.wait_for_timeout(20)
    slider.fill("2.5")
    late = page.get_by_text("from the next run")
    expect(late).to_have_count(0)
    page.get_by_role("button", name="Add module").click()
    page.get_by_role("slider", name="mood").nth(1).fill("2")
    expect(late).to_have_count(1)
    sent: list[str] = []
    page.on("request", lambda request: sent.append(request.post_data or "") if "/requests/" in request.url else None)
    for route in held:
        route.continue_()
    expect(page.locator(".changes li").first).to_contain_text("mood: 2.5 from token")
    expect(page.get_by_text("First difference at token")).to_be_visible()
    expect(page.locator(".status").last).to_contain_text("done")
    expect(late).to_have_count(0)
    assert {name for each in sent for name in json.loads(each)} == {"n1_mood"}


def test_an_expression_steers_instead_of_edits(opened: Opened) -> None:
    """Catches an expression that is not sent as it is, one that is dropped beside edits, and a refusal not shown."""
    page = opened.open("steer")
    page.get_by_label("Most tokens").fill("6")
    field, run = page.get_by_label("Expression instead of edits"), page.get_by_role("button", name="Run both")
    field.fill(" 0.3 sunny@generated ")
    with page.expect_request(lambda request: "sunny" in (request.post_data or "")) as sent:
        run.click()
    assert sent.value.post_data_json["steering"] == "0.3 sunny@generated"
    expect(page.get_by_text("First difference at token")).to_be_visible()
    expect(page.locator(".status").last).to_contain_text("done")
    field.fill("0.3 nothing")
    run.click()
    expect(page.locator(".side-by-side").last.get_by_role("alert")).to_contain_text("nothing")
    page.get_by_label("Module", exact=True).select_option("mood")
    page.get_by_role("button", name="Add module").click()
    run.click()
    expect(page.locator(".steer > .error")).to_contain_text("either edits or an expression")
    page.wait_for_function("() => location.hash.includes('expression=0.3')")


def test_probes_colour_the_stream_and_stop_it(opened: Opened, pictures: Path) -> None:
    """Catches values of other tokens than those that are coloured, a chart without axis, a stop that is not sent."""
    page = opened.open("probes")
    page.get_by_role("button", name="Add probe").click()
    page.get_by_label("Most tokens").fill("40")
    page.get_by_role("button", name="Run", exact=True).click()
    expect(page.locator(".status")).to_contain_text("done")
    tokens = page.locator(".token").all_inner_texts()
    page.get_by_role("listbox").focus()
    values = []
    for n in range(len(tokens) - 1):  # the last token of an output has no value
        page.keyboard.press("ArrowRight")
        expect(page.locator(".inspector h3")).to_contain_text(f"Token {n + 1}:")
        text = page.locator(".inspector p").inner_text()
        values.append(float(re.findall(r"mood/happy: (\S+)", text)[0].rstrip(".")))
    bound = sorted(values)[len(values) // 2]
    page.get_by_role("spinbutton", name="Threshold of mood/happy").fill(str(bound))
    expect(page.locator(".probe .hint")).to_contain_text(f"above {bound:g};")
    over = {int(each.get_attribute("data-index") or -1) for each in page.locator(".token.over").all()}
    assert over >= {n for n, value in enumerate(values) if value > bound + 0.01}
    assert not over & {n for n, value in enumerate(values) if value < bound - 0.01}
    chart = page.get_by_role("img", name="Values of mood/happy")
    low, high = min(values), max(values)
    assert low < 0 < high
    labels = [f"min {low:g}", f"max {high:g}", "zero 0", f"threshold {bound:g}"]
    expect(chart.locator("text")).to_have_text(labels)
    heights = [each.bounding_box()["y"] for each in chart.locator("text").all()]
    top, bottom = chart.bounding_box()["y"], chart.bounding_box()["y"] + chart.bounding_box()["height"]
    assert top <= heights[1] < min(heights[2:]) <= max(heights[2:]) < heights[0] < bottom
    page.screenshot(path=pictures / "studio-probes.png", full_page=True)
    page.get_by_label("Stop there").check()
    page.get_by_role("button", name="Run", exact=True).click()
    expect(page.locator(".status")).to_contain_text("stopped by mood/happy = ")
    assert page.locator(".token").count() <= min(over) + 1 < len(tokens)


def test_patching_draws_cells_as_they_come(opened: Opened, pictures: Path) -> None:
    """Catches cells in the wrong row or column, a map that waits for the end, and cells out of the keyboard's reach."""
    page = opened.open("patching")
    with page.expect_request(PATCH_ROUTE) as sent:
        page.get_by_role("button", name="Run study").click()
    page.wait_for_function(
        """() => { const cells = [...document.querySelectorAll(".heat td")];
          return document.querySelector("progress") && cells.some((cell) => cell.innerText) &&
            cells.some((cell) => !cell.innerText); }"""
    )
    expect(page.locator(".status")).to_contain_text("done · 150 of 150 cells")
    expect(page.locator(".status")).to_contain_text("noise floor")
    assert opened.copied_request() == (sent.value.url, sent.value.post_data_json)
    body = {**sent.value.post_data_json, "stream": False}
    key = {"authorization": f"Bearer {opened.server.keys['all']}"}
    answer = httpx.post(f"{opened.server.url}/v1/steering/patch", json=body, headers=key, timeout=TIMEOUT_MS / 1000)
    grid = np.array(answer.json()["grids"]["post_block"])
    shown = np.array([float(each) for each in page.locator(".heat td").all_inner_texts()]).reshape(grid.shape)
    np.testing.assert_allclose(shown, grid, rtol=0.06, atol=0.01)  # two digits are shown
    assert np.ptp(grid) > 0.5
    row, column = 3, 4
    page.get_by_role("grid", name="Cells by layer and token").get_by_role("gridcell").first.focus()
    for move in (*["ArrowDown"] * row, "End"):
        page.keyboard.press(move)
    expect(page.locator(":focus")).to_have_attribute("data-row", str(row))
    expect(page.locator(".cell")).to_contain_text(f"Layer {row}, position {column} ")
    said = page.locator(".cell").inner_text()
    assert said.startswith("Layer ") and "recovered" in said
    assert abs(float(re.findall(r"recovered (\S+)", said)[0]) - grid[row, column]) < 0.01
    page.locator('.heat [data-row="20"][data-column="3"]').hover()
    expect(page.locator(".cell")).to_contain_text("Layer 20, position 3")
    expect(page.get_by_role("rowheader", name="29", exact=True)).to_be_visible()
    expect(
        page.get_by_role("columnheader", name="France").or_(page.get_by_role("columnheader", name="Italy"))
    ).to_be_visible()
    page.screenshot(path=pictures / "studio-patching.png", full_page=True)


def test_patching_shows_errors_and_is_cancelled(opened: Opened) -> None:
    """Catches a swallowed error, cells that are left out without a word, and a study that runs on after its cancel."""
    page = opened.open("patching")
    run = page.get_by_role("button", name="Run study")
    page.get_by_label("Layers").fill("all")
    run.click()
    expect(page.get_by_role("alert")).to_contain_text("'all' is neither a number nor a range")
    page.get_by_label("Layers").fill("2")
    corrupt = page.get_by_label("Corrupt prompt").input_value()
    page.get_by_label("Corrupt prompt").fill("The capital of the Italian republic is")
    run.click()
    expect(page.locator(".status")).to_contain_text("4 of 4 cells · not aligned: positions 3, 4, 5 ·")
    page.get_by_label("Corrupt prompt").fill(corrupt)
    page.get_by_label("Layers").fill("6-4")
    run.click()
    expect(page.get_by_role("alert")).to_contain_text("ends before it begins")
    expect(page.locator(".status")).to_have_count(0)  # cells of the last study would look like those of this one
    page.get_by_label("Layers").fill("2, 99")
    run.click()
    expect(page.get_by_role("alert")).to_contain_text("layers[1]")  # the API's own words
    expect(page.locator(".status")).to_have_text("failed")
    page.get_by_label("Layers").fill("")
    for name in ("Clean prompt", "Corrupt prompt"):  # so many cells that the study runs until it is cancelled
        page.get_by_label(name).fill("and so on, " * 20 + page.get_by_label(name).input_value())
    with page.expect_event("requestfailed", lambda request: "steering/patch" in request.url):
        run.click()
        expect(page.locator(".heat td:not(:empty)").first).to_be_visible()
        page.get_by_role("button", name="Cancel").click()
    expect(page.locator(".status")).to_contain_text(re.compile(r"stopped by you · \d+ of \d{4} cells"))
    expect(page.get_by_role("alert")).to_have_count(0)
    assert 0 < page.locator(".heat td:not(:empty)").count() < page.locator(".heat td").count()
    start = {
        "event": "start",
        "metric": MARKUP,
        "points": ["post_block"],
        "layers": ["0"],
        "positions": [f"0 {MARKUP}"],
    }
    cell = {"event": "cell", "row": 0, "column": 0, "value": None, "error": MARKUP}
    error = {"event": "error", "error": {"message": MARKUP, "code": 500}}
    body = "".join(f"data: {json.dumps(each)}\n\n" for each in ({**start, "cells": 1}, cell, error))
    page.route(PATCH_ROUTE, lambda route: route.fulfill(body=body, content_type="text/event-stream"))
    run.click()
    expect(page.get_by_role("alert")).to_have_text(MARKUP)
    expect(page.locator(".cell")).to_contain_text(f"failed, {MARKUP}")
    expect(page.get_by_role("columnheader").last).to_contain_text("<img")


def test_a_gate_steers_where_the_probe_fires(opened: Opened, pictures: Path) -> None:
    """Catches a gate that steers everywhere or nowhere, or that has another threshold than the rack."""
    page = opened.open("probes")
    page.get_by_role("button", name="Add probe").click()
    page.get_by_label("Most tokens").fill("40")
    page.get_by_role("button", name="Run", exact=True).click()
    expect(page.locator(".status")).to_contain_text("done")
    plain = page.locator(".token").all_inner_texts()
    page.get_by_role("spinbutton", name="Threshold of mood/happy").fill("0.5")
    page.get_by_label("Steer there with").select_option("mood")
    page.get_by_label("Strength").fill("-3")
    with page.expect_request(CHAT_ROUTE) as sent:
        page.get_by_role("button", name="Run", exact=True).click()
    edits = sent.value.post_data_json["steering"]
    assert [each["when"]["above"] for each in edits] == [0.5] and edits[0]["when"]["window"] == "previous"
    assert opened.copied_request() == (sent.value.url, sent.value.post_data_json)
    expect(page.locator(".status")).to_contain_text("done")
    expect(page.locator(".probe .hint")).to_contain_text("tokens steered")
    over, steered = (
        {int(each.get_attribute("data-index") or -1) for each in page.locator(f".token.{name}").all()}
        for name in ("over", "marked")
    )
    last = page.locator(".token").count() - 1
    assert {n for n in steered if 0 < n < last} == {n + 1 for n in over if n + 1 < last}
    assert 0 < len(over) < last and page.locator(".token").all_inner_texts() != plain
    page.screenshot(path=pictures / "studio-gate.png", full_page=True)


def test_copied_requests_run(opened: Opened) -> None:
    """Catches a copied command or script that does not run, that sends something else, or that has the key."""
    page = opened.open()
    with page.expect_request(CHAT_ROUTE) as sent:
        say(page, "It's \"fine\" \\ $HOME `x` \u2028 \U0001f600, isn't it?", 8)
    assert opened.copied_request() == (sent.value.url, sent.value.post_data_json)
    assert sent.value.post_data_json["readouts"]["lens"]
    shown = "".join(page.locator(".token").all_inner_texts())
    environment = {**os.environ, "VLLM_STEER_API_KEY": opened.server.keys["all"]}
    for command in ([sys.executable, "-c", opened.copied("Python")], ["bash", "-c", opened.copied("curl")]):
        answer = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
        lines = re.findall(r"^data: (\{.*)$", answer.stdout, re.MULTILINE)
        choices = [choice for line in lines for choice in json.loads(line)["choices"]]
        assert "".join(choice["delta"].get("content") or "" for choice in choices) == shown


def test_the_address_has_the_settings(opened: Opened) -> None:
    """Catches a setting that a shared address loses, a key in it, and an address that is taken for HTML or a name."""
    page = opened.open("steer")
    page.get_by_label("Prompt").fill(MARKUP)
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_label("Module", exact=True).select_option("mood")
    page.get_by_role("button", name="Add module").click()
    page.get_by_role("slider", name="mood").fill("2.5")
    page.wait_for_function("() => location.hash.includes('2.5')")
    address = page.url
    assert opened.server.keys["all"] not in address and "key" not in address
    page.goto("about:blank")
    page.goto(address)
    expect(page.get_by_label("Prompt")).to_have_value(MARKUP)
    opened.enter(opened.server.keys["all"])
    expect(page.get_by_role("slider", name="mood")).to_have_value("2.5")
    expect(page.get_by_label("Temperature")).to_have_value("0.5")
    page.wait_for_function("text => location.href === text", arg=address)
    rack = json.dumps([["mood/happy", "0.25", "below", True, "mood", "-2", "latch"], [MARKUP]])
    page.evaluate("rack => { location.hash = `probes?prompt=Hi&probes=${encodeURIComponent(rack)}` }", rack)
    expect(page.get_by_role("spinbutton", name="Threshold of mood/happy")).to_have_value("0.25")
    expect(page.get_by_label("Stop there").first).to_be_checked()
    expect(page.get_by_label("Where")).to_have_value("latch")
    expect(page.locator(".probe legend").last).to_have_text(MARKUP)
    page.evaluate("text => { location.hash = `steer?edits=${text}` }", MARKUP)
    expect(page.get_by_role("alert")).to_contain_text("cannot be read")
    page.evaluate("location.hash = '__proto__?value=1'")
    expect(page.get_by_role("heading", level=2)).to_have_text("Chat")
    page.evaluate("location.hash = 'patching?layers=3-5&metric=logprob'")
    expect(page.get_by_label("Layers")).to_have_value("3-5")
    expect(page.get_by_label("Metric")).to_have_value("logprob")


def test_traffic_counts_the_requests_of_all_clients(opened: Opened, pictures: Path) -> None:
    """Catches counts of another kind of request, and counts that do not move."""
    page = opened.open("traffic")
    count = lambda name: page.locator("tr", has=page.locator(f"th:text-is('{name}')")).locator("td")  # noqa: E731
    for name in ("steered", "neither steered nor captured", "Stopped by a readout"):
        expect(count(name).nth(1)).to_have_text("0")
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 0}
    stop = {"readouts": {"mood": {"probe": "mood/happy"}}, "stop_on": [{"readout": "mood", "above": -1e6}]}
    key = {"authorization": f"Bearer {opened.server.keys['all']}"}
    with httpx.Client(base_url=opened.server.url, headers=key, timeout=60) as client:
        for fields in ({}, {"steering_modules": ["mood"]}, {"steering_modules": ["mood"]}, stop):
            answer = client.post("/v1/chat/completions", json=body | fields)
            assert answer.status_code == 200, answer.text
    expect(count("steered").nth(1)).to_have_text("2")
    expect(count("Stopped by a readout").nth(1)).to_have_text("1")
    expect(count("neither steered nor captured").nth(1)).to_have_text("2")  # readouts are counted below
    expect(count("Readouts").nth(1)).to_have_text("1")
    expect(count("Requests").nth(1)).to_have_text("4")
    page.screenshot(path=pictures / "studio-traffic.png")


def test_modules_are_uploaded_deleted_and_set_for_everybody(opened: Opened, pictures: Path, tmp_path: Path) -> None:
    """Catches an upload that the API does not get, and changes for everybody by one careless click."""
    page = opened.open("modules")
    table = page.get_by_role("table", name="Modules")
    expect(table).to_contain_text("mood")
    (tmp_path / "broken.npy").write_bytes(b"nothing")
    file, upload = page.get_by_label("File of a module"), page.get_by_role("button", name="Upload")
    expect(upload).to_be_disabled()
    file.set_input_files(tmp_path / "broken.npy")
    upload.click()
    expect(page.get_by_role("alert")).to_be_visible()
    save_file({"base.post_block.9": np.ones(576, np.float32)}, tmp_path / "ones.safetensors")
    file.set_input_files(tmp_path / "ones.safetensors")
    expect(page.get_by_role("alert")).to_be_visible()  # nothing is sent before the button
    upload.click()
    expect(page.get_by_text("ones is registered.")).to_be_visible()
    expect(upload).to_be_disabled()
    expect(table).to_contain_text("base: post_block 9")
    everybody = page.get_by_role("button", name="Set for everybody")
    expect(everybody).to_be_disabled()
    page.get_by_label("Module for all requests").select_option("ones")
    page.get_by_label("Scale").fill("0.5")
    page.get_by_label("I mean all requests").check()
    everybody.click()
    expect(page.get_by_text(re.compile("Global steering is set: ones . 0.5"))).to_be_visible()
    page.screenshot(path=pictures / "studio-modules.png")
    for view in ("Chat", "Steer", "Probes"):
        page.get_by_role("link", name=view).click()
        expect(page.locator("main > .warning")).to_contain_text(re.compile("Global steering is set: ones . 0.5"))
    page.get_by_role("link", name="Modules").click()
    page.get_by_role("button", name="Clear").click()
    expect(page.get_by_text("No global steering is set.")).to_be_visible()
    page.get_by_role("button", name="Delete ones").click()
    page.get_by_role("link", name="Chat").click()  # a question that was left is not asked any more
    page.get_by_role("link", name="Modules").click()
    page.get_by_role("button", name="Delete ones").click()
    expect(table).to_contain_text("base: post_block 9")
    page.get_by_role("button", name="Delete for everybody").click()
    expect(table).not_to_contain_text("base: post_block 9")


def test_server_lists_what_is_refused_and_why(opened: Opened, pictures: Path) -> None:
    """Catches a report that the page cannot show, and refusals without their reason."""
    page = opened.open("server")
    expect(page.get_by_role("table", name="Engine", exact=True)).to_contain_text("30 layers")
    refused = page.get_by_role("table", name="Refused, and why")
    expect(refused).to_contain_text("--steering-points mlp_in")
    expect(page.get_by_role("table", name="Limits")).to_contain_text("record_columns")
    page.screenshot(path=pictures / "studio-server.png")
