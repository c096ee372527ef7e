// SPDX-License-Identifier: Apache-2.0
// Steer: plain beside steered from one seed; sliders are live strengths that act in the running stream.

import { ask, report } from "./api.js";
import { editsOfFile, editsOfModule, editsOfText, factor, live } from "./edits.js";
import { modules, problem as refused, refreshModules } from "./modules.js";
import { CopyTurn, Inspector, Status, Tokens } from "./tokens.js";
import { colour, firstDifference, Turn } from "./turn.js";
import { chosenOf, Field, html, short, signal, View, visible } from "./ui.js";

const prompt = signal("Tell me about your day at the lake.");
const temperature = signal("0");
const seed = signal("0");
const maxTokens = signal("100");
const strengths = signal([]);
const chosen = signal("");
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

/** Name for a live strength: the API takes letters, digits and the like. */
const liveName = (title) => `${title.replace(/[^A-Za-z0-9_]/g, "_").slice(0, 40)}_${++added}`;

function add(title, edits, strength = 1) {
  const item = { title, name: liveName(title), edits, strength: signal(String(strength)), start: strength, sent: strength, busy: false };
  strengths.value = [...strengths.value, item];
  problem.value = "";
}

const choices = () => modules.value.map((each) => [each.name, each.name]);

async function addModule() {
  const wanted = chosenOf(chosen, choices());
  try {
    const found = await ask("GET", `v1/steering/modules/${encodeURIComponent(wanted)}?data=true`);
    const edits = editsOfModule(found.content.data);
    if (!edits.length) throw new Error(`The module ${wanted} has no edits, only probes.`);
    add(wanted, edits);
  } catch (error) {
    problem.value = error.message;
  }
}

function attempt(title, read) {
  try {
    add(title, read());
  } catch (error) {
    problem.value = error.message;
  }
}

async function addFile(event) {
  const file = event.target.files[0];
  event.target.value = "";
  if (!file) return;
  const buffer = await file.arrayBuffer();
  const site = { point: point.value, layer: layer.value === "" ? NaN : Number(layer.value) };
  attempt(file.name, () => (/\.json$/i.test(file.name) ? editsOfText(new TextDecoder().decode(buffer), site) : editsOfFile(buffer)));
}

function compare() {
  const [one, other] = [plain.value, steered.value];
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
  const common = { max_tokens: Number(maxTokens.value), temperature: Number(temperature.value), seed: Number(seed.value) };
  const messages = [{ role: "user", content: prompt.value }];
  const steering = strengths.value.flatMap((item) => {
    item.start = item.sent = Number(item.strength.value);
    return live(item.edits, item.name, item.start);
  });
  const turns = [new Turn(), new Turn()];
  [plain.value, steered.value] = turns;
  for (const turn of turns) turn.onToken = compare;
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

/** Send a strength to the running stream. While one is on its way, only the newest of the later ones is kept. */
async function change(item) {
  const turn = steered.value;
  if (item.busy || turn.state.value !== "running" || !turn.id.value) return;
  const wanted = Number(item.strength.value);
  if (wanted === item.sent) return;
  item.busy = true;
  item.sent = wanted;
  try {
    const answer = await ask("POST", `v1/steering/requests/${encodeURIComponent(turn.id.value)}`, {
      [item.name]: factor(wanted, item.start),
    });
    turn.markAt(answer.position, `${item.title}: ${short(wanted)} from here`);
    changes.value = [...changes.value, `${item.title}: ${short(wanted)} from position ${answer.position} on`];
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
    return html`<div class="slider">
      <label for=${id}>${item.title}</label>
      <input id=${id} type="range" min="-8" max="8" step="0.1" value=${value} onInput=${onInput} aria-valuetext=${value} />
      <input type="number" step="0.1" value=${value} onInput=${onInput} aria-label=${`Strength of ${item.title}`} />
      <span class="hint">${item.edits.length} ${item.edits.length === 1 ? "edit" : "edits"}</span>
      <button
        type="button"
        class="quiet"
        aria-label=${`Remove ${item.title}`}
        onClick=${() => {
          strengths.value = strengths.value.filter((each) => each !== item);
        }}
      >
        Remove
      </button>
    </div>`;
  }
}

class Side extends View {
  view() {
    const { title, turn } = this.props;
    return html`<section class="side-by-side">
      <h3>${title}</h3>
      <${Tokens}
        turn=${turn}
        label=${`Tokens, ${title.toLowerCase()}`}
        colourOf=${(token) => (token.logprob === undefined ? "" : colour(-token.logprob, 0, 4))}
        colours="surprise"
        onSelect=${(of, index) => {
          for (const each of [plain.value, steered.value]) each.selected.value = index < each.tokens.length ? index : -1;
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
      First difference at token ${at + 1}: <code>${visible(one?.text ?? "")}</code> plain, <code>${visible(other?.text ?? "")}</code> steered.
    </p>`;
  }
}

export class Steer extends View {
  componentDidMount() {
    if (report.value) refreshModules();
  }

  view() {
    const running = [plain.value, steered.value].some((turn) => turn.state.value === "running");
    const points = (report.value?.points ?? []).filter((each) => each.on && each.name).map((each) => [each.name, each.name]);
    return html`<div class="steer">
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
            ? html`<button type="button" onClick=${stop}>Stop</button>`
            : html`<button type="submit" class="primary">Run both</button>`}
        </div>
      </form>
      <section aria-label="Edits">
        ${strengths.value.length ? null : html`<p class="hint">Add an edit. Its slider acts in the running stream.</p>`}
        ${strengths.value.map((item) => html`<${Slider} key=${item.name} item=${item} />`)}
        <div class="row">
          ${modules.value.length
            ? html`<${Field} label="Module" kind="select" value=${chosen} options=${choices()} />
                <button type="button" onClick=${addModule}>Add module</button>`
            : html`<p class="hint">No modules are registered.</p>`}
          <button type="button" class="quiet" onClick=${refreshModules}>Refresh modules</button>
        </div>
        <details>
          <summary>Paste or open a vector</summary>
          <${Field} label="Vector or edits (JSON)" kind="textarea" rows="3" value=${pasted} spellcheck="false" />
          <div class="row">
            <${Field} label="Point" kind="select" value=${point} options=${points.length ? points : [["post_block", "post_block"]]} />
            <${Field} label="Layer" kind="number" min="0" value=${layer} />
            <button
              type="button"
              onClick=${() => attempt("pasted", () => editsOfText(pasted.value, { point: point.value, layer: layer.value === "" ? NaN : Number(layer.value) }))}
            >
              Add pasted
            </button>
            <label class="file">File (.safetensors of a module, .json) <input type="file" onChange=${addFile} /></label>
          </div>
        </details>
      </section>
      ${problem.value || refused.value ? html`<p class="error" role="alert">${problem.value || refused.value}</p>` : null}
      <${Difference} />
      <div class="pair">
        <${Side} title="Plain" turn=${plain.value} />
        <${Side} title="Steered" turn=${steered.value} />
      </div>
      ${changes.value.length ? html`<ol class="changes" aria-label="Changes in the stream">${changes.value.map((each) => html`<li>${each}</li>`)}</ol>` : null}
      <aside aria-label="Selected token"><${Inspector} turn=${selected.value} /></aside>
    </div>`;
  }
}
