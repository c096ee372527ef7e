// SPDX-License-Identifier: Apache-2.0
// Traffic: what the server counts of the requests of all clients.

import { send } from "./api.js";
import { Table } from "./server.js";
import { Alert, html, signal, View } from "./ui.js";

const EVERY = 2000;
const ROWS = [
	["Requests", "requests"],
	["neither steered nor captured", "requests", "plain"],
	["steered", "requests", "steered"],
	["captured", "requests", "captured"],
	["steered and captured", "requests", "steered_captured"],
	["Readouts", "readouts"],
	["Stopped by a readout", "readout_stops"],
	["Tokens steered by a gate", "gated_tokens", "open"],
	["Changes of live strengths", "live_changes"],
	["Patching studies", "studies"],
	["Refused requests", "refused_requests"],
];
const GAUGES = [
	["Running", "num_requests_running"],
	["Waiting", "num_requests_waiting"],
	["Steered or captured, admitted", "requests_admitted"],
];

const first = signal(null);
const now = signal(null);
const problem = signal("");

/** Sum the samples of a page in Prometheus' text format, by name, and by name and kind or gate. */
export function sumsOf(text) {
	const sums = new Map();
	for (const [, name, labels = "", value] of text.matchAll(/^vllm(?:_steer)?:(\w+?)(?:_total)?(\{.*\})? (\S+)$/gm)) {
		const kind = /[{,](?:kind|gate)="(\w+)"/.exec(labels)?.[1];
		for (const key of kind ? [name, `${name} ${kind}`] : [name]) sums.set(key, (sums.get(key) ?? 0) + Number(value));
	}
	return sums;
}

async function refresh() {
	try {
		now.value = sumsOf(await (await send("GET", "metrics")).text());
		first.value ??= now.value;
		problem.value = "";
	} catch (error) {
		problem.value = error.message;
	}
}

export class Traffic extends View {
	componentDidMount() {
		first.value = null;
		refresh();
		this.timer = setInterval(refresh, EVERY);
	}

	componentWillUnmount() {
		clearInterval(this.timer);
		super.componentWillUnmount();
	}

	view() {
		const sums = now.value;
		const of = (from, row) => from?.get(row.slice(1).join(" ")) ?? 0;
		return html`<p class="hint">Counts of all clients since the server began; each cell of a study is a request. Texts are not shown.</p>
		<${Alert} text=${problem.value} />
		${sums &&
		html`<${Table}
				caption="Requests"
				head=${["Count", "Total", "Since this view was opened"]}
				rows=${ROWS.map((row) => [row[0], of(sums, row), of(sums, row) - of(first.value, row)])}
			/>
			<${Table} caption="Now" head=${["Requests", "Number"]} rows=${GAUGES.map((row) => [row[0], of(sums, row)])} />`}`;
	}
}
