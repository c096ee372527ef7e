// SPDX-License-Identifier: Apache-2.0
// Probes: readouts over a stream, with a threshold; a stop or edits beyond it.

import { report } from "./api.js";
import { editsFrom, gated, parsed } from "./edits.js";
import { choices as moduleChoices, modules, problem as refused, refreshModules, SiteFields } from "./modules.js";
import { listSetting, share } from "./share.js";
import { CopyTurn, Inspector, Legend, Status, Tokens } from "./tokens.js";
import { colour, Turn } from "./turn.js";
import { Alert, Button, chosenOf, Field, html, plural, PromptForm, promptSettings, readNumber, Remove, sampling, short, signal, View } from "./ui.js";

const settings = promptSettings("Tell me a story about a storm.");
const rack = signal([]);
const chosen = signal("");
const pasted = signal("");
const point = signal("post_block");
const layer = signal("");
const sigmoid = signal(false);
const problem = signal("");
const turn = signal(new Turn());
const shown = signal("");
const KEPT = ["bound", "side", "stop", "gate", "strength", "window"];
const WINDOWS = [
	["previous", "token after it"],
	["latch", "from then on"],
	["token", "at the token itself"],
];
let added = 0;

/** Return the probes of all modules as `module/probe`. */
export const probesOf = (list) => list.flatMap((each) => each.probes.map((probe) => `${each.name}/${probe}`));

/** Return the lowest and the highest of the values, and of the bound. */
export function extent(values, bound) {
	const all = Number.isFinite(bound) ? [...values, bound] : values;
	if (!all.length) return [0, 1];
	const [low, high] = [Math.min(...all), Math.max(...all)];
	return low === high ? [low - 1, high + 1] : [low, high];
}

/** Return a slider's range: the values so far with a margin, and the bound. */
export function sliderRange(seen, bound) {
	const [low, high] = seen.length ? extent(seen, NaN) : [-1, 1];
	const margin = (high - low) / 4;
	return extent([low - margin, high + margin], bound);
}

function add(title, readout) {
	const name = `p${++added}_${title.replace(/[^A-Za-z0-9_]/g, "_").slice(0, 30)}`;
	rack.value = [...rack.value, { title, name, readout, bound: signal("0"), stop: signal(false), side: signal("above"), gate: signal(""), strength: signal("2"), window: signal("previous"), seen: [] }];
	shown.value = name;
	problem.value = "";
}

/** The module's probes of the rack; pasted ones are too long for an address. */
const probes = listSetting(
	() =>
		rack.value
			.filter((each) => each.title === each.readout.probe)
			.map((each) => [each.title, ...KEPT.map((name) => each[name].value)]),
	(list) => {
		rack.value = [];
		for (const [title, ...given] of list) {
			add(String(title), { probe: String(title) });
			const item = rack.value.at(-1);
			KEPT.forEach((name, n) => {
				if (typeof given[n] === typeof item[name].value) item[name].value = given[n];
			});
		}
	},
	problem,
);
share("probes", { ...settings, probes });

function addPasted() {
	try {
		const probe = parsed(pasted.value);
		if (layer.value === "") throw new Error("The probe needs a layer, counted from 0.");
		add(`pasted, layer ${layer.value}`, { probe, point: point.value, layer: Number(layer.value), sigmoid: sigmoid.value });
	} catch (error) {
		problem.value = error.message;
	}
}

const conditionOf = (item) => ({ readout: item.name, [item.side.value]: readNumber(item.bound.value, `Threshold of ${item.title}`, -1e30, 1e30) });

/** Return the edits of a probe's module, which apply where the probe is beyond its threshold. */
const gateOf = async (item) =>
	gated(await editsFrom(item.gate.value), readNumber(item.strength.value, "Strength"), { ...conditionOf(item), window: item.window.value });

async function run() {
	turn.value.stop();
	problem.value = "";
	const mine = new Turn();
	turn.value = mine;
	const fields = sampling(settings);
	if (rack.value.length) fields.readouts = Object.fromEntries(rack.value.map((each) => [each.name, each.readout]));
	mine.titles = Object.fromEntries(rack.value.map((each) => [each.name, each.title]));
	try {
		const stops = rack.value.filter((each) => each.stop.value).map(conditionOf);
		if (stops.length) fields.stop_on = stops;
		const edits = (await Promise.all(rack.value.filter((each) => each.gate.value).map(gateOf))).flat();
		if (edits.length) fields.steering = edits;
	} catch (error) {
		problem.value = error.message;
		return;
	}
	if (turn.value === mine) mine.run([{ role: "user", content: settings.prompt.value }], fields);
}

const values = (name) => turn.value.values[name] ?? [];
const isOver = (item, value) => (item.side.value === "above" ? value > Number(item.bound.value) : value < Number(item.bound.value));

class Probe extends View {
	view() {
		const { item } = this.props;
		turn.value.count.value;
		const found = values(item.name);
		if (found.length) item.seen = [Math.min(...item.seen, ...found), Math.max(...item.seen, ...found)];
		const [low, high] = sliderRange(item.seen, Number(item.bound.value));
		const over = found.filter((value) => isOver(item, value)).length;
		const steered = item.gate.value && turn.value.tokens.filter((token) => token.mark).length;
		const id = `bound-${item.name}`;
		const onInput = ({ target }) => {
			item.bound.value = target.type === "range" ? String(short(Number(target.value))) : target.value;
			turn.value.touchAll();
		};
		return html`<fieldset class="probe">
			<legend>${item.title}</legend>
			<div class="row">
				<label for=${id}>Threshold</label>
				<input id=${id} type="range" min=${low} max=${high} step="any" value=${item.bound.value} onInput=${onInput} />
				<input type="number" step="any" value=${item.bound.value} onInput=${onInput} aria-label=${`Threshold of ${item.title}`} />
				<${Field} label="Side" kind="select" value=${item.side} options=${[["above", "above"], ["below", "below"]]} />
				<${Field} label="Stop there" kind="checkbox" value=${item.stop} />
				<${Field} label="Steer there with" kind="select" value=${item.gate} options=${[["", "nothing"], ...moduleChoices()]} />
				${item.gate.value
					? html`<${Field} label="Strength" kind="number" step="0.1" value=${item.strength} />
							<${Field} label="Where" kind="select" value=${item.window} options=${WINDOWS} />`
					: null}
				<${Button} class="quiet" aria-pressed=${shown.value === item.name} onClick=${() => (shown.value = item.name)}>Colour by this<//>
				<${Remove} item=${item} from=${rack} />
			</div>
			${found.length ? html`<p class="hint">${over} of ${plural(found.length, "token")} ${item.side.value} ${short(Number(item.bound.value))}; from ${short(Math.min(...found))} to ${short(Math.max(...found))}${steered ? `; ${plural(steered, "token")} steered` : ""}</p>` : null}
		</fieldset>`;
	}
}

/** The values by token, and the threshold as a dashed line. */
class Chart extends View {
	view() {
		const item = rack.value.find((each) => each.name === shown.value);
		turn.value.count.value;
		const found = item ? values(item.name) : [];
		if (found.length < 2) return null;
		const bound = Number(item.bound.value);
		const [low, high] = extent(found, bound);
		const y = (value) => 98 - (96 * (value - low)) / (high - low);
		const points = found.map((value, n) => `${(1000 * n) / (found.length - 1)},${y(value)}`).join(" ");
		return html`<svg class="chart" viewBox="0 0 1000 100" preserveAspectRatio="none" role="img" aria-label=${`Values of ${item.title} by token, from ${short(low)} to ${short(high)}, threshold ${short(bound)}`}>
			<polyline class="line" points=${points} />
			<line class="bound" x1="0" x2="1000" y1=${y(bound)} y2=${y(bound)} />
		</svg>`;
	}
}

export class Probes extends View {
	componentDidMount() {
		if (report.value) refreshModules();
	}

	view() {
		const running = turn.value.state.value === "running";
		const choices = probesOf(modules.value).map((each) => [each, each]);
		const item = rack.value.find((each) => each.name === shown.value);
		const found = item ? values(item.name) : [];
		turn.value.count.value;
		const [low, high] = extent(found, NaN);
		const colourOf = (token) => {
			const value = item ? token.scores[item.name] : undefined;
			if (value === undefined || value === null) return "";
			return `${colour(value, low, high)}${isOver(item, value) ? " over" : ""}`;
		};
		return html`<div>
			<${PromptForm} settings=${settings} title="Run" run=${run} stop=${() => turn.value.stop()} running=${running} />
			<section aria-label="Probes">
				${rack.value.length ? null : html`<p class="hint">Add a probe: it colours tokens as they stream, and can stop or steer them.</p>`}
				${rack.value.map((each) => html`<${Probe} key=${each.name} item=${each} />`)}
				<div class="row">
					${choices.length
						? html`<${Field} label="Probe of a module" kind="select" value=${chosen} options=${choices} />
								<${Button} onClick=${() => add(chosenOf(chosen, choices), { probe: chosenOf(chosen, choices) })}>Add probe<//>`
						: html`<p class="hint">No module has a probe.</p>`}
				</div>
				<details>
					<summary>Paste a probe</summary>
					<${Field} label="Weights (JSON)" kind="textarea" rows="3" value=${pasted} spellcheck="false" />
					<div class="row">
						<${SiteFields} ...${{ point, layer }} />
						<${Field} label="Sigmoid" kind="checkbox" value=${sigmoid} />
						<${Button} onClick=${addPasted}>Add pasted<//>
					</div>
				</details>
			</section>
			<${Alert} text=${problem.value || refused.value} />
			<${Chart} />
			${found.length ? html`<${Legend} what=${item.title} low=${short(low)} high=${short(high)} />` : null}
			<${Tokens}
				turn=${turn.value}
				label="Tokens of the answer"
				colourOf=${colourOf}
				colours=${`${shown.value} ${low} ${high}`}
				onSelect=${(of, index) => {
					of.selected.value = index;
				}}
			/>
			<${Status} turn=${turn.value} /><${CopyTurn} turn=${turn.value} />
			<aside aria-label="Selected token"><${Inspector} turn=${turn.value} /></aside>
		</div>`;
	}
}
