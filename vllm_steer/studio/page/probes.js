// SPDX-License-Identifier: Apache-2.0
// Probes: readouts over a stream, with a threshold; a stop or edits beyond it.

import { editsFrom, gated, parsed } from "./edits.js";
import { choices as moduleChoices, modules, Paste, problem as refused } from "./modules.js";
import { listSetting, share } from "./share.js";
import { Answer, Inspector, Legend } from "./tokens.js";
import { colour, Turn } from "./turn.js";
import { Alert, attempt, Button, chosenOf, component, Field, html, plural, PromptForm, promptSettings, readNumber, Remove, sampling, short, signal, uniqueName } from "./ui.js";

const settings = promptSettings("Tell me a story about a storm.");
const rack = signal([]);
const chosen = signal("");
const paste = { pasted: signal(""), point: signal("post_block"), layer: signal("") };
const name = signal("");
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
	const name = uniqueName(title);
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
	const { pasted, point, layer } = paste;
	attempt(problem, () => {
		const probe = parsed(pasted.value);
		if (layer.value === "") throw new Error("The probe needs a layer, counted from 0.");
		add(name.value.trim() || `pasted probe, layer ${layer.value} ${point.value}`, { probe, point: point.value, layer: Number(layer.value), sigmoid: sigmoid.value });
	});
}

const conditionOf = (item) => ({ readout: item.name, [item.side.value]: readNumber(item.bound.value, `Threshold of ${item.title}`, -1e30, 1e30) });

/** Return the edits of a probe's module, which apply where the probe is beyond its threshold. */
const gateOf = async (item) =>
	gated(await editsFrom(item.gate.value), readNumber(item.strength.value, "Strength"), { ...conditionOf(item), window: item.window.value });

async function run() {
	turn.value.stop();
	const mine = new Turn();
	turn.value = mine;
	const fields = sampling(settings);
	if (rack.value.length) fields.readouts = Object.fromEntries(rack.value.map((each) => [each.name, each.readout]));
	mine.titles = Object.fromEntries(rack.value.map((each) => [each.name, each.title]));
	const stops = rack.value.filter((each) => each.stop.value).map(conditionOf);
	if (stops.length) fields.stop_on = stops;
	const edits = (await Promise.all(rack.value.filter((each) => each.gate.value).map(gateOf))).flat();
	if (edits.length) fields.steering = edits;
	if (turn.value === mine) mine.run([{ role: "user", content: settings.prompt.value }], fields);
}

const values = (name) => turn.value.values[name] ?? [];
const isOver = (item, value) => (item.side.value === "above" ? value > Number(item.bound.value) : value < Number(item.bound.value));

const Probe = component(({ item }) => {
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
			${item.gate.value &&
			html`<${Field} label="Strength" kind="number" step="0.1" value=${item.strength} />
				<${Field} label="Where" kind="select" value=${item.window} options=${WINDOWS} />`}
			<${Button} class="quiet" aria-pressed=${shown.value === item.name} onClick=${() => (shown.value = item.name)}>Colour by this<//>
			<${Remove} item=${item} from=${rack} />
		</div>
		${found.length > 0 && html`<p class="hint">${over} of ${plural(found.length, "token")} ${item.side.value} ${short(Number(item.bound.value))}; from ${short(Math.min(...found))} to ${short(Math.max(...found))}${steered ? `; ${plural(steered, "token")} steered` : ""}</p>`}
	</fieldset>`;
});

/** Draw the values by token, with lines at their extremes, at zero if it is among them, and at the threshold. */
function chart(item, found) {
	const bound = Number(item.bound.value);
	const [low, high] = extent(found, bound);
	const y = (value) => 96 - (84 * (value - low)) / (high - low);
	const [least, most] = [Math.min(...found), Math.max(...found)];
	const lines = Object.entries({ min: least, max: most, zero: 0, threshold: bound }).filter(([, value]) => value >= low && value <= high);
	const points = found.map((value, n) => `${(1000 * n) / (found.length - 1)},${y(value)}`).join(" ");
	return html`<svg class="chart" role="img" aria-label=${`Values of ${item.title} by token, from ${short(least)} to ${short(most)}, threshold ${short(bound)}`}>
		<svg viewBox="0 0 1000 100" preserveAspectRatio="none"><polyline points=${points} /></svg>
		${lines.map(([name, value]) => {
			const [height, x] = [`${y(value)}%`, { zero: "50%", threshold: "100%" }[name]];
			return html`<g class=${name}><line x2="100%" y1=${height} y2=${height} /><text x=${x} y=${height} dy="-3">${name} ${short(value)}</text></g>`;
		})}
	</svg>`;
}

export const Probes = component(() => {
	const running = turn.value.state.value === "running";
	const choices = modules.value.flatMap((each) => each.probes.map((probe) => Array(2).fill(`${each.name}/${probe}`)));
	const item = rack.value.find((each) => each.name === shown.value);
	const found = item ? values(item.name) : [];
	turn.value.count.value;
	const [low, high] = extent(found, NaN);
	const colourOf = (token) => {
		const value = token.scores[item?.name] ?? NaN;
		return `${colour(value, low, high)}${item && isOver(item, value) ? " over" : ""}`;
	};
	return html`<${PromptForm} settings=${settings} title="Run" run=${() => attempt(problem, run)} stop=${() => turn.value.stop()} running=${running} />
	<section aria-label="Probes">
		${!rack.value.length && html`<p class="hint">Add a probe: it colours tokens as they stream, and can stop or steer them.</p>`}
		${rack.value.map((each) => html`<${Probe} key=${each.name} item=${each} />`)}
		<div class="row">
			${choices.length
				? html`<${Field} label="Probe of a module" kind="select" value=${chosen} options=${choices} />
						<${Button} onClick=${() => add(chosenOf(chosen, choices), { probe: chosenOf(chosen, choices) })}>Add probe<//>`
				: html`<p class="hint">No module has a probe.</p>`}
		</div>
		<${Paste} title="Paste a probe" label="Weights (JSON)" add=${addPasted} ...${paste}>
			<${Field} label="Name" value=${name} hint="empty for its place" />
			<${Field} label="Sigmoid" kind="checkbox" value=${sigmoid} />
		<//>
	</section>
	<${Alert} text=${problem.value || refused.value} />
	${found.length > 1 && chart(item, found)}
	${found.length > 0 && html`<${Legend} what=${item.title} low=${short(low)} high=${short(high)} />`}
	<${Answer} turn=${turn.value} current=${turn} label="Tokens of the answer" colourOf=${colourOf} colours=${`${shown.value} ${low} ${high}`} />
	<aside aria-label="Selected token"><${Inspector} turn=${turn.value} /></aside>`;
});
