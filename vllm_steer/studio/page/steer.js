// SPDX-License-Identifier: Apache-2.0
// Steer: plain beside steered from one seed; sliders are live strengths that act in the running stream.

import { ask, report } from "./api.js";
import { editsFrom, editsOfFile, editsOfText, factor, fitting, live, normOf, unitOf } from "./edits.js";
import { choices, modules, NoModules, Paste, problem as refused, refresh, titleOf } from "./modules.js";
import { listSetting, share } from "./share.js";
import { Answer, Inspector, Legend } from "./tokens.js";
import { firstDifference, surprise, Turn } from "./turn.js";
import { Alert, attempt, Button, chosenOf, component, effect, Field, html, PromptForm, promptSettings, readNumber, Remove, sampling, short, signal, uniqueName, untracked, visible } from "./ui.js";

const settings = promptSettings("Tell me about a walk through the town.");
const strengths = signal([]);
const chosen = signal("");
const expression = signal("");
const paste = { pasted: signal(""), point: signal("post_block"), layer: signal("") };
const problem = signal("");
const plain = signal(new Turn());
const steered = signal(new Turn());
const difference = signal(-1);
const changes = signal([]);
const selected = signal(null);

const LOADING = "not loaded yet";

/**
 * Add a row. One without edits waits for those of the module with its title; a row with a fault blocks the run. The run
 * has the strengths at its start, sent last, and confirmed last.
 */
function add(title, edits, strength = 1) {
	const item = { title, module: edits ? "" : title, name: uniqueName(title), edits, norms: (edits ?? []).map(normOf), strength: signal(String(strength)), start: 1, sent: 1, last: 1, busy: false, fault: signal(edits ? "" : LOADING) };
	strengths.value = [...strengths.value, item];
	problem.value = "";
}

async function load(item) {
	item.edits = [];
	try {
		item.edits = await editsFrom(item.module);
		item.norms = item.edits.map(normOf);
		item.fault.value = "";
	} catch (error) {
		item.fault.value = error.message || "not loaded";
	}
}

const edits = listSetting(
	() => strengths.value.filter((each) => each.module).map((each) => [each.module, each.strength.value]),
	(list) => {
		strengths.value = [];
		for (const [name, strength] of list) add(String(name), null, strength);
	},
	problem,
);
share("steer", { ...settings, edits, expression });

effect(() => {
	if (report.value) strengths.value.filter((each) => !each.edits).forEach((each) => untracked(() => load(each)));
});

const strengthOf = (item) => readNumber(item.strength.value, `Strength of ${item.title}`);
const atLayers = (title, edits) => {
	const layers = edits.flatMap((edit) => edit.layers ?? []);
	return layers.length ? `${title}, layer ${[...new Set(layers)].join(", ")}` : title;
};

const addRead = (title, read) =>
	attempt(problem, () => {
		const found = fitting(read());
		add(atLayers(title, found), found);
	});

/** Names of JSON files by their text. */
const opened = new Map();

function addPasted() {
	const { pasted, point, layer } = paste;
	const title = opened.get(pasted.value) ?? "pasted";
	addRead(title, () => editsOfText(pasted.value, { point: point.value, layer: layer.value }, title));
}

/** Add a file. JSON goes through the text field, where it waits for its layer if it does not tell it. */
async function addFile(event) {
	const file = event.target.files[0];
	event.target.value = "";
	if (!file) return;
	const buffer = await file.arrayBuffer();
	if (!/\.json$/i.test(file.name)) return addRead(file.name, () => editsOfFile(buffer));
	paste.pasted.value = new TextDecoder().decode(buffer);
	opened.set(paste.pasted.value, file.name);
	addPasted();
}

function step() {
	const [one, other] = [plain.value, steered.value];
	strengths.value.forEach(change); // those that moved before there was an id
	if (difference.value >= 0) return;
	const at = firstDifference(one.tokens, other.tokens);
	if (at < 0) return;
	difference.value = at;
	for (const turn of [one, other]) {
		turn.tokens[at].differs = true;
		turn.touch(at);
	}
}

function run() {
	stop();
	const common = sampling(settings);
	const messages = [{ role: "user", content: settings.prompt.value }];
	const text = expression.value.trim();
	if (text && strengths.value.length) throw new Error("A request has either edits or an expression: remove one of them.");
	const given = strengths.value.map((item) => {
		if (item.fault.value) throw new Error(`${item.title}: ${item.fault.value}`);
		return strengthOf(item);
	});
	const steering = text || strengths.value.flatMap((item, n) => live(item.edits, item.name, (item.start = item.sent = item.last = given[n])));
	const turns = [new Turn(), new Turn()];
	turns[1].items = strengths.value;
	[plain.value, steered.value] = turns;
	for (const turn of turns) turn.onToken = step;
	difference.value = -1;
	changes.value = [];
	selected.value = null;
	turns[0].run(messages, common);
	turns[1].run(messages, steering.length ? { ...common, steering } : common);
}

function stop() {
	plain.value.stop();
	steered.value.stop();
}

/** Send a strength to the running stream. While one is on its way, only the newest later one is kept. */
async function change(item) {
	const turn = steered.value;
	if (item.busy || !turn.items.includes(item) || turn.state.value !== "running" || !turn.id.value) return;
	let wanted;
	try {
		wanted = strengthOf(item);
	} catch {
		return; // being typed
	}
	if (wanted === item.sent) return;
	item.busy = true;
	item.sent = wanted;
	try {
		const answer = await ask("POST", `v1/steering/requests/${encodeURIComponent(turn.id.value)}`, {
			[item.name]: factor(wanted, item.start),
		});
		item.last = wanted;
		turn.markAt(answer.position, `${item.title}: ${short(wanted)} from here`);
		changes.value = [...changes.value, `${item.title}: ${short(wanted)} from token ${turn.number(answer.position)} on`];
	} catch (error) {
		if (error.status !== 409 && error.status !== 404) problem.value = error.message;
	} finally {
		item.busy = false;
	}
	change(item);
}

const Slider = component(({ item }) => {
	const onInput = (event) => {
		item.strength.value = event.target.value;
		change(item);
	};
	const id = `strength-${item.name}`;
	const value = item.strength.value;
	const fault = item.fault.value;
	const late = steered.value.state.value === "running" && !steered.value.items.includes(item);
	const about = late ? "from the next run" : modules.value.find((each) => each.name === item.module)?.description;
	const unit = fault || unitOf(item.edits, item.norms, modules.value.flatMap((each) => each.streams ?? []));
	return html`<div class="slider">
		<label for=${id}>${item.module && !fault ? titleOf(item.title) : item.title}</label>
		<input id=${id} type="range" min="-3" max="3" step="0.1" value=${value} onInput=${onInput} />
		<input type="number" step="0.1" value=${value} onInput=${onInput} aria-label=${`Strength of ${item.title}`} />
		<${Remove} item=${item} from=${strengths} />
		${fault && fault !== LOADING ? html`<${Alert} text=${fault} />` : html`<span class="hint">${about && !fault ? `${about} · ` : ""}${unit}</span>`}
	</div>`;
});

/** Return what steers an answer: its expression, or its strengths as it began and as they were changed last. */
function steeredBy({ request, items }) {
	if (!request) return strengths.value.length || expression.value.trim() ? "" : " (no edits)";
	const words = items.map(({ title, start, last }) => `${title} × ${short(start)}${last === start ? "" : ` → ${short(last)}`}`).join("; ");
	return request.steering ? `: ${words || request.steering}` : " (no edits)";
}

const Side = ({ title, by = "", turn }) => html`<section class="side-by-side">
	<h3>${title}${by}</h3>
	<${Answer} turn=${turn} label=${`Tokens, ${title.toLowerCase()}`} colourOf=${surprise} current=${selected} />
</section>`;

const Difference = component(() => {
	const at = difference.value;
	const done = [plain.value, steered.value].every((turn) => turn.state.value === "done");
	if (at < 0) return done && html`<p role="status">Both answers are the same.</p>`;
	const [one, other] = [plain.value.tokens[at], steered.value.tokens[at]];
	return html`<p role="status">
		First difference at token ${at + 1}: "<code>${visible(one?.text ?? "")}</code>" plain, "<code>${visible(other?.text ?? "")}</code>" steered.
	</p>`;
});

export const Steer = component(() => {
	const running = [plain.value, steered.value].some((turn) => turn.state.value === "running");
	return html`<div class="steer">
		<${PromptForm} settings=${settings} title="Run both" run=${() => attempt(problem, run)} stop=${stop} running=${running} />
		<section aria-label="Edits">
			${!strengths.value.length && html`<p class="hint">Add a module or a vector; its slider acts in the running stream.</p>`}
			${strengths.value.map((item) => html`<${Slider} key=${item.name} item=${item} />`)}
			<div class="row">
				${modules.value.length
					? html`<${Field} label="Module" kind="select" value=${chosen} options=${choices()} />
							<${Button} onClick=${() => add(chosenOf(chosen, choices()), null)}>Add module<//>`
					: html`<${NoModules} />`}
				<${Button} class="quiet" onClick=${refresh}>Refresh modules<//>
			</div>
			<${Field} label="Expression instead of edits" value=${expression} hint="doses of modules, such as 0.2 calm" />
			<${Paste} title="Paste or open a vector" label="Vector or edits (JSON)" add=${addPasted} ...${paste}>
				<label>File (.safetensors of a module, .json) <input type="file" onChange=${addFile} /></label>
			<//>
		</section>
		<${Alert} text=${problem.value || refused.value} />
		<${Difference} />
		<div class="columns">
			<div class="pair">
				<${Side} title="Plain" turn=${plain.value} />
				<${Side} title="Steered" by=${steeredBy(steered.value)} turn=${steered.value} />
			</div>
			<aside class="side" aria-label="Selected token">
				<${Legend} what="Probability" low="high" high="low" />
				<${Inspector} turn=${selected.value} />
			</aside>
		</div>
		${changes.value.length > 0 && html`<ol class="changes" aria-label="Changes in the stream">${changes.value.map((each) => html`<li>${each}</li>`)}</ol>`}
	</div>`;
});
