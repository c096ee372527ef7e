// SPDX-License-Identifier: Apache-2.0
// Modules: list, upload, delete; global steering with a warning of whom it concerns.

import { ask } from "./api.js";
import { ranges } from "./server.js";
import { chosenOf, Field, html, short, signal, View } from "./ui.js";

const ROUTE = "v1/steering/modules";
/** The registered modules, as the API lists them. */
export const modules = signal([]);
export const problem = signal("");
const done = signal("");
const overall = signal(null);
const name = signal("");
const asked = signal("");
const chosen = signal("");
const scale = signal("1");
const sure = signal(false);

/** Run an action, and show the API's words if it is refused. Returns whether it succeeded. */
async function attempt(action, success = "") {
  problem.value = done.value = "";
  try {
    await action();
    done.value = success;
    return true;
  } catch (error) {
    problem.value = error.message;
    return false;
  }
}

/** Ask for the modules. */
export function refreshModules() {
  return attempt(async () => {
    modules.value = (await ask("GET", ROUTE)).data;
  });
}

/** Ask for the modules and for global steering. */
export async function refresh() {
  if (await refreshModules()) {
    await attempt(async () => {
      overall.value = await ask("GET", "v1/steering/set");
    });
  }
}

/** Return whether global steering is set, in words. */
export function globalWords() {
  const now = overall.value;
  const used = now?.modules?.map((each) => `${each.name ?? each.digest} × ${short(each.scale)}`).join(", ");
  return !now ? "" : now.digest ? `Global steering is set${used ? `: ${used}` : ""}.` : "No global steering is set.";
}

/** Return what a module edits, in a line. */
export function summary(content) {
  const parts = [];
  for (const [tier, points] of Object.entries(content.tiers)) {
    for (const [point, layers] of Object.entries(points)) parts.push(`${tier}: ${point} ${ranges(layers)}`);
  }
  return [...parts, ...content.edits].join("; ") || "no edits";
}

async function upload(event) {
  const file = event.target.files[0];
  event.target.value = "";
  if (!file) return;
  const wanted = name.value.trim() || file.name.replace(/\.[^.]*$/, "");
  const ok = await attempt(async () => {
    const buffer = await file.arrayBuffer();
    await ask("POST", `${ROUTE}?name=${encodeURIComponent(wanted)}`, buffer, { type: "application/octet-stream" });
  }, `${wanted} is registered.`);
  if (ok) {
    const words = done.value;
    await refresh();
    done.value = words;
    name.value = "";
  }
}

async function remove(module) {
  const ok = await attempt(() => ask("DELETE", `${ROUTE}/${encodeURIComponent(module)}`));
  asked.value = "";
  if (ok) {
    await refresh();
    done.value = `${module} is deleted.`;
  }
}

const choices = () => modules.value.map((each) => [each.name, each.name]);

async function setGlobal() {
  const body = { modules: [[chosenOf(chosen, choices()), Number(scale.value)]] };
  const ok = await attempt(() => ask("POST", "v1/steering/set", body));
  sure.value = false;
  if (ok) await refresh();
}

async function clearGlobal() {
  if (await attempt(() => ask("POST", "v1/steering/clear"))) await refresh();
}

const Row = ({ module }) => html`<tr>
  <th scope="row">${module.name}</th>
  <td>${module.description}</td>
  <td>${module.problem ?? summary(module.content)}</td>
  <td>${module.probes.join(", ") || "none"}</td>
  <td><code>${module.digest.slice(0, 19)}</code> (${module.versions.length})</td>
  <td>
    ${asked.value === module.name
      ? html`<button type="button" class="danger" onClick=${() => remove(module.name)}>Delete for everybody</button>
          <button
            type="button"
            onClick=${() => {
              asked.value = "";
            }}
          >
            Keep
          </button>`
      : html`<button
          type="button"
          class="quiet"
          aria-label=${`Delete ${module.name}`}
          onClick=${() => {
            asked.value = module.name;
          }}
        >
          Delete
        </button>`}
  </td>
</tr>`;

class Global extends View {
  view() {
    const now = overall.value;
    return html`<section aria-label="Global steering">
      <h3>Global steering</h3>
      <p role="status">${globalWords()}</p>
      <p class="warning">
        Global steering changes every request of every client and API key of this server that is admitted from then on, also those
        of people who do not know about it. Running requests keep what they have.
      </p>
      <form
        class="row"
        onSubmit=${(event) => {
          event.preventDefault();
          setGlobal();
        }}
      >
        <${Field} label="Module for all requests" kind="select" value=${chosen} options=${choices()} />
        <${Field} label="Scale" kind="number" step="0.1" value=${scale} />
        <${Field} label="I mean all requests" kind="checkbox" value=${sure} />
        <button type="submit" class="danger" disabled=${!sure.value || !modules.value.length}>Set for everybody</button>
        <button type="button" onClick=${clearGlobal} disabled=${!now?.digest}>Clear</button>
      </form>
    </section>`;
  }
}

export class Modules extends View {
  componentDidMount() {
    refresh();
  }

  view() {
    asked.value;
    return html`<div class="tables">
      <div class="row">
        <${Field} label="Name" value=${name} hint="of the new module; empty for the file's" />
        <label class="file">File of a module or of another tool <input type="file" onChange=${upload} /></label>
        <button type="button" class="quiet" onClick=${refresh}>Refresh</button>
      </div>
      ${problem.value ? html`<p class="error" role="alert">${problem.value}</p>` : null}
      ${done.value ? html`<p role="status">${done.value}</p>` : null}
      <table>
        <caption>Modules</caption>
        <thead>
          <tr>${["Name", "Description", "Edits", "Probes", "Digest (versions)", "Action"].map((each) => html`<th scope="col">${each}</th>`)}</tr>
        </thead>
        <tbody>
          ${modules.value.map((module) => html`<${Row} key=${module.name} module=${module} />`)}
        </tbody>
      </table>
      ${modules.value.length ? null : html`<p class="hint">No modules are registered.</p>`}
      <${Global} />
    </div>`;
  }
}
