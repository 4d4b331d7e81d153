// Groups: trajectories of one task side by side, with verdicts and the judge's requests.
import { chosenAgent } from "./agent.js";
import { get } from "./api.js";
import { h, Slot } from "./dom.js";
import { ago, count, NONE, score, seconds, signed } from "./format.js";
import { content, json, prose } from "./text.js";
import { verdictOf } from "./trajectory.js";

const SIZE = 50;
const MAX_MEMBERS = 16; // whose last answers are read

export function groups(place, { query }) {
  const before = query.get("before") ?? "";
  const slot = new Slot(h("div", { class: "card" }));
  place.append(h("h1", {}, "Groups"), slot.element);
  return {
    refresh: async () => slot.show(await get("groups", { limit: SIZE, before, alias: chosenAgent() }), (found) => (found.data.length ? [
      h("div", { class: "scroll" }, h("table", { class: "list" },
        h("thead", {}, h("tr", {}, ["Group", "State", "Alias", "Task", "Members", "Judge failures", "Formed"].map((name) => h("th", { scope: "col" }, name)))),
        h("tbody", {}, found.data.map((one) => h("tr", {},
          h("td", {}, h("a", { href: `#/groups/${encodeURIComponent(one.id)}`, class: "mono" }, one.id)),
          h("td", {}, h("span", { class: `tag is-${one.state}` }, one.state), one.drop_reason ? h("small", {}, one.drop_reason) : null),
          h("td", {}, one.alias), h("td", { class: "task" }, one.key), h("td", { class: "num" }, count(one.members.length)),
          h("td", { class: "num" }, one.failures ? count(one.failures) : NONE), h("td", {}, ago(one.formed_at))))))),
      h("div", { class: "pager" }, before ? h("a", { href: "#/groups" }, "Newest") : h("span"), h("span", { class: "dim" }, `${count(found.data.length)} shown`),
        found.next ? h("a", { href: `#/groups?before=${encodeURIComponent(found.next)}` }, "Older →") : h("span", { class: "dim" }, "the oldest")),
    ] : h("p", { class: "empty" }, before ? "There are no older ones." : "No group yet: trajectories are grouped when they are sealed."))),
  };
}

export function group(place, { path }) {
  const slot = new Slot(h("div", { class: "stack" }));
  place.append(slot.element);
  const name = encodeURIComponent(path[0]);
  return {
    refresh: async () => {
      const [found, requests] = await Promise.all([get(`groups/${name}`), get(`groups/${name}/judge-requests`)]);
      const read = found.members.slice(0, MAX_MEMBERS).map((id) => get(`trajectories/${encodeURIComponent(id)}`, { tokens: false }).catch(() => null));
      slot.show([found, requests.data, await Promise.all(read)], ([one, judge_requests, members]) => [head(one), side(one, members), judge_requests.length ? judged(judge_requests) : null]);
    },
  };
}

function head(one) {
  const scores = one.members.map((id) => one.verdicts[id]?.score).filter((value) => value !== undefined);
  const mean = scores.reduce((sum, value) => sum + value, 0) / (scores.length || 1);
  return h("section", { class: "card" },
    h("p", { class: "dim" }, h("a", { href: "#/groups" }, "Groups"), " /"), h("h1", { class: "mono wrap" }, one.id),
    h("dl", { class: "facts" }, [["state", h("span", { class: `tag is-${one.state}` }, one.state)], ["alias", one.alias], ["task", one.key], ["members", count(one.members.length)],
      ["mean score", scores.length ? score(mean) : NONE], ["formed", ago(one.formed_at)], one.drop_reason ? ["dropped", one.drop_reason] : null].filter(Boolean)
      .map(([term, value]) => h("div", {}, h("dt", {}, term), h("dd", {}, value)))));
}

/** GRPO's advantages: (score - mean of the group) / standard deviation; as in exports. */
function advantages(one) {
  const scored = one.members.filter((id) => one.verdicts[id]);
  const values = scored.map((id) => one.verdicts[id].score);
  const mean = values.reduce((sum, value) => sum + value, 0) / (values.length || 1);
  const deviation = Math.sqrt(values.reduce((sum, value) => sum + (value - mean) ** 2, 0) / Math.max(1, values.length - 1));
  return Object.fromEntries(scored.map((id, at) => [id, deviation > 0 && values.length > 1 ? (values[at] - mean) / deviation : 0]));
}

function side(one, members) {
  const gains = advantages(one);
  const order = one.members.map((id, at) => [id, members[at]]).sort(([a], [b]) => (one.verdicts[b]?.score ?? -1e9) - (one.verdicts[a]?.score ?? -1e9));
  return h("div", { class: "members" }, order.map(([id, read]) => {
    const last = read?.messages.findLast((message) => message.role === "assistant");
    const gain = gains[id];
    return h("section", { class: "card" },
      h("header", { class: "between" }, h("a", { class: "mono wrap", href: `#/trajectories/${encodeURIComponent(id)}` }, id),
        gain === undefined ? null : h("span", { class: `verdict ${gain > 0 ? "better" : gain < 0 ? "worse" : "unknown"}`, title: "(score - mean of the group) / standard deviation" }, `advantage ${signed(gain)}`)),
      read ? h("p", { class: "dim small" }, `${read.alias}@${read.version} · ${count(read.calls.length)} calls · ${count(read.messages.length)} messages · ${read.state}`) : null,
      one.verdicts[id] ? verdictOf(one.verdicts[id], false) : h("p", { class: "empty" }, "No verdict."),
      last ? [h("small", { class: "dim" }, "Last answer"), content(last.content) ?? json(last.tool_calls ?? "")] : null);
  }));
}

function judged(judge_requests) {
  return h("section", { class: "card" }, h("h2", {}, "Judge requests"), judge_requests.map((one) => h("details", {},
    h("summary", {}, h("span", { class: "mono" }, one.id), ` ${one.judge} · status ${one.status} · ${count(one.prompt_tokens)} + ${count(one.completion_tokens)} tokens · ${seconds(one.latency)}`),
    one.error ? prose(one.error, "bad") : null,
    h("small", { class: "dim" }, `Request to ${one.url}`), json(one.request), h("small", { class: "dim" }, "Response"), json(one.response))));
}
