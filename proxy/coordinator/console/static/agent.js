// The agent that every page shows, chosen in the bar; "" stands for all agents. The address names it, so that a link
// shows the same; this tab remembers it for links that name none.
import { get } from "./api.js";
import { h } from "./dom.js";

const PLACE = "ratchet-agent";

/** The chosen agent; "" for all. */
export const chosenAgent = () => sessionStorage.getItem(PLACE) ?? "";

function choose(name) {
  if (name) sessionStorage.setItem(PLACE, name); else sessionStorage.removeItem(PLACE);
}

/** Take the agent out of the parameters of an address; if they name none, write the chosen one into the address. */
export function agentOfAddress(path, parameters) {
  if (parameters.has("agent")) choose(parameters.get("agent"));
  else if (chosenAgent()) history.replaceState(null, "", addressOf(path, parameters));
  parameters.delete("agent");
}

/** A page's address with the chosen agent. */
export function addressOf(path, parameters) {
  const all = new URLSearchParams(parameters);
  if (chosenAgent()) all.set("agent", chosenAgent()); else all.delete("agent");
  return `#/${[path, all.toString()].filter(Boolean).join("?")}`;
}

/** The list in the bar: hidden with a single agent. `onChange` is called when another agent is chosen. */
export class AgentChooser {
  constructor(field, onChange) {
    this.field = field;
    this.onChange = onChange;
    this.shown = null;
    field.addEventListener("change", () => { choose(field.value); onChange(); });
  }

  /** Read the agents again; an agent without records that is no longer served is not offered. */
  async refresh() {
    const agents = (await get("agents")).data;
    const text = JSON.stringify(agents);
    if (text === this.shown) { this.field.value = chosenAgent(); return; }
    this.shown = text;
    const was = chosenAgent();
    if (was && !agents.some((one) => one.agent === was)) choose("");
    const title = (one) => (one.state === "serving" ? one.agent : `${one.agent} (${one.state.replaceAll("_", " ")})`);
    this.field.replaceChildren(h("option", { value: "" }, "All agents"), ...agents.map((one) => h("option", { value: one.agent }, title(one))));
    this.field.value = chosenAgent();
    this.field.hidden = agents.length < 2;
    if (was !== chosenAgent()) this.onChange();
  }
}
