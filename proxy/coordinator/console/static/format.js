// Formats numbers and times. Pure, except for `ago`: `tick` updates its elements.
import { h } from "./dom.js";

const plain = new Intl.NumberFormat("en");
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const axis = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
const when = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium" });

export const NONE = "–";
export const count = (n) => (n === null || n === undefined ? NONE : Math.abs(n) < 100000 ? plain.format(n) : compact.format(n));
export const short = (n) => axis.format(n);
export const score = (n) => (n === null || n === undefined ? NONE : n.toFixed(3));
export const signed = (n) => (n > 0 ? "+" : n < 0 ? "−" : "±") + Math.abs(n).toFixed(3);
export const percent = (n, digits = 1) => (Number.isFinite(n) ? `${(100 * n).toFixed(digits)}%` : NONE);
export const figure = (n) => (n === null || n === undefined ? NONE : Number.isInteger(n) ? count(n) : Number(n.toPrecision(4)).toString());

export function seconds(n) {
  if (n === null || n === undefined || !Number.isFinite(n)) return NONE;
  if (n === 0) return "0 s";
  if (n < 0.001) return `${Math.round(n * 1e6)} µs`;
  if (n < 1) return `${(n * 1000).toFixed(n < 0.01 ? 1 : 0)} ms`;
  if (n < 90) return `${n.toFixed(n < 10 ? 1 : 0)} s`;
  if (n < 5400) return `${Math.round(n / 60)} min`;
  return n < 172800 ? `${(n / 3600).toFixed(1)} h` : `${Math.round(n / 86400)} d`;
}

/** A time as its age, with the full date as a tooltip. */
export function ago(unix) {
  if (!unix) return h("span", {}, NONE);
  const date = new Date(unix * 1000);
  const element = h("time", { datetime: date.toISOString(), title: when.format(date), "data-at": unix });
  showAge(element);
  return element;
}

function showAge(element) {
  const past = Date.now() / 1000 - Number(element.dataset.at);
  element.textContent = past < 2 ? "now" : `${seconds(Math.floor(past))} ago`;
}

/** Update all ages on the page. */
export function tick() {
  document.querySelectorAll("time[data-at]").forEach(showAge);
}
