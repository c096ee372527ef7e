// SPDX-License-Identifier: Apache-2.0
// Edits with live strengths, made from modules, pasted JSON and vector files.

import { ask, report } from "./api.js";
import { plural, short } from "./ui.js";

/** A strength that adds nothing in float32, in the place of 0: a live strength multiplies the strength of the request. */
export const NOTHING = 1e-12;

const add = (point, layer, vector, tokens = "all", strength = 1) => ({ kind: "add", point, layers: [Number(layer)], vector, strength, tokens });

const TIERS = { base: "all", prefill: "prompt", decode: "generated" };

/**
 * Return the edits of a module's content, as GET /v1/steering/modules/{name}?data=true has it.
 * @param {Record<string, any>} data
 */
export function editsOfModule(data) {
	const edits = [];
	for (const [tier, tokens] of Object.entries(TIERS)) {
		for (const [point, layers] of Object.entries(data[tier] ?? {})) {
			for (const [layer, entry] of Object.entries(layers)) {
				const { vector, scale } = entry?.vector === undefined ? { vector: entry } : entry;
				edits.push(add(point, layer, vector, tokens, scale));
			}
		}
	}
	return [...edits, ...(data.edits ?? [])];
}

export async function editsFrom(name) {
	const found = await ask("GET", `v1/steering/modules/${encodeURIComponent(name)}?data=true`);
	const edits = editsOfModule(found.content.data);
	if (!edits.length) throw new Error(`The module ${name} has no edits, only probes.`);
	return edits;
}

/** Return edits if their layers and lists of numbers fit the model; throw otherwise. */
export function fitting(edits) {
	const { hidden_size: width = 0, num_layers: count = 0 } = report.value ?? {};
	for (const { vector, layers } of edits) {
		const far = Array.isArray(layers) && layers.find((layer) => layer >= count);
		if (count && far) throw new Error(`Layer: '${far}' is not a number from 0 to ${count - 1}.`);
		if (width && isVector(vector) && vector.length !== width) throw new Error(`The vector has ${vector.length} numbers instead of ${width}.`);
	}
	return edits;
}

const isVector = (value) => Array.isArray(value) && value.length > 1 && value.every((each) => typeof each === "number");

/** Return the norm that strength 1 of an edit adds; NaN unless its vector is a list of numbers or packed in float32. */
export function normOf({ kind, vector, dose, strength }) {
	if (kind !== "add" || dose !== undefined) return NaN;
	const packed = vector?.dtype === "float32" && new Float32Array(Uint8Array.from(atob(vector.data), (sign) => sign.charCodeAt(0)).buffer);
	return isVector(vector) || packed ? Math.hypot(...(packed || vector)) * Math.abs(strength ?? 1) : NaN;
}

/** Write the range of the values that are known. */
function range(values) {
	const known = values.filter(Number.isFinite).sort((one, other) => one - other);
	return [...new Set([...known.slice(0, 1), ...known.slice(-1)].map((each) => short(each)))].join(" to ");
}

/** Say what strength 1 of edits with these norms is. `streams` has the lengths of the stream that are known. */
export function unitOf(edits, norms, streams) {
	const streamOf = ({ point, layers }) => streams.find((each) => each.point === point && layers?.includes(each.layer));
	const [norm, share] = [norms, edits.map((edit, n) => (100 * norms[n]) / streamOf(edit)?.length)].map(range);
	return `${plural(edits.length, "edit")}, as given at strength 1${norm && `: a norm of ${norm}`}${share && `, ${share} % of the stream's length`}`;
}

/** Return the value of pasted JSON. */
export function parsed(text) {
	try {
		return JSON.parse(text);
	} catch (error) {
		throw new Error(`This is not JSON: ${error.message}`);
	}
}

const OTHER = "Register it under Modules.";
const HOOKS = { hook_resid_pre: "pre_attn", hook_resid_mid: "post_attn", hook_resid_post: "post_block" };

/**
 * Read JSON: one edit or a list of edits as the API has them, or a vector: a list of numbers, or with a site in the
 * words of Neuronpedia or of an edit. `site` is for a vector that does not tell its own.
 */
export function editsOfText(text, site, title) {
	const value = parsed(text);
	const { kind, values, vector = values, hookName, hookType, layerNumber, layer, point } = isVector(value) ? { vector: value } : (value ?? {});
	if (!kind && isVector(vector)) {
		const [, number, hook] = /^blocks\.(\d+)\.(.*)$/.exec(hookName) ?? ["", layerNumber ?? layer ?? site.layer, hookName ?? hookType];
		if (hook && !HOOKS[hook]) throw new Error(`The page does not know the hook '${hook}'. ${OTHER}`);
		if (!/^\d+$/.test(number)) throw new Error(`${title} does not tell its layer: choose Point and Layer, and press Add pasted.`);
		return [add(HOOKS[hook] ?? point ?? site.point, number, vector)];
	}
	const edits = Array.isArray(value) ? value : [value];
	if (!edits.length || edits.some((edit) => typeof edit !== "object" || edit === null || !edit.kind)) {
		throw new Error('Paste a list of numbers, or edits such as {"kind": "add", "point": "post_block", "layers": [12], "vector": [...]}.');
	}
	return edits;
}

const DTYPES = { F32: "float32", F16: "float16", BF16: "bfloat16" };

/** Read the vectors of a module's safetensors file, such as `base.post_block.12`. */
export function editsOfFile(buffer) {
	const view = new DataView(buffer);
	const length = buffer.byteLength > 8 ? Number(view.getBigUint64(0, true)) : Infinity;
	if (length > buffer.byteLength - 8) throw new Error(`This is not a safetensors file. ${OTHER}`);
	const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, length)));
	const scales = JSON.parse(header.__metadata__?.scales ?? "{}");
	if (header.__metadata__?.edits) throw new Error(`This module has edits of other kinds. ${OTHER}`);
	const edits = [];
	for (const [name, { dtype, shape, data_offsets: [start, end] = [] }] of Object.entries(header)) {
		const site = /^(base|prefill|decode)\.(\w+)\.(\d+)$/.exec(name);
		if (!site || !DTYPES[dtype]) continue;
		const bytes = new Uint8Array(buffer, 8 + length + start, end - start);
		const data = btoa(Array.from(bytes, (byte) => String.fromCharCode(byte)).join(""));
		const vector = { dtype: DTYPES[dtype], shape, data };
		edits.push(add(site[2], site[3], vector, TIERS[site[1]], scales[name]));
	}
	if (!edits.length) throw new Error(`The file has no tensor such as base.post_block.12. ${OTHER}`);
	return edits;
}

/** Return edits with a live strength and a start strength. */
export const live = (edits, name, strength) =>
	edits.map((edit) => ({ ...edit, strength: (edit.strength ?? 1) * (strength || NOTHING), live: name }));

/** Return the live factor that takes edits started at one strength to another. */
export const factor = (strength, start) => strength / (start || NOTHING);

/** Return edits that apply only where a condition holds. The API chooses the tokens of those for all tokens. */
export function gated(edits, strength, when) {
	return edits.map(({ tokens, ...edit }) => {
		const named = tokens === undefined || tokens === "all" ? {} : { tokens };
		return { ...edit, ...named, strength: (edit.strength ?? 1) * strength, when };
	});
}
