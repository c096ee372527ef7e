// SPDX-License-Identifier: Apache-2.0
// Patching: a study's cells by layer and token, coloured as they arrive.

import { model, pointChoices, stream } from "./api.js";
import { readNumbers } from "./chat.js";
import { share } from "./share.js";
import { Copy, Legend } from "./tokens.js";
import { colour } from "./turn.js";
import { Alert, attempt, batch, Button, chosenOf, component, Field, html, short, signal, submits, View, visible } from "./ui.js";

const ROUTE = "v1/steering/patch";
const METRICS = [
	["recovered", "recovered: 0 corrupt, 1 clean"],
	["logit_diff", "answer minus foil, nats"],
	["logprob", "log-probability of the answer"],
];
const DIRECTIONS = [
	["denoising", "clean rows into the corrupt run"],
	["noising", "corrupt rows into the clean run"],
];

const clean = signal("The capital of France is");
const corrupt = signal("The capital of Italy is");
const answer = signal(" Paris");
const foil = signal(" Rome");
const point = signal("post_block");
const metric = signal("recovered");
const direction = signal("denoising");
const layers = signal("");
const positions = signal("");
const problem = signal("");
/** The latest study: its request, the events `start` and `summary`, and its cells by row and column. */
const study = signal(null);
const state = signal("idle");
const count = signal(0);
const at = signal([0, 0]);
let abort = null;
share("patching", { clean, corrupt, answer, foil, point, metric, direction, layers, positions });

function bodyOf() {
	const body = { model: model.value, clean: clean.value, corrupt: corrupt.value, answer: answer.value, points: [point.value] };
	if (foil.value) body.foil = foil.value;
	if (layers.value.trim()) body.layers = readNumbers(layers.value, "Layers");
	if (positions.value.trim()) body.positions = readNumbers(positions.value, "Positions");
	return { ...body, metric: metric.value, direction: direction.value, stream: true };
}

function take(into, event) {
	if (event.event === "start") {
		into.start = event;
		into.cells = event.layers.map(() => event.positions.map(() => null));
	} else if (event.event === "cell") {
		into.cells[event.row][event.column] = { value: event.value, error: event.error };
		count.value++;
	} else if (event.event === "summary") {
		into.summary = event;
	}
}

async function run() {
	abort?.abort();
	study.value = null;
	if (!(await attempt(problem, () => (study.value = { request: bodyOf(), start: null, summary: null, cells: [] })))) return;
	const [mine, stopper] = [study.value, new AbortController()];
	abort = stopper;
	batch(() => {
		state.value = "running";
		count.value = 0;
		at.value = [0, 0];
	});
	let end = "done";
	try {
		for await (const event of stream(ROUTE, mine.request, stopper.signal)) {
			if (abort === stopper) batch(() => take(mine, event));
			if (event.event === "summary") break;
		}
	} catch (error) {
		end = stopper.signal.aborted ? "stopped by you" : "failed";
		if (end === "failed" && abort === stopper) problem.value = error.message;
	}
	if (abort === stopper) state.value = end;
}

/** Return the lowest and the highest value of the cells that have arrived. */
export function extremes(cells) {
	const values = cells.flat().flatMap((cell) => cell?.value ?? []);
	return [Math.min(...values), Math.max(...values)];
}

function wordsOf({ start, summary, cells }, [row, column]) {
	const cell = cells[row][column];
	const place = `Layer ${start.layers[row]}, position ${visible(start.positions[column])}`;
	if (!cell) return `${place}: ${state.value === "running" ? "waiting" : "not run"}`;
	if (cell.value === null) return `${place}: failed, ${cell.error ?? "no number"}`;
	const noise = summary?.below_floor[start.points[0]][row][column] ? " (within the noise)" : "";
	return `${place}: ${start.metric} ${short(cell.value, 4)}${noise}`;
}

const MOVES = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], Home: [0, -Infinity], End: [0, Infinity] };
const within = (value, length) => Math.min(length - 1, Math.max(0, value));

class Grid extends View {
	select = (event) => {
		const cell = event.target.closest?.("td");
		if (cell) at.value = [Number(cell.dataset.row), Number(cell.dataset.column)];
	};

	move = (event) => {
		const step = MOVES[event.key];
		if (!step) return;
		event.preventDefault();
		const { cells } = this.props.study;
		const [row, column] = [within(at.value[0] + step[0], cells.length), within(at.value[1] + step[1], cells[0].length)];
		event.currentTarget.querySelector(`[data-row="${row}"][data-column="${column}"]`)?.focus();
	};

	cell(cell, row, column, range) {
		const { start, summary } = this.props.study;
		const here = row === at.value[0] && column === at.value[1];
		const classes = [cell && colour(cell.value, range[0], range[1]), summary?.below_floor[start.points[0]][row][column] && "faint", here && "at"];
		return html`<td
			tabindex=${here ? 0 : -1}
			data-row=${row}
			data-column=${column}
			aria-label=${cell ? undefined : "waiting"}
			class=${classes.filter(Boolean).join(" ")}
			>${cell ? (cell.value === null ? "failed" : short(cell.value, 2)) : ""}</td
		>`;
	}

	view() {
		const { study: shown } = this.props;
		const { start, cells } = shown;
		count.value;
		const range = extremes(cells);
		return html`<div class="wide">
				<table class="heat" role="grid" aria-label="Cells by layer and token" aria-readonly="true" onKeyDown=${this.move} onFocusIn=${this.select} onMouseOver=${this.select}>
					<thead>
						<tr>
							<th scope="col">Layer</th>
							${start.positions.map((name) => html`<th scope="col">${visible(name)}</th>`)}
						</tr>
					</thead>
					<tbody>
						${cells.map(
							(line, row) => html`<tr>
								<th scope="row">${start.layers[row]}</th>
								${line.map((cell, column) => this.cell(cell, row, column, range))}
							</tr>`,
						)}
					</tbody>
				</table>
			</div>
			<p class="cell">${wordsOf(shown, at.value)}</p>
			${range[0] < range[1] && html`<${Legend} what=${start.metric} low=${short(range[0])} high=${short(range[1])} />`}`;
	}
}

/** Progress while cells arrive; then what their values are to be compared with. */
const Facts = component(({ study: shown }) => {
	const { start, summary } = shown;
	const total = start?.cells ?? 0;
	const skipped = start?.skipped?.flat().join(", ");
	const facts = [state.value, total && `${count.value} of ${total} cells`, skipped && `not aligned: positions ${skipped}`];
	if (summary) {
		const { metric: name, clean: high, corrupt: low } = summary.unpatched;
		const failed = Object.keys(summary.failed).length;
		facts.push(`${name} unpatched: clean ${short(high)}, corrupt ${short(low)}`, `noise floor ${short(summary.noise_floor)}`,
			`patched with its own rows: ${short(summary.control_error)}`, failed && `${failed} failed`);
	}
	return html`${state.value === "running" && html`<progress aria-label="Cells" max=${total || 1} value=${count.value} />`}
		<p class="status" role="status">${facts.filter(Boolean).join(" · ")}</p>`;
});

export const Patching = component(() => {
	const points = pointChoices();
	const shown = study.value;
	return html`<form
		onSubmit=${submits(() => {
			point.value = chosenOf(point, points);
			run();
		})}
	>
		<p class="hint">
			The clean prompt has the answer, the corrupt one the foil. A cell runs one prompt with the rows of the other at one layer and token.
		</p>
		<div class="row grid">
			<${Field} label="Clean prompt" value=${clean} />
			<${Field} label="Corrupt prompt" value=${corrupt} />
			<${Field} label="Answer" value=${answer} hint="mostly with a space before it" />
			<${Field} label="Foil" value=${foil} />
			<${Field} label="Point" kind="select" value=${point} options=${points} />
			<${Field} label="Metric" kind="select" value=${metric} options=${METRICS} />
			<${Field} label="Direction" kind="select" value=${direction} options=${DIRECTIONS} />
			<${Field} label="Layers" value=${layers} hint="such as 0, 4-6; empty for all" />
			<${Field} label="Positions" value=${positions} hint="counted from 0; empty for all" />
			${state.value === "running"
				? html`<${Button} onClick=${() => abort.abort()}>Cancel<//>`
				: html`<button class="primary">Run study</button>`}
		</div>
	</form>
	<${Alert} text=${problem.value} />
	${shown &&
	html`<${Facts} study=${shown} />
		${count.value >= 0 && shown.start && html`<${Grid} study=${shown} />`}
		<${Copy} path=${ROUTE} body=${shown.request} />`}`;
});
