// SPDX-License-Identifier: Apache-2.0
// The settings of a view in the fragment of the address. Keys and answers are never part of it.

/**
 * A setting: a signal, or what has its `value`. A setting with the value that it began with is not in the address.
 * @typedef {{value: string | boolean}} Setting
 */

/** @type {Record<string, [string, Setting, string | boolean][]>} */
const views = {};

/** Make settings of a view part of its address. */
export function share(view, settings) {
	views[view] = Object.entries(settings).map(([name, setting]) => [name, setting, setting.value]);
}

export function addressOf(view) {
	const parameters = new URLSearchParams();
	for (const [name, setting, first] of views[view] ?? []) {
		if (setting.value !== first) parameters.set(name, String(setting.value));
	}
	return parameters.size ? `#${view}?${parameters}` : `#${view}`;
}

/** Take the settings from a fragment. One without settings leaves them as they are. Returns the name of the view. */
export function restore(fragment) {
	const [view, ...rest] = fragment.slice(1).split("?");
	if (rest.length && Object.hasOwn(views, view)) {
		const parameters = new URLSearchParams(rest.join("?"));
		for (const [name, setting, first] of views[view]) {
			const given = parameters.get(name);
			setting.value = given === null ? first : typeof first === "boolean" ? given === "true" : given;
		}
	}
	return view;
}

/** Return a setting that holds a list of lists as JSON. `problem` gets the error if `set` cannot use it. */
export const listSetting = (get, set, problem) => ({
	get value() {
		return JSON.stringify(get());
	},
	set value(text) {
		try {
			const list = JSON.parse(text);
			if (!Array.isArray(list) || !list.every(Array.isArray)) throw new Error("not a list of lists");
			set(list);
		} catch (error) {
			problem.value = `The address has settings that cannot be read: ${error.message}`;
		}
	},
});
