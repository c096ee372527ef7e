// SPDX-License-Identifier: Apache-2.0
// The frame of the page: views, key and connection.

import { connect, key, link, model, noReport, overall, refreshGlobal, refusal, report } from "./api.js";
import { Chat } from "./chat.js";
import { globalWords, Modules, refresh } from "./modules.js";
import { Patching } from "./patching.js";
import { Probes } from "./probes.js";
import { Server } from "./server.js";
import { addressOf, restore } from "./share.js";
import { Steer } from "./steer.js";
import { Traffic } from "./traffic.js";
import { Alert, Button, component, effect, Field, html, render, signal, submits, untracked } from "./ui.js";

const VIEWS = { chat: Chat, steer: Steer, probes: Probes, patching: Patching, traffic: Traffic, modules: Modules, server: Server };
const titleOf = (name) => name[0].toUpperCase() + name.slice(1);

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

addEventListener("hashchange", ({ newURL }) => {
	view.value = viewOf(new URL(newURL).hash); // the timer may replace the address
	write();
});
effect(write);

function useKey(secret) {
	key.value = secret;
	connect();
}

const Banner = component(() => {
	if (link.value === "no") {
		return html`<${Alert} text="The connection to the server is lost. What has arrived is kept; the page reconnects by itself." />`;
	}
	if (link.value === "locked") {
		return html`<${Alert} text=${refusal.value} />
			<form class="row" onSubmit=${submits(() => useKey(typed.value.trim()))}>
				<${Field} label="API key" kind="password" autocomplete="off" value=${typed} hint="kept in this tab's memory only" />
				<button class="primary">Use key</button>
			</form>`;
	}
	const steered = overall.value?.digest && ["chat", "steer", "probes"].includes(view.value);
	const words = noReport.value || (steered && `${globalWords()} It steers every answer, also plain ones.`);
	return words && html`<p class="warning" role="status">${words}</p>`;
});

const App = component(() => {
	const Shown = VIEWS[view.value];
	return html`<header class="top">
			<h1>vllm-steer studio</h1>
			<nav aria-label="Views">
				${Object.keys(VIEWS).map((name) => html`<a href=${`#${name}`} aria-current=${name === view.value ? "page" : undefined}>${titleOf(name)}</a>`)}
			</nav>
			<span class="model">${model.value ?? ""}</span>
			${key.value && link.value !== "locked" && html`<${Button} class="quiet" onClick=${() => useKey((typed.value = ""))}>Forget key<//>`}
		</header>
		<main>
			<h2 class="hidden">${titleOf(view.value)}</h2>
			<${Banner} />
			<${Shown} />
		</main>`;
});

// Each view begins with the present modules. It can be open before the key is known.
effect(() => {
	if (view.value && report.value) untracked(refresh);
});
addEventListener("focus", refreshGlobal);

const root = /** @type {HTMLElement} */ (document.getElementById("root"));
root.replaceChildren();
render(html`<${App} />`, root);
connect();
