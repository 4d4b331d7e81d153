// Charts: values by version with intervals, one interval, a sparkline, shares of a total.
import { h, s } from "./dom.js";
import { count, percent, score, short, signed } from "./format.js";

const LEFT = 36, RIGHT = 14, TOP = 12, BOTTOM = 28;

function ticks(low, high, most) {
  const span = high - low || 1;
  const step = [1, 2, 5, 10].map((n) => n * 10 ** Math.floor(Math.log10(span / most))).find((n) => span / n <= most) ?? span;
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step / 1e6; at += step) found.push(Number(at.toPrecision(12)));
  return found;
}

function bounds(points, floor) {
  const lows = points.map((p) => p.low ?? p.mean), highs = points.map((p) => p.high ?? p.mean);
  let low = Math.min(...lows, floor ?? Infinity), high = Math.max(...highs);
  if (floor === undefined && points.every((p) => p.mean >= 0 && p.mean <= 1)) return [0, 1];
  const margin = (high - low) * 0.05 || Math.abs(high) * 0.5 || 0.5;
  return [low === floor ? floor : low - margin, high + margin];
}

/**
 * A mean by version with its 95% interval; a click, or Enter, opens the trajectories behind a point.
 * points: {version, mean, low, high, count}. link: version -> address. marks: version -> its state. format: of a value.
 * floor: the least value of the axis; without one, scores of 0 to 1 have that range. small: one of several beside it.
 */
export function curve(points, { what, link, marks = {}, format = score, floor, small = false }) {
  const [W, H] = small || innerWidth < 620 ? [360, 170] : [1000, 260];
  const [low, high] = bounds(points, floor);
  const first = points[0].version, last = points.at(-1).version;
  const x = (version) => (first === last ? (LEFT + W - RIGHT) / 2 : LEFT + ((version - first) / (last - first)) * (W - LEFT - RIGHT));
  const y = (value) => TOP + (1 - (Math.min(high, Math.max(low, value)) - low) / (high - low)) * (H - TOP - BOTTOM);
  const known = points.filter((p) => typeof p.low === "number");
  const caption = h("figcaption", { class: "dim" });
  const describe = (p) => caption.replaceChildren(h("b", {}, `@${p.version}`), marks[p.version] ? ` ${marks[p.version]}` : "",
    `  ${small ? "" : "mean "}${format(p.mean)}${typeof p.low === "number" ? ` · 95% ${format(p.low)} to ${format(p.high)}` : ""}${small ? "" : ` · ${count(p.count)} scored · click to list them`}`);
  const edge = [...known.map((p) => `${x(p.version)},${y(p.high)}`), ...known.toReversed().map((p) => `${x(p.version)},${y(p.low)}`)];
  const few = points.length <= (small ? 30 : 80);
  const dots = points.filter((p) => few || marks[p.version]).map((p) => s("g", {},
    small || !few || typeof p.low !== "number" ? null : s("line", { class: "whisker", x1: x(p.version), x2: x(p.version), y1: y(p.low), y2: y(p.high) }),
    s("circle", { class: `dot ${marks[p.version] ?? ""}`, cx: x(p.version), cy: y(p.mean), r: marks[p.version] ? 5 : 3.5 })));
  const guide = s("line", { class: "guide", y1: TOP, y2: H - BOTTOM, visibility: "hidden" });
  let at = points.length - 1;
  const show = (place) => {
    at = place;
    const where = x(points[at].version);
    for (const [name, value] of [["visibility", "visible"], ["x1", where], ["x2", where]]) guide.setAttribute(name, value);
    describe(points[at]);
  };
  const nearest = (event) => {
    const box = drawing.getBoundingClientRect(), place = ((event.clientX - box.left) / box.width) * W;
    return points.reduce((best, p, index) => (Math.abs(x(p.version) - place) < Math.abs(x(points[best].version) - place) ? index : best), 0);
  };
  const open = () => { location.hash = link(points[at].version); };
  const keys = { ArrowLeft: () => show(Math.max(0, at - 1)), ArrowRight: () => show(Math.min(points.length - 1, at + 1)), Enter: open };
  const drawing = s("svg", {
    viewBox: `0 0 ${W} ${H}`, class: "curve", tabindex: 0, role: "img", "data-focus": `curve ${what}`,
    "aria-label": `${what} by version, from ${format(points[0].mean)} at version ${first} to ${format(points.at(-1).mean)} at version ${last}. Arrow keys read the points, Enter lists their trajectories.`,
    on: {
      pointermove: (event) => show(nearest(event)),
      click: (event) => { show(nearest(event)); open(); },
      keydown: (event) => { if (keys[event.key]) { event.preventDefault(); keys[event.key](); } },
    },
  },
  ticks(low, high, small ? 3 : 5).map((value) => s("g", {},
    s("line", { class: "grid", x1: LEFT, x2: W - RIGHT, y1: y(value), y2: y(value) }),
    s("text", { class: "axis", x: LEFT - 8, y: y(value) + 4, "text-anchor": "end" }, short(value)))),
  ticks(first, last, W / 70).filter(Number.isInteger).map((value) => s("text", { class: "axis", x: x(value), y: H - 9, "text-anchor": "middle" }, `@${value}`)),
  known.length > 1 ? s("polygon", { class: "band", points: edge.join(" ") }) : null,
  s("polyline", { class: "line", points: points.map((p) => `${x(p.version)},${y(p.mean)}`).join(" ") }),
  guide, dots);
  describe(points.at(-1));
  return h("figure", {}, drawing, caption);
}

/** A difference with its interval, beside zero; `most` is what the ends of the line stand for. */
export function interval(gain, most) {
  const x = (value) => 4 + ((Math.max(-most, Math.min(most, value)) + most) / (2 * most)) * 152;
  return s("svg", { viewBox: "0 0 160 20", class: `interval ${gain.verdict}`, role: "img", "aria-label": `${signed(gain.value)}, 95% ${signed(gain.low)} to ${signed(gain.high)}` },
    s("line", { class: "zero", x1: x(0), x2: x(0), y1: 1, y2: 19 }),
    s("line", { class: "reach", x1: x(gain.low), x2: x(gain.high), y1: 10, y2: 10 }),
    s("circle", { cx: x(gain.value), cy: 10, r: 4 }));
}

/** Recent values, oldest first, as a line. */
export function spark(values, label) {
  const most = Math.max(...values, 1e-9);
  const at = (value, place) => `${(place / Math.max(1, values.length - 1)) * 200},${34 - (value / most) * 30}`;
  return s("svg", { viewBox: "0 0 200 36", preserveAspectRatio: "none", class: "spark", role: "img", "aria-label": label },
    s("polyline", { points: values.map(at).join(" ") }));
}

/** Shares of a whole as one bar with a legend: parts are {name, value, kind, href, title}. */
export function shares(parts, label) {
  const total = parts.reduce((sum, part) => sum + part.value, 0);
  return [
    h("div", { class: "shares", role: "img", "aria-label": `${label}: ${parts.map((p) => `${p.name} ${percent(p.value / total)}`).join(", ")}` },
      parts.filter((part) => part.value).map((part) => h("i", { class: part.kind, style: { "flex-grow": part.value }, title: part.name }))),
    h("ul", { class: "legend" }, parts.map((part) => h("li", { title: part.title },
      h("i", { class: part.kind }),
      part.href ? h("a", { href: part.href, "data-focus": `${label} ${part.name}` }, part.name) : h("span", {}, part.name),
      h("b", {}, count(part.value)), h("span", { class: "dim" }, total ? percent(part.value / total) : "")))),
  ];
}
