// SPDX-License-Identifier: Apache-2.0
// One streamed answer: its tokens with alternatives, lens and scores as they arrive.

import { ask, model, noteGlobal, stream } from "./api.js";
import { batch, short, signal } from "./ui.js";

const CHUNK = 32;
export const ROUTE = "v1/chat/completions";

/**
 * @typedef {object} Token
 * @property {string} text
 * @property {number} index place in the answer
 * @property {number} [id]
 * @property {string} [name] text as the sampler has it; special tokens have no other
 * @property {number} [logprob]
 * @property {{text: string, logprob: number}[]} top the sampler's alternatives
 * @property {{layers: number[], ids: number[][], logprobs: number[][]}} [lens] of the position that predicts the token
 * @property {Record<string, number>} scores probe values at the token
 * @property {boolean} [forked] chosen by the reader
 * @property {boolean} [differs] first token that differs from another answer
 * @property {string} [mark] what changed at this token
 */

/** Assign the text of an event to its tokens. A token that is only part of a character has no text of its own. */
export function textsOf(names, delta) {
	if (names.join("") === delta) return names;
	return names.map((_, n) => (n === names.length - 1 ? delta : ""));
}

/** Return the first index at which two lists of tokens differ, or -1 as long as one is the beginning of the other. */
export const firstDifference = (one, other) => one.findIndex(({ text }, n) => n < other.length && text !== other[n].text);

/** Return from which layer of the lens on all have the token on top, in words. Layers between were not measured. */
export function settledWords(token) {
	const layer = settled(token);
	if (layer === null) return "No layer of the lens ends with it on top.";
	const before = token.lens.layers[token.lens.layers.indexOf(layer) - 1] ?? -1;
	return before === layer - 1 ? `On top from layer ${layer} on.` : `On top from a layer between ${before + 1} and ${layer} on.`;
}

/** Return the earliest layer of the lens from which on all have the token on top, or null. */
export function settled(token) {
	if (!token.lens || token.id === undefined) return null;
	const { layers, ids } = token.lens;
	let found = null;
	for (let n = layers.length - 1; n >= 0 && ids[n][0] === token.id; n--) found = layers[n];
	return found;
}

/** Return the class of a value's colour, "c0" to "c5", in a range. */
export function colour(value, low, high) {
	if (!Number.isFinite(value) || high <= low) return "";
	return `c${Math.min(5, Math.max(0, Math.floor((6 * (value - low)) / (high - low))))}`;
}

/** Return the class of a token's colour by how improbable it was. */
export const surprise = (token) => colour(-token.logprob, 0, 4);

export class Turn {
	/** Chunks of tokens: appending renders only the last one. */
	chunks = signal([]);
	count = signal(0);
	/** "idle", "running", "done", "stopped" or "failed". */
	state = signal("idle");
	error = signal("");
	finish = signal("");
	selected = signal(-1);
	id = signal("");
	applied = signal(null);
	/** @type {Token[]} */
	tokens = [];
	request = null;
	/** Tokens before those of the request: of a fork. */
	offset = 0;
	started = 0;
	firstAfter = signal(0);
	perSecond = signal(0);
	/** @type {any} */
	#promptLen = null;
	/** Layers of the lens, and titles of readouts. */
	layers = [];
	/** @type {Record<string, string>} */
	titles = {};
	/** @type {any[]} */
	items = [];
	/**
	 * Values of each readout, in the order of the tokens.
	 * @type {Record<string, number[]>}
	 */
	values = {};
	#lens = new Map();
	#waiting = [];
	#marks = new Map();
	onToken = () => {};

	get text() {
		return this.tokens.map((token) => token.text).join("");
	}

	/** @param {Token} token */
	push(token) {
		token.index = this.tokens.length;
		this.tokens.push(token);
		let last = this.chunks.value.at(-1);
		if (!last || last.tokens.length >= CHUNK) {
			last = { tokens: [], version: signal(0), key: this.chunks.value.length };
			this.chunks.value = [...this.chunks.value, last];
		}
		last.tokens.push(token);
		last.version.value++;
		this.count.value++;
	}

	/** Render a token again whose facts have changed. */
	touch(index) {
		const chunk = this.chunks.value[Math.floor(index / CHUNK)];
		if (chunk) chunk.version.value++;
		if (index === this.selected.value) this.count.value = this.tokens.length;
	}

	touchAll() {
		batch(() => this.chunks.value.forEach((chunk) => chunk.version.value++));
	}

	/** Mark the token at a position, now or when it arrives. */
	markAt(position, text) {
		this.#marks.set(position, text);
		this.#mark(this.at(position), position);
	}

	#mark(token, position) {
		const text = this.#marks.get(position);
		if (!token || text === undefined) return;
		token.mark = text;
		this.touch(token.index);
	}

	stop() {
		this.abort?.abort();
	}

	/** Send a chat request and take its stream. */
	async run(messages, settings) {
		this.request = {
			model: model.value,
			messages,
			stream: true,
			logprobs: true,
			top_logprobs: 5,
			return_token_ids: true,
			...settings,
		};
		this.abort = new AbortController();
		this.offset = this.tokens.length;
		this.state.value = "running";
		this.started = performance.now();
		try {
			for await (const event of stream(ROUTE, this.request, this.abort.signal)) batch(() => this.take(event));
			this.state.value = "done";
		} catch (error) {
			const stopped = this.abort.signal.aborted;
			this.state.value = stopped ? "stopped" : "failed";
			this.error.value = stopped ? "" : error.message || "This answer was cut off.";
		}
	}

	take(event) {
		if (event.id) this.id.value = event.id;
		if (event.steering_applied) {
			this.applied.value = event.steering_applied;
			noteGlobal(event.steering_applied.global);
		}
		if (event.prompt_token_ids) this.#promptLen = event.prompt_token_ids.length;
		for (const choice of event.choices ?? []) {
			const delta = choice.delta?.content ?? "";
			const items = choice.logprobs?.content ?? [];
			if (items.length) {
				const texts = textsOf(items.map((item) => item.token), delta);
				items.forEach((item, n) => this.#add(item, texts[n], choice.token_ids?.[n]));
			} else if (delta) {
				this.#add({ top_logprobs: [] }, delta, choice.token_ids?.[0]);
			}
			if (choice.readouts) this.#read(choice.readouts);
			if (choice.steering_trace) this.#trace(choice.steering_trace);
			if (choice.finish_reason) this.finish.value = this.#finishWords(choice);
		}
	}

	#finishWords({ finish_reason: reason, stop_reason: why }) {
		const [, name, value, position] = /^readout (\S+) is (\S+) at position (\d+)$/.exec(why) ?? [];
		if (name) return `stopped by ${this.titles[name] ?? name} = ${short(Number(value))} at token ${this.number(Number(position))}`;
		return `finish: ${why ? `${reason}: ${why}` : reason}`;
	}

	#add(item, text, id) {
		const made = this.tokens.length - this.offset;
		if (made === 0) this.firstAfter.value = performance.now() - this.started;
		else this.perSecond.value = (1000 * made) / (performance.now() - this.started - this.firstAfter.value);
		const top = (item.top_logprobs ?? []).map((each) => ({ text: each.token, logprob: each.logprob }));
		const token = { text, name: item.token, id, logprob: item.logprob, top, scores: {}, index: 0 };
		this.push(token);
		this.#place(token);
	}

	/** Position in the whole sequence of a generated token of this request; NaN before it is known. */
	position(token) {
		return this.#promptLen === null ? NaN : this.#promptLen + token.index - this.offset;
	}

	/** Number, from 1, of the token of the answer at a position. */
	number(position) {
		return position - (this.#promptLen ?? 0) + this.offset + 1;
	}

	/** Number of tokens without text at the end. */
	get silent() {
		return this.tokens.length - 1 - this.tokens.findLastIndex((token) => token.text);
	}

	/** The generated token at a position, if it has arrived. */
	at(position) {
		return this.#promptLen === null ? undefined : this.tokens[position - this.#promptLen + this.offset];
	}

	#place(token) {
		const position = this.position(token);
		const lens = this.#lens.get(position - 1);
		if (lens) {
			token.lens = lens;
			this.#lens.delete(position - 1);
		}
		for (const [name, at, value] of this.#waiting.splice(0)) this.#score(name, at, value);
		this.#mark(token, position);
		this.onToken();
	}

	#read(readouts) {
		for (const [name, read] of Object.entries(readouts)) {
			read.positions.forEach((position, n) => {
				if (read.token_ids) this.#see(position, { layers: this.layers, ids: read.token_ids[n], logprobs: read.logprobs[n] });
				else this.#score(name, position, read.values[n]);
			});
		}
	}

	/** Mark the tokens at which a gate was open. */
	#trace(trace) {
		trace.positions?.forEach((position, n) => {
			if (trace.gates?.[n]?.some(Boolean)) this.markAt(position, "steered");
		});
	}

	/** The lens at a position shows what the layers predict for the token after it. */
	#see(position, lens) {
		const token = this.at(position + 1);
		if (token && token.index >= this.offset) {
			token.lens = lens;
			this.touch(token.index);
		} else {
			this.#lens.set(position, lens);
		}
	}

	#score(name, position, value) {
		const token = this.at(position);
		if (token) {
			token.scores[name] = Array.isArray(value) ? value[0] : value;
			if (token.scores[name] !== null) (this.values[name] ??= []).push(token.scores[name]);
			this.touch(token.index);
		} else if (this.#promptLen === null || position >= this.#promptLen) {
			this.#waiting.push([name, position, value]);
		}
	}
}

/** Texts of token ids. */
const texts = new Map();
const wanted = new Set();
/** Grows when texts have arrived. */
export const known = signal(0);
let asking = false;
let separator = null;

/** Return the text of a token id, or null and ask the server for it. */
export function textOf(id) {
	const text = texts.get(id);
	if (text !== undefined) return text;
	wanted.add(id);
	if (!asking) {
		asking = true;
		setTimeout(askTexts, 30);
	}
	return null;
}

const SIGN = "␞";

/**
 * Split detokenized text at the separator. It begins with two; between them is what the tokenizer puts before each.
 */
export function splitTexts(text, count) {
	const parts = text.split(SIGN);
	if (parts.length !== count + 3) return null;
	const pad = parts[1];
	return parts.slice(2, -1).map((part) => (pad && part.endsWith(pad) ? part.slice(0, -pad.length) : part));
}

const detokenize = async (tokens) => (await ask("POST", "detokenize", { model: model.value, tokens })).prompt;

async function askTexts() {
	while (wanted.size) {
		const ids = [...wanted].slice(0, 400);
		try {
			separator ??= (await ask("POST", "tokenize", { model: model.value, prompt: SIGN, add_special_tokens: false })).tokens;
			const tokens = [...separator, ...separator, ...ids.flatMap((id) => [id, ...separator])];
			const found = splitTexts(await detokenize(tokens), ids.length);
			for (const [n, id] of ids.entries()) texts.set(id, found ? found[n] : await detokenize([id]));
		} catch {
			ids.forEach((id) => texts.set(id, `#${id}`));
		}
		ids.forEach((id) => wanted.delete(id));
		known.value++;
	}
	asking = false;
}
