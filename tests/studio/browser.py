# SPDX-License-Identifier: Apache-2.0
"""The studio's page in a browser."""

from __future__ import annotations

import ast
import json
from dataclasses import dataclass, field
from typing import Any

from playwright.sync_api import expect

TIMEOUT_MS = 120_000
"""The model answers within seconds on an idle machine."""
VIEWS = ("chat", "steer", "probes", "patching", "traffic", "modules", "server")
CHAT_ROUTE = "**/v1/chat/completions"
PATCH_ROUTE = "**/v1/steering/patch"
MARKUP = '<img src=x onerror="window.ran=1"><b class=markup>&amp;</b>'
"""Would set a variable and add an element if it were taken for HTML."""

CONTRAST = """() => {
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const rgba = (text) => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = text; canvas.fillRect(0, 0, 1, 1);
    return canvas.getImageData(0, 0, 1, 1).data;
  };
  const luminance = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map((v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const paint = rgba(getComputedStyle(at).backgroundColor);
      if (paint[3] === 255) return paint;
    }
    return [255, 255, 255, 255];
  };
  const low = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!own || !element.checkVisibility() || element.disabled || element.tagName === "OPTION") continue;
    const pair = [luminance(rgba(getComputedStyle(element).color)), luminance(behind(element))].sort((a, b) => b - a);
    const ratio = (pair[0] + 0.05) / (pair[1] + 0.05);
    if (ratio < 4.5) low.push(`${element.outerHTML.slice(0, 100)}: ${ratio.toFixed(2)}`);
  }
  return low;
}"""
"""Returns the elements whose text has less contrast than WCAG AA demands."""

AXE = """() => axe.run(document, {
  resultTypes: ["violations"], rules: { "scrollable-region-focusable": { enabled: false } },
})"""
"""Returns what axe finds. Browsers let the keyboard into areas that scroll, without an attribute of the page."""

BROKEN_WORDS = """() => [...document.querySelectorAll("thead th")].filter((element) => {
  const range = document.createRange();
  const node = element.firstChild;
  return node?.nodeType === 3 && [...node.data.matchAll(/\\w+/g)].some(({ index, 0: word }) => {
    range.setStart(node, index);
    range.setEnd(node, index + word.length);
    return range.getClientRects().length > 1;
  });
}).map((element) => element.textContent)"""
"""Returns the headings of columns with a word that goes over several lines."""

RAGGED = """() => [...document.querySelectorAll(".row")].filter((row) => {
  const boxes = [...row.querySelectorAll("input, select, button")].map((each) => each.getBoundingClientRect());
  const differ = (a, b) => a.top < b.bottom && b.top < a.bottom && Math.abs(a.top + a.bottom - b.top - b.bottom) > 8;
  return boxes.some((one) => boxes.some((other) => differ(one, other)));
}).map((element) => element.textContent.slice(0, 100))"""
"""Returns the rows of a form in which controls of a line are not on one height."""

UNNAMED = """() => [...document.querySelectorAll("input, select, textarea, button, a, [role=listbox], svg[role=img]")]
  .filter((element) => element.checkVisibility())
  .filter((element) => !(element.labels?.length || element.ariaLabel || element.textContent.trim()))
  .map((element) => element.outerHTML.slice(0, 100))"""
"""Returns the controls without a name for screen readers."""


@dataclass
class Server:
    """A server with keys: `all` has every right, `reader` only reads."""

    url: str
    keys: dict[str, str]


@dataclass
class Opened:
    """A page of the studio, with what its browser has reported."""

    browser: Any
    server: Server
    errors: list[str] = field(default_factory=list)
    requested: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        rights = ["clipboard-read", "clipboard-write"]
        self.context = self.browser.new_context(viewport={"width": 1280, "height": 860}, permissions=rights)
        self.page = self.context.new_page()
        self.page.set_default_timeout(TIMEOUT_MS)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", self._heard)
        self.page.on("request", lambda request: self.requested.append(request.url))

    def _heard(self, message: Any) -> None:
        # The browser itself reports answers that are errors and connections that fail.
        if message.type == "error" and not message.text.startswith("Failed to load resource"):
            self.errors.append(message.text)

    def open(self, view: str = "chat", key: str | None = "all") -> Any:
        """Open a view, and enter a key if one is given. Returns Playwright's page."""
        self.page.goto(f"{self.server.url}/studio/#{view}")
        if key is not None:
            self.enter(self.server.keys[key])
            self.page.get_by_role("button", name="Forget key").wait_for()
            self.page.get_by_text("SmolLM2").wait_for()
            self.page.wait_for_load_state("networkidle")
        return self.page

    def enter(self, secret: str) -> None:
        """Enter a key and send it with the keyboard."""
        self.page.get_by_label("API key").fill(secret)
        self.page.keyboard.press("Enter")

    def copied(self, kind: str) -> str:
        """Copy the last request as a command or script, which must not have the key, and return it."""
        self.page.evaluate("navigator.clipboard.writeText('')")
        self.page.get_by_role("button", name=f"Copy as {kind}").last.click()
        text: str = self.page.wait_for_function("() => navigator.clipboard.readText()").json_value()
        assert not any(secret in text for secret in self.server.keys.values())
        return text

    def copied_request(self) -> tuple[str, Any]:
        """Return address and body of the script that the page copies, without sending it."""
        found = {
            statement.targets[0].id: statement.value
            for statement in ast.parse(self.copied("Python")).body
            if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name)
        }
        return ast.literal_eval(found["url"]), ast.literal_eval(found["body"])

    def close(self) -> None:
        """Close the page; raise ``AssertionError`` if a script failed or another host was asked."""
        ran = self.page.evaluate("[window.ran, document.querySelectorAll('.markup').length]")
        self.context.close()
        assert self.errors == []
        assert ran == [None, 0], "text was taken for HTML"
        assert [url for url in self.requested if not url.startswith(f"{self.server.url}/")] == []


def say(page: Any, text: str, tokens: int = 12) -> None:
    """Send a message with the keyboard, and wait for the end of the answer."""
    if not page.get_by_label("Most tokens").is_visible():
        page.get_by_text("Settings").click()
    page.get_by_label("Most tokens").fill(str(tokens))
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")
    expect(page.locator(".status").last).to_contain_text("done")


def events(*texts: str, error: str | None = None) -> str:
    """Return a stream of one token for each text, without its end."""
    made = []
    for n, text in enumerate(texts):
        top = [{"token": text, "logprob": -0.1, "bytes": []}, {"token": f"{text}!", "logprob": -3.0, "bytes": []}]
        item = {"token": text, "logprob": -0.1, "bytes": [], "top_logprobs": top}
        choice = {"index": 0, "delta": {"content": text}, "logprobs": {"content": [item]}, "token_ids": [n]}
        made.append({"id": "chatcmpl-x", "choices": [choice], "prompt_token_ids": [1, 2]})
    if error is not None:
        made.append({"error": {"message": error, "code": 500}})
    return "".join(f"data: {json.dumps(each)}\n\n" for each in made)
