# SPDX-License-Identifier: Apache-2.0
"""The studio when a user mistypes or pastes, an answer fails, or another client changes global steering.

The fixture `opened` also catches a script that fails, a request to another host, and text that is taken for HTML.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from playwright.sync_api import expect
from safetensors.numpy import save_file

from tests.studio.browser import CHAT_ROUTE, TIMEOUT_MS, Opened, events, say

pytestmark = pytest.mark.slow
expect.set_options(timeout=TIMEOUT_MS)


def send(page: Any, text: str) -> None:
    """Send a chat message with the keyboard."""
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def test_global_steering_of_another_client_is_shown(opened: Opened) -> None:
    """Catches a page that denies the global steering which another client has set since the page was opened."""
    page = opened.open("steer")
    banner = page.locator("main > .warning")
    expect(banner).to_have_count(0)
    key = {"authorization": f"Bearer {opened.server.keys['all']}"}
    with httpx.Client(base_url=opened.server.url, headers=key, timeout=60) as client:
        assert client.post("/v1/steering/set", json={"modules": [["mood", 0.5]]}).status_code == 200
        try:
            page.get_by_label("Most tokens").fill("3")
            page.get_by_role("button", name="Run both").click()
            expect(banner).to_contain_text(re.compile("Global steering is set: mood . 0.5"))
            expect(page.locator(".status").first).to_contain_text("done")
            expect(page.locator(".status").first).to_contain_text("global steering was on")
            expect(page.get_by_role("heading", name="Steered (no edits)")).to_be_visible()
        finally:
            client.post("/v1/steering/clear")
    page.get_by_role("link", name="Chat").click()  # a view asks when it is opened
    expect(banner).to_have_count(0)


def test_the_range_of_a_threshold_only_widens(opened: Opened) -> None:
    """Catches a slider that cannot go above the values of a run which the threshold has stopped."""
    page = opened.open("probes")
    page.get_by_role("button", name="Add probe").click()
    page.get_by_label("Most tokens").fill("30")
    run = page.get_by_role("button", name="Run", exact=True)
    slider = page.get_by_role("slider", name="Threshold")
    box = page.get_by_role("spinbutton", name="Threshold of mood/happy")
    bounds = lambda: [float(slider.get_attribute(name) or "nan") for name in ("min", "max")]  # noqa: E731
    run.click()
    expect(page.locator(".status")).to_contain_text("done")
    said = page.locator(".probe .hint").inner_text()
    low, high = (float(each) for each in re.findall(r"from (\S+) to ([^;\s]+)", said)[0])
    first = bounds()
    assert first[0] < low < high < first[1]
    typed = str(low - (high - low) / 10)
    box.fill(typed)
    page.get_by_label("Stop there").check()
    run.click()
    expect(page.locator(".status")).to_contain_text("at token 1 ")
    expect(page.locator(".status")).to_contain_text("1 token ")
    assert bounds()[0] <= first[0] and bounds()[1] >= first[1]
    slider.press("ArrowRight")
    expect(box).not_to_have_value(typed)
    assert len(re.sub(r"^-?0*\.?0*|\.", "", box.input_value())) <= 3


def test_failed_turns_are_not_sent_again(opened: Opened) -> None:
    """Catches an empty answer in the next request, typed text that is lost, and one that cannot be sent again."""
    page = opened.open()
    sent: list[Any] = []
    replies = [
        {"status": 400, "json": {"error": {"message": "no"}}},
        {"body": events("Once"), "content_type": "text/event-stream"},
        {"body": events("Yes") + "data: [DONE]\n\n", "content_type": "text/event-stream"},
    ]

    def answer(route: Any) -> None:
        sent.append(route.request.post_data_json["messages"])
        route.fulfill(**replies[min(len(sent) - 1, 2)])

    page.route(CHAT_ROUTE, answer)
    send(page, "First")
    expect(page.get_by_role("alert")).to_have_text("no")
    expect(page.get_by_label("Message", exact=True)).to_have_value("First")
    send(page, "Second")
    expect(page.locator(".message").last.get_by_role("alert")).to_have_text("This answer was cut off.")
    expect(page.get_by_text("connection to the server is lost")).to_have_count(0)
    page.get_by_role("button", name="Send again").last.click()
    expect(page.locator(".status").last).to_contain_text("done")
    send(page, "Third")
    expect(page.locator(".message")).to_have_count(6)
    expect(page.locator(".status").last).to_contain_text("done")
    question = lambda text: {"role": "user", "content": text}  # noqa: E731
    assert sent[:3] == [[question("First")], [question("Second")], [question("Second")]]
    assert sent[3] == [question("Second"), {"role": "assistant", "content": "Yes"}, question("Third")]
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".message")).to_have_count(0)


def test_layers_and_tokens_that_give_no_lens_are_refused(opened: Opened) -> None:
    """Catches an answer without a lens, and without a word of why."""
    page = opened.open()
    sent: list[Any] = []
    page.on("request", lambda request: sent.append(request.url) if request.url.endswith("completions") else None)
    page.get_by_text("Settings").click()
    for label, text, message in (
        ("Layers", "5-2", "Layers: the range '5-2' ends before it begins"),
        ("Tokens per layer", "1000", "Tokens per layer: '1000' is not a number from 1 to 20"),
    ):
        page.get_by_label(label, exact=True).fill(text)
        send(page, "Hello")
        expect(page.get_by_role("alert")).to_contain_text(message)
        expect(page.get_by_label("Message", exact=True)).to_have_value("Hello")
        page.get_by_label(label, exact=True).fill("")
    assert sent == []
    expect(page.locator(".message")).to_have_count(0)
    page.get_by_label("Tokens per layer").fill("2")
    say(page, "Hello", 2)
    expect(page.locator(".message")).to_have_count(2)


def test_a_broken_edit_of_an_address_blocks_the_run(opened: Opened) -> None:
    """Catches an edit that is dropped, or a strength that becomes 0, and a plain run titled Steered."""
    edits = json.dumps([["nothing", 1], ["mood", "abc"]])
    page = opened.open()
    sent: list[Any] = []
    page.on("request", lambda request: sent.append(request.url) if request.url.endswith("completions") else None)
    page.evaluate("edits => { location.hash = `steer?edits=${encodeURIComponent(edits)}` }", edits)
    fault = page.locator(".slider").first.get_by_role("alert")
    expect(fault).to_contain_text("'nothing'")
    run, problem = page.get_by_role("button", name="Run both"), page.locator(".steer > .error")
    run.click()
    expect(problem).to_contain_text("nothing: ")
    page.get_by_role("button", name="Remove nothing").click()
    run.click()
    expect(problem).to_contain_text("Strength of mood: 'abc' is not a number from -1000 to 1000")
    page.get_by_role("spinbutton", name="Strength of mood").fill("1e38")
    run.click()
    expect(problem).to_contain_text("'1e38' is not a number")
    assert sent == []


def test_an_address_that_is_written_late_does_not_undo_a_click(opened: Opened) -> None:
    """Catches a view that does not change because the settings of the one before are written to the address first."""
    page = opened.open("chat")
    page.evaluate("() => { location.hash = '#steer'; history.replaceState(null, '', '#chat'); }")
    expect(page.get_by_role("heading", level=2).first).to_have_text("Steer", timeout=20_000)


def test_a_run_that_is_left_and_stopped_takes_no_more_strengths(opened: Opened) -> None:
    """Catches an answer that is lost with its view, one that goes on after Stop, and a strength sent to its end."""
    page = opened.open("steer")
    changed: list[str] = []
    page.on("request", lambda request: changed.append(request.url) if "steering/requests/" in request.url else None)
    page.get_by_label("Module", exact=True).select_option("mood")
    page.get_by_role("button", name="Add module").click()
    page.get_by_label("Most tokens").fill("2000")
    page.get_by_role("button", name="Run both").click()
    tokens = page.locator(".side-by-side").last.locator(".token")
    expect(tokens.nth(2)).to_be_attached()
    page.get_by_role("link", name="Chat").click()
    page.get_by_role("link", name="Steer").click()
    expect(tokens.nth(4)).to_be_attached()
    page.get_by_role("button", name="Stop").click()
    for status in page.locator(".status").all():
        expect(status).to_contain_text("stopped by you")
    count = tokens.count()
    page.get_by_role("slider", name="mood").fill("2")
    expect(page.get_by_role("button", name="Run both")).to_be_visible()
    expect(page.get_by_role("alert")).to_have_count(0)
    page.wait_for_load_state("networkidle")
    assert (changed, tokens.count()) == ([], count)


def test_a_wrong_threshold_or_strength_of_a_gate_blocks_the_run(opened: Opened) -> None:
    """Catches a bound or strength that becomes 0, a stop that is not sent, and a plain run beside a fault."""
    page = opened.open("probes")
    sent: list[str] = []
    page.on("request", lambda request: sent.append(request.url) if request.url.endswith("completions") else None)
    page.get_by_role("button", name="Add probe").click()
    run, problem = page.get_by_role("button", name="Run", exact=True), page.get_by_role("alert")
    threshold = page.get_by_role("spinbutton", name="Threshold of mood/happy")
    threshold.fill("")
    page.get_by_label("Stop there").check()
    run.click()
    expect(problem).to_contain_text("Threshold of mood/happy: '' is not a number")
    threshold.fill("0")
    page.get_by_label("Stop there").uncheck()
    page.get_by_label("Steer there with").select_option("mood")
    page.get_by_label("Strength").fill("5000")
    run.click()
    expect(problem).to_contain_text("'5000' is not a number from -1000 to 1000")
    assert sent == []


def test_an_answer_without_text_is_told_and_not_sent_again(opened: Opened) -> None:
    """Catches an empty answer in the next request, and an answer of special tokens that looks like none."""
    page = opened.open()
    sent: list[Any] = []
    done = "data: [DONE]\n\n"
    replies = [done, events("", "", "", "", "") + done, events("Yes") + done]

    def answer(route: Any) -> None:
        sent.append(route.request.post_data_json["messages"])
        route.fulfill(body=replies[len(sent) - 1], content_type="text/event-stream")

    page.route(CHAT_ROUTE, answer)
    for number, text in enumerate(("First", "Second", "Third"), 1):
        send(page, text)
        expect(page.locator(".message")).to_have_count(2 * number)
        expect(page.locator(".message > .status").last).to_contain_text("done")
    expect(page.locator(".message .warning")).to_have_text("The last 5 tokens have no text. Lower the strengths.")
    assert sent[1:] == [[{"role": "user", "content": text}] for text in ("Second", "Third")]


def test_steer_takes_pasted_vectors_and_files(opened: Opened, tmp_path: Path) -> None:
    """Catches a pasted edit or a file that is dropped, a site that is not the file's, and a strength without a unit."""
    page = opened.open("steer")
    page.get_by_text("Paste or open a vector").click()
    page.get_by_label("Vector or edits").fill("[1, 2")
    page.get_by_role("button", name="Add pasted").click()
    expect(page.get_by_role("alert")).to_contain_text("This is not JSON")
    page.get_by_label("Vector or edits").fill("[1, 2]")
    page.get_by_label("Layer").fill("3")
    page.get_by_role("button", name="Add pasted").click()
    expect(page.get_by_role("alert")).to_contain_text("has 2 numbers instead of 576")
    page.get_by_label("Vector or edits").fill(json.dumps([1] * 576))
    page.get_by_label("Layer").fill("30")
    page.get_by_role("button", name="Add pasted").click()
    expect(page.get_by_role("alert")).to_contain_text("'30' is not a number from 0 to 29")
    page.get_by_label("Layer").fill("3")
    page.get_by_role("button", name="Add pasted").click()
    page.get_by_role("button", name="Remove pasted, layer 3").click()
    (tmp_path / "ours.json").write_text(json.dumps([1.0] * 576))
    (tmp_path / "theirs.json").write_text(
        json.dumps({"hookType": "hook_resid_pre", "layerNumber": 5, "vector": [1] * 576})
    )
    file = page.locator("input[type=file]")
    file.set_input_files(tmp_path / "theirs.json")  # the field still has layer 3
    page.get_by_role("button", name="Remove theirs.json, layer 5").click()
    expect(page.locator(".slider")).to_have_count(0)
    page.get_by_label("Layer").fill("")
    file.set_input_files(tmp_path / "ours.json")
    expect(page.get_by_role("alert")).to_contain_text("ours.json does not tell its layer: choose Point and Layer")
    page.get_by_label("Layer").fill("14")
    page.get_by_role("button", name="Add pasted").click()
    key = {"authorization": f"Bearer {opened.server.keys['all']}"}
    told = httpx.get(f"{opened.server.url}/v1/steering/modules/sunny", headers=key, timeout=60).json()["streams"][0]
    hint = page.locator(".slider", has_text="ours.json, layer 14").locator(".hint")
    expect(hint).to_contain_text("1 edit, as given at strength 1: a norm of 24, ")  # 24 is the root of 576
    share = re.findall(r"(\S+) % of the stream's length", hint.inner_text())[0]
    assert abs(float(share) / (2400 / told["length"]) - 1) < 0.01
    page.get_by_role("button", name="Remove ours.json").click()
    page.get_by_label("Most tokens").fill("3")
    vector = np.random.default_rng(0).standard_normal(576).astype("float32") * 40
    save_file({"base.post_block.9": vector}, tmp_path / "loud.safetensors")
    file.set_input_files(tmp_path / "loud.safetensors")
    expect(page.get_by_role("slider", name="loud.safetensors")).to_be_visible()
    expect(page.locator(".slider .hint")).to_contain_text(f"a norm of {float(f'{np.linalg.norm(vector):.3g}'):g}")
    page.get_by_role("button", name="Run both").click()
    expect(page.get_by_text("First difference at token 1:")).to_be_visible()


def test_a_pasted_probe_has_a_name(opened: Opened) -> None:
    """Catches a probe that cannot be told from another one, and a name that is not the user's."""
    page = opened.open("probes")
    page.get_by_text("Paste a probe").click()
    page.get_by_label("Weights").fill(json.dumps([0.1] * 576))
    page.get_by_label("Layer").fill("12")
    add, legends = page.get_by_role("button", name="Add pasted"), page.locator(".probe legend")
    add.click()
    expect(legends).to_have_text(["pasted probe, layer 12 post_block"])
    page.get_by_label("Name").fill("tone")
    add.click()
    expect(legends).to_have_text(["pasted probe, layer 12 post_block", "tone"])
