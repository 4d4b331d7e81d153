// The one way in which anything comes onto a page. Text becomes text nodes and nothing else, whoever wrote it:
// no HTML is ever parsed here. Characters that cannot be seen, or that turn the order of others, are shown by name.

const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u115f\u1160\u17b4\u17b5\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ufeff\ufff9-\ufffb]|[\u{e0000}-\u{e0fff}]/gu;
const SVG = "http://www.w3.org/2000/svg";

/** Text as nodes; what is hidden in it as a small mark with its code point. */
export function visible(text) {
  const nodes = [];
  let from = 0;
  for (const found of text.matchAll(HIDDEN)) {
    if (found.index > from) nodes.push(document.createTextNode(text.slice(from, found.index)));
    const code = `U+${found[0].codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`;
    const mark = document.createElement("span");
    mark.className = "hidden-char";
    mark.title = "a character that cannot be seen";
    mark.textContent = code;
    nodes.push(mark);
    from = found.index + found[0].length;
  }
  if (from < text.length) nodes.push(document.createTextNode(text.slice(from)));
  return nodes;
}

/** An element: attributes, `on` listeners and `style` properties by name, then children (texts, nodes, lists of them). */
export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** An element of a drawing. */
export function s(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    else if (name === "style") for (const [key, said] of Object.entries(value)) element.style.setProperty(key, said);
    else if (name === "href" && !String(value).startsWith("#/")) throw new Error("a link leads only to this console");
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  add(element, children);
  return element;
}

function add(element, children) {
  for (const child of children) {
    if (child === null || child === undefined || child === false) continue;
    if (Array.isArray(child)) add(element, child);
    else if (child instanceof Node) element.append(child);
    else element.append(...visible(String(child)));
  }
}

/** Shows data in a place and builds it anew only when the data has changed, so that nothing jumps and focus stays. */
export class Slot {
  constructor(element) {
    this.element = element;
    this.seen = null;
  }

  show(data, build) {
    const text = JSON.stringify(data);
    if (text === this.seen) return;
    this.seen = text;
    const held = this.element.contains(document.activeElement) ? document.activeElement.dataset.focus : null;
    this.element.replaceChildren(...[build(data)].flat(9).filter(Boolean));
    this.element.querySelectorAll("table.list").forEach(name);
    if (held) [...this.element.querySelectorAll("[data-focus]")].find((one) => one.dataset.focus === held)?.focus();
  }
}

/** Let the cells of a list say whose they are: on a narrow screen there is no head above them. */
function name(table) {
  const heads = [...table.tHead.rows[0].cells].map((cell) => cell.textContent);
  for (const row of table.tBodies[0].rows) [...row.cells].forEach((cell, at) => { cell.dataset.name = heads[at]; });
}

let toastTimer = 0;

/** Say something that passes. */
export function toast(text) {
  const place = document.getElementById("toast");
  place.replaceChildren(...visible(text));
  place.hidden = false;
  clearTimeout(toastTimer);
  toastTimer = setTimeout(() => { place.hidden = true; }, 6000);
}

/** Ask before something is done; resolves to the form's values, or null. `fields` are elements with a name. */
export function ask(title, text, fields, verb) {
  return new Promise((resolve) => {
    const done = (value) => { dialog.close(); dialog.remove(); resolve(value); };
    const form = h("form", {
      on: { submit: (event) => { event.preventDefault(); done(Object.fromEntries(new FormData(form))); } },
    },
    h("h2", {}, title), h("p", {}, text), fields,
    h("div", { class: "actions" },
      h("button", { type: "button", on: { click: () => done(null) } }, "Cancel"),
      h("button", { type: "submit", class: "primary" }, verb)));
    const dialog = h("dialog", { "aria-label": title, on: { cancel: (event) => { event.preventDefault(); done(null); } } }, form);
    document.body.append(dialog);
    dialog.showModal();
  });
}
