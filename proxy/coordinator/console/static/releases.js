// A release: the versions that serve, their evidence, the loss that can be found, and the time line of their shares.
import { interval } from "./charts.js";
import { h, s } from "./dom.js";
import { ago, count, figure, NONE, percent, score, seconds, signed } from "./format.js";

const ROLES = { holdback: "anchor, held back", live: "live", ramp: "in its ramp" };
const HUES = 6; // colors of versions in the time line
const address = (alias, version) => `#/versions/${encodeURIComponent(alias)}/${version}`;

/** The release of one agent, as /api/releases describes it. */
export function release(one) {
  const known = new Map(one.evidence.map((found) => [found.version, found]));
  return [
    h("div", { class: "members" }, one.serving.map((found) => served(one, found, known.get(found.version)))),
    one.figures ? limits(one.figures) : h("p", { class: "dim" }, "No evidence is recorded: no version has been in a ramp yet, or trainer.release.policy is immediate, which protects no users."),
    timeline(one),
  ];
}

function served(one, found, evidence) {
  const live = found.role === "live", anchored = live && one.anchor === found.version;
  return h("section", { class: "served" },
    h("header", { class: "between" }, h("a", { href: address(one.alias, found.version), "data-focus": `served ${one.alias} ${found.version}` }, h("b", {}, `@${found.version}`)),
      h("span", { class: `tag ${found.role}` }, anchored ? "live and anchor" : ROLES[found.role] ?? found.role)),
    h("p", {}, h("b", { class: "big" }, percent(found.share, 0)), h("span", { class: "dim" }, " of new trajectories")),
    live && one.pinned ? h("p", {}, h("span", { class: "tag hold" }, "pinned"), ` by ${one.pinned.by}: ${one.pinned.reason} `, h("small", { class: "dim" }, ago(one.pinned.at))) : null,
    evidence && found.version !== one.anchor ? harm(evidence, found.role) : null);
}

/** Evidence of harm on a logarithmic scale, and the length of the ramp. */
export function harm(evidence, state) {
  const reached = Math.max(0, Math.min(1, Math.log(Math.max(1, evidence.harm)) / Math.log(evidence.enough || 1000)));
  const kind = reached >= 0.5 ? "bad" : evidence.harm > 1 ? "warn" : "good";
  return [
    h("p", { class: "dim small" }, `Evidence of harm ${figure(Number(evidence.harm.toPrecision(3)))}; at ${figure(evidence.enough)} it is rolled back.`,
      evidence.streams ? ` By ${Object.entries(evidence.streams).map(([name, value]) => `${name} ${figure(Number(Number(value).toPrecision(3)))}`).join(", ")}.` : ""),
    h("div", { class: "track", role: "img", "aria-label": `evidence of harm ${evidence.harm} of ${evidence.enough}` }, h("i", { class: kind, style: { width: `${100 * reached}%` } })),
    state === "ramp" && evidence.ramp_length ? h("p", { class: "dim small" }, `${count(evidence.counted)} of ${count(evidence.ramp_length)} trajectories of the ramp are counted.`) : null,
  ];
}

/** What the traffic can show, and what it has shown. */
export function limits(known) {
  const gain = known.live_minus_anchor;
  const found = known.detectable ? Object.entries(known.detectable).map(([period, loss]) => `${typeof loss === "number" ? loss.toPrecision(2) : NONE} in a ${period}`).join(", ") : null;
  return h("div", { class: "limits" },
    known.status ? h("p", {}, known.status) : null,
    gain ? h("div", { class: "who" }, h("span", {}, `What serves minus the anchor (@${known.anchor}): `), h("b", {}, signed(gain.value)),
      h("span", { class: "dim" }, `${signed(gain.low)} to ${signed(gain.high)}, at all times 95%, ${count(gain.count)} counted`),
      interval({ ...gain, verdict: gain.low > 0 ? "better" : gain.high < 0 ? "worse" : "unknown" }, Math.max(Math.abs(gain.low), Math.abs(gain.high), 0.02))) : null,
    found ? h("p", {}, `Loss that is found at ${figure(Math.round(known.per_day))} scored trajectories a day: ${found}. This is the median; one in ten takes twice as long. Smaller losses are not found by traffic.`)
      : h("p", { class: "dim" }, "Which loss can be found is known after the first scores."),
    known.traffic_too_small ? h("p", { class: "bad" }, "Traffic is too small: a loss of 0.1 takes more than a month. Held-out tasks or a workflow must decide (trainer.release.held_out_share, or workflow and tasks).") : null,
    known.deserved_round_size ? h("p", { class: "dim" }, roundSize(known.round_size, known.deserved_round_size)) : null,
    known.at ? h("p", { class: "dim small" }, "as of ", ago(known.at)) : null);
}

/** The size of a full round beside the one that the traffic deserves, and the remedy if they are far apart. */
function roundSize(size, deserved) {
  const remedy = size < deserved / 2 ? ": raise trainer.groups_per_round" : size > 2 * deserved ? ": lower trainer.groups_per_round" : "";
  return `A full round has ${count(size)} trajectories; about ${count(deserved)} would suit this traffic${remedy}.`;
}

/** The shares of new trajectories over time, and a mark for each decision. */
function timeline(one) {
  const changes = one.decisions.filter((found) => found.shares && Object.keys(found.shares).length);
  if (!changes.length) return null;
  const [W, H] = innerWidth < 620 ? [360, 110] : [1000, 96];
  const [begin, end] = [changes[0].at, Math.max(Date.now() / 1000, changes.at(-1).at + 1)];
  const x = (at) => (W * (at - begin)) / (end - begin);
  const parts = changes.flatMap((change, at) => {
    const [from, to] = [x(change.at), x(changes[at + 1]?.at ?? end)];
    let below = H;
    return Object.entries(change.shares).map(([version, share]) => [Number(version), share]).sort(([a], [b]) => a - b).map(([version, share]) => {
      below -= share * H;
      const drawn = s("g", { class: `share-${version % HUES}` }, s("title", {}, `@${version}: ${percent(share, 0)} for ${seconds((changes[at + 1]?.at ?? end) - change.at)}`),
        s("rect", { x: from, y: below, width: Math.max(0.5, to - from), height: share * H }),
        to - from > 34 && share > 0.15 ? s("text", { class: "axis", x: (from + to) / 2, y: below + (share * H) / 2 + 4, "text-anchor": "middle" }, `@${version}`) : null);
      return drawn;
    });
  });
  const marks = one.decisions.filter((found) => found.at >= begin).map((found) => s("g", { class: `mark ${found.action}` },
    s("title", {}, `${found.action} @${found.version}: ${found.reason} (${found.by})`), s("circle", { cx: x(found.at), cy: H + 10, r: 4 })));
  return h("figure", { class: "timeline" },
    s("svg", { viewBox: `-6 0 ${W + 12} ${H + 18}`, role: "img", "aria-label": `Shares of new trajectories over the last ${seconds(end - begin)}, ${changes.length} changes` }, parts, marks),
    h("figcaption", { class: "dim between" }, h("span", {}, ago(begin)), h("span", {}, "share of new trajectories by version; a dot for each decision"), h("span", {}, "now")),
    h("ol", { class: "decisions" }, one.decisions.toReversed().slice(0, 8).map((found) => h("li", {}, h("span", { class: `tag ${found.action}` }, found.action),
      h("a", { href: address(one.alias, found.version) }, `@${found.version}`), h("span", {}, found.reason), h("small", { class: "dim" }, `${found.by}, `, ago(found.at))))));
}
