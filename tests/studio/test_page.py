# SPDX-License-Identifier: Apache-2.0
"""The studio as a whole: keys, failures, text that looks like HTML, accessibility, and the pure parts.

The fixture `opened` also catches, in each test, a script that fails or is refused by the policy, a request to another
host, and text that is taken for HTML.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import expect

from benchmarks import page_frames
from tests.studio.browser import (
    AXE,
    BROKEN_WORDS,
    CHAT_ROUTE,
    CONTRAST,
    MARKUP,
    RAGGED,
    TIMEOUT_MS,
    UNNAMED,
    VIEWS,
    Opened,
    events,
    say,
)
from tests.studio.npm import unpack

pytestmark = pytest.mark.slow
expect.set_options(timeout=TIMEOUT_MS)


def test_wrong_key_and_missing_rights(opened: Opened) -> None:
    """Catches a refusal that is not shown in the API's words, and a key that is stored."""
    page = opened.open(key=None)
    expect(page.get_by_role("alert")).to_contain_text("missing API key")
    opened.enter("vsk-wrong")
    expect(page.get_by_role("alert")).to_contain_text("invalid API key")
    opened.enter(opened.server.keys["reader"])
    page.get_by_role("button", name="Forget key").wait_for()
    page.get_by_label("Message", exact=True).fill("Hello")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("'capture'")
    stored = page.evaluate("[localStorage.length, sessionStorage.length, document.cookie, location.href]")
    assert stored == [0, 0, "", f"{opened.server.url}/studio/#chat"]
    page.reload()
    expect(page.get_by_role("alert")).to_contain_text("missing API key")


def test_lost_connection(opened: Opened) -> None:
    """Catches an answer that looks complete although its stream broke, and a page that stays dead afterwards."""
    page = opened.open()
    broken = events("Once", " upon")
    page.route(CHAT_ROUTE, lambda route: route.fulfill(body=broken, content_type="text/event-stream"))
    page.get_by_label("Message", exact=True).fill("Hello")
    page.keyboard.press("Enter")
    expect(page.locator(".status")).to_contain_text("failed")
    expect(page.get_by_role("alert").first).to_contain_text("connection to the server is lost")
    assert "".join(page.locator(".token").all_inner_texts()) == "Once upon"
    page.unroute(CHAT_ROUTE)
    opened.context.set_offline(True)
    page.get_by_label("Message", exact=True).fill("Are you there?")
    page.keyboard.press("Enter")
    expect(page.locator(".status").last).to_contain_text("failed")
    opened.context.set_offline(False)
    expect(page.locator("main > .error")).to_have_count(0)
    say(page, "And now?", 3)


def test_server_without_steering(opened: Opened) -> None:
    """Catches a page that sends readouts to a server that does not know them, or that does not say what is missing."""
    sent: list[Any] = []

    def answer(route: Any) -> None:
        sent.append(route.request.post_data_json)
        route.fulfill(body=events("Yes") + "data: [DONE]\n\n", content_type="text/event-stream")

    opened.page.route("**/v1/steering/**", lambda route: route.fulfill(status=404, json={"detail": "Not Found"}))
    opened.page.route(CHAT_ROUTE, answer)
    page = opened.open()
    expect(page.locator(".warning")).to_contain_text("--enable-steering")
    say(page, "Hello")
    assert "readouts" not in sent[0] and sent[0]["messages"] == [{"role": "user", "content": "Hello"}]


def test_markup_is_text_everywhere(opened: Opened) -> None:
    """Catches text of users, models, modules or errors that a view takes for HTML."""
    key = {"authorization": f"Bearer {opened.server.keys['all']}"}
    edit = {"decode": {"post_block": {"3": [0.0] * 576}}}
    with httpx.Client(base_url=opened.server.url, headers=key, timeout=60) as client:
        made = client.post("/v1/steering/modules", json={"name": "marked", "description": MARKUP, **edit})
        assert made.status_code == 200, made.text
    page = opened.open()
    reply = {"body": events(MARKUP, MARKUP, error=MARKUP), "content_type": "text/event-stream"}
    page.route(CHAT_ROUTE, lambda route: route.fulfill(**reply))
    page.get_by_text("Settings").click()
    page.get_by_label("System message").fill(MARKUP)
    page.get_by_label("Message", exact=True).fill(MARKUP)
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_have_text(MARKUP)
    assert page.locator(".token").all_inner_texts() == [MARKUP, MARKUP]
    page.locator(".token").first.click()
    expect(page.locator(".alternative").first).to_contain_text("<img")
    page.get_by_label("Layers").fill(MARKUP)
    page.get_by_label("Message", exact=True).fill("again")
    page.keyboard.press("Enter")
    expect(page.locator("main .error").last).to_contain_text("Layers: '<img")
    page.get_by_role("link", name="Modules").click()
    expect(page.get_by_role("row", name="marked")).to_contain_text("<img")
    page.get_by_role("link", name="Probes").click()
    page.get_by_text("Paste a probe").click()
    page.get_by_label("Weights").fill(MARKUP)
    page.get_by_role("button", name="Add pasted").click()
    expect(page.get_by_role("alert")).to_contain_text("<img")
    page.get_by_label("Prompt").fill(MARKUP)
    page.get_by_role("button", name="Run", exact=True).click()
    expect(page.get_by_role("alert").last).to_have_text(MARKUP)
    page.get_by_role("link", name="Steer").click()
    page.get_by_label("Prompt").fill(MARKUP)
    page.get_by_text("Paste or open a vector").click()
    page.get_by_label("Vector or edits").fill(MARKUP)
    page.get_by_role("button", name="Add pasted").click()
    expect(page.get_by_role("alert")).to_contain_text("<img")
    page.get_by_role("button", name="Run both").click()
    expect(page.get_by_role("alert").last).to_have_text(MARKUP)


@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_contrast_and_names_of_controls(scheme: str, opened: Opened, pictures: Path) -> None:
    """Catches text below WCAG AA's contrast, controls without a name, and a page that is wider than a laptop."""
    opened.page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    page = opened.open()
    say(page, "Name three colours.", 12)
    page.locator(".token").nth(2).click()
    for view in VIEWS:
        page.evaluate("name => { location.hash = name }", view)
        expect(page.get_by_role("heading", level=2)).to_have_text(view.capitalize())
        assert page.evaluate(CONTRAST) == []
        assert page.evaluate(UNNAMED) == []
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.evaluate("location.hash = 'chat'")
    if scheme == "dark":
        page.screenshot(path=pictures / "studio-dark.png")


@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_axe_finds_no_violation_and_phones_show_all(scheme: str, opened: Opened, tmp_path: Path) -> None:
    """Catches roles, names, headings, tables or colours that assistive technology cannot use, also on a phone.

    A view that scrolls sideways at a phone's width, a table that breaks its words into letters, or a ragged form is
    wrong, too.
    """
    opened.page.emulate_media(color_scheme=scheme)
    opened.context.add_init_script(path=unpack("axe-core@4.14.1", tmp_path) / "axe.min.js")
    page = opened.open()
    say(page, "Name three colours.", 6)
    page.locator(".token").nth(2).click()
    buttons = {"steer": "Run both", "probes": "Run", "patching": "Run study"}
    for view in VIEWS:
        button = buttons.get(view)
        page.evaluate("name => { location.hash = name }", f"{view}?layers=0-1&maxTokens=4" if button else view)
        expect(page.get_by_role("heading", level=2)).to_have_text(view.capitalize())
        if view == "probes":
            page.get_by_role("button", name="Add probe").click()
        if button:
            page.get_by_role("button", name=button, exact=True).click()
            expect(page.locator(".status").last).to_contain_text("done")
        page.wait_for_load_state("networkidle") if view != "traffic" else expect(
            page.locator("td").first
        ).to_be_visible()
        for width in (390, 1280):
            page.set_viewport_size({"width": width, "height": 860})
            found = page.evaluate(AXE)
            assert (
                found["passes"]
                and [(each["id"], [node["html"][:200] for node in each["nodes"]]) for each in found["violations"]] == []
            )
            assert page.evaluate("document.documentElement.scrollWidth") <= width, view
            assert page.evaluate(BROKEN_WORDS) == page.evaluate(RAGGED) == [], view


@pytest.mark.parametrize("view", ["chat", "probes", "steer"])
def test_a_long_stream_is_rendered_once(view: str, chromium: Any) -> None:
    """Catches a view that renders all of its values or tokens again in each frame, which freezes it for seconds.

    A frame may render the view around them and the last group of tokens; a busy machine has more of such frames.
    """
    found = page_frames.measure(chromium, view, 1000)
    assert found["tokens"] == page_frames.TOKENS * (1 + (view == "steer"))
    assert 0 < found["elements"] < 3 * found["tokens"] + 400 * found["renders"]


def test_pure_parts(opened: Opened) -> None:
    """Catches wrong splits of events and tokens, wrong layers, and strengths that start at another value."""
    page = opened.open(key=None)
    found = page.evaluate(
        """async () => {
          const [api, chat, edits, server, turn, ui] = await Promise.all(
            ["api", "chat", "edits", "server", "turn", "ui"].map((name) => import(`./${name}.js`)));
          const fault = (run) => { try { return run(); } catch (error) { return error.message; } };
          return {
            events: api.splitEvents("data: 1\\r\\n\\r\\n: note\\n\\ndata: 2\\n\\ndata: 3"),
            message: [api.messageOf(400, '{"error": {"message": "no"}}'),
              api.messageOf(502, "<h1>"), api.messageOf(500, "")],
            layers: [chat.readNumbers("4-6, 0,29", "Layers"), fault(() => chat.readNumbers("all", "Layers")),
              chat.spreadLayers(30, 40, 5)],
            name: ui.uniqueName("é"),
            visible: ui.visible(" a b\\n\u202e\u00a0"),
            ranges: server.byReason({0: "a", 1: "a", 2: "b", 5: "a"}),
            split: [turn.splitTexts("␞␞a␞ b␞", 2), turn.splitTexts("␞ ␞a ␞b ␞", 2), turn.splitTexts("␞␞␞a␞", 1)],
            texts: [turn.textsOf(["a", "b"], "ab"), turn.textsOf(["\\ufffd", "\\ufffd"], "é")],
            first: turn.firstDifference([{text: "a"}, {text: "b"}], [{text: "a"}, {text: "c"}]),
            settled: turn.settled({id: 7, lens: {layers: [1, 2, 3], ids: [[7], [5], [7]]}}),
            module: edits.editsOfModule(
              {base: {post_block: {3: {vector: [1], scale: 2}}}, decode: {pre_attn: {1: [4]}}}),
            live: [edits.live([{strength: 2}], "n", 0)[0], edits.factor(3, 0) * edits.NOTHING, edits.factor(3, 2)],
            pasted: [edits.editsOfText("[1, 2]", {point: "post_block", layer: 4}),
              fault(() => edits.editsOfText("3", {}))],
            sites: ['[1, 2]', '{"vector": [1, 2], "layer": 7, "point": "pre_attn"}',
              '{"hookName": "blocks.3.hook_resid_mid", "values": [1, 2]}',
              '{"hookName": "blocks.3.hook_z", "values": [1, 2]}',
              '{"hookType": "hook_resid_post", "layerNumber": 0, "vector": [1, 2]}'].map((text) => fault(() => {
                const [{point, layers: [layer]}] = edits.editsOfText(text, {point: "post_block", layer: ""}, "a.json");
                return `${point} ${layer}`;
              })),
            norms: [{vector: [3, 4], strength: -2}, {vector: {dtype: "float32", data: "AABAQAAAgEA="}},
              {vector: [3, 4], dose: 1}, {vector: {module: "a"}}].map((edit) => edits.normOf({kind: "add", ...edit})),
            unit: edits.unitOf([{point: "post_block", layers: [4]}, {point: "pre_attn", layers: [4]}], [5, 10],
              [{point: "post_block", layer: 4, length: 20}]),
          };
        }"""
    )
    assert found["events"] == [["1", "2"], "data: 3"]
    assert found["message"] == ["no", "<h1>", "HTTP 500"]
    assert found["layers"][0] == [0, 4, 5, 6, 29] and "'all'" in found["layers"][1]
    assert found["layers"][2] == [6, 14, 22, 29] or found["layers"][2][-1] == 29
    assert re.fullmatch("[a-z][a-zA-Z0-9_]*", found["name"])  # as the API demands of live strengths
    assert found["visible"] == "␣a b⏎U+202EU+00A0"
    assert found["ranges"] == [["0-1, 5", "a"], ["2", "b"]]
    assert found["split"] == [["a", " b"], ["a", "b"], None]
    assert found["texts"] == [["a", "b"], ["", "é"]]
    assert (found["first"], found["settled"]) == (1, 3)
    edit = {"kind": "add", "point": "post_block", "layers": [3], "vector": [1], "strength": 2, "tokens": "all"}
    assert found["module"][0] == edit and found["module"][1]["tokens"] == "generated"
    assert found["live"] == [{"strength": 2e-12, "live": "n"}, 3, 1.5]
    assert found["pasted"][0][0]["layers"] == [4] and "list of numbers" in found["pasted"][1]
    assert "a.json does not tell its layer" in found["sites"][0] and "the hook 'hook_z'" in found["sites"][3]
    assert [found["sites"][n] for n in (1, 2, 4)] == ["pre_attn 7", "post_attn 3", "post_block 0"]
    assert found["norms"][:2] == [10, 5] and [math.isnan(each) for each in found["norms"][2:]] == [True, True]
    assert found["unit"] == "2 edits, as given at strength 1: a norm of 5 to 10, 25 % of the stream's length"
