// What agents do, by version: curves of each measure, and the use of each tool.
import { get } from "./api.js";
import { chosenAgent } from "./agent.js";
import { curve } from "./charts.js";
import { h, Slot } from "./dom.js";
import { count, figure, NONE, percent, seconds } from "./format.js";
import { change, MEASURES, pointOf } from "./measures.js";
import { listed } from "./trajectories.js";

const MAX_TOOLS = 20;

export function behavior(place) {
  const slot = new Slot(h("div", { class: "stack" }));
  place.append(h("h1", {}, "Behavior"), slot.element);
  return {
    refresh: async () => slot.show((await get("behavior", { alias: chosenAgent() })).data, (agents) => {
      const seen = agents.filter((one) => one.rows.length);
      return seen.length ? seen.map(ofAgent) : h("p", { class: "empty card" }, "No trajectory has ended yet.");
    }),
  };
}

function ofAgent({ alias, rows }) {
  const link = (version) => listed({ policy: `${alias}@${version}` });
  const drawn = MEASURES.map((measure) => ({ measure, points: rows.map((row) => pointOf(row, measure)).filter((p) => typeof p.mean === "number") }))
    .filter(({ points }) => points.some((p) => p.mean > 0));
  return h("section", { class: "card" }, h("h2", {}, alias),
    h("p", { class: "dim small" }, `The newest trajectories of each version, at most 200. A click on a curve lists a version's trajectories.`),
    h("div", { class: "multiples" }, drawn.map(({ measure, points }) => h("section", {}, h("h3", { title: measure.note }, measure.title, h("small", { class: "dim" }, ` ${measure.note}`)),
      curve(points, { what: `${alias} ${measure.title}`, link, format: measure.format, floor: 0, small: true })))),
    toolUse(alias, rows),
    h("details", {}, h("summary", { "data-focus": `figures ${alias}` }, "The figures as a table"), figures(rows, link)));
}

/** Tools by calls per trajectory at the oldest and at the newest version. */
function toolUse(alias, rows) {
  const first = rows[0], last = rows.at(-1);
  const of = (row, tool) => row.tools.find((one) => one.tool === tool) ?? { per_trajectory: 0, trajectory_share: 0 };
  const names = [...new Set([...last.tools, ...first.tools].map((one) => one.tool))].slice(0, MAX_TOOLS);
  if (!names.length) return null;
  const heads = ["Tool", `Calls per trajectory @${first.version}`, `@${last.version}`, "Change", `Trajectories that use it @${first.version}`, `@${last.version}`, `Time until the result @${first.version}`, `@${last.version}`];
  return h("div", { class: "scroll" }, h("table", {},
    h("thead", {}, h("tr", {}, heads.map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, names.map((name) => {
      const [before, after] = [of(first, name), of(last, name)];
      const number = (n) => figure(Number(n.toFixed(2)));
      return h("tr", {}, h("td", {}, h("a", { href: listed({ policy: alias, tool: name }) }, h("code", {}, name))),
        h("td", { class: "num" }, number(before.per_trajectory)), h("td", { class: "num" }, number(after.per_trajectory)),
        h("td", { class: "num" }, change(before.per_trajectory, after.per_trajectory, number)),
        h("td", { class: "num" }, percent(before.trajectory_share)), h("td", { class: "num" }, percent(after.trajectory_share)),
        h("td", { class: "num" }, untilResult(before)), h("td", { class: "num" }, untilResult(after)));
    }))));
}

/** Median and 95th percentile, from the answer that asks for a tool to the request with its result. */
const untilResult = ({ seconds: time }) => (time ? `${seconds(time.p50)}, p95 ${seconds(time.p95)}` : NONE);

function figures(rows, link) {
  return h("div", { class: "scroll" }, h("table", {},
    h("thead", {}, h("tr", {}, ["Version", "Trajectories", ...MEASURES.map((one) => one.title)].map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, rows.toReversed().map((row) => h("tr", {}, h("td", {}, h("a", { href: link(row.version) }, `@${row.version}`)), h("td", { class: "num" }, count(row.trajectories)),
      MEASURES.map((measure) => { const { mean } = pointOf(row, measure); return h("td", { class: "num" }, typeof mean === "number" ? measure.format(mean) : NONE); }))))));
}
