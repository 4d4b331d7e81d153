// One trajectory: transcript, verdicts, feedback, and the calls with their tokens.
import { get, post } from "./api.js";
import { ask, h, Slot, toast } from "./dom.js";
import { ago, count, figure, score, seconds } from "./format.js";
import { content, json, prose } from "./text.js";
import { chooser, forget, overlayOf, tokensOf } from "./tokens.js";
import { listed } from "./trajectories.js";

const PAGE = 60; // messages shown at first

export function trajectory(place, { path, query }) {
  const slot = new Slot(h("div", { class: "stack" }));
  const overlay = { name: overlayOf(query) };
  const { tokens, ...filters } = Object.fromEntries(query);
  place.append(slot.element);
  forget();
  const refresh = async () => {
    const found = await get(`trajectories/${encodeURIComponent(path.join("/"))}`, { tokens: false });
    slot.show(found, (one) => [head(one, filters, refresh), h("div", { class: "columns wide-left" },
      h("div", { class: "stack" }, transcript(one, overlay)), h("div", { class: "stack" }, verdicts(one), people(one), calls(one), tools(one)))]);
  };
  return { refresh };
}

function head(one, filters, refresh) {
  const fact = (name, ...value) => h("div", {}, h("dt", {}, name), h("dd", {}, ...value));
  return h("section", { class: "card" },
    h("header", { class: "between" },
      h("div", {}, h("p", { class: "dim" }, h("a", { href: listed(filters) }, "Trajectories"), " /"), h("h1", { class: "mono wrap" }, one.id)),
      h("div", { class: "actions" },
        h("button", { type: "button", on: { click: () => rate(one, "up", refresh) } }, "↑ Good"),
        h("button", { type: "button", on: { click: () => rate(one, "down", refresh) } }, "↓ Bad"))),
    h("dl", { class: "facts" },
      fact("state", h("span", { class: `tag is-${one.state}` }, one.state), one.drop_reason ? ` ${one.drop_reason}` : null, one.sealed_by ? h("small", { class: "dim" }, ` sealed by ${one.sealed_by}`) : null),
      fact("policy", one.purpose === "other_model" ? one.alias : `${one.alias}@${one.version}`), one.purpose === "live" ? null : fact("purpose", one.purpose),
      fact("task", one.task ?? "–"), one.group_id ? fact("group", h("a", { href: `#/groups/${encodeURIComponent(one.group_id)}`, class: "mono" }, one.group_id)) : null,
      one.key_id ? fact("key", h("span", { class: "mono" }, one.key_id)) : null,
      one.trained.length ? fact("trained", one.trained.map(policy).slice(0, 6).join(", "), one.trained.length > 6 ? ` and ${count(one.trained.length - 6)} later ones` : null) : null,
      one.round_id ? fact("round", h("a", { href: listed({ round: one.round_id }), class: "mono" }, one.round_id)) : null,
      fact("opened", ago(one.opened_at)), fact("last call", ago(one.last_active_at))));
}

const policy = (one) => (Array.isArray(one) ? one.join("@") : typeof one === "object" ? `${one.alias}@${one.version}` : String(one));

async function rate(one, value, refresh) {
  const form = await ask(value === "up" ? "This was good" : "This was bad", "The feedback is stored with the trajectory; judges that use feedback apply it.",
    [h("label", { for: "comment" }, "Comment (optional)"), h("textarea", { id: "comment", name: "comment", rows: 4, maxlength: 10000 })], "Send");
  if (!form) return;
  try {
    const done = await post("feedback", { trajectory_id: one.id, value, comment: form.comment });
    toast(done.state === "placed" ? "Recorded." : done.detail ?? "Recorded.");
    setTimeout(refresh, 400);
  } catch (error) { toast(error.message); }
}

function transcript(one, overlay) {
  const answers = new Map(one.sampled_messages.map((answer) => [answer.message, answer]));
  const drawn = (said, at) => message(said, overlay.name && answers.has(at) ? tokensOf(answers.get(at), overlay.name) : null);
  const list = h("ol", { class: "talk" }, one.messages.slice(0, PAGE).map(drawn));
  const changed = (name) => {
    overlay.name = name;
    list.replaceChildren(...one.messages.slice(0, list.children.length).map(drawn));
  };
  const more = one.messages.length > PAGE ? h("button", { type: "button", on: { click: () => {
    list.append(...one.messages.slice(list.children.length, list.children.length + 5 * PAGE).map((said, at) => drawn(said, at + list.children.length)));
    if (list.children.length >= one.messages.length) more.remove();
  } } }, `Show more of ${count(one.messages.length)} messages`) : null;
  return h("section", { class: "card" }, h("header", { class: "between" }, h("h2", {}, `Transcript · ${count(one.messages.length)} messages`), answers.size ? chooser(overlay.name, changed) : null),
    one.messages.length ? list : h("p", { class: "empty" }, "No message is stored."), more);
}

/** One message of a chat, with its tokens if they are asked for. */
function message(one, tokens) {
  const reasoning = one.reasoning ?? one.reasoning_content;
  const name = one.role === "tool" ? `tool result ${one.name ?? ""}` : one.role;
  return h("li", { class: `message ${["system", "user", "assistant", "tool"].includes(one.role) ? one.role : "other"}` },
    h("div", { class: "who" }, h("b", {}, name ?? "?"), one.tool_call_id ? h("code", { class: "dim" }, one.tool_call_id) : null),
    reasoning ? h("details", { class: "reasoning" }, h("summary", {}, "Reasoning"), content(reasoning)) : null,
    content(one.content), one.refusal ? prose(one.refusal, "bad") : null,
    (Array.isArray(one.tool_calls) ? one.tool_calls : []).map((call) => h("div", { class: "call" },
      h("div", { class: "who" }, h("span", { class: "tag ramp" }, "calls"), h("b", { class: "mono" }, call.function?.name ?? "?"), h("code", { class: "dim" }, call.id ?? "")),
      json(call.function?.arguments ?? ""))), tokens);
}

function verdicts(one) {
  const newest = one.verdicts.findLast((verdict) => verdict.score !== null);
  return h("section", { class: "card" }, h("h2", {}, "Verdicts"),
    one.verdicts.length ? one.verdicts.toReversed().map((verdict) => verdictOf(verdict, verdict === newest)) : h("p", { class: "empty" }, "No verdict yet."));
}

/** A judge's verdict; `counts` marks the one that is used. */
export function verdictOf(verdict, counts) {
  return h("article", { class: "verdict-card" },
    h("div", { class: "who" }, verdict.score === null ? h("span", { class: "tag reject" }, "failed") : h("b", { class: "big" }, score(verdict.score)),
      h("span", {}, verdict.judge), h("code", { class: "dim wrap" }, verdict.judge_version.slice(0, 12)), counts ? h("span", { class: "tag live" }, "counts") : null,
      h("small", { class: "dim" }, ago(verdict.judged_at), verdict.latency ? ` · took ${seconds(verdict.latency)}` : "")),
    verdict.failure ? prose(verdict.failure, "bad") : null, verdict.explanation ? prose(verdict.explanation) : null,
    Object.keys(verdict.components).length ? h("dl", { class: "means" }, Object.entries(verdict.components).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, figure(value))))) : null);
}

function people(one) {
  return h("section", { class: "card" }, h("h2", {}, "Feedback"),
    one.feedback.length ? one.feedback.toReversed().map((given) => h("article", { class: "verdict-card" },
      h("div", { class: "who" }, given.value === null ? null : h("b", { class: "big" }, given.value === 1 ? "↑ up" : given.value === 0 || given.value === -1 ? "↓ down" : figure(given.value)),
        h("span", {}, given.source), h("small", { class: "dim" }, ago(given.given_at), given.applied_at ? " · applied by a judge" : "")),
      given.comment ? prose(given.comment) : null, given.demonstration ? [h("small", { class: "dim" }, "Demonstration"), prose(given.demonstration)] : null))
      : h("p", { class: "empty" }, "No feedback yet."));
}

const CONTEXTS = { root: "first of its context", exact: "continues the sampled ids, id for id", fork: "a context of its own" };

function calls(one) {
  return h("section", { class: "card" }, h("h2", {}, `Calls · ${count(one.calls.length)}`), one.calls.slice(-200).map((call) => {
    const shown = h("div", { class: "stack" });
    const tag = call.untrainable ? "reject" : call.context === "fork" ? "hold" : "live";
    return h("article", { class: "verdict-card" },
      h("div", { class: "who" }, h("span", { class: `tag ${tag}`, title: CONTEXTS[call.context] }, call.untrainable ? "untrainable" : call.context),
        h("span", {}, `@${call.version}`), call.role ? h("span", {}, call.role) : null, h("span", { class: "dim" }, `${call.dialect}${call.streamed ? ", streamed" : ""}`),
        call.state === "answered" ? null : h("span", { class: "tag hold" }, call.state), h("small", { class: "dim" }, ago(call.started_at))),
      h("p", { class: "dim small" }, `linked by ${call.linked_by} · ${count(call.prompt_tokens)} + ${count(call.completion_tokens)} tokens`,
        call.ended_at ? ` · ${seconds(call.ended_at - call.started_at)}` : "", call.choices.length ? ` · ${call.choices.map((choice) => choice.finish_reason ?? "?").join(", ")}` : ""),
      call.untrainable ? prose(call.untrainable, "bad") : null, call.error ? prose(call.error, "bad") : null,
      call.completion_tokens ? h("details", { on: { toggle: (event) => { if (event.target.open && !shown.hasChildNodes()) shown.append(...call.choices.map((one) => tokensOf({ call_id: call.id, choice: one.index }, "logprob", true))); } } }, h("summary", {}, "Tokens"), shown) : null);
  }));
}

function tools(one) {
  if (!one.tools.length) return null;
  return h("section", { class: "card" }, h("h2", {}, `Tools offered · ${count(one.tools.length)}`), one.tools.slice(0, 100).map((tool) =>
    h("details", {}, h("summary", {}, h("code", {}, tool.function?.name ?? tool.name ?? "?")), json(tool))));
}
