// SPDX-License-Identifier: Apache-2.0
// The frame of the page: views, key and connection.

import { connect, key, link, LOST, model, noReport, refusal, report } from "./api.js";
import { Chat } from "./chat.js";
import { Modules, refresh } from "./modules.js";
import { Patching } from "./patching.js";
import { Probes } from "./probes.js";
import { Server } from "./server.js";
import { addressOf, restore } from "./share.js";
import { Steer } from "./steer.js";
import { Traffic } from "./traffic.js";
import { effect, Field, html, render, signal, untracked, View } from "./ui.js";

const VIEWS = {
  chat: ["Chat", Chat],
  steer: ["Steer", Steer],
  probes: ["Probes", Probes],
  patching: ["Patching", Patching],
  traffic: ["Traffic", Traffic],
  modules: ["Modules", Modules],
  server: ["Server", Server],
};

const view = signal(viewOf(location.hash));
const typed = signal("");

function viewOf(hash) {
  const name = restore(hash);
  return Object.hasOwn(VIEWS, name) ? name : "chat";
}

let timer = 0;
/** Write the settings to the address, as browsers allow it: not at each step of a slider. */
function write() {
  const address = addressOf(view.value);
  clearTimeout(timer);
  timer = setTimeout(() => history.replaceState(null, "", address), 300);
}

addEventListener("hashchange", () => {
  view.value = viewOf(location.hash);
  write();
});
effect(write);

class KeyForm extends View {
  view() {
    return html`<form
      class="key"
      onSubmit=${(event) => {
        event.preventDefault();
        key.value = typed.value.trim();
        connect();
      }}
    >
      <${Field} label="API key" kind="password" autocomplete="off" value=${typed} hint="kept in this tab's memory only" />
      <button type="submit" class="primary">Use key</button>
    </form>`;
  }
}

class Banner extends View {
  view() {
    if (link.value === "no") return html`<p class="error" role="alert">${LOST}</p>`;
    if (link.value === "locked") {
      return html`<section class="error" role="alert"><p>${refusal.value}</p></section>
        <${KeyForm} />`;
    }
    return noReport.value ? html`<p class="warning" role="status">${noReport.value}</p>` : null;
  }
}

class App extends View {
  view() {
    const Shown = VIEWS[view.value][1];
    return html`<header class="top">
        <h1>vllm-steer studio</h1>
        <nav aria-label="Views">
          ${Object.entries(VIEWS).map(
            ([name, [title]]) => html`<a href=${`#${name}`} aria-current=${name === view.value ? "page" : undefined}>${title}</a>`,
          )}
        </nav>
        <span class="model">${model.value ?? ""}</span>
        ${key.value && link.value !== "locked"
          ? html`<button
              type="button"
              class="quiet"
              onClick=${() => {
                key.value = typed.value = "";
                connect();
              }}
            >
              Forget key
            </button>`
          : null}
      </header>
      <main>
        <h2 class="hidden">${VIEWS[view.value][0]}</h2>
        <${Banner} />
        <${Shown} />
      </main>`;
  }
}

// Views can be open before the key is known.
effect(() => {
  if (report.value) untracked(refresh);
});

const root = /** @type {HTMLElement} */ (document.getElementById("root"));
root.replaceChildren();
render(html`<${App} />`, root);
connect();
