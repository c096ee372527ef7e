// SPDX-License-Identifier: Apache-2.0
// Steer: plain beside steered from one seed; sliders are live strengths that act in the running stream.

import { ask, pointChoices, report } from "./api.js";
import { editsFrom, editsOfFile, editsOfText, factor, live } from "./edits.js";
import { globalWords, modules, problem as refused, refresh } from "./modules.js";
import { listSetting, share } from "./share.js";
import { CopyTurn, Inspector, Status, Tokens } from "./tokens.js";
import { colour, firstDifference, Turn } from "./turn.js";
import { chosenOf, effect, Field, html, PromptForm, promptSettings, sampling, short, signal, untracked, View, visible } from "./ui.js";

const settings = promptSettings("Tell me about your day at the lake.");
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
/** Modules of the address, which wait for the API. */
const wanted = signal([]);
let added = 0;

/** Name for a live strength: letters, digits and the like. */
const liveName = (title) => `${title.replace(/[^A-Za-z0-9_]/g, "_").slice(0, 40)}_${++added}`;

function add(title, edits, module = "", strength = 1) {
  const item = { title, module, name: liveName(title), edits, strength: signal(String(strength)), start: strength, sent: strength, busy: false };
  strengths.value = [...strengths.value, item];
  problem.value = "";
}

const choices = () => modules.value.map((each) => [each.name, each.name]);

async function addModule(name, strength) {
  try {
    add(name, await editsFrom(name), name, strength);
  } catch (error) {
    problem.value = error.message;
  }
}

const edits = listSetting(
  () => [...strengths.value.filter((each) => each.module).map((each) => [each.module, Number(each.strength.value)]), ...wanted.value],
  (list) => {
    strengths.value = [];
    wanted.value = list.map(([name, strength]) => [String(name), Number(strength) || 0]);
  },
  problem,
);
share("steer", { ...settings, edits });

effect(() => {
  if (!report.value || !wanted.value.length) return;
  const list = wanted.value;
  wanted.value = [];
  untracked(() => list.forEach(([name, strength]) => addModule(name, strength)));
});

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
  const steering = strengths.value.flatMap((item) => {
    item.start = item.sent = Number(item.strength.value);
    return live(item.edits, item.name, item.start);
  });
  const turns = [new Turn(), new Turn()];
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
    if (report.value) refresh();
  }

  view() {
    const running = [plain.value, steered.value].some((turn) => turn.state.value === "running");
    return html`<div class="steer">
      <${PromptForm} settings=${settings} title="Run both" run=${run} stop=${stop} running=${running} />
      <section aria-label="Edits">
        ${strengths.value.length ? null : html`<p class="hint">Add an edit. Its slider acts in the running stream.</p>`}
        ${strengths.value.map((item) => html`<${Slider} key=${item.name} item=${item} />`)}
        <div class="row">
          ${modules.value.length
            ? html`<${Field} label="Module" kind="select" value=${chosen} options=${choices()} />
                <button type="button" onClick=${() => addModule(chosenOf(chosen, choices()))}>Add module</button>`
            : html`<p class="hint">No modules are registered.</p>`}
          <button type="button" class="quiet" onClick=${refresh}>Refresh modules</button>
        </div>
        <details>
          <summary>Paste or open a vector</summary>
          <${Field} label="Vector or edits (JSON)" kind="textarea" rows="3" value=${pasted} spellcheck="false" />
          <div class="row">
            <${Field} label="Point" kind="select" value=${point} options=${pointChoices()} />
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
      <p class="hint">Global steering also steers the plain side, because it applies to every request. ${globalWords()}</p>
      <div class="pair">
        <${Side} title="Plain" turn=${plain.value} />
        <${Side} title="Steered" turn=${steered.value} />
      </div>
      ${changes.value.length ? html`<ol class="changes" aria-label="Changes in the stream">${changes.value.map((each) => html`<li>${each}</li>`)}</ol>` : null}
      <aside aria-label="Selected token"><${Inspector} turn=${selected.value} /></aside>
    </div>`;
  }
}
