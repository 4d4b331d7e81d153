// The sampled tokens of an answer, shaded by what is asked: logprob, mismatch, advantage or the loss mask.
import { get } from "./api.js";
import { h } from "./dom.js";
import { count, NONE } from "./format.js";

const MAX_TOKENS = 3000;
const PLACE = "tokens"; // the parameter of the address

// Overlay -> its title, what it shows, the shade of a token (-1 to 1), and what the numbers mean.
export const OVERLAYS = {
  logprob: ["Logprob", (one) => (one.logprob === undefined ? 0 : Math.max(-1, one.logprob / 4)), "darker the less likely the engine found the token"],
  mismatch: ["Trainer-engine mismatch", (one) => clip((one.mismatch ?? 0) / 0.5), "trainer's minus engine's logprob before the round, full color at 0.5 nats"],
  advantage: ["Advantage", (one) => clip((one.advantage ?? 0) / 2), "green is made likelier, red less likely, full color at 2"],
  mask: ["Loss mask", (one) => (one.trained ? 1 : 0), "colored tokens carry loss"],
};
const clip = (n) => Math.max(-1, Math.min(1, n));

/** The overlay that the address names; "" for none. */
export const overlayOf = (query) => (OVERLAYS[query.get(PLACE)] ? query.get(PLACE) : "");

/** A list to choose the overlay; the choice becomes part of the address, and `onChange` gets it. */
export function chooser(chosen, onChange) {
  const field = h("select", { id: "overlay", "aria-label": "Tokens", on: { change: () => {
    const [path, query = ""] = location.hash.split("?");
    const kept = new URLSearchParams(query);
    if (field.value) kept.set(PLACE, field.value); else kept.delete(PLACE);
    history.replaceState(null, "", [path, kept.toString()].filter(Boolean).join("?"));
    onChange(field.value);
  } } },
  [["", "Tokens: hidden"], ...Object.entries(OVERLAYS).map(([name, [title]]) => [name, `Tokens: ${title.toLowerCase()}`])]
    .map(([value, title]) => h("option", { value, selected: value === chosen }, title)));
  return field;
}

const visibleFirst = new IntersectionObserver((seen) => seen.filter((one) => one.isIntersecting).forEach((one) => {
  visibleFirst.unobserve(one.target);
  one.target.dispatchEvent(new Event("seen"));
}), { rootMargin: "200px" });

/** A place for the tokens of one answer, which are read at once, or when it comes into view. */
export function tokensOf(answer, overlay, atOnce = false) {
  const place = h("div", { class: "overlay", on: { seen: () => show(place, answer, overlay) } }, "reading …");
  if (atOnce) show(place, answer, overlay); else visibleFirst.observe(place);
  return place;
}

const read = new Map(); // call id -> promise of the call; the newest few
function callOf(id) {
  if (!read.has(id)) {
    read.set(id, get(`calls/${encodeURIComponent(id)}`));
    read.get(id).catch(() => read.delete(id));
    if (read.size > 100) read.delete(read.keys().next().value);
  }
  return read.get(id);
}

/** Forget the tokens that were read: another trajectory, or a round may have trained it. */
export const forget = () => read.clear();

async function show(place, { call_id, choice }, overlay) {
  try {
    const call = await callOf(call_id);
    const sampled = call.choices.find((one) => one.index === choice);
    const training = call.training.find((one) => one.choice === choice);
    if (!sampled) { place.replaceChildren("No token is stored."); return; }
    place.replaceChildren(summary(call, sampled, training), drawn(sampled, training, overlay));
  } catch (error) { place.replaceChildren(error.message); }
}

function summary(call, sampled, training) {
  const gaps = training?.mismatch ?? [];
  const mean = gaps.length ? gaps.reduce((sum, gap) => sum + Math.abs(gap ?? 0), 0) / gaps.length : null;
  const trained = !training ? "not in a round yet" : training.untrained ? `no loss: ${training.untrained.replaceAll("_", " ")}`
    : `${training.advantages.length ? "mean advantage" : "advantage"} ${training.advantage.toFixed(3)} · mean mismatch ${mean === null ? "not compared" : `${mean.toPrecision(2)} nats`}`;
  return h("p", { class: "dim small" }, `${count(sampled.token_ids.length)} sampled tokens after ${count(call.prompt_tokens)} of context · ${trained}`);
}

function drawn(sampled, training, overlay) {
  const [, shade, note] = OVERLAYS[overlay];
  const trained = Boolean(training) && training.untrained === null;
  const tokens = sampled.token_ids.slice(0, MAX_TOKENS).map((id, at) => ({ id, logprob: sampled.logprobs[at], mismatch: training?.mismatch[at], advantage: trained ? training.advantages[at] ?? training.advantage : null, trained }));
  const number = (n, digits) => (typeof n === "number" ? n.toFixed(digits) : NONE);
  return h("div", { class: `tokens is-${overlay}`, title: note, role: "img", "aria-label": `${count(tokens.length)} tokens, ${note}` }, tokens.map((one) => {
    const value = shade(one);
    return h("span", { class: value < 0 ? "less" : value > 0 ? "more" : null, style: { "--shade": String(Math.round(Math.abs(value) * 80)) },
      title: `token ${one.id} · logprob ${number(one.logprob, 4)}${typeof one.logprob === "number" ? `, p ${Math.exp(one.logprob).toFixed(3)}` : ""} · mismatch ${number(one.mismatch, 4)} · advantage ${number(one.advantage, 3)} · ${one.trained ? "carries loss" : "no loss"}` }, String(one.id));
  }), sampled.token_ids.length > MAX_TOKENS ? `and ${count(sampled.token_ids.length - MAX_TOKENS)} more` : null);
}
