// SPDX-License-Identifier: Apache-2.0
// Rendering: Preact with htm, and signals for state. Text reaches the page only as text nodes and attributes.

import htm from "./vendor/htm.js";
import { Component, h, options, render } from "./vendor/preact.js";
import { batch, effect, signal, untracked } from "./vendor/signals.js";

export { batch, effect, render, signal, untracked };
export const html = htm.bind(h);

// At most one rendering per frame, however many tokens arrive. Hidden tabs have no frames, so a timer stands in.
options.debounceRendering = (run) => {
	let done = false;
	const once = () => {
		if (!done) {
			done = true;
			run();
		}
	};
	requestAnimationFrame(once);
	setTimeout(once, 100);
};

/** A component that renders again when a signal changes that its method `view` has read. */
export class View extends Component {
	/** @returns {any} the content */
	view() {
		throw new Error("not implemented");
	}

	render() {
		let content;
		let first = true;
		this.stop?.();
		this.stop = effect(() => {
			if (first) {
				first = false;
				content = this.view();
			} else {
				this.forceUpdate();
			}
		});
		return content;
	}

	componentWillUnmount() {
		this.stop?.();
	}
}

/** Run an action, and show the words of an error in the signal `problem`. Returns whether it succeeded. */
export async function attempt(problem, action) {
	problem.value = "";
	try {
		await action();
		return true;
	} catch (error) {
		problem.value = error.message;
		return false;
	}
}

/** Return a component of a function from properties to content, which renders again like a `View`. */
export const component = (draw) =>
	class extends View {
		view() {
			return draw(this.props);
		}
	};

/** Return a handler that stores the value of a field in a signal. */
export const into = (target) => (event) => {
	target.value = event.target.type === "checkbox" ? event.target.checked : event.target.value;
};

/** Return the chosen one of `[value, text]` pairs: the first one unless the signal has another. */
export const chosenOf = (value, choices) => (choices.some(([name]) => name === value.value) ? value.value : (choices[0]?.[0] ?? ""));

export const Alert = ({ text }) => text && html`<p class="error" role="alert">${text}</p>`;

export const Button = (props) => html`<button type="button" ...${props} />`;

/** Return a handler of a form that calls `run` with it. */
export const submits = (run) => (event) => {
	event.preventDefault();
	run(event.target);
};

/** Return the number of a field. Throws unless it is one within the bounds. */
export function readNumber(value, what, low = -1000, high = 1000) {
	const number = String(value).trim() === "" ? NaN : Number(value);
	if (number >= low && number <= high) return number;
	throw new Error(`${what}: '${value}' is not a number from ${low} to ${high}.`);
}

let names = 0;

/** Return a name for a request that no other has. It begins with a letter, as the API demands. */
export const uniqueName = (title) => `n${++names}_${title.replace(/[^A-Za-z0-9_]/g, "_").slice(0, 40)}`;

/** Count things: "1 token", "2 tokens". */
export const plural = (count, thing) => `${count} ${thing}${count === 1 ? "" : "s"}`;

let fields = 0;

/** A labelled field: `kind` is "text", "number", "checkbox", "password", "select" or "textarea". */
export class Field extends View {
	id = `field-${++fields}`;

	view() {
		const { label, kind = "text", value, options: choices, hint, ...rest } = this.props;
		const common = { id: this.id, ...rest };
		let control;
		if (kind === "select") {
			const chosen = chosenOf(value, choices);
			control = html`<select ...${common} value=${chosen} onChange=${into(value)}>
				${choices.map(([name, text]) => html`<option value=${name} selected=${name === chosen}>${text}</option>`)}
			</select>`;
		} else if (kind === "checkbox") {
			control = html`<input ...${common} type=${kind} checked=${value.value} onChange=${into(value)} />`;
		} else {
			control = html`<${kind === "textarea" ? kind : "input"} ...${common} type=${kind} value=${value.value} onInput=${into(value)} />`;
		}
		return html`<div class=${`field ${kind}`}>
			<label for=${this.id}>${label}</label>${control}${hint && html`<span class="hint">${hint}</span>`}
		</div>`;
	}
}

/** A button that removes an item from the list of a signal. */
export const Remove = ({ item, from }) => html`<${Button}
	class="quiet"
	aria-label=${`Remove ${item.title}`}
	onClick=${() => (from.value = from.value.filter((each) => each !== item))}
	>Remove<//>`;

export const SamplingFields = ({ temperature, seed, maxTokens }) => html`<${Field} label="Temperature" kind="number" step="0.1" min="0" value=${temperature} />
	<${Field} label="Seed" kind="number" value=${seed} />
	<${Field} label="Most tokens" kind="number" min="1" value=${maxTokens} />`;

export const promptSettings = (text) => ({ prompt: signal(text), temperature: signal("0"), seed: signal("0"), maxTokens: signal("100") });

export const sampling = ({ maxTokens, temperature, seed }) => ({
	max_tokens: Number(maxTokens.value),
	temperature: Number(temperature.value),
	seed: Number(seed.value),
});

export const PromptForm = ({ settings, title, run, stop, running }) => html`<form onSubmit=${submits(() => settings.prompt.value.trim() && run())}>
	<${Field} label="Prompt" kind="textarea" required value=${settings.prompt} />
	<div class="row">
		<${SamplingFields} ...${settings} />
		${running ? html`<${Button} onClick=${stop}>Stop<//>` : html`<button class="primary">${title}</button>`}
	</div>
</form>`;

/** Show white space and control characters, also those that turn the direction of text, as visible signs. */
export const visible = (text) =>
	text
		.replaceAll("\n", "⏎")
		.replaceAll("\t", "⇥")
		.replace(/^ +| +$/g, (run) => "␣".repeat(run.length))
		.replace(/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\u00a0]/gu, (sign) => `U+${sign.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`);

/** Format a number with at most `digits` significant digits. */
export const short = (value, digits = 3) => (value === null || value === undefined ? "–" : String(Number(value.toPrecision(digits))));

/** Format the probability of a log-probability. */
export const percent = (logprob) => {
	const value = 100 * Math.exp(logprob ?? NaN);
	if (Number.isNaN(value)) return "–";
	return value >= 10 ? `${value.toFixed(0)} %` : value >= 0.1 ? `${value.toFixed(1)} %` : "< 0.1 %";
};
