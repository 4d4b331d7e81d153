// The list of trajectories, with filters in the address, paged by key.
import { chosenAgent } from "./agent.js";
import { get } from "./api.js";
import { h, Slot } from "./dom.js";
import { ago, count, score } from "./format.js";

const SIZE = 50;
const STATES = ["", "open", "sealed", "grouped", "trained", "dropped"];
const SINCE = { "": "any time", 3600: "the last hour", 86400: "the last day", 604800: "the last week" };

/** The address of the list with these filters, or of one of its trajectories. */
export function listed(filters, id = "") {
  const given = new URLSearchParams(Object.entries(filters).filter(([, value]) => value)).toString();
  return `#/trajectories${id ? `/${encodeURIComponent(id)}` : ""}${given ? `?${given}` : ""}`;
}

/** The address of a version's scored trajectories. */
export const scoredOf = (alias, version) => listed({ policy: `${alias}@${version}`, scored: "true" });

const RESULTS = { "unknown_tool": "unknown tool", "invalid_json": "invalid JSON", "schema_violation": "violates the schema", "unexpected_argument": "unexpected argument", "error": "failed: error", "timeout": "failed: timeout", "empty": "empty result", "ok": "result ok", "valid": "valid call", "unchecked": "unchecked" };
const SCORED = { "": "any", true: "scored", false: "not scored" };
const RARE = ["role", "tool", "tag", "round", "search"]; // shown on request

export function trajectories(place, { query }) {
  const filters = Object.fromEntries(query);
  const rows = new Slot(h("div", { class: "card" }));
  place.append(h("h1", {}, "Trajectories"), form(filters), rows.element);
  return {
    refresh: async () => {
      const { within, policy, ...rest } = filters;
      const [, alias, version] = /^(.*?)(?:@(\d+))?$/s.exec(policy ?? "");
      const found = await get("trajectories", { ...rest, alias: alias || chosenAgent(), version, limit: SIZE, since: within ? Math.floor(Date.now() / 1000) - Number(within) : "" });
      rows.show(found, () => table(found, filters));
    },
  };
}

function form(filters) {
  const { before, ...kept } = filters;
  const field = (name, label, hint) => h("div", { class: "field" }, h("label", { for: `f-${name}` }, label),
    h("input", { id: `f-${name}`, name, value: kept[name] ?? "", placeholder: hint, spellcheck: "false", autocomplete: "off" }));
  const number = (name, label) => h("div", { class: "field short" }, h("label", { for: `f-${name}` }, label),
    h("input", { id: `f-${name}`, name, value: kept[name] ?? "", type: "number", step: "any" }));
  const choice = (name, label, options) => h("div", { class: "field" }, h("label", { for: `f-${name}` }, label),
    h("select", { id: `f-${name}`, name, value: kept[name] ?? "", on: { change: () => element.requestSubmit() } },
      options.map(([value, label]) => h("option", { value, selected: value === (kept[name] ?? "") }, label))));
  const more = h("details", { class: "more", open: RARE.some((name) => kept[name]) }, h("summary", {}, "More filters"), h("div", { class: "filters" },
    field("role", "Role", "planner"), field("tool", "Tool", "search"), field("tag", "Tag", "nightly"), field("round", "Round", "rnd_…"), field("search", "Id begins with", "run-7")));
  const element = h("form", { class: "filters card", role: "search", on: { submit: (event) => {
    event.preventDefault();
    location.hash = listed(Object.fromEntries([...new FormData(element)].map(([name, value]) => [name, value.trim()])));
  } } },
  choice("state", "State", STATES.map((state) => [state, state || "any"])),
  field("policy", "Policy", "alias or alias@7"), field("task", "Task", "mail/17"),
  choice("scored", "Score", Object.entries(SCORED)), number("min_score", "Least score"), number("max_score", "Most"),
  choice("outcome", "With a tool call", [["", "any"], ...Object.entries(RESULTS)]),
  choice("within", "Opened", Object.entries(SINCE).sort(([a], [b]) => a - b)),
  h("div", { class: "field buttons" }, h("button", { class: "primary", type: "submit" }, "Show"),
    Object.keys(kept).length ? h("a", { href: "#/trajectories" }, "Clear") : null), more);
  return element;
}

function table(found, filters) {
  if (!found.data.length) return h("p", { class: "empty" }, filters.before ? "There are no older ones." : "No trajectory matches.");
  return [
    h("div", { class: "scroll" }, h("table", { class: "list" },
      h("thead", {}, h("tr", {}, ["Trajectory", "State", "Policy", "Task", "Score", "Calls", "Opened", "Last call"].map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", {}, found.data.map((one) => h("tr", {},
        h("td", {}, h("a", { href: listed(filters, one.id), class: "mono" }, one.id), one.purpose === "live" ? null : h("small", {}, one.purpose)),
        h("td", {}, h("span", { class: `tag is-${one.state}` }, one.state), one.drop_reason ? h("small", {}, one.drop_reason) : null),
        h("td", {}, one.purpose === "other_model" ? one.alias : `${one.alias}@${one.version}`), h("td", { class: "task" }, one.task ?? "–"),
        h("td", { class: "num" }, score(one.score)), h("td", { class: "num" }, count(one.calls)),
        h("td", {}, ago(one.opened_at)), h("td", {}, ago(one.last_active_at))))))),
    h("div", { class: "pager" },
      filters.before ? h("a", { href: listed({ ...filters, before: "" }) }, "Newest") : h("span"),
      h("span", { class: "dim" }, `${count(found.data.length)} shown`),
      found.next ? h("a", { href: listed({ ...filters, before: found.next }) }, "Older →") : h("span", { class: "dim" }, "the oldest")),
  ];
}
