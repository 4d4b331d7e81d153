// Versions with their release, decisions and evidence; decisions by hand.
import { chosenAgent } from "./agent.js";
import { get, post } from "./api.js";
import { ask, h, Slot, toast } from "./dom.js";
import { ago, NONE, percent } from "./format.js";
import { harm, limits, release } from "./releases.js";
import { json, prose } from "./text.js";

const MAX_ROWS = 200;

export function versions(place) {
  const slot = new Slot(h("div", { class: "stack" }));
  place.append(h("h1", {}, "Versions"), slot.element);
  return {
    refresh: async () => slot.show((await Promise.all([get("policies", { alias: chosenAgent() }), get("releases", { alias: chosenAgent() })])).map((page) => page.data), ([all, releases]) => [...Map.groupBy(all, (one) => one.alias)].map(([alias, found]) =>
      h("section", { class: "card" }, h("h2", {}, alias), releases.filter((one) => one.alias === alias).map(release), h("div", { class: "scroll" }, h("table", { class: "list" },
        h("thead", {}, h("tr", {}, ["Version", "State", "Share", "Created", "Newest decision"].map((name) => h("th", { scope: "col" }, name)))),
        h("tbody", {}, found.toReversed().slice(0, MAX_ROWS).map(row)))),
      found.length > MAX_ROWS ? h("p", { class: "dim" }, `The newest ${MAX_ROWS} of ${found.length}.`) : null))),
  };
}

function row(one) {
  const decision = one.decision;
  return h("tr", {},
    h("td", {}, h("a", { href: `#/versions/${encodeURIComponent(one.alias)}/${one.version}` }, `@${one.version}`)),
    h("td", {}, h("span", { class: `tag ${one.state}` }, one.state), one.trained_on_deleted ? h("small", { class: "bad" }, "trained on deleted data") : null),
    h("td", { class: "num" }, one.share ? percent(one.share, 0) : NONE), h("td", {}, ago(one.created_at)),
    h("td", { class: "wrap" }, decision ? [h("span", { class: `tag ${decision.action}` }, decision.action), ` ${decision.reason} `, h("span", { class: "dim" }, decision.decided_by)] : NONE));
}

export function version(place, { path }) {
  const [alias, number] = path;
  const slot = new Slot(h("div", { class: "stack" }));
  place.append(slot.element);
  const refresh = async () => {
    const [all, releases, decisions, prompt] = await Promise.all([get("policies", { alias }), get("releases", { alias }), get(`policies/${Number(number)}/decisions`, { alias }), get(`policies/${Number(number)}/prompt`, { alias })]);
    const found = all.data.find((one) => one.version === Number(number));
    const live = all.data.find((one) => one.state === "live");
    if (!found) throw Object.assign(new Error(`there is no ${alias}@${number}`), { status: 404 });
    const evidence = releases.data[0]?.evidence.find((one) => one.version === found.version) ?? null;
    slot.show([found, decisions.data, prompt.prompt, all.data, evidence], () => [head(found, live, all.data, refresh), evidence ? released(evidence, found.state) : null, decided(decisions.data), prompt.prompt ? prompted(prompt.prompt) : null,
      Object.keys(found.evidence).length ? h("section", { class: "card" }, h("h2", {}, "Evidence of the version"), json(found.evidence)) : null]);
  };
  return { refresh };
}

function head(one, live, all, refresh) {
  const fact = (name, value) => h("div", {}, h("dt", {}, name), h("dd", {}, value));
  return h("section", { class: "card" },
    h("header", { class: "between" },
      h("div", {}, h("p", { class: "dim" }, h("a", { href: "#/versions" }, "Versions"), " /"), h("h1", {}, `${one.alias}@${one.version}`)),
      h("div", { class: "actions" }, verbs(one, live, all).map((verb) =>
        h("button", { type: "button", class: WORDS[verb].kind, on: { click: () => decide(one, verb, live, all, refresh) } }, `${WORDS[verb].title} …`)))),
    h("dl", { class: "facts" }, fact("state", h("span", { class: `tag ${one.state}` }, one.state)), one.share ? fact("share of new trajectories", percent(one.share, 0)) : null,
      fact("served as", h("code", {}, one.served_name)), fact("created", ago(one.created_at)), one.round_id ? fact("by round", h("code", {}, one.round_id)) : null,
      one.pinned_at ? fact("pinned", ago(one.pinned_at)) : null,
      one.pruned_at ? fact("its folder was deleted", ago(one.pruned_at)) : null, one.trained_on_deleted ? fact("note", "trained on data that was deleted later") : null));
}

// Verb -> its title, its button, what happens, and what is said when it is done.
const WORDS = {
  promote: { title: "Promote", kind: "primary", text: "New trajectories start on it at once, and the live version is retired or held back. Open trajectories keep their version.", done: "is live" },
  hold: { title: "Hold", kind: "", text: "It stays as it is until a person promotes it or rolls back.", done: "is held" },
  reject: { title: "Reject", kind: "danger", text: "The live version stays.", done: "is rejected" },
  rollback: { title: "Roll back to", kind: "danger", text: "It serves new trajectories at once.", done: "is live" },
  pin: { title: "Pin", kind: "", text: "It serves all new trajectories, and nothing is released until it is unpinned. Versions in a ramp or held back are retired.", done: "is pinned" },
  unpin: { title: "Unpin", kind: "primary", text: "The release goes on.", done: "is no longer pinned" },
};

/** What a person may decide about a version. */
function verbs(one, live, all) {
  const isMovable = (other) => other.version > one.version && (other.state !== "rejected" || !other.recalled_at);
  if (one.state === "live" && one.pinned_at) return ["unpin"];
  if (one.state === "live") return ["pin", ...(all.some(isMovable) ? ["rollback"] : [])];
  if (live?.pinned_at) return [];
  if (live && live.version > one.version) return ["rollback"];
  return ["promote", ...(["candidate", "ramp"].includes(one.state) ? ["hold", ...(live ? ["reject"] : [])] : [])];
}

/** What a rollback to a version rejects, in words. */
function rejects(target, all) {
  const later = all.filter((one) => one.version > target && one.state !== "rejected").map((one) => `@${one.version}`);
  if (!later.length) return "The later versions are rejected already: tick Now to move their open trajectories.";
  return `This rejects ${later.slice(-8).join(", ")}${later.length > 8 ? ` and ${later.length - 8} before them` : ""}.`;
}

async function decide(one, verb, live, all, refresh) {
  const { title, text, done } = WORDS[verb];
  const takesBack = verb === "rollback" || verb === "reject";
  const target = verb === "reject" ? live.version : one.version;
  const rejected = verb === "promote" && one.state === "rejected";
  const form = await ask(`${title} ${one.alias}@${one.version}?`, [live ? `Now ${one.alias}@${live.version} is live.` : "", rejected ? "It was rejected: the decisions below say why." : "", text, takesBack ? rejects(target, all) : ""].join(" "),
    [h("label", { for: "reason" }, "Reason (stored with the decision)"), h("input", { id: "reason", name: "reason", required: true, maxlength: 2000, autocomplete: "off" }),
      takesBack ? h("label", { class: "check" }, h("input", { type: "checkbox", name: "now" }), " Now: open trajectories of the rejected versions go on with the live one, marked and not trained") : null], title);
  if (!form) return;
  try {
    await post(`policies/${target}/${takesBack ? "rollback" : verb}?${new URLSearchParams({ alias: one.alias })}`, { reason: form.reason, by: "console", ...(rejected ? { rejected } : {}), ...(form.now ? { now: true } : {}) });
    toast(`${one.alias}@${one.version} ${done}.`);
    await refresh();
  } catch (error) { toast(error.message); }
}

/** What is known about a version that serves, or served. */
function released(evidence, state) {
  return h("section", { class: "card" }, h("h2", {}, "Release"), harm(evidence, state), limits(evidence));
}

function decided(decisions) {
  return h("section", { class: "card" }, h("h2", {}, "Decisions"), decisions.length ? decisions.map((one) => h("article", { class: "verdict-card decision" },
    h("div", { class: "who" }, h("span", { class: `tag ${one.action}` }, one.action), h("span", {}, one.decided_by), h("small", { class: "dim" }, ago(one.decided_at))),
    prose(one.reason), grounds(one.evidence)))
    : h("p", { class: "empty" }, "No decision yet."));
}

/** The evidence of a decision: the shares that it left, what was known of the release, and all of it as JSON. */
function grounds(evidence) {
  if (!Object.keys(evidence).length) return null;
  const shares = Object.entries(evidence.shares ?? {});
  return [
    shares.length ? h("p", { class: "dim small" }, `Shares of new trajectories after it: ${shares.map(([name, share]) => `@${name} ${percent(share, 0)}`).join(", ")}.`) : null,
    evidence.now ? h("p", { class: "dim small" }, "Open trajectories of the rejected versions went on with the live one.") : null,
    evidence.known ? harm(evidence.known) : null,
    h("details", {}, h("summary", {}, "Evidence"), json(evidence))];
}

function prompted(prompt) {
  return h("section", { class: "card" }, h("h2", {}, "Its prompt"), h("p", { class: "dim" }, `${prompt.mode ?? ""}`), prose(prompt.text ?? prompt.content ?? JSON.stringify(prompt)));
}
