// Charts: the learning curve with intervals, one interval, a sparkline, shares of a total.
import { h, s } from "./dom.js";
import { count, percent, score, signed } from "./format.js";

const LEFT = 36, RIGHT = 14, TOP = 12, BOTTOM = 28;

function ticks(low, high, most) {
  const span = high - low || 1;
  const step = [1, 2, 5, 10].map((n) => n * 10 ** Math.floor(Math.log10(span / most))).find((n) => span / n <= most) ?? span;
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step / 1e6; at += step) found.push(Number(at.toPrecision(12)));
  return found;
}

function bounds(points) {
  const lows = points.map((p) => p.low), highs = points.map((p) => p.high);
  let low = Math.min(...lows), high = Math.max(...highs);
  if (points.every((p) => p.mean >= 0 && p.mean <= 1)) { low = 0; high = 1; }
  const margin = (high - low) * 0.05 || 0.5;
  return low === 0 && high === 1 ? [0, 1] : [low - margin, high + margin];
}

/** Mean score by version with its 95% interval. `marks`: version -> live or canary. */
export function curve(points, marks) {
  const [W, H] = innerWidth < 620 ? [360, 190] : [1000, 260];
  const [low, high] = bounds(points);
  const first = points[0].version, last = points.at(-1).version;
  const x = (version) => (first === last ? (LEFT + W - RIGHT) / 2 : LEFT + ((version - first) / (last - first)) * (W - LEFT - RIGHT));
  const y = (value) => TOP + (1 - (Math.min(high, Math.max(low, value)) - low) / (high - low)) * (H - TOP - BOTTOM);
  const caption = h("figcaption", { class: "dim" });
  const describe = (p) => {
    caption.replaceChildren(h("b", {}, `@${p.version}`), marks[p.version] ? ` ${marks[p.version]}` : "",
      `  mean ${score(p.mean)} · 95% ${score(p.low)} to ${score(p.high)} · ${count(p.count)} scored`);
  };
  const edge = [...points.map((p) => `${x(p.version)},${y(p.high)}`), ...points.toReversed().map((p) => `${x(p.version)},${y(p.low)}`)];
  const versionTicks = ticks(first, last, W / 70).filter(Number.isInteger);
  const few = points.length <= 80;
  const dots = points.filter((p) => few || marks[p.version]).map((p) => {
    const dot = s("circle", { class: `dot ${marks[p.version] ?? ""}`, cx: x(p.version), cy: y(p.mean), r: marks[p.version] ? 5 : 3.5 });
    const whisker = !few ? null : s("line", { class: "whisker", x1: x(p.version), x2: x(p.version), y1: y(p.low), y2: y(p.high) });
    return s("g", {}, whisker, dot);
  });
  const guide = s("line", { class: "guide", y1: TOP, y2: H - BOTTOM, visibility: "hidden" });
  const nearest = (at) => points.reduce((best, p) => (Math.abs(x(p.version) - at) < Math.abs(x(best.version) - at) ? p : best));
  const show = (p) => { guide.setAttribute("visibility", "visible"); guide.setAttribute("x1", x(p.version)); guide.setAttribute("x2", x(p.version)); describe(p); };
  let at = points.length - 1;
  const drawing = s("svg", {
    viewBox: `0 0 ${W} ${H}`, class: "curve", tabindex: 0, role: "img", "data-focus": "curve",
    "aria-label": `Mean score by version, from ${score(points[0].mean)} at version ${first} to ${score(points.at(-1).mean)} at version ${last}. Arrow keys read the points.`,
    on: {
      pointermove: (event) => {
        const box = drawing.getBoundingClientRect();
        show(nearest(((event.clientX - box.left) / box.width) * W));
      },
      keydown: (event) => {
        if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
        event.preventDefault();
        at = Math.max(0, Math.min(points.length - 1, at + (event.key === "ArrowLeft" ? -1 : 1)));
        show(points[at]);
      },
    },
  },
  ticks(low, high, 5).map((value) => s("g", {},
    s("line", { class: "grid", x1: LEFT, x2: W - RIGHT, y1: y(value), y2: y(value) }),
    s("text", { class: "axis", x: LEFT - 8, y: y(value) + 4, "text-anchor": "end" }, String(Number(value.toPrecision(3)))))),
  versionTicks.map((value) => s("text", { class: "axis", x: x(value), y: H - 9, "text-anchor": "middle" }, `@${value}`)),
  points.length > 1 ? s("polygon", { class: "band", points: edge.join(" ") }) : null,
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
