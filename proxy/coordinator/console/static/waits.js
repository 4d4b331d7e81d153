// How long trajectories and rounds wait, by stage, as percentiles.
import { h } from "./dom.js";
import { count, seconds } from "./format.js";

// Stage -> who waits, for whom, and what the figure is.
const STAGES = {
  rollout: ["Agent", "its own work", "first to last call of a trajectory"],
  sealing: ["Trajectory", "a further call", "last call until it is complete: trainer.seal_after_idle_seconds, or finish"],
  grouping: ["Trajectory", "other rollouts", "complete until its group is formed"],
  judging: ["Group", "the judge", "formed until the verdict"],
  round: ["Group", "the learner", "verdict until its round starts"],
  training: ["Round", "the learner's steps", "start until commit"],
  serving: ["Version", "the replicas", "commit until it serves: load, proof and checks"],
  learner_idle: ["Learner", "judged groups", "end of a round until the next one starts"],
};

/** The card of one agent; null if nothing was measured. */
export function waits({ alias, rows }) {
  if (!rows.length) return null;
  const most = Math.max(...rows.map((one) => one.p90), 1e-9);
  const at = (value) => `${Math.min(100, (100 * value) / most)}%`;
  return h("section", { class: "card" }, h("h2", {}, `Who waits for whom · ${alias}`),
    h("div", { class: "scroll" }, h("table", { class: "waits" },
      h("thead", {}, h("tr", {}, ["Who waits", "for", "p50", "p90", "p99", ""].map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", {}, rows.map((one) => {
        const [who, whom, note] = STAGES[one.stage] ?? [one.stage, "", ""];
        return h("tr", { title: `${note}; ${count(one.count)} measured` }, h("td", {}, who), h("td", {}, whom),
          [one.p50, one.p90, one.p99].map((value) => h("td", { class: "num" }, seconds(value))),
          h("td", { class: "bar-cell" }, h("i", { class: "wide", style: { width: at(one.p90) } }), h("i", { style: { width: at(one.p50) } })));
      })))));
}
