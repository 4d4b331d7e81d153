// Asks the proxy that served this page, and nobody else. The operator's key stays in this tab (sessionStorage) and
// travels in the Authorization header alone.

const PLACE = "ratchet-operator-key";
const HERE = new URL("../", document.baseURI);

export const key = {
  get: () => sessionStorage.getItem(PLACE) ?? "",
  set: (value) => sessionStorage.setItem(PLACE, value),
  forget: () => sessionStorage.removeItem(PLACE),
};

/** What went wrong: `status` 0 where the proxy was not reached. */
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }

  get needsKey() { return this.status === 401 || (this.status === 403 && /key/i.test(this.message)); }
}

/** Answers as they come: whoever listens knows whether the proxy is there. */
export const reached = new EventTarget();

async function send(path, options) {
  let answer;
  try {
    answer = await fetch(new URL(path, HERE), { cache: "no-store", credentials: "same-origin", ...options });
  } catch {
    reached.dispatchEvent(new Event("lost"));
    throw new Refused(0, "the proxy does not answer");
  }
  reached.dispatchEvent(new Event("there"));
  return answer;
}

async function asJson(answer) {
  const text = await answer.text();
  let value = null;
  try { value = JSON.parse(text); } catch { /* told below */ }
  if (answer.ok && value !== null) return value;
  const said = value?.error?.message ?? value?.detail?.[0]?.msg ?? `the proxy answered ${answer.status}`;
  throw new Refused(answer.status, String(said));
}

const bearer = () => (key.get() ? { authorization: `Bearer ${key.get()}` } : {});

/** GET /api/PATH with parameters; those without a value are left out. */
export async function get(path, parameters = {}, signal = undefined) {
  const said = Object.entries(parameters).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  const query = said.length ? `?${new URLSearchParams(said)}` : "";
  return asJson(await send(`api/${path}${query}`, { headers: bearer(), signal }));
}

/** POST /api/PATH with a JSON body. */
export async function post(path, body) {
  const headers = { ...bearer(), "content-type": "application/json" };
  return asJson(await send(`api/${path}`, { method: "POST", headers, body: JSON.stringify(body) }));
}

/** The proxy's metrics: name -> samples {labels, value}. */
export async function metrics() {
  const answer = await send("metrics", {});
  if (!answer.ok) throw new Refused(answer.status, `/metrics answered ${answer.status}`);
  return parse(await answer.text());
}

function parse(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    const told = /^([a-z_]+)(?:\{(.*)\})? ([^ ]+)$/.exec(line);
    if (!told) continue;
    const labels = {};
    for (const [, name, value] of (told[2] ?? "").matchAll(/([a-z_]+)="((?:[^"\\]|\\.)*)"/g)) {
      labels[name] = value.replace(/\\(.)/g, (_, one) => (one === "n" ? "\n" : one));
    }
    if (!found.has(told[1])) found.set(told[1], []);
    found.get(told[1]).push({ labels, value: told[3] === "+Inf" ? Infinity : Number(told[3]) });
  }
  return found;
}
