// Rounds with their metrics, and alarms.
import { chosenAgent } from "./agent.js";
import { get } from "./api.js";
import { h, Slot } from "./dom.js";
import { ago, count, figure, score, seconds } from "./format.js";
import { json, prose } from "./text.js";
import { listed } from "./trajectories.js";

const SIZE = 50;

export function rounds(place, { query }) {
  const before = query.get("before") ?? "";
  const slot = new Slot(h("div", { class: "stack" }));
  place.append(h("h1", {}, "Rounds"), slot.element);
  return {
    refresh: async () => slot.show(await get("training", { limit: SIZE, before, alias: chosenAgent() }), (found) => [
      found.rounds.length ? found.rounds.map(round) : h("p", { class: "empty card" }, before ? "There are no older ones." : "No round has been trained yet."),
      h("div", { class: "pager" }, before ? h("a", { href: "#/rounds" }, "Newest") : h("span"),
        found.next ? h("a", { href: `#/rounds?before=${encodeURIComponent(found.next)}` }, "Older →") : h("span"))]),
  };
}

function round(one) {
  const metrics = one.metrics;
  const figures = Object.entries(metrics).filter(([, value]) => typeof value === "number");
  const others = Object.fromEntries(Object.entries(metrics).filter(([, value]) => value !== null && typeof value === "object" && Object.keys(value).length));
  return h("section", { class: "card" },
    h("header", { class: "between" }, h("div", { class: "who" }, h("span", { class: `tag ${one.state}` }, one.state),
      h("b", {}, one.to_version === null ? `${one.alias} from @${one.from_version}` : h("a", { href: `#/versions/${encodeURIComponent(one.alias)}/${one.to_version}` }, `${one.alias}@${one.from_version} → @${one.to_version}`)),
      h("span", {}, `reward ${score(metrics.reward)}`), h("a", { href: listed({ round: one.id }) }, `${count(metrics.trajectories)} trajectories`), h("span", { class: "dim" }, `${count(metrics.tokens_trained)} tokens · ${seconds(metrics.seconds)}`)),
    h("small", { class: "dim" }, one.ended_at ? ["ended ", ago(one.ended_at)] : ["began ", ago(one.started_at)])),
    one.reason ? prose(one.reason, "bad") : null,
    figures.length ? h("details", {}, h("summary", {}, "All metrics"),
      h("dl", { class: "means" }, figures.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, figure(value))))), Object.keys(others).length ? json(others) : null) : null);
}

export function alarms(place) {
  const slot = new Slot(h("div", { class: "stack" }));
  place.append(h("h1", {}, "Alarms"), slot.element);
  return {
    every: true,
    refresh: async () => slot.show((await get("alarms", { alias: chosenAgent() })).data, (found) => (found.length ? found.map((one) =>
      h("section", { class: one.cleared_at ? "alarm cleared" : "alarm" }, h("b", {}, one.name.replaceAll("_", " ")), h("span", {}, one.reason),
        h("small", {}, one.count === 1 ? "once, " : `${count(one.count)} times, since `, ago(one.raised_at), one.cleared_at ? [" · cleared ", ago(one.cleared_at)] : ` · last `, one.cleared_at ? null : ago(one.last_raised_at))))
      : h("p", { class: "empty card" }, "No alarm was ever raised."))),
  };
}
