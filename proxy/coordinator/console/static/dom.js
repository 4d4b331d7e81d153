// The only code that writes to a page. All text becomes text nodes: no HTML is ever parsed. Invisible characters, and
// those that change the text direction, are shown by code point.

const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u115f\u1160\u17b4\u17b5\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ufeff\ufff9-\ufffb]|[\u{e0000}-\u{e0fff}]/gu;
const SVG = "http://www.w3.org/2000/svg";

/** Text as nodes; each hidden character becomes a small mark with its code point. */
export function visible(text) {
  const nodes = [];
  let from = 0;
  for (const found of text.matchAll(HIDDEN)) {
    if (found.index > from) nodes.push(document.createTextNode(text.slice(from, found.index)));
    const code = `U+${found[0].codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`;
    const mark = document.createElement("span");
    mark.className = "hidden-char";
    mark.title = "an invisible character";
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
    else if (name === "style") for (const [key, style] of Object.entries(value)) element.style.setProperty(key, style);
    else if (name === "href" && !String(value).startsWith("#/")) throw new Error("links must stay within the console");
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

/** Shows data in an element and rebuilds it only if the data has changed, which keeps focus and position. */
export class Slot {
  constructor(element) {
    this.element = element;
    this.seen = null;
  }

  show(data, build) {
    const text = JSON.stringify(data);
    if (text === this.seen) return;
    this.seen = text;
    const focused = this.element.contains(document.activeElement) ? document.activeElement.dataset.focus : null;
    this.element.replaceChildren(...[build(data)].flat(9).filter(Boolean));
    this.element.querySelectorAll("table.list").forEach(name);
    if (focused) [...this.element.querySelectorAll("[data-focus]")].find((one) => one.dataset.focus === focused)?.focus();
  }
}

/** Label the cells of a list with their column: on a narrow screen the header is hidden. */
function name(table) {
  const heads = [...table.tHead.rows[0].cells].map((cell) => cell.textContent);
  for (const row of table.tBodies[0].rows) [...row.cells].forEach((cell, at) => { cell.dataset.name = heads[at]; });
}

let toastTimer = 0;

/** Show a message for a few seconds. */
export function toast(text) {
  const place = document.getElementById("toast");
  place.replaceChildren(...visible(text));
  place.hidden = false;
  clearTimeout(toastTimer);
  toastTimer = setTimeout(() => { place.hidden = true; }, 6000);
}

/** Ask for confirmation; resolves to the values of the form, or null. `fields`: elements with a name. */
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
