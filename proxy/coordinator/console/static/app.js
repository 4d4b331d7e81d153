// The console: routing, the key, and the connection status.
import { addressOf, AgentChooser, agentOfAddress } from "./agent.js";
import { connection, key } from "./api.js";
import { behavior } from "./behavior.js";
import { h, toast } from "./dom.js";
import { seconds, tick } from "./format.js";
import { group, groups } from "./groups.js";
import { overview } from "./overview.js";
import { alarms, rounds } from "./training.js";
import { trajectories } from "./trajectories.js";
import { trajectory } from "./trajectory.js";
import { usage } from "./usage.js";
import { version, versions } from "./versions.js";

// In the order of the bar: name, title, page. A page gets its element and the address, and returns its refresh function.
const PAGES = [
  ["", "Overview", overview],
  ["trajectories", "Trajectories", (place, address) => (address.path.length ? trajectory : trajectories)(place, address)],
  ["groups", "Groups", (place, address) => (address.path.length ? group : groups)(place, address)],
  ["versions", "Versions", (place, address) => (address.path.length > 1 ? version : versions)(place, address)],
  ["behavior", "Behavior", behavior],
  ["rounds", "Rounds", rounds],
  ["usage", "Usage", usage],
  ["alarms", "Alarms", alarms],
];
const EVERY = 5000; // milliseconds between refreshes of a live page
const OLD = 20000; // milliseconds after which the data counts as old

const main = document.getElementById("main");
const agents = new AgentChooser(document.getElementById("agent"), agentChanged);
const pulse = document.getElementById("pulse");
let shown = null; // {refresh, every}
let looking = false;
let seenAt = 0;
let lostAt = 0;
let turn = 0;

function nav(current) {
  document.getElementById("nav").replaceChildren(...PAGES.filter(([, title]) => title).map(([name, title]) =>
    h("a", { href: `#/${name}`, "aria-current": name === current ? "page" : null }, title)));
  document.querySelector("nav [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });
}

function address() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  return [path, new URLSearchParams(query)];
}

async function route() {
  const [path, query] = address();
  agentOfAddress(path, query);
  const [name, ...rest] = path.split("/").map(decodeURIComponent);
  const page = PAGES.find(([known]) => known === name) ?? PAGES[0];
  const mine = ++turn;
  shown?.stop?.();
  shown = null;
  nav(page[0]);
  document.title = `${page[1]} · Ratchet`;
  const place = h("div", { class: "page" });
  main.replaceChildren(place);
  const created = page[2](place, { path: rest, query });
  if (mine === turn) shown = created;
  await refreshPage();
}

/** Another agent: a list starts at its newest page again. */
function agentChanged() {
  const [path, query] = address();
  query.delete("before");
  const chosen = addressOf(path, query);
  if (chosen === location.hash) route(); else location.hash = chosen;
}

/** Refresh the page; show the error if that fails. */
async function refreshPage() {
  const page = shown;
  if (!page || looking === page) return;
  looking = page;
  try {
    await page.refresh();
    if (page !== shown) return;
    seenAt = Date.now();
    main.querySelector(".trouble")?.remove();
    document.getElementById("leave").hidden = !key.get();
    await agents.refresh();
  } catch (error) {
    if (page === shown) trouble(error);
  } finally {
    if (looking === page) looking = false;
    showStatus();
  }
}

function trouble(error) {
  if (error.needsKey) { askForKey(error); return; }
  if (error.status === undefined) console.error(error);
  main.querySelector(".trouble")?.remove();
  main.prepend(h("div", { class: "trouble", role: "alert" },
    h("b", {}, error.status ? "The request failed. " : "The proxy cannot be reached. "), error.message,
    h("button", { type: "button", on: { click: refreshPage } }, "Try again")));
}

function askForKey(error) {
  shown = null;
  const wrong = key.get() !== "";
  key.forget();
  document.getElementById("leave").hidden = true;
  document.getElementById("agent").hidden = true;
  agents.shown = null;
  const field = h("input", { id: "key", type: "password", autocomplete: "off", spellcheck: "false", required: true,
    "aria-describedby": "key-hint", placeholder: "rk-…" });
  const enter = (event) => { event.preventDefault(); key.set(field.value.trim()); route(); };
  main.replaceChildren(h("form", { class: "gate card", on: { submit: enter } },
    h("h1", {}, "Operator key required"),
    h("p", { id: "key-hint", class: wrong ? "bad" : "", role: wrong ? "alert" : null },
      wrong ? `That key is not accepted: ${error.message}` : "Recorded data is shown to operators only."),
    h("label", { for: "key" }, "Key"), field,
    h("button", { class: "primary", type: "submit" }, "Open"),
    h("p", { class: "dim" }, "The key stays in this tab and is sent to this proxy only. Create one: ",
      h("code", {}, "ratchet keys create --scope operator --name me"))));
  field.focus();
}

function showStatus() {
  const age = Date.now() - seenAt;
  const [kind, text] = lostAt ? ["lost", `unreachable for ${seconds(Math.max(1, Math.round((Date.now() - lostAt) / 1000)))}`]
    : !seenAt ? ["", "connecting"] : age > OLD && shown?.every ? ["old", `${seconds(Math.round(age / 1000))} old`] : ["live", shown?.every ? "live" : "connected"];
  pulse.className = `pulse ${kind}`;
  if (pulse.lastChild.textContent !== text) pulse.lastChild.textContent = text;
  document.body.classList.toggle("is-old", kind === "lost" || kind === "old");
}

connection.addEventListener("lost", () => { lostAt ||= Date.now(); showStatus(); });
connection.addEventListener("there", () => { lostAt = 0; });

function theme(choice) {
  const dark = choice ? choice === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  if (choice) document.documentElement.dataset.theme = choice;
  document.getElementById("theme").textContent = dark ? "☀" : "☾";
  return dark;
}

document.getElementById("theme").addEventListener("click", () => {
  const choice = theme(localStorage.getItem("ratchet-theme")) ? "light" : "dark";
  localStorage.setItem("ratchet-theme", choice);
  theme(choice);
});
document.getElementById("leave").addEventListener("click", () => { key.forget(); toast("The key was removed."); route(); });
document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); main.focus(); });
addEventListener("hashchange", () => { route(); scrollTo(0, 0); });
document.addEventListener("visibilitychange", () => { if (!document.hidden && shown?.every) refreshPage(); });
setInterval(() => { tick(); showStatus(); }, 1000);
setInterval(() => { if (!document.hidden && shown?.every) refreshPage(); }, EVERY);
theme(localStorage.getItem("ratchet-theme"));
route();
