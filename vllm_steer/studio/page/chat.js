// SPDX-License-Identifier: Apache-2.0
// Chat: each token with the sampler's alternatives and a lens by layer; an alternative forks the conversation.

import { report } from "./api.js";
import { share } from "./share.js";
import { Answer, Inspector, Legend } from "./tokens.js";
import { colour, settled, surprise, Turn } from "./turn.js";
import { Alert, attempt, Button, component, Field, html, promptSettings, readNumber, sampling, SamplingFields, signal, submits, View } from "./ui.js";

/**
 * A message. Its children are continuations of the conversation; `shown` is the one that the page shows.
 * @typedef {{role: string, text: string, turn: Turn | null, parent: Message | null, children: Message[], shown: number}} Message
 */

/**
 * @param {Message | null} parent
 * @param {Turn | null} turn
 * @returns {Message}
 */
function message(role, text, parent, turn = null) {
	const made = { role, text, turn, parent, children: [], shown: 0 };
	if (parent) parent.shown = parent.children.push(made) - 1;
	return made;
}

const root = message("root", "", null);
const version = signal(0);
const current = signal(null);
const { prompt: draft, temperature, seed, maxTokens } = promptSettings("");
const system = signal("");
const lens = signal(true);
const topK = signal("4");
const layers = signal("");
const colouring = signal("depth");
const problem = signal("");

share("chat", { system, temperature, seed, maxTokens, lens, topK, layers, colouring });

export function shownPath(from) {
	const path = [];
	for (let at = from; at.children.length; ) path.push((at = at.children[at.shown]));
	return path;
}

/**
 * Read a list of numbers such as "0, 4-6, 29".
 * @returns {number[]}
 */
export function readNumbers(text, what) {
	const found = new Set();
	for (const part of text.split(",").map((each) => each.trim()).filter(Boolean)) {
		const match = /^(\d+)(?:\s*-\s*(\d+))?$/.exec(part);
		if (!match) throw new Error(`${what}: '${part}' is neither a number nor a range such as 4-6.`);
		const [first, last] = [Number(match[1]), Number(match[2] ?? match[1])];
		if (last < first) throw new Error(`${what}: the range '${part}' ends before it begins.`);
		if (last - first > 1000) throw new Error(`${what}: '${part}' has more than 1000 numbers.`);
		for (let number = first; number <= last; number++) found.add(number);
	}
	return [...found].sort((one, other) => one - other);
}

/** Return layers spread over the model, the last one among them, as many as the engine can record with `k` tokens each. */
export function spreadLayers(count, columns, k) {
	const n = Math.min(count, 10, Math.floor(columns / (2 * k)));
	return Array.from({ length: n }, (_, i) => count - 1 - Math.round(((n - 1 - i) * count) / n));
}

function defaultLayers() {
	const found = report.value;
	if (!found?.num_layers) return [];
	return spreadLayers(found.num_layers, found.limits.record_columns ?? 32, Math.max(1, Number(topK.value) || 1));
}

function settings(turn) {
	const chosen = sampling({ maxTokens, temperature, seed });
	if (lens.value && report.value) {
		const top_k = readNumber(topK.value, "Tokens per layer", 1, 20);
		turn.layers = layers.value.trim() ? readNumbers(layers.value, "Layers") : defaultLayers();
		const columns = report.value.limits.record_columns;
		if (!turn.layers.length && columns) throw new Error(`Tokens per layer: '${top_k}' is more than the server records, ${columns >> 1}.`);
		if (turn.layers.length) {
			chosen.readouts = {
				lens: { lens: { top_k }, point: "post_block", layers: turn.layers, positions: [[-1, null]] },
			};
		}
	}
	return chosen;
}

/** Return the messages up to one, without the turns whose answer failed or is empty. */
function messagesTo(last) {
	const path = [];
	for (let at = last; at.parent; at = at.parent) {
		if (at.turn && (at.turn.state.value === "failed" || !at.turn.text)) at = at.parent;
		else path.unshift({ role: at.role, content: at.turn ? at.turn.text : at.text });
	}
	if (system.value.trim()) path.unshift({ role: "system", content: system.value });
	return path;
}

async function answer(parent, prefix = []) {
	const turn = new Turn();
	const chosen = {};
	if (!(await attempt(problem, () => Object.assign(chosen, settings(turn))))) {
		if (!parent.children.length) parent.parent.children.pop();
		parent.parent.shown = Math.max(0, parent.parent.children.length - 1);
		return;
	}
	if (draft.value === parent.text) draft.value = "";
	prefix.forEach((token) => turn.push({ ...token }));
	message("assistant", "", parent, turn);
	current.value = turn;
	version.value++;
	const messages = messagesTo(parent);
	if (prefix.length) {
		setTimeout(() => [.../** @type {NodeListOf<HTMLElement>} */ (document.querySelectorAll(".tokens"))].at(-1)?.focus(), 150);
		messages.push({ role: "assistant", content: turn.text });
		Object.assign(chosen, { add_generation_prompt: false, continue_final_message: true });
	}
	await turn.run(messages, chosen);
	if (turn.state.value === "failed" && !prefix.length) draft.value ||= parent.text;
}

function again({ parent, turn }) {
	answer(parent, turn.tokens.slice(0, turn.offset));
}

function clear() {
	shownPath(root).at(-1)?.turn?.stop();
	root.children = [];
	current.value = null;
	problem.value = "";
	version.value++;
}

function say() {
	const text = draft.value;
	const path = shownPath(root);
	const last = path.at(-1) ?? root;
	if (!text.trim() || last.turn?.state.value === "running") return;
	answer(message("user", text, last));
}

function fork(owner, token, text) {
	owner.turn.stop();
	const kept = owner.turn.tokens.slice(0, token.index);
	const alternative = token.top.find((each) => each.text === text);
	answer(owner.parent, [...kept, { text, name: text, top: token.top, logprob: alternative?.logprob, lens: token.lens, scores: {}, forked: true }]);
}

function show(at, step) {
	const { parent } = at;
	parent.shown = (parent.shown + step + parent.children.length) % parent.children.length;
	version.value++;
}

function colourOf(token) {
	if (colouring.value === "depth") return colour(settled(token), token.lens?.layers[0], report.value?.num_layers ?? 1);
	return surprise(token);
}

const Entry = component(({ at, onEnter }) => {
	version.value;
	const siblings = at.parent.children;
	return html`<article class=${`message ${at.role}`}>
		<header>
			<strong>${at.role === "user" ? "You" : "Model"}</strong>
			${siblings.length > 1 &&
			html`<span class="forks">
				<${Button} aria-label="Previous fork" onClick=${() => show(at, -1)}>‹<//>
				fork ${siblings.indexOf(at) + 1} of ${siblings.length}
				<${Button} aria-label="Next fork" onClick=${() => show(at, 1)}>›<//>
			</span>`}
		</header>
		${at.turn
			? html`<${Answer} turn=${at.turn} label="Tokens of the answer" colours=${colouring.value} ...${{ colourOf, onEnter, current }} />
					${at.turn.state.value === "failed" && html`<${Button} onClick=${() => again(at)}>Send again<//>`}`
			: html`<p class="text">${at.text}</p>`}
	</article>`;
});

export class Chat extends View {
	enter = () => /** @type {HTMLElement | null} */ (document.querySelector(".inspector button"))?.focus();

	view() {
		version.value;
		const path = shownPath(root);
		const owner = path.find((each) => each.turn && each.turn === current.value);
		const running = path.at(-1)?.turn?.state.value === "running";
		const depth = colouring.value === "depth";
		return html`<div class="columns">
			<div>
				${!path.length && html`<p class="hint">Ask the model something. Each token of its answer carries what the layers predicted.</p>`}
				${path.map((at) => html`<${Entry} key=${at} at=${at} onEnter=${this.enter} />`)}
				<${Alert} text=${problem.value} />
				<form class="say" onSubmit=${submits(say)}>
					<${Field}
						label="Message"
						kind="textarea"
						required
						value=${draft}
						onKeyDown=${(event) => {
							if (event.key === "Enter" && !event.shiftKey) {
								event.preventDefault();
								event.target.form.requestSubmit();
							}
						}}
					/>
					${running ? html`<${Button} onClick=${() => path.at(-1).turn.stop()}>Stop<//>` : html`<button class="primary">Send</button>`}
					${path.length > 0 && html`<${Button} onClick=${clear}>New chat<//>`}
				</form>
				<details>
					<summary>Settings</summary>
					<div class="row">
						<${SamplingFields} ...${{ temperature, seed, maxTokens }} />
						<${Field} label="Lens" kind="checkbox" value=${lens} />
						<${Field} label="Tokens per layer" kind="number" min="1" max="20" value=${topK} />
						<${Field} label="Layers" value=${layers} placeholder=${defaultLayers().join(", ")} hint="such as 0, 4-6, 29" />
						<${Field} label="System message" value=${system} />
					</div>
				</details>
			</div>
			<aside class="side" aria-label="Selected token">
				<${Field}
					label="Colour"
					kind="select"
					value=${colouring}
					options=${[
						["depth", "layer from which the token is on top"],
						["surprise", "improbability"],
					]}
				/>
				<${Legend}
					what=${depth ? "On top from layer" : "Probability"}
					low=${depth ? String(current.value?.layers[0] ?? 0) : "high"}
					high=${depth ? String((report.value?.num_layers ?? 1) - 1) : "low"}
				/>
				<${Inspector} turn=${current.value} onFork=${owner && ((token, text) => fork(owner, token, text))} />
			</aside>
		</div>`;
	}
}
