// The first page: learning report, serving versions, job progress, alarms.
import { chosenAgent } from "./agent.js";
import { get } from "./api.js";
import { curve, interval, shares, spark } from "./charts.js";
import { h, Slot } from "./dom.js";
import { ago, count, figure, NONE, percent, score, seconds, signed } from "./format.js";
import { change, MEASURES, pointOf } from "./measures.js";
import { Traffic } from "./traffic.js";
import { listed, scoredOf } from "./trajectories.js";
import { waits } from "./waits.js";

const STATES = { open: "more calls may come", sealed: "complete, waits for a group", grouped: "waits for its verdict and its round", trained: "part of a committed round", dropped: "will not be trained" };
const STALE = 30; // seconds without an update after which a job that has not ended is shown as silent

const card = (title, ...parts) => h("section", { class: "card" }, h("h2", {}, title), parts);
const empty = (text) => h("p", { class: "empty" }, text);

export function overview(place) {
  const traffic = new Traffic();
  const slots = Object.fromEntries(["alarms", "aliases", "states", "rounds", "waits", "proxy", "tools", "tokens"].map((name) => [name, new Slot(h("div", { class: `slot slot-${name}` }))]));
  const column = (...names) => h("div", { class: "stack" }, names.map((name) => slots[name].element));
  place.append(slots.alarms.element, slots.aliases.element,
    h("div", { class: "columns" }, column("states", "rounds"), column("proxy", "waits", "tokens", "tools")));
  return {
    every: true,
    refresh: async () => {
      const chosen = { alias: chosenAgent() };
      const [report, proxy, behavior, waiting] = await Promise.all([get("overview", chosen), traffic.read(chosenAgent()), get("behavior", chosen), get("waits", chosen)]);
      const rowsOf = Object.fromEntries(behavior.data.map((one) => [one.alias, one.rows]));
      slots.alarms.show(report.alarms, alarms);
      slots.aliases.show(report.aliases.map((one) => ({ ...one, behavior: rowsOf[one.alias] ?? [], progress: one.progress.map((job) => ({ ...job, silent: !job.ended && report.at - job.updated_at > STALE })) })), (found) => found.map(alias));
      slots.states.show([report.trajectories, report.dropped], ([states, dropped]) => trajectories(states, dropped));
      slots.rounds.show({ found: report.rounds, relative: report.aliases.filter((one) => one.relative).map((one) => one.alias) }, rounds);
      slots.waits.show(waiting.data, (found) => found.map(waits));
      slots.proxy.show(proxy, ofProxy);
      slots.tools.show(proxy.tools, tools);
      slots.tokens.show([proxy.contexts, proxy.untrainable], ([contexts, reasons]) => tokens(contexts, reasons));
    },
  };
}

function alarms(active) {
  return active.map((one) => h("section", { class: "alarm", role: "alert" },
    h("b", {}, one.name.replaceAll("_", " ")), h("span", {}, one.reason),
    h("small", {}, one.count === 1 ? "once, " : `${count(one.count)} times, since `, ago(one.raised_at))));
}

const TITLES = { better: "Yes, it is learning", worse: "No, it got worse", unknown: "Not proven yet" };

function alias(one) {
  const whole = one.learning.families[0];
  const verdict = whole ? whole.gain.verdict : one.learning.missing ? "missing" : "unknown";
  const marks = {};
  if (one.live) marks[one.live.version] = "live";
  if (one.ramp) marks[one.ramp.version] = "ramp";
  return h("section", { class: "card alias" },
    h("header", {},
      h("div", {}, h("h1", {}, one.alias), chips(one)),
      h("p", { class: `answer ${verdict}` }, h("b", {}, TITLES[verdict] ?? "Not known yet"),
        whole ? h("span", {}, `${signed(whole.gain.value)}  (95% ${signed(whole.gain.low)} to ${signed(whole.gain.high)})`) : h("span", {}, one.learning.missing ?? ""))),
    tiles(one),
    one.learning.versions.length ? curve(one.learning.versions, { what: `${one.alias} mean score`, marks, link: (version) => scoredOf(one.alias, version) }) : one.relative ? null : empty("No scores of production traffic yet. The curve starts with the first verdicts; set trainer.judge."),
    whole ? comparison(one.learning.families) : null,
    one.learning.notes.length ? h("ul", { class: "dim" }, one.learning.notes.map((note) => h("li", {}, note))) : null,
    one.learning.versions.length > 1 ? h("details", {}, h("summary", { "data-focus": `table ${one.alias}` }, "The curve as a table"), table(one.learning.versions)) : null,
    one.progress.length ? h("div", { class: "jobs" }, one.progress.map(jobProgress)) : null,
    one.decisions.length ? h("ol", { class: "decisions" }, one.decisions.map(decision)) : null);
}

const at = (alias, version) => `#/versions/${encodeURIComponent(alias)}/${version}`;

function chips(one) {
  const ramp = one.ramp;
  return h("div", { class: "chips" },
    one.live ? h("a", { class: "chip live", href: at(one.alias, one.live.version), title: `created ${new Date(one.live.created_at * 1000).toLocaleString()}` }, `live @${one.live.version}`) : h("span", { class: "chip" }, "nothing is live"),
    ramp ? h("a", { class: "chip ramp", href: at(one.alias, ramp.version), title: "ramp: scores and mean, beside those of the live version" },
      `ramp @${ramp.version} · ${percent(ramp.share, 0)} · ${score(ramp.ramp.mean)} of ${count(ramp.ramp.count)} / live ${score(ramp.live.mean)} of ${count(ramp.live.count)}`) : null,
    (one.release?.serving ?? []).filter((found) => found.role === "holdback").map((found) => h("a", { class: "chip", href: at(one.alias, found.version), title: "held back as the version that newer ones are compared with" }, `anchor @${found.version} · ${percent(found.share, 0)}`)),
    one.release?.pinned ? h("span", { class: "chip hold", title: one.release.pinned.reason }, "pinned") : null,
    one.awaiting_approval ? h("a", { class: "chip hold", href: at(one.alias, one.awaiting_approval.version), title: one.awaiting_approval.reason }, `@${one.awaiting_approval.version} awaits approval`) : null,
    Object.entries(one.versions).filter(([state]) => !["live", "ramp", "holdback"].includes(state)).map(([state, n]) => {
      const waits = state === "unproven" && one.learning.unproven; // newer than the live version
      return h("span", waits ? { class: "chip hold", title: waits } : { class: "chip" }, `${count(n)} ${state}`);
    }));
}

/** The live version's figures, each with its change since the oldest version. */
function tiles(one) {
  const of = (rows) => rows.find((row) => row.version === one.live?.version) ?? rows.at(-1);
  const curves = [{ title: "score", note: "mean score", format: score, better: 1, points: one.learning.versions },
    ...MEASURES.map((measure) => ({ ...measure, points: one.behavior.map((row) => pointOf(row, measure)) }))];
  const shown = curves.filter(({ points }) => points.some((p) => p.mean > 0));
  if (!shown.length) return null;
  return h("div", { class: "tiles of-agent" }, shown.map(({ title, note, format, better, points }) => {
    const first = points[0], now = of(points);
    const apart = typeof first.low === "number" && (now.low > first.high || now.high < first.low);
    const kind = apart && better ? ((now.mean - first.mean) * better > 0 ? "good" : "bad") : "dim";
    const since = now.version === first.version ? null : change(first.mean, now.mean, format);
    return h("a", { class: "tile", href: title === "score" ? scoredOf(one.alias, now.version) : "#/behavior", title: `${note}, @${now.version}`, "data-focus": `tile ${one.alias} ${title}` },
      h("span", {}, title), h("b", {}, typeof now.mean === "number" ? format(now.mean) : NONE), since ? h("small", { class: kind }, `${since} since @${first.version}`) : null);
  }));
}

const range = (side) => (side.first_version === side.last_version ? `@${side.first_version}` : `@${side.first_version}–@${side.last_version}`);

function comparison(families) {
  const gains = families.flatMap((one) => [one.gain, one.same_tasks]).filter(Boolean);
  const most = Math.max(...gains.flatMap((gain) => [Math.abs(gain.low), Math.abs(gain.high)]), 0.05);
  const row = (name, before, after, gain, kind = "") => h("tr", { class: kind },
    h("th", { scope: "row" }, name), h("td", { class: "num" }, before), h("td", { class: "num" }, after),
    h("td", { class: "num" }, signed(gain.value)), h("td", {}, interval(gain, most)),
    h("td", {}, h("span", { class: `verdict ${gain.verdict}` }, gain.verdict)));
  const side = (one) => [h("b", {}, score(one.mean)), h("small", {}, `${range(one)}, n ${count(one.count)}`)];
  return h("div", { class: "scroll" }, h("table", { class: "compare" },
    h("thead", {}, h("tr", {}, ["Real traffic", "Before", "After", "Gain", "95% interval", ""].map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, families.map((one) => [
      row(one.family === "all" ? "All" : one.family, side(one.before), side(one.after), one.gain),
      one.same_tasks ? row(`on the ${count(one.same_tasks.count)} tasks that came under both`, "", "", one.same_tasks, "sub") : null,
    ]))));
}

function table(versions) {
  return h("div", { class: "scroll" }, h("table", {},
    h("thead", {}, h("tr", {}, ["Version", "Mean", "95% interval", "Scored"].map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, versions.toReversed().map((v) => h("tr", {}, h("td", {}, `@${v.version}`), h("td", { class: "num" }, score(v.mean)),
      h("td", { class: "num" }, `${score(v.low)} to ${score(v.high)}`), h("td", { class: "num" }, count(v.count)))))));
}

function jobProgress(one) {
  const share = one.total ? Math.min(1, one.done / one.total) : 0;
  const state = one.ended ? "done" : one.silent ? "silent" : "";
  return h("div", { class: `job ${state}` },
    h("div", { class: "job-head" }, h("b", {}, one.phase), h("span", {}, `${figure(one.done)} / ${figure(one.total)}`),
      h("span", { class: "dim" }, one.ended ? ["ended ", ago(one.updated_at)] : one.silent ? ["silent, last update ", ago(one.updated_at)]
        : `${one.seconds_per_item === null ? NONE : seconds(one.seconds_per_item)} each · ${one.eta_seconds === null ? "no estimate yet" : `${seconds(one.eta_seconds)} left`}`)),
    h("div", { class: "track", role: "progressbar", "aria-label": one.phase, "aria-valuemin": 0, "aria-valuemax": one.total, "aria-valuenow": one.done },
      h("i", { style: { width: `${100 * share}%` } })),
    Object.keys(one.means).length ? h("dl", { class: "means" }, Object.entries(one.means).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, figure(value))))) : null);
}

function decision(one) {
  return h("li", {}, h("span", { class: `tag ${one.action}` }, one.action), h("b", {}, `@${one.version}`), h("span", {}, one.reason),
    h("small", { class: "dim" }, `${one.by}, `, ago(one.at)));
}

function trajectories(states, dropped) {
  const total = Object.values(states).reduce((sum, n) => sum + n, 0);
  if (!total) return card("Trajectories", empty("Nothing has been recorded yet. Point an agent's base_url at this proxy."));
  const parts = Object.entries(STATES).map(([name, title]) => ({ name, value: states[name] ?? 0, kind: `state-${name}`, title, href: `#/trajectories?state=${name}` }));
  return card(`Trajectories · ${count(total)}`, shares(parts, "Trajectories"),
    dropped.length ? h("details", {}, h("summary", { "data-focus": "dropped" }, "Why some were dropped"),
      h("dl", { class: "reasons" }, dropped.map((one) => [h("dt", {}, one.reason, h("b", {}, count(one.count))), h("dd", {}, one.meaning ?? "")]))) : null);
}

/** `relative`: aliases whose judge ranks within groups; means of such scores cannot be compared between rounds. */
function rounds({ found, relative }) {
  if (!found.length) return card("Rounds", empty("No round was trained yet."));
  const rewarded = found.filter((one) => one.state === "committed" && one.metrics.reward !== undefined && !relative.includes(one.alias)).reverse();
  const single = new Set(rewarded.map((one) => one.alias)).size === 1;
  const ids = new Map(rewarded.map((one) => [one.to_version, one.id]));
  const points = rewarded.map((one) => ({ version: one.to_version, mean: one.metrics.reward, low: null, high: null, count: one.metrics.trajectories }));
  return card(h("a", { href: "#/rounds", "data-focus": "rounds" }, "Rounds"),
    single && points.length > 1 ? [h("p", { class: "dim small" }, "Mean reward by version made; a click lists the trajectories that a round trained on."),
      curve(points, { what: "mean reward of rounds", link: (version) => listed({ round: ids.get(version) }), small: true })] : null,
    h("div", { class: "scroll" }, h("table", {},
      h("thead", {}, h("tr", {}, ["Version", "Reward", "Trajectories", "Rejected rows", "Tokens", "Moved", "Time", "Ended"].map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", {}, found.slice(0, 8).map((one) => h("tr", { title: one.reason },
        h("td", {}, one.state === "committed" ? h("a", { href: listed({ round: one.id }), title: "the trajectories that it trained on" }, `${one.alias}@${one.to_version}`) : h("span", { class: `tag ${one.state}` }, one.state)),
        h("td", { class: "num" }, relative.includes(one.alias) ? "relative" : score(one.metrics.reward)), h("td", { class: "num" }, count(one.metrics.trajectories)),
        rejected(one.metrics),
        h("td", { class: "num" }, count(one.metrics.tokens_trained)),
        h("td", { class: "num", title: one.policy_movement ?? "" }, one.metrics.approx_kl === undefined ? NONE : one.metrics.approx_kl.toPrecision(2)),
        h("td", { class: "num" }, seconds(one.metrics.seconds)),
        h("td", {}, ago(one.ended_at))))))));
}

/** Rows that a policy too far from the one that is trained has sampled. */
function rejected({ rows, rows_rejected: n }) {
  if (!rows || n === undefined) return h("td", { class: "num" }, NONE);
  return h("td", { class: `num${n > 0.25 * rows ? " bad" : ""}`, title: "sampled by a policy too far from the one that is trained" }, `${count(n)} of ${count(rows)}`);
}

function ofProxy(proxy) {
  const over = proxy.active ? `over the last ${seconds(Math.round(proxy.watched))}` : "since the proxy started";
  const tile = (name, value, title, bad = false) => h("div", { class: `tile${bad ? " bad" : ""}`, title }, h("span", {}, name), h("b", {}, value));
  return card("This proxy", proxy.rates.length > 1 ? spark(proxy.rates, "Calls per second") : h("div", { class: "spark" }),
    h("div", { class: "tiles" },
      tile("calls/s", proxy.rate === null ? NONE : figure(Number(proxy.rate.toFixed(1))), "while this page watched"),
      tile("p50", seconds(proxy.p50), `whole calls, ${over}`), tile("p99", seconds(proxy.p99), `whole calls, ${over}`),
      tile("first token", seconds(proxy.first50), `median of streamed calls, ${over}`),
      tile("overhead, p99", seconds(proxy.overhead99), `the part that is spent in the proxy, ${over}`),
      tile("in flight", count(proxy.underWay), "calls that have not ended"),
      tile("failed", `${count(proxy.failed)} of ${count(proxy.calls)}`, "since the proxy started", proxy.failed > 0.02 * proxy.calls),
      tile("journal lag", seconds(proxy.lag), "age of the oldest record that is not in the store", proxy.lag > 60),
      tile("store", proxy.storeUp ? "up" : "down", "whether the store answered last time", !proxy.storeUp)),
    proxy.lost ? h("p", { class: "bad" }, `${count(proxy.lost)} records were lost: see the alarm proxy_journal_lost.`) : null,
    proxy.replicas.some((one) => !one.up) ? h("p", { class: "bad" }, "Down: ", proxy.replicas.filter((one) => !one.up).map((one) => one.url).join(", ")) : null);
}

function tokens(contexts, reasons) {
  const tokensOf = (name) => contexts[name] ?? 0;
  const total = Object.values(contexts).reduce((sum, n) => sum + n, 0);
  if (!total) return card("Token contexts", empty("No token has been sampled since this proxy started."));
  return card("Token contexts", shares([
    { name: "exact", value: tokensOf("root") + tokensOf("exact"), kind: "good", title: "first calls, and calls that continue the sampled ids, id for id" },
    { name: "forked", value: tokensOf("fork"), kind: "warn", title: "a context of its own" },
    { name: "untrainable", value: tokensOf("untrainable"), kind: "bad", title: "may carry no loss" },
  ], "Sampled tokens"),
  Object.keys(reasons).length ? h("p", { class: "dim" }, "Untrainable calls: ", Object.entries(reasons).map(([why, n]) => `${why} ${count(n)}`).join(" · ")) : null);
}

function tools(found) {
  if (!found.length) return null;
  return card(chosenAgent() ? "Tools · all agents" : "Tools", h("div", { class: "scroll" }, h("table", {},
    h("thead", {}, h("tr", {}, ["Tool", "Calls", "Invalid calls", "Failed"].map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, found.slice(0, 8).map((one) => h("tr", {}, h("td", {}, h("code", {}, one.name)), h("td", { class: "num" }, count(one.calls)),
      h("td", { class: `num${one.wrong > 0.1 * one.calls ? " bad" : ""}` }, percent(one.wrong / one.calls)),
      h("td", { class: `num${one.failed > 0.1 * one.results ? " bad" : ""}` }, one.results ? percent(one.failed / one.results) : NONE)))))));
}
