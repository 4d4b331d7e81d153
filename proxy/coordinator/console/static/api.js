// Requests to the proxy that served this page. The operator's key is kept in this tab (sessionStorage) and sent only in
// the Authorization header.

const PLACE = "ratchet-operator-key";
const HERE = new URL("../", document.baseURI);

export const key = {
  get: () => sessionStorage.getItem(PLACE) ?? "",
  set: (value) => sessionStorage.setItem(PLACE, value),
  forget: () => sessionStorage.removeItem(PLACE),
};

/** A failed request; `status` is 0 if the proxy is unreachable. */
export class RequestFailed extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }

  get needsKey() { return this.status === 401 || (this.status === 403 && /key/i.test(this.message)); }
}

/** Events `lost` and `there`: whether the proxy answers. */
export const connection = new EventTarget();

async function send(path, options) {
  let response;
  try {
    response = await fetch(new URL(path, HERE), { cache: "no-store", credentials: "same-origin", ...options });
  } catch {
    connection.dispatchEvent(new Event("lost"));
    throw new RequestFailed(0, "the proxy does not answer");
  }
  connection.dispatchEvent(new Event("there"));
  return response;
}

async function asJson(response) {
  const text = await response.text();
  let value = null;
  try { value = JSON.parse(text); } catch { /* reported below */ }
  if (response.ok && value !== null) return value;
  const message = value?.error?.message ?? value?.detail?.[0]?.msg ?? `the proxy answered ${response.status}`;
  throw new RequestFailed(response.status, String(message));
}

const bearer = () => (key.get() ? { authorization: `Bearer ${key.get()}` } : {});

/** GET /api/PATH with the parameters that have a value. */
export async function get(path, parameters = {}, signal = undefined) {
  const given = Object.entries(parameters).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  const query = given.length ? `?${new URLSearchParams(given)}` : "";
  return asJson(await send(`api/${path}${query}`, { headers: bearer(), signal }));
}

/** POST /api/PATH with a JSON body. */
export async function post(path, body) {
  const headers = { ...bearer(), "content-type": "application/json" };
  return asJson(await send(`api/${path}`, { method: "POST", headers, body: JSON.stringify(body) }));
}

/** The proxy's metrics: name -> samples {labels, value}. */
export async function metrics() {
  const response = await send("metrics", {});
  if (!response.ok) throw new RequestFailed(response.status, `/metrics answered ${response.status}`);
  return parse(await response.text());
}

function parse(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    const match = /^([a-z_]+)(?:\{(.*)\})? ([^ ]+)$/.exec(line);
    if (!match) continue;
    const labels = {};
    for (const [, name, value] of (match[2] ?? "").matchAll(/([a-z_]+)="((?:[^"\\]|\\.)*)"/g)) {
      labels[name] = value.replace(/\\(.)/g, (_, one) => (one === "n" ? "\n" : one));
    }
    if (!found.has(match[1])) found.set(match[1], []);
    found.get(match[1]).push({ labels, value: match[3] === "+Inf" ? Infinity : Number(match[3]) });
  }
  return found;
}
