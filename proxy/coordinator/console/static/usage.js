// What keys use: calls and tokens by key and by agent or model.
import { get } from "./api.js";
import { chosenAgent } from "./agent.js";
import { h, Slot } from "./dom.js";
import { count } from "./format.js";

const PERIODS = [[1, "today"], [7, "7 days"], [30, "30 days"], [365, "a year"]]; // UTC days, today included
const SUMS = [["calls", "Calls"], ["failed", "Failed"], ["prompt_tokens", "Prompt tokens"], ["completion_tokens", "Completion tokens"]];

export function usage(place, { query }) {
  const days = Number(query.get("days")) || 30;
  const slot = new Slot(h("div", { class: "stack" }));
  place.append(h("h1", {}, "Usage"),
    h("p", {}, PERIODS.map(([length, title]) => [length === days ? h("b", {}, title) : h("a", { href: `#/usage?days=${length}` }, title), " "])),
    slot.element);
  return {
    every: true,
    refresh: async () => slot.show((await get(`usage?days=${days}&by=key_id&by=alias${chosenAgent() ? `&alias=${encodeURIComponent(chosenAgent())}` : ""}`)).data,
      (rows) => (rows.length ? table(rows) : h("p", { class: "empty card" }, "No call has ended in this time."))),
  };
}

function table(rows) {
  return h("section", { class: "card" },
    h("p", { class: "dim small" }, "Recorded calls that ended, by UTC days; deleted trajectories stay counted."),
    h("div", { class: "scroll" }, h("table", {},
      h("thead", {}, h("tr", {}, ["Key", "Agent or model", ...SUMS.map(([, title]) => title)].map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", {}, rows.map((row) => h("tr", {}, h("td", {}, keyOf(row)), h("td", {}, row.alias),
        SUMS.map(([name]) => h("td", { class: "num" }, count(row[name])))))))));
}

function keyOf({ key_id, key_name }) {
  if (!key_id) return "no key";
  return key_name ? [key_name, " ", h("code", { class: "dim" }, key_id)] : h("code", {}, key_id);
}
