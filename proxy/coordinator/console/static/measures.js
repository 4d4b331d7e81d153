// What is measured of each version: name, unit, and which direction is better, if one is.
import { figure, NONE, percent, seconds } from "./format.js";

const number = (n) => (n === null || n === undefined ? NONE : figure(Number(n.toPrecision(3))));
const share = (n) => (n === null || n === undefined ? NONE : percent(n));

export const MEASURES = [
  { name: "calls", title: "calls", note: "model calls per trajectory", format: number },
  { name: "tool_calls", title: "tool calls", note: "tool calls per trajectory", format: number },
  { name: "sampled_tokens", title: "tokens", note: "sampled tokens per trajectory", format: number },
  { name: "seconds", title: "duration", note: "from the first to the last call of a trajectory", format: seconds },
  { name: "invalid_tool_calls", title: "invalid tool calls", note: "share of the tool calls that do not fit the offered tools", format: share, better: -1 },
  { name: "failed_tool_calls", title: "failed tool calls", note: "share of the tool results that are errors, timeouts or empty", format: share, better: -1 },
  { name: "truncated_answers", title: "truncated answers", note: "share of the answers that reached their length limit", format: share, better: -1 },
];

/** A measure of a version as {version, mean, low, high, count}; mean null without data. */
export function pointOf(row, measure) {
  const found = row.means[measure.name] ?? { mean: row[measure.name], low: null, high: null };
  return { version: row.version, count: row.trajectories, ...found };
}

/** A difference in the unit of a measure, with its sign. */
export function change(from, to, format) {
  if (from === null || to === null || from === undefined || to === undefined) return null;
  const size = format(Math.abs(to - from));
  return `${to > from ? "+" : to < from ? "−" : "±"}${size}`;
}
