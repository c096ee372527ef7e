// SPDX-License-Identifier: Apache-2.0
// Modules: list, upload, delete; global steering with a warning of whom it concerns.

import { ask, overall, pointChoices, refreshGlobal } from "./api.js";
import { ranges, Table } from "./server.js";
import { Alert, attempt, Button, chosenOf, component, Field, html, short, signal, submits, View } from "./ui.js";

const ROUTE = "v1/steering/modules";
export const modules = signal([]);
export const problem = signal("");
const done = signal("");
const loaded = signal(false);
const name = signal("");
const file = signal(null);
const asked = signal("");
const chosen = signal("");
const scale = signal("1");
const sure = signal(false);

/** Read the modules and global steering. */
export function refresh() {
	done.value = "";
	return attempt(problem, async () => {
		modules.value = (await ask("GET", ROUTE)).data;
		loaded.value = true;
		await refreshGlobal();
	});
}

export const titleOf = (name) => (loaded.value && modules.value.every((each) => each.name !== name) ? `${name} (deleted)` : name);

export const choices = () => modules.value.map((each) => [each.name, each.name]);

export const NoModules = () =>
	html`<p class="hint">No modules are registered. Make one with <code>vllm-steer make</code>, and upload it under <a href="#modules">Modules</a>.</p>`;

export const Paste = ({ title, label, pasted, point, layer, add, children }) => html`<details>
	<summary>${title}</summary>
	<${Field} label=${label} kind="textarea" rows="3" value=${pasted} spellcheck="false" />
	<div class="row">
		<${Field} label="Point" kind="select" value=${point} options=${pointChoices()} />
		<${Field} label="Layer" kind="number" min="0" value=${layer} />
		${children}
		<${Button} onClick=${add}>Add pasted<//>
	</div>
</details>`;

export function globalWords() {
	const now = overall.value;
	const used = now?.modules?.map((each) => `${each.name ? titleOf(each.name) : each.digest} × ${short(each.scale)}`).join(", ");
	return !now ? "" : now.digest ? `Global steering is set${used ? `: ${used}` : ""}.` : "No global steering is set.";
}

export function summary(content) {
	const parts = [];
	for (const [tier, points] of Object.entries(content.tiers)) {
		for (const [point, layers] of Object.entries(points)) parts.push(`${tier}: ${point} ${ranges(layers)}`);
	}
	return [...parts, ...content.edits].join("; ") || "no edits";
}

/** Change something on the server, and read its state again. */
const change = (action, success = "") =>
	attempt(problem, async () => {
		done.value = "";
		await action();
		await refresh();
		done.value = success;
	});

async function upload(form) {
	const given = file.value;
	const wanted = name.value.trim() || given.name.replace(/\.[^.]*$/, "");
	const path = `${ROUTE}?name=${encodeURIComponent(wanted)}`;
	const send = async () => ask("POST", path, await given.arrayBuffer(), { type: "application/octet-stream" });
	if (!(await change(send, `${wanted} is registered.`))) return;
	form.reset();
	file.value = null;
	name.value = "";
}

async function remove(module) {
	await change(() => ask("DELETE", `${ROUTE}/${encodeURIComponent(module)}`), `${module} is deleted.`);
	asked.value = "";
}

async function setGlobal() {
	const body = { modules: [[chosenOf(chosen, choices()), Number(scale.value)]] };
	await change(() => ask("POST", "v1/steering/set", body));
	sure.value = false;
}

const clearGlobal = () => change(() => ask("POST", "v1/steering/clear"));

const rowOf = (module) => [
	module.name,
	module.description,
	module.problem ?? summary(module.content),
	module.probes.join(", ") || "none",
	html`<code>${module.digest.slice(0, 19)}</code> (${module.versions.length})`,
	asked.value === module.name
		? html`<${Button} class="danger" onClick=${() => remove(module.name)}>Delete for everybody<//> <${Button} onClick=${() => (asked.value = "")}>Keep<//>`
		: html`<${Button} class="danger" aria-label=${`Delete ${module.name}`} onClick=${() => (asked.value = module.name)}>Delete<//>`,
];

const Global = component(() => {
	return html`<section aria-label="Global steering">
		<h3>Global steering</h3>
		<p role="status">${globalWords()}</p>
		<p class="warning">
			Global steering changes every later request of every client and API key of this server. Running requests keep what they have.
		</p>
		<form class="row" onSubmit=${submits(setGlobal)}>
			<${Field} label="Module for all requests" kind="select" value=${chosen} options=${choices()} />
			<${Field} label="Scale" kind="number" step="0.1" value=${scale} />
			<${Field} label="I mean all requests" kind="checkbox" value=${sure} />
			<button class="danger" disabled=${!sure.value || !modules.value.length}>Set for everybody</button>
			<${Button} onClick=${clearGlobal} disabled=${!overall.value?.digest}>Clear<//>
		</form>
	</section>`;
});

export class Modules extends View {
	componentDidMount() {
		asked.value = "";
	}

	view() {
		return html`<form class="row" onSubmit=${submits(upload)}>
			<label class="field">File of a module or of another tool <input type="file" onChange=${(event) => (file.value = event.target.files[0])} /></label>
			<${Field} label="Name" value=${name} hint="empty for the file's name" />
			<button class="primary" disabled=${!file.value}>Upload</button>
			<${Button} class="quiet" onClick=${refresh}>Refresh<//>
		</form>
		<${Alert} text=${problem.value} />
		${done.value && html`<p role="status">${done.value}</p>`}
		<${Table} caption="Modules" head=${["Name", "Description", "Edits", "Probes", "Digest (versions)", "Action"]} rows=${modules.value.map(rowOf)} />
		${!modules.value.length && html`<${NoModules} />`}
		<${Global} />`;
	}
}
