// SPDX-License-Identifier: Apache-2.0
// Server: what the engine serves, and what it refuses and why.

import { noReport, report } from "./api.js";
import { Alert, component, html } from "./ui.js";

/** Join layers with equal reasons: {0: "a", 1: "a", 5: "b"} becomes [["0-1", "a"], ["5", "b"]]. */
export function byReason(reasons) {
	const groups = new Map();
	for (const [layer, why] of Object.entries(reasons)) groups.set(why, [...(groups.get(why) ?? []), Number(layer)]);
	return [...groups].map(([why, layers]) => [ranges(layers), why]);
}

/** Write layers as ranges: [0, 1, 2, 5] becomes "0-2, 5". */
export function ranges(layers) {
	const found = [];
	for (const layer of [...layers].sort((one, other) => one - other)) {
		const last = found.at(-1);
		if (last && layer === last[1] + 1) last[1] = layer;
		else found.push([layer, layer]);
	}
	return found.map(([first, last]) => (first === last ? `${first}` : `${first}-${last}`)).join(", ");
}

const size = (bytes) => (bytes >= 2 ** 20 ? `${(bytes / 2 ** 20).toFixed(1)} MiB` : `${(bytes / 1024).toFixed(1)} KiB`);

export const Table = ({ caption, head, rows }) => html`<div class="wide"><table>
	<caption>${caption}</caption>
	<thead>
		<tr>${head.map((each) => html`<th scope="col">${each}</th>`)}</tr>
	</thead>
	<tbody>
		${rows.map(([first, ...rest]) => html`<tr><th scope="row">${first}</th>${rest.map((each) => html`<td>${each}</td>`)}</tr>`)}
	</tbody>
</table></div>`;

function refusals(found) {
	const rows = [];
	for (const point of found.points) {
		if (!point.on) rows.push([point.name, "all", "edit, read", `off; switched on by ${point.switched_on_by}`]);
		for (const [layers, why] of byReason(point.refused)) rows.push([point.name, layers, "edit", why]);
		for (const [layers, why] of byReason(point.unread)) rows.push([point.name, layers, "read", why]);
	}
	if (found.no_capture) rows.push(["all points", "all", "read", found.no_capture]);
	if (found.mixed_head) rows.push(["lens", "all", "read", found.mixed_head]);
	if (found.no_plain_code) rows.push(["stock code when idle", "all", "", found.no_plain_code]);
	for (const conflict of found.conflicts.filter((each) => each.present)) rows.push([conflict.setting, "", "", conflict.reason]);
	for (const why of found.unproven) rows.push(["unproven", "", "", why]);
	return rows;
}

export const Server = component(() => {
	const found = report.value;
	if (!found) return html`<p class="hint">${noReport.value ? "There is nothing to show." : "Waiting for the server."}</p>`;
	const refused = refusals(found);
	const facts = [
		["Model", `${found.model_class ?? found.architecture} (${found.num_layers} layers, width ${found.hidden_size}, ${found.dtype})`],
		["Longest sequence", `${found.max_model_len} tokens`],
		["vllm-steer", found.vllm_steer],
		["vLLM", `${found.vllm}, ${found.vllm_is_tested ? "tested" : (found.vllm_check ?? "untested")}`],
		["Self-check at start", found.self_checks.map((each) => (each.ran === false ? "skipped" : "passed")).join(", ") || "none"],
	];
	return html`<${Alert} text=${found.problem} />
	<${Table} caption="Engine" head=${["Fact", "Value"]} rows=${facts} />
	<${Table}
		caption="Hook points"
		head=${["Point", "Value", "Edits", "Reads", "Seen by"]}
		rows=${found.points.map((point) => [
			point.name,
			point.value,
			...[point.edits, point.reads].map((all) => (all ? "all layers" : point.on ? "not all layers" : "off")),
			point.seen_by,
		])}
	/>
	${refused.length
		? html`<${Table} caption="Refused, and why" head=${["What", "Layers", "For", "Why"]} rows=${refused} />`
		: html`<p>The engine refuses no layer and no point.</p>`}
	<${Table} caption="Kinds of edits" head=${["Kind", "Formula"]} rows=${Object.entries(found.edits)} />
	<${Table} caption="Limits of a request or the engine" head=${["Limit", "Value"]} rows=${Object.entries(found.limits)} />
	<${Table}
		caption="Memory of the tables"
		head=${["Table", "Size"]}
		rows=${Object.entries(found.table_bytes).map(([name, bytes]) => [name, size(bytes)])}
	/>`;
});
