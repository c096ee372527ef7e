// SPDX-License-Identifier: Apache-2.0
// Edits with live strengths, made from modules, pasted JSON and vector files.

import { ask, report } from "./api.js";

/** A strength that adds nothing in float32, in the place of 0: a live strength multiplies the strength of the request. */
export const NOTHING = 1e-12;

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
				const { vector, scale } = entry?.vector === undefined ? { vector: entry, scale: 1 } : entry;
				edits.push({ kind: "add", point, layers: [Number(layer)], vector, strength: scale ?? 1, tokens });
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

/** Return the value of pasted JSON. */
export function parsed(text) {
	try {
		return JSON.parse(text);
	} catch (error) {
		throw new Error(`This is not JSON: ${error.message}`);
	}
}

/**
 * Read pasted JSON: one edit or a list of edits as the API has them, a list of numbers, or Neuronpedia's vector.
 * @param {string} text
 * @param {{point: string, layer: number}} site where a list of numbers is added
 */
export function editsOfText(text, site) {
	const value = parsed(text);
	if (isVector(value)) {
		if (!Number.isInteger(site.layer) || site.layer < 0) throw new Error("A list of numbers needs a layer, counted from 0.");
		return [{ kind: "add", point: site.point, layers: [site.layer], vector: value, tokens: "all" }];
	}
	const hook = /^blocks\.(\d+)\.hook_resid_(pre|mid|post)$/.exec(value?.hookName ?? "");
	if (hook && isVector(value.values)) {
		const point = { pre: "pre_attn", mid: "post_attn", post: "post_block" }[hook[2]];
		return [{ kind: "add", point, layers: [Number(hook[1])], vector: value.values, tokens: "all" }];
	}
	const edits = Array.isArray(value) ? value : [value];
	if (!edits.length || edits.some((edit) => typeof edit !== "object" || edit === null || !edit.kind)) {
		throw new Error('Paste a list of numbers, or edits such as {"kind": "add", "point": "post_block", "layers": [12], "vector": [...]}.');
	}
	return edits;
}

const OTHER = "Register it under Modules.";
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
		let text = "";
		for (const byte of bytes) text += String.fromCharCode(byte);
		const vector = { dtype: DTYPES[dtype], shape, data: btoa(text) };
		edits.push({ kind: "add", point: site[2], layers: [Number(site[3])], vector, strength: scales[name] ?? 1, tokens: TIERS[site[1]] });
	}
	if (!edits.length) throw new Error(`The file has no tensor such as base.post_block.12. ${OTHER}`);
	return edits;
}

/** Return edits with a live strength and a start strength. */
export function live(edits, name, strength) {
	return edits.map((edit) => ({ ...edit, strength: (edit.strength ?? 1) * (strength === 0 ? NOTHING : strength), live: name }));
}

/** Return the live factor that takes edits started at one strength to another. */
export function factor(strength, start) {
	return strength / (start === 0 ? NOTHING : start);
}

/** Return edits that apply only where a condition holds. The API chooses the tokens of those for all tokens. */
export function gated(edits, strength, when) {
	return edits.map(({ tokens, ...edit }) => {
		const named = tokens === undefined || tokens === "all" ? {} : { tokens };
		return { ...edit, ...named, strength: (edit.strength ?? 1) * strength, when };
	});
}
