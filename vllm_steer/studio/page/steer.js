// SPDX-License-Identifier: Apache-2.0
// Steer: plain beside steered from one seed; sliders are live strengths that act in the running stream.

import { ask, report } from "./api.js";
import { editsFrom, editsOfFile, editsOfText, factor, fitting, live } from "./edits.js";
import { choices, modules, NoModules, problem as refused, refresh, SiteFields, titleOf } from "./modules.js";
import { listSetting, share } from "./share.js";
import { CopyTurn, Inspector, Legend, Status, Tokens } from "./tokens.js";
import { colour, firstDifference, Turn } from "./turn.js";
import { Alert, Button, chosenOf, effect, Field, html, plural, PromptForm, promptSettings, readNumber, Remove, sampling, short, signal, untracked, View, visible } from "./ui.js";

const settings = promptSettings("Tell me about a walk through the town.");
const strengths = signal([]);
const chosen = signal("");
const expression = signal("");
const pasted = signal("");
const point = signal("post_block");
const layer = signal("");
const problem = signal("");
const plain = signal(new Turn());
const steered = signal(new Turn());
const difference = signal(-1);
const changes = signal([]);
const selected = signal(null);
let added = 0;

const liveName = (title) => `${title.replace(/[^A-Za-z0-9_]/g, "_").slice(0, 40)}_${++added}`;

const LOADING = "not loaded yet";

/** Add a row. One without edits waits for those of its module; a row with a fault blocks the run. */
function add(title, edits, module = "", strength = 1) {
	const item = { title, module, name: liveName(title), edits, strength: signal(String(strength)), start: 1, sent: 1, busy: false, fault: signal(edits ? "" : LOADING) };
	strengths.value = [...strengths.value, item];
	problem.value = "";
}

async function load(item) {
	item.edits = [];
	try {
		item.edits = await editsFrom(item.module);
		item.fault.value = "";
	} catch (error) {
		item.fault.value = error.message || "not loaded";
	}
}

const numbered = (text) => (text !== "" && Number.isFinite(Number(text)) ? Number(text) : text);

const edits = listSetting(
	() => strengths.value.filter((each) => each.module).map((each) => [each.module, numbered(each.strength.value)]),
	(list) => {
		strengths.value = [];
		for (const [name, strength] of list) add(String(name), null, String(name), strength);
	},
	problem,
);
share("steer", { ...settings, edits, expression });

effect(() => {
	if (report.value) strengths.value.filter((each) => !each.edits).forEach((each) => untracked(() => load(each)));
});

const strengthOf = (item) => readNumber(item.strength.value, `Strength of ${item.title}`);
const siteOf = () => ({ point: point.value, layer: layer.value === "" ? NaN : Number(layer.value) });
const atLayers = (title, edits) => {
	const layers = edits.flatMap((edit) => edit.layers ?? []);
	return layers.length ? `${title}, layer ${[...new Set(layers)].join(", ")}` : title;
};

function attempt(title, read) {
	try {
		const found = fitting(read());
		add(atLayers(title, found), found);
	} catch (error) {
		problem.value = error.message;
	}
}

async function addFile(event) {
	const file = event.target.files[0];
	event.target.value = "";
	if (!file) return;
	const buffer = await file.arrayBuffer();
	attempt(file.name, () => (/\.json$/i.test(file.name) ? editsOfText(new TextDecoder().decode(buffer), siteOf()) : editsOfFile(buffer)));
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

async function run() {
	stop();
	const common = sampling(settings);
	const messages = [{ role: "user", content: settings.prompt.value }];
	const text = expression.value.trim();
	let steering;
	try {
		if (text && strengths.value.length) throw new Error("A request has either edits or an expression: remove one of them.");
		steering = text || strengths.value.flatMap((item) => {
			if (item.fault.value) throw new Error(`${item.title}: ${item.fault.value}`);
			item.start = item.sent = strengthOf(item);
			return live(item.edits, item.name, item.start);
		});
	} catch (error) {
		problem.value = error.message;
		return;
	}
	const turns = [new Turn(), new Turn()];
	turns[1].items = strengths.value;
	[plain.value, steered.value] = turns;
	for (const turn of turns) turn.onToken = step;
	difference.value = -1;
	changes.value = [];
	selected.value = null;
	problem.value = "";
	await Promise.all([turns[0].run(messages, common), turns[1].run(messages, steering.length ? { ...common, steering } : common)]);
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
		turn.markAt(answer.position, `${item.title}: ${short(wanted)} from here`);
		changes.value = [...changes.value, `${item.title}: ${short(wanted)} from token ${turn.number(answer.position)} on`];
	} catch (error) {
		if (error.status !== 409 && error.status !== 404) problem.value = error.message;
	} finally {
		item.busy = false;
	}
	change(item);
}

class Slider extends View {
	view() {
		const { item } = this.props;
		const onInput = (event) => {
			item.strength.value = event.target.value;
			change(item);
		};
		const id = `strength-${item.name}`;
		const value = item.strength.value;
		const fault = item.fault.value;
		const late = steered.value.state.value === "running" && !steered.value.items.includes(item);
		const about = modules.value.find((each) => each.name === item.module)?.description;
		return html`<div class="slider">
			<label for=${id}>${item.module && !fault ? titleOf(item.title) : item.title}</label>
			<input id=${id} type="range" min="-3" max="3" step="0.1" value=${value} onInput=${onInput} />
			<input type="number" step="0.1" value=${value} onInput=${onInput} aria-label=${`Strength of ${item.title}`} />
			<${Remove} item=${item} from=${strengths} />
			${fault && fault !== LOADING ? html`<${Alert} text=${fault} />` : html`<span class="hint">${fault || (late ? "from the next run" : (about ? `${about} · ` : "") + plural(item.edits.length, "edit"))}</span>`}
		</div>`;
	}
}

class Side extends View {
	view() {
		const { title, turn } = this.props;
		const idle = turn.state.value === "idle";
		const bare = title === "Steered" && !(idle ? strengths.value.length || expression.value.trim() : turn.request.steering);
		return html`<section class="side-by-side">
			<h3>${title}${bare ? " (no edits)" : ""}</h3>
			<${Tokens}
				turn=${turn}
				label=${`Tokens, ${title.toLowerCase()}`}
				colourOf=${(token) => (token.logprob === undefined ? "" : colour(-token.logprob, 0, 4))}
				colours="surprise"
				onSelect=${(of, index) => {
					for (const each of [plain.value, steered.value]) each.selected.value = each === of ? index : -1;
					selected.value = of;
				}}
			/>
			<${Status} turn=${turn} /><${CopyTurn} turn=${turn} />
		</section>`;
	}
}

class Difference extends View {
	view() {
		const at = difference.value;
		const done = [plain.value, steered.value].every((turn) => turn.state.value === "done");
		if (at < 0) return done ? html`<p role="status">Both answers are the same.</p>` : null;
		const [one, other] = [plain.value.tokens[at], steered.value.tokens[at]];
		return html`<p role="status">
			First difference at token ${at + 1}: "<code>${visible(one?.text ?? "")}</code>" plain, "<code>${visible(other?.text ?? "")}</code>" steered.
		</p>`;
	}
}

export class Steer extends View {
	componentDidMount() {
		if (report.value) refresh();
	}

	view() {
		const running = [plain.value, steered.value].some((turn) => turn.state.value === "running");
		return html`<div class="steer">
			<${PromptForm} settings=${settings} title="Run both" run=${run} stop=${stop} running=${running} />
			<section aria-label="Edits">
				${strengths.value.length ? null : html`<p class="hint">Add a module or a vector; its slider acts in the running stream.</p>`}
				${strengths.value.map((item) => html`<${Slider} key=${item.name} item=${item} />`)}
				<div class="row">
					${modules.value.length
						? html`<${Field} label="Module" kind="select" value=${chosen} options=${choices()} />
								<${Button} onClick=${() => add(chosenOf(chosen, choices()), null, chosenOf(chosen, choices()))}>Add module<//>`
						: html`<${NoModules} />`}
					<${Button} class="quiet" onClick=${refresh}>Refresh modules<//>
				</div>
				<${Field} label="Expression instead of edits" value=${expression} hint="doses of modules, such as 0.2 calm" />
				<details>
					<summary>Paste or open a vector</summary>
					<${Field} label="Vector or edits (JSON)" kind="textarea" rows="3" value=${pasted} spellcheck="false" />
					<div class="row">
						<${SiteFields} ...${{ point, layer }} />
						<${Button} onClick=${() => attempt("pasted", () => editsOfText(pasted.value, siteOf()))}>Add pasted<//>
						<label>File (.safetensors of a module, .json) <input type="file" onChange=${addFile} /></label>
					</div>
				</details>
			</section>
			<${Alert} text=${problem.value || refused.value} />
			<${Difference} />
			<div class="columns">
				<div class="pair">
					<${Side} title="Plain" turn=${plain.value} />
					<${Side} title="Steered" turn=${steered.value} />
				</div>
				<aside class="side" aria-label="Selected token">
					<${Legend} what="Probability" low="high" high="low" />
					<${Inspector} turn=${selected.value} />
				</aside>
			</div>
			${changes.value.length ? html`<ol class="changes" aria-label="Changes in the stream">${changes.value.map((each) => html`<li>${each}</li>`)}</ol>` : null}
		</div>`;
	}
}
