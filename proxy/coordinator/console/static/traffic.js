// Rates and quantiles from the proxy's counters, since this page was opened, or since the proxy started.
import { metrics } from "./api.js";

const WINDOW = 300; // seconds

export class Traffic {
  constructor() { this.looks = []; }

  /** Read the counters again; return the current figures, of one agent where the counters distinguish agents. */
  async read(agent) {
    if (agent !== this.agent) [this.agent, this.looks] = [agent, []];
    const at = performance.now() / 1000;
    const found = await metrics();
    if (agent) for (const [name, samples] of found) found.set(name, samples.filter((one) => (one.labels.alias ?? agent) === agent));
    const calls = sum(found, "ratchet_calls_total");
    if (this.looks.length && sum(this.looks.at(-1).found, "ratchet_calls_total") > calls) this.looks = []; // the proxy restarted
    this.looks.push({ at, found });
    while (this.looks.length > 2 && at - this.looks[0].at > WINDOW) this.looks.shift();
    return this.figures();
  }

  figures() {
    const now = this.looks.at(-1), first = this.looks[0];
    const active = sum(now.found, "ratchet_calls_total") > sum(first.found, "ratchet_calls_total");
    const since = active ? first.found : null; // without calls meanwhile: since the proxy's start
    const rates = this.looks.slice(1).map((look, place) => {
      const before = this.looks[place];
      return (sum(look.found, "ratchet_calls_total") - sum(before.found, "ratchet_calls_total")) / (look.at - before.at || 1);
    });
    const quantile = (name, share) => quantileOf(now.found, since, name, share);
    return {
      watched: now.at - first.at,
      active,
      rates,
      rate: this.looks.length > 1 ? (sum(now.found, "ratchet_calls_total") - sum(first.found, "ratchet_calls_total")) / (now.at - first.at) : null,
      calls: sum(now.found, "ratchet_calls_total"),
      failed: ["failed", "refused"].reduce((all, state) => all + sum(now.found, "ratchet_calls_total", { state }), 0),
      aborted: sum(now.found, "ratchet_calls_total", { state: "aborted" }),
      underWay: sum(now.found, "ratchet_calls_in_flight"),
      p50: quantile("ratchet_call_duration_seconds", 0.5),
      p99: quantile("ratchet_call_duration_seconds", 0.99),
      first50: quantile("ratchet_time_to_first_token_seconds", 0.5),
      overhead99: quantile("ratchet_overhead_seconds", 0.99),
      lag: sum(now.found, "ratchet_journal_lag_seconds"),
      storeUp: sum(now.found, "ratchet_store_up") > 0,
      lost: sum(now.found, "ratchet_journal_lost_records_total"),
      replicas: (now.found.get("ratchet_upstream_up") ?? []).map((one) => ({ url: one.labels.upstream, up: one.value > 0 })),
      contexts: by(now.found, "ratchet_context_tokens_total", "context"),
      untrainable: by(now.found, "ratchet_untrainable_calls_total", "reason"),
      tools: tools(now.found),
    };
  }
}

function sum(found, name, labels = {}) {
  return (found.get(name) ?? [])
    .filter((one) => Object.entries(labels).every(([key, value]) => one.labels[key] === value))
    .reduce((total, one) => total + one.value, 0);
}

function by(found, name, label) {
  const totals = {};
  for (const one of found.get(name) ?? []) totals[one.labels[label]] = (totals[one.labels[label]] ?? 0) + one.value;
  return totals;
}

function tools(found) {
  const byName = new Map();
  const of = (name) => byName.get(name) ?? byName.set(name, { name, calls: 0, wrong: 0, results: 0, failed: 0 }).get(name);
  for (const { labels, value } of found.get("ratchet_tool_calls_total") ?? []) {
    of(labels.tool).calls += value;
    if (labels.outcome !== "valid" && labels.outcome !== "unchecked") of(labels.tool).wrong += value;
  }
  for (const { labels, value } of found.get("ratchet_tool_results_total") ?? []) {
    of(labels.tool).results += value;
    if (labels.result !== "ok") of(labels.tool).failed += value;
  }
  return [...byName.values()].sort((a, b) => b.calls - a.calls);
}

function quantileOf(found, since, name, share) {
  const buckets = new Map();
  const take = (samples, sign) => {
    for (const { labels, value } of samples ?? []) {
      const edge = labels.le === "+Inf" ? Infinity : Number(labels.le);
      buckets.set(edge, (buckets.get(edge) ?? 0) + sign * value);
    }
  };
  take(found.get(`${name}_bucket`), 1);
  if (since) take(since.get(`${name}_bucket`), -1);
  const edges = [...buckets.keys()].sort((a, b) => a - b);
  const wanted = share * (buckets.get(Infinity) ?? 0);
  if (!wanted) return null;
  let low = 0, below = 0;
  for (const edge of edges) {
    if (buckets.get(edge) >= wanted) {
      return edge === Infinity ? low : low + ((edge - low) * (wanted - below)) / (buckets.get(edge) - below || 1);
    }
    [low, below] = [edge, buckets.get(edge)];
  }
  return low;
}
