// SPDX-License-Identifier: Apache-2.0
// The server's public HTTP API. The key stays in the memory of this tab.

import { signal } from "./ui.js";

const BASE = new URL("../", document.baseURI);

/** The API key; empty if the server needs none. Never stored and never part of an address. */
export const key = signal("");
/** Whether the server answers: "yes", "no", or "locked" if it refuses the key. */
export const link = signal("yes");
export const refusal = signal("");
/** Id of the model, and the report of GET /v1/steering/capabilities; null before they are known. */
export const model = signal(null);
export const report = signal(null);
/** Why there is no report, in the server's words. */
export const noReport = signal("");

export function pointChoices() {
	const on = (report.value?.points ?? []).filter((each) => each.on).map((each) => [each.name, each.name]);
	return on.length ? on : [["post_block", "post_block"]];
}

/** An error of the server, or a lost connection: status 0 and no message, because the page has a banner for it. */
export class ApiError extends Error {
	constructor(status, message) {
		super(message);
		this.status = status;
	}
}

/** Global steering, as GET /v1/steering/set reports it; null before it is known. */
export const overall = signal(null);

/** Ask for global steering. Its state stays as it is if the key may not read it. */
export async function refreshGlobal() {
	if (report.value) overall.value = await ask("GET", "v1/steering/set").catch(() => overall.value);
}

/** Take the digest of global steering that an answer was steered by, or null. */
export function noteGlobal(digest) {
	if (digest === (overall.value?.digest ?? null)) return;
	overall.value = { digest };
	refreshGlobal();
}

/** Return the message of an error body, as the API words it. */
export function messageOf(status, text) {
	try {
		const body = JSON.parse(text);
		const found = body.error?.message ?? body.message ?? body.detail ?? body.error;
		if (typeof found === "string") return found;
		if (found !== undefined) return JSON.stringify(found);
	} catch {
		// Not JSON: a proxy's page, for example.
	}
	return text.trim().slice(0, 500) || `HTTP ${status}`;
}

/** Send a request and return its response. Throws an ApiError unless it is a success. */
export async function send(method, path, body, options) {
	const { type = "application/json", signal: abort } = options ?? {};
	const payload = body instanceof ArrayBuffer ? body : JSON.stringify(body);
	/** @type {Record<string, string>} */
	const headers = body === undefined ? {} : { "Content-Type": type };
	if (key.value) headers.Authorization = `Bearer ${key.value}`;
	let response;
	try {
		response = await fetch(new URL(path, BASE), {
			method,
			headers,
			body: payload,
			signal: abort,
			credentials: "omit",
			cache: "no-store",
		});
	} catch (error) {
		if (abort?.aborted) throw error;
		lose();
		throw new ApiError(0, "");
	}
	if (response.ok) return response;
	const message = messageOf(response.status, await response.text().catch(() => ""));
	if (response.status === 401) {
		link.value = "locked";
		refusal.value = message;
	}
	throw new ApiError(response.status, message);
}

export async function ask(method, path, body, options) {
	const response = await send(method, path, body, options);
	const text = await response.text();
	return text ? JSON.parse(text) : null;
}

/**
 * Split the text of a stream of server-sent events into the data of complete events, and the rest.
 * @returns {[string[], string]}
 */
export function splitEvents(buffer) {
	const parts = buffer.replaceAll("\r\n", "\n").split("\n\n");
	const rest = parts.pop() ?? "";
	const events = parts.map((part) =>
		part
			.split("\n")
			.filter((line) => line.startsWith("data:"))
			.map((line) => line.slice(5).trimStart())
			.join("\n"),
	);
	return [events.filter(Boolean), rest];
}

/** Yield the events of a streamed answer. Throws an ApiError if the stream ends before `[DONE]`. */
export async function* stream(path, body, abort) {
	const response = await send("POST", path, body, { signal: abort });
	const reader = /** @type {ReadableStream} */ (response.body).pipeThrough(new TextDecoderStream()).getReader();
	let buffer = "";
	try {
		for (;;) {
			const { done, value } = await reader.read();
			if (done) break;
			const [events, rest] = splitEvents(buffer + value);
			buffer = rest;
			for (const data of events) {
				if (data === "[DONE]") return;
				const event = JSON.parse(data);
				// The error of one cell ends no study.
				if (event.error && event.event !== "cell") throw new ApiError(event.error.code ?? 500, messageOf(500, data));
				yield event;
			}
		}
	} catch (error) {
		if (error instanceof ApiError || abort?.aborted) throw error;
	}
	lose();
	throw new ApiError(0, "");
}

let waiting = false;

/** Note that the server is gone, and ask for it every two seconds. */
async function lose() {
	link.value = "no";
	if (waiting) return;
	waiting = true;
	while (link.value === "no") {
		await new Promise((resolve) => setTimeout(resolve, 2000));
		const answer = await fetch(new URL("health", BASE), { cache: "no-store" }).catch(() => null);
		if (answer?.ok) {
			link.value = "yes";
			if (!model.value) connect();
		}
	}
	waiting = false;
}

export async function connect() {
	refusal.value = "";
	try {
		model.value = (await ask("GET", "v1/models")).data[0].id;
	} catch (error) {
		if (error.status !== 401 && error.status !== 0) noReport.value = error.message;
		return;
	}
	try {
		report.value = await ask("GET", "v1/steering/capabilities");
		noReport.value = "";
	} catch (error) {
		report.value = null;
		noReport.value =
			error.status === 404
				? "This server was started without --enable-steering. Chat works; steering, lenses and probes do not."
				: error.message;
	}
	link.value = "yes"; // not before: what is sent without the report has no lens
}

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

/** Return the shell command that sends a request. It has a variable in the place of the key. */
export function curlOf(path, body) {
	const auth = key.value ? ' -H "Authorization: Bearer $VLLM_STEER_API_KEY"' : "";
	return `curl -sN ${quoted(new URL(path, BASE).href)} -H 'Content-Type: application/json'${auth} -d ${quoted(JSON.stringify(body))}`;
}

/** Return a JSON value as Python writes it. */
export function literalOf(value) {
	const text = JSON.stringify(value);
	if (Array.isArray(value)) return `[${value.map(literalOf).join(", ")}]`;
	if (typeof value !== "object" || !value) return { true: "True", false: "False", null: "None" }[text] ?? text;
	return `{${Object.entries(value).map(([name, each]) => `${JSON.stringify(name)}: ${literalOf(each)}`).join(", ")}}`;
}

/** Return a script in Python that sends a request and prints the answer as it comes. */
export function pythonOf(path, body) {
	const sent = JSON.parse(JSON.stringify(body));
	const fields = Object.entries(sent).map(([name, value]) => `    ${JSON.stringify(name)}: ${literalOf(value)},\n`);
	const auth = key.value ? '\nheaders["Authorization"] = "Bearer " + os.environ["VLLM_STEER_API_KEY"]' : "";
	return `import json
${key.value ? "import os\n" : ""}import urllib.request

body = {
${fields.join("")}}
headers = {"Content-Type": "application/json"}${auth}
url = ${JSON.stringify(new URL(path, BASE).href)}
with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
    for line in answer:
        print(line.decode(), end="")
`;
}
