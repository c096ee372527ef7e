// SPDX-License-Identifier: Apache-2.0
// Probes: readouts over a stream, with a threshold, and a stop at it.

import { report } from "./api.js";
import { modules, problem as refused, refreshModules } from "./modules.js";
import { CopyTurn, Inspector, Legend, Status, Tokens } from "./tokens.js";
import { colour, Turn } from "./turn.js";
import { chosenOf, Field, html, short, signal, View } from "./ui.js";

const prompt = signal("Tell me a story about a storm.");
const temperature = signal("0");
const seed = signal("0");
const maxTokens = signal("100");
const rack = signal([]);
const chosen = signal("");
const pasted = signal("");
const point = signal("post_block");
const layer = signal("");
const sigmoid = signal(false);
const problem = signal("");
const turn = signal(new Turn());
const shown = signal("");
let added = 0;

/** Return the probes of all modules as `module/probe`. */
export const probesOf = (list) => list.flatMap((each) => each.probes.map((probe) => `${each.name}/${probe}`));

/** Return the lowest and the highest of the values, and of the bound. */
export function extent(values, bound) {
  const all = Number.isFinite(bound) ? [...values, bound] : values;
  if (!all.length) return [0, 1];
  const [low, high] = all.reduce(([a, b], value) => [Math.min(a, value), Math.max(b, value)], [Infinity, -Infinity]);
  return low === high ? [low - 1, high + 1] : [low, high];
}

function add(title, readout) {
  const name = `p${++added}_${title.replace(/[^A-Za-z0-9_]/g, "_").slice(0, 30)}`;
  rack.value = [...rack.value, { title, name, readout, bound: signal("0"), stop: signal(false), side: signal("above") }];
  shown.value = name;
  problem.value = "";
}

function addPasted() {
  try {
    const probe = JSON.parse(pasted.value);
    if (layer.value === "") throw new Error("The probe needs a layer, counted from 0.");
    add("pasted", { probe, point: point.value, layer: Number(layer.value), sigmoid: sigmoid.value });
  } catch (error) {
    problem.value = error instanceof SyntaxError ? `This is not JSON: ${error.message}` : error.message;
  }
}

function run() {
  turn.value.stop();
  problem.value = "";
  turn.value = new Turn();
  const settings = { max_tokens: Number(maxTokens.value), temperature: Number(temperature.value), seed: Number(seed.value) };
  if (rack.value.length) settings.readouts = Object.fromEntries(rack.value.map((each) => [each.name, each.readout]));
  const stops = rack.value
    .filter((each) => each.stop.value)
    .map((each) => ({ readout: each.name, [each.side.value]: Number(each.bound.value) }));
  if (stops.length) settings.stop_on = stops;
  turn.value.run([{ role: "user", content: prompt.value }], settings);
}

const values = (name) => turn.value.tokens.map((token) => token.scores[name]).filter((value) => value !== undefined && value !== null);
const isOver = (item, value) => (item.side.value === "above" ? value > Number(item.bound.value) : value < Number(item.bound.value));

class Probe extends View {
  view() {
    const { item } = this.props;
    turn.value.count.value;
    const found = values(item.name);
    const [low, high] = extent(found, Number(item.bound.value));
    const over = found.filter((value) => isOver(item, value)).length;
    const id = `bound-${item.name}`;
    const onInput = (event) => {
      item.bound.value = event.target.value;
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
        <button
          type="button"
          class="quiet"
          aria-pressed=${shown.value === item.name}
          onClick=${() => {
            shown.value = item.name;
          }}
        >
          Colour by this
        </button>
        <button
          type="button"
          class="quiet"
          aria-label=${`Remove ${item.title}`}
          onClick=${() => {
            rack.value = rack.value.filter((each) => each !== item);
          }}
        >
          Remove
        </button>
      </div>
      ${found.length ? html`<p class="hint">${over} of ${found.length} tokens ${item.side.value} ${short(Number(item.bound.value))}; from ${short(Math.min(...found))} to ${short(Math.max(...found))}</p>` : null}
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
    const points = (report.value?.points ?? []).filter((each) => each.on).map((each) => [each.name, each.name]);
    const colourOf = (token) => {
      const value = item ? token.scores[item.name] : undefined;
      if (value === undefined || value === null) return "";
      return `${colour(value, low, high)}${isOver(item, value) ? " over" : ""}`;
    };
    return html`<div>
      <form
        onSubmit=${(event) => {
          event.preventDefault();
          run();
        }}
      >
        <${Field} label="Prompt" kind="textarea" rows="2" value=${prompt} />
        <div class="row">
          <${Field} label="Temperature" kind="number" step="0.1" min="0" value=${temperature} />
          <${Field} label="Seed" kind="number" value=${seed} />
          <${Field} label="Most tokens" kind="number" min="1" value=${maxTokens} />
          ${running
            ? html`<button type="button" onClick=${() => turn.value.stop()}>Stop</button>`
            : html`<button type="submit" class="primary">Run</button>`}
        </div>
      </form>
      <section aria-label="Probes">
        ${rack.value.length ? null : html`<p class="hint">Add a probe. Tokens are coloured by its value while they stream.</p>`}
        ${rack.value.map((each) => html`<${Probe} key=${each.name} item=${each} />`)}
        <div class="row">
          ${choices.length
            ? html`<${Field} label="Probe of a module" kind="select" value=${chosen} options=${choices} />
                <button type="button" onClick=${() => add(chosenOf(chosen, choices), { probe: chosenOf(chosen, choices) })}>Add probe</button>`
            : html`<p class="hint">No module has a probe.</p>`}
        </div>
        <details>
          <summary>Paste a probe</summary>
          <${Field} label="Weights (JSON)" kind="textarea" rows="3" value=${pasted} spellcheck="false" />
          <div class="row">
            <${Field} label="Point" kind="select" value=${point} options=${points.length ? points : [["post_block", "post_block"]]} />
            <${Field} label="Layer" kind="number" min="0" value=${layer} />
            <${Field} label="Sigmoid" kind="checkbox" value=${sigmoid} />
            <button type="button" onClick=${addPasted}>Add pasted</button>
          </div>
        </details>
      </section>
      ${problem.value || refused.value ? html`<p class="error" role="alert">${problem.value || refused.value}</p>` : null}
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
