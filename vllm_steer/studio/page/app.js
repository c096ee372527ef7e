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
import { Alert, Button, effect, Field, html, render, signal, submits, untracked, View } from "./ui.js";

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

class KeyForm extends View {
	view() {
		return html`<form
			class="row"
			onSubmit=${submits(() => {
				key.value = typed.value.trim();
				connect();
			})}
		>
			<${Field} label="API key" kind="password" autocomplete="off" value=${typed} hint="kept in this tab's memory only" />
			<button type="submit" class="primary">Use key</button>
		</form>`;
	}
}

class Banner extends View {
	view() {
		if (link.value === "no") {
			return html`<${Alert} text="The connection to the server is lost. What has arrived is kept; the page reconnects by itself." />`;
		}
		if (link.value === "locked") {
			return html`<section class="error" role="alert"><p>${refusal.value}</p></section>
				<${KeyForm} />`;
		}
		const steered = overall.value?.digest && ["chat", "steer", "probes"].includes(view.value);
		const words = noReport.value || (steered && `${globalWords()} It steers every answer, also plain ones.`);
		return words ? html`<p class="warning" role="status">${words}</p>` : null;
	}
}

class App extends View {
	view() {
		const Shown = VIEWS[view.value];
		return html`<header class="top">
				<h1>vllm-steer studio</h1>
				<nav aria-label="Views">
					${Object.keys(VIEWS).map((name) => html`<a href=${`#${name}`} aria-current=${name === view.value ? "page" : undefined}>${titleOf(name)}</a>`)}
				</nav>
				<span class="model">${model.value ?? ""}</span>
				${key.value && link.value !== "locked"
					? html`<${Button}
							class="quiet"
							onClick=${() => {
								key.value = typed.value = "";
								connect();
							}}
						>Forget key<//>`
					: null}
			</header>
			<main>
				<h2 class="hidden">${titleOf(view.value)}</h2>
				<${Banner} />
				<${Shown} />
			</main>`;
	}
}

// Views can be open before the key is known.
effect(() => {
	if (report.value) untracked(refresh);
});
effect(() => {
	if (view.value) untracked(refreshGlobal);
});
addEventListener("focus", refreshGlobal);

const root = /** @type {HTMLElement} */ (document.getElementById("root"));
root.replaceChildren();
render(html`<${App} />`, root);
connect();
