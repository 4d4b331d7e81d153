// Versions with their decisions and evidence; promotion and rollback by hand.
import { get, post } from "./api.js";
import { ask, h, Slot, toast } from "./dom.js";
import { ago, NONE, percent } from "./format.js";
import { json, prose } from "./text.js";

const MAX_ROWS = 200;

export function versions(place) {
  const slot = new Slot(h("div", { class: "stack" }));
  place.append(h("h1", {}, "Versions"), slot.element);
  return {
    refresh: async () => slot.show((await get("policies")).data, (all) => [...Map.groupBy(all, (one) => one.alias)].map(([alias, found]) =>
      h("section", { class: "card" }, h("h2", {}, alias), h("div", { class: "scroll" }, h("table", { class: "list" },
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
    h("td", { class: "num" }, one.canary_share ? percent(one.canary_share, 0) : NONE), h("td", {}, ago(one.created_at)),
    h("td", { class: "wrap" }, decision ? [h("span", { class: `tag ${decision.action}` }, decision.action), ` ${decision.reason} `, h("span", { class: "dim" }, decision.decided_by)] : NONE));
}

export function version(place, { path }) {
  const [alias, number] = path;
  const slot = new Slot(h("div", { class: "stack" }));
  place.append(slot.element);
  const refresh = async () => {
    const [all, decisions, prompt] = await Promise.all([get("policies", { alias }), get(`policies/${Number(number)}/decisions`, { alias }), get(`policies/${Number(number)}/prompt`, { alias })]);
    const found = all.data.find((one) => one.version === Number(number));
    const live = all.data.find((one) => one.state === "live");
    if (!found) throw Object.assign(new Error(`there is no ${alias}@${number}`), { status: 404 });
    slot.show([found, decisions.data, prompt.prompt, live?.version], () => [head(found, live, refresh), decided(decisions.data), prompt.prompt ? prompted(prompt.prompt) : null,
      Object.keys(found.evidence).length ? h("section", { class: "card" }, h("h2", {}, "Evidence of the version"), json(found.evidence)) : null]);
  };
  return { refresh };
}

function head(one, live, refresh) {
  const newer = one.state !== "live" && !(live && live.version > one.version);
  const fact = (name, value) => h("div", {}, h("dt", {}, name), h("dd", {}, value));
  return h("section", { class: "card" },
    h("header", { class: "between" },
      h("div", {}, h("p", { class: "dim" }, h("a", { href: "#/versions" }, "Versions"), " /"), h("h1", {}, `${one.alias}@${one.version}`)),
      h("div", { class: "actions" }, one.state === "live" ? null : newer
        ? h("button", { type: "button", class: "primary", on: { click: () => decide(one, "promote", live, refresh) } }, "Promote …")
        : h("button", { type: "button", class: "danger", on: { click: () => decide(one, "rollback", live, refresh) } }, "Roll back …"))),
    h("dl", { class: "facts" }, fact("state", h("span", { class: `tag ${one.state}` }, one.state)), one.canary_share ? fact("share of new trajectories", percent(one.canary_share, 0)) : null,
      fact("served as", h("code", {}, one.served_name)), fact("created", ago(one.created_at)), one.round_id ? fact("by round", h("code", {}, one.round_id)) : null,
      one.pruned_at ? fact("its folder was deleted", ago(one.pruned_at)) : null, one.trained_on_deleted ? fact("note", "trained on data that was deleted later") : null));
}

const WORDS = {
  promote: ["Promote", "New trajectories start on it at once, and the live version is retired. Open trajectories keep their version."],
  rollback: ["Roll back to", "It is live at once, and all later versions are rejected."],
};

async function decide(one, verb, live, refresh) {
  const [title, text] = WORDS[verb];
  const rejected = verb === "promote" && one.state === "rejected";
  const form = await ask(`${title} ${one.alias}@${one.version}?`, `${live ? `Now ${one.alias}@${live.version} is live. ` : ""}${rejected ? "It was rejected: the decisions below say why. " : ""}${text}`,
    [h("label", { for: "reason" }, "Reason (stored with the decision)"), h("input", { id: "reason", name: "reason", required: true, maxlength: 2000, autocomplete: "off" })], title);
  if (!form) return;
  try {
    await post(`policies/${one.version}/${verb}?${new URLSearchParams({ alias: one.alias })}`, { reason: form.reason, by: "console", ...(rejected ? { rejected } : {}) });
    toast(`${one.alias}@${one.version} is live.`);
    await refresh();
  } catch (error) { toast(error.message); }
}

function decided(decisions) {
  return h("section", { class: "card" }, h("h2", {}, "Decisions"), decisions.length ? decisions.map((one) => h("article", { class: "verdict-card" },
    h("div", { class: "who" }, h("span", { class: `tag ${one.action}` }, one.action), h("span", {}, one.decided_by), h("small", { class: "dim" }, ago(one.decided_at))),
    prose(one.reason), Object.keys(one.evidence).length ? h("details", {}, h("summary", {}, "Evidence"), json(one.evidence)) : null))
    : h("p", { class: "empty" }, "No decision yet."));
}

function prompted(prompt) {
  return h("section", { class: "card" }, h("h2", {}, "Its prompt"), h("p", { class: "dim" }, `${prompt.mode ?? ""}`), prose(prompt.text ?? prompt.content ?? JSON.stringify(prompt)));
}
