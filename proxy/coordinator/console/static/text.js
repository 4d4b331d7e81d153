// Renders text of agents, tools and judges: long texts folded, JSON indented, images named and never loaded.
import { h, visible } from "./dom.js";
import { count } from "./format.js";

const FOLD = 3000; // characters shown at first

/** A text in a box, in its own writing direction; long texts are folded. */
export function prose(text, kind = "") {
  const whole = String(text);
  const box = h("div", { class: `prose ${kind}`, dir: "auto" }, whole.slice(0, FOLD));
  if (whole.length <= FOLD) return box;
  const more = h("button", { type: "button", class: "quiet", on: { click: () => { box.replaceChildren(...visible(whole)); more.remove(); } } },
    `Show all ${count(whole.length)} characters`);
  return [box, more];
}

/** Indented JSON; other text unchanged. */
export function json(value) {
  let text = value;
  if (typeof value !== "string") text = JSON.stringify(value, null, 2);
  else try { text = JSON.stringify(JSON.parse(value), null, 2); } catch { /* unchanged */ }
  return prose(text ?? "", "code");
}

/** The content of a message: text, or parts. */
export function content(value) {
  if (value === null || value === undefined || value === "") return null;
  if (typeof value === "string") return prose(value);
  if (!Array.isArray(value)) return json(value);
  return value.map((part) => {
    if (typeof part === "string") return prose(part);
    if (typeof part?.text === "string") return prose(part.text);
    return h("div", { class: "part" }, `${part?.type ?? "part"}, not loaded`, h("details", {}, h("summary", {}, "Details"), json(part)));
  });
}
