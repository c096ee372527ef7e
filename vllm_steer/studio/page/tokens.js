// SPDX-License-Identifier: Apache-2.0
// The tokens of an answer, coloured, and the panel with the facts of the selected one.

import { curlOf, pythonOf } from "./api.js";
import { known, ROUTE, settledWords, textOf } from "./turn.js";
import { Alert, Button, component, html, percent, plural, short, View, visible } from "./ui.js";

const MOVES = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, Home: -Infinity, End: Infinity };

class Chunk extends View {
	shouldComponentUpdate(next) {
		// Its signals say when it changes; this is for what the list changes.
		return next.colours !== this.props.colours || next.selected !== this.props.selected;
	}

	view() {
		const { chunk, colourOf, selected, prefix } = this.props;
		chunk.version.value;
		return chunk.tokens.map((token) => {
			const at = token.index === selected;
			const classes = ["token", colourOf(token), token.differs && "differs", token.mark && "marked", token.forked && "forked", at && "at"];
			return html`<span
				key=${token.index}
				id=${`${prefix}-${token.index}`}
				role="option"
				aria-selected=${at}
				data-index=${token.index}
				aria-label=${token.text.trim() ? undefined : token.text ? "white space" : "no text"}
				title=${[token.mark, token.differs && "first different token", token.forked && "chosen by you"].filter(Boolean).join("; ") || undefined}
				class=${classes.filter(Boolean).join(" ")}
				>${token.text}</span
			>`;
		});
	}
}

let lists = 0;

/** All tokens of a turn: hover or arrow keys select one, Enter opens its alternatives. */
class Tokens extends View {
	prefix = `tokens-${++lists}`;

	/** Select a token, as the only one of the turns with the same signal `current`. */
	choose(index) {
		const { turn, current } = this.props;
		if (current.value && current.value !== turn) current.value.selected.value = -1;
		current.value = turn;
		turn.selected.value = index;
	}

	select = (event) => {
		const index = event.target.dataset?.index;
		if (index !== undefined) this.choose(Number(index));
	};

	hover = (event) => {
		// Text that moves below a resting mouse causes events, too.
		if (event.movementX || event.movementY) this.select(event);
	};

	move = (event) => {
		const { turn, onEnter } = this.props;
		const step = MOVES[event.key];
		const last = turn.tokens.length - 1;
		if (step !== undefined && last >= 0) {
			event.preventDefault();
			const now = turn.selected.value;
			const wanted = now < 0 ? (step < 0 ? last : 0) : Math.min(last, Math.max(0, now + step));
			this.choose(wanted);
			document.getElementById(`${this.prefix}-${wanted}`)?.scrollIntoView({ block: "nearest" });
		} else if (event.key === "Enter" && onEnter) {
			event.preventDefault();
			onEnter();
		}
	};

	view() {
		const { turn, colourOf, colours, label } = this.props;
		const selected = turn.selected.value;
		return html`<div
			class="tokens"
			role="listbox"
			tabindex="0"
			aria-label=${label}
			aria-activedescendant=${selected >= 0 ? `${this.prefix}-${selected}` : undefined}
			onMouseMove=${this.hover}
			onClick=${this.select}
			onKeyDown=${this.move}
		>
			${turn.chunks.value.map((chunk, n) => {
				const inside = selected >= 0 && chunk.tokens[0].index <= selected && selected <= chunk.tokens.at(-1).index;
				return html`<${Chunk} key=${chunk.key} ...${{ chunk, colourOf, colours, prefix: this.prefix, selected: inside ? selected : -1 }} />`;
			})}
		</div>`;
	}
}

const Status = component(({ turn }) => {
	const state = turn.state.value;
	if (state === "idle") return null;
	const first = turn.firstAfter.value;
	const facts = [
		state === "stopped" ? "stopped by you" : state,
		turn.finish.value,
		plural(turn.count.value, "token"),
		turn.applied.value?.global && "global steering was on",
		first && `first token after ${(first / 1000).toFixed(2)} s`,
		turn.perSecond.value && `${turn.perSecond.value.toFixed(1)} tokens/s`,
	];
	return html`<p class="status" role="status">${facts.filter(Boolean).join(" · ")}</p>
		${turn.silent > 4 && html`<p class="warning" role="status">The last ${turn.silent} tokens have no text. Lower the strengths.</p>`}
		<${Alert} text=${turn.error.value} />
		<${Copy} path=${ROUTE} body=${turn.request} />`;
});

export const Copy = ({ path, body }) =>
	Object.entries({ curl: curlOf, Python: pythonOf }).map(
		([name, write]) => html`<${Button} class="quiet" onClick=${() => navigator.clipboard?.writeText(write(path, body))}>Copy as ${name}<//>`,
	);

/** The tokens of a turn, what became of it, and its request. */
export const Answer = (props) => html`<${Tokens} ...${props} /><${Status} turn=${props.turn} />`;

function alternative(token, [text, logprob, same], onFork) {
	const shown = html`<code>${text === null ? "…" : visible(text) || "∅"}</code> <small>${percent(logprob)}</small>`;
	const classes = same ? "alternative same" : "alternative";
	if (!onFork || same || !text) return html`<span class=${classes}>${same ? "✓ " : ""}${shown}</span>`;
	return html`<${Button} class=${classes} title="Continue from here with this token" onClick=${() => onFork(token, text)}>${shown}<//>`;
}

function row(token, items, onFork) {
	return html`<div class="alternatives">${items.map((item) => alternative(token, item, onFork))}</div>`;
}

function lensOf(token, onFork) {
	const { layers, ids, logprobs } = token.lens;
	const rows = layers.map((layer, n) => [layer, ids[n].map((id, k) => [textOf(id), logprobs[n][k], id === token.id])]);
	return html`<h4>Lens by layer</h4>
		<table class="lens">
			<thead>
				<tr><th scope="col">Layer</th><th scope="col">Likeliest tokens</th></tr>
			</thead>
			<tbody>
				${rows.reverse().map(
					([layer, items]) => html`<tr>
						<th scope="row">${layer}</th>
						<td>${row(token, items, onFork)}</td>
					</tr>`,
				)}
			</tbody>
		</table>`;
}

/** The selected token: what the sampler and each layer had on top. */
export const Inspector = component(({ turn, onFork }) => {
	if (!turn || turn.selected.value < 0 || !turn.tokens[turn.selected.value]) {
		return html`<p class="hint">Point at a token, or move to the tokens and use the arrow keys.</p>`;
	}
	turn.count.value;
	known.value;
	const token = turn.tokens[turn.selected.value];
	return html`<div class="inspector">
		<h3>Token ${token.index + 1}: <code>${visible(token.text) || "(no text)"}</code></h3>
		<p>
			${token.logprob === undefined ? null : html`Probability ${percent(token.logprob)}. `}
			${token.lens && settledWords(token)}
			${Object.entries(token.scores).map(([name, value]) => html` <span>${turn.titles[name] ?? name}: ${short(value)}.</span>`)}
			${token.mark && html` ${token.mark}.`}
		</p>
		${token.top.length > 0 && html`<h4>Sampler</h4>`}
		${row(token, token.top.map((each) => [each.text, each.logprob, each.text === (token.name ?? token.text)]), onFork)}
		${token.lens && lensOf(token, onFork)}
	</div>`;
});

export const Legend = ({ low, high, what }) => html`<p class="legend">
	${what}: ${low}${" "}
	${[0, 1, 2, 3, 4, 5].map((n) => html`<span class=${`swatch c${n}`} aria-hidden="true"> </span>`)} ${high}
</p>`;
