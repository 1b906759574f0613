// The ladder over time: live, pinned, trimmable and the rest stacked up to resident; extent and the whole process as lines.

import { el, put, svg } from "./dom.js";
import { parts } from "./ladder.js";
import { bytes, clock, exact, instant, moment, signed } from "./units.js";
import { STEPS } from "./words.js";

const HEIGHT = 260;
const LEFT = 64;
const BOTTOM = 24;
const TOP = 10;
const STACKED = ["live", "rest", "kept", "unseen", "pinned", "trimmable"];

// Round steps of an axis in bytes: powers of two times 1, 2.5 or 5 would mislead in IEC, so powers of two alone.
function ticks(most) {
  let step = 1;
  while (most / step > 5) step *= 2;
  const all = [];
  for (let value = 0; value <= most; value += step) all.push(value);
  return all;
}

// A chart that is redrawn in the same element, so that focus and position are kept. `onpick(index)` is called for a chosen point.
// `draw(points, marks)`: points are [{at_unix_s, rss_bytes, steps}], in ascending order; marks are the times that are compared.
export function chart(node, { onpick }) {
  const picture = svg("svg", { class: "chart", role: "img", tabindex: 0 });
  const reading = el("output", { class: "reading" });
  const drawing = { points: [], show: () => {}, nearest: () => 0 };
  // The time that is read off; null = the newest.
  let time = null;
  const place = () => {
    if (time === null) return drawing.points.length - 1;
    return closest(drawing.points, time);
  };
  const move = (index) => {
    const at = Math.max(0, Math.min(drawing.points.length - 1, index));
    time = at === drawing.points.length - 1 ? null : drawing.points[at].at_unix_s;
    drawing.show(at);
    return at;
  };
  picture.addEventListener("pointermove", (event) => move(drawing.nearest(event)));
  picture.addEventListener("click", (event) => onpick(move(drawing.nearest(event))));
  picture.addEventListener("keydown", (event) => {
    const all = drawing.points.length;
    const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -all, End: all }[event.key];
    if (by !== undefined) {
      event.preventDefault();
      move(place() + by);
    }
    if (event.key === "Enter") onpick(place());
  });
  return {
    draw(points, marks) {
      if (points.length < 2) {
        const text = points.length ? "Only one sample so far: the chart needs two." : "No samples of this time.";
        put(node, el("p", { class: "quiet" }, text));
        return;
      }
      // Removing and inserting it again would lose the focus.
      if (picture.parentNode !== node) put(node, picture, reading);
      Object.assign(drawing, { points }, plot(picture, reading, points, marks, node.clientWidth));
      drawing.show(place());
    },
  };
}

const closest = (points, at_unix_s) =>
  points.reduce((best, one, index) => (Math.abs(one.at_unix_s - at_unix_s) < Math.abs(points[best].at_unix_s - at_unix_s) ? index : best), 0);

// Draws points and marks; returns how a point is shown, and which one is nearest to a pointer.
function plot(picture, reading, points, marks, width) {
  // One unit of the drawing is one pixel, so that letters keep their shape at any width.
  const WIDTH = Math.max(300, width || 1000);
  const from = points[0].at_unix_s;
  const to = points.at(-1).at_unix_s;
  const most = Math.max(1, ...points.map((one) => Math.max(one.steps.extent_bytes, one.rss_bytes ?? 0)));
  const x = (at) => LEFT + ((at - from) / Math.max(1e-9, to - from)) * (WIDTH - LEFT - 8);
  const y = (value) => TOP + (1 - value / (most * 1.04)) * (HEIGHT - TOP - BOTTOM);
  const cuts = points.map((one) => parts(one.steps));
  // A gap in the record is a gap in the chart: points further apart than this are not connected.
  const usual = median(points.slice(1).map((one, index) => one.at_unix_s - points[index].at_unix_s));
  const runs = [];
  points.forEach((one, index) => {
    if (index === 0 || one.at_unix_s - points[index - 1].at_unix_s > usual * 4) runs.push([]);
    runs.at(-1).push(index);
  });

  const low = points.map(() => 0);
  const areas = STACKED.map((name) => {
    const d = runs
      .map((run) => {
        const upper = run.map((i) => `${x(points[i].at_unix_s).toFixed(1)},${y(low[i] + cuts[i][name]).toFixed(1)}`);
        const lower = run.map((i) => `${x(points[i].at_unix_s).toFixed(1)},${y(low[i]).toFixed(1)}`).reverse();
        return `M${upper.join("L")}L${lower.join("L")}Z`;
      })
      .join("");
    points.forEach((_, i) => {
      low[i] += cuts[i][name];
    });
    return cuts.some((cut) => cut[name] > 0) ? svg("path", { class: `area ${name}`, d }) : null;
  });
  const line = (name, value) =>
    svg("path", {
      class: `line ${name}`,
      fill: "none",
      d: runs
        .map((run) => `M${run.map((i) => `${x(points[i].at_unix_s).toFixed(1)},${y(value(points[i])).toFixed(1)}`).join("L")}`)
        .join(""),
    });

  const long = to - from > 86400 * 0.9;
  const grid = ticks(most).map((value) => [
    svg("line", { class: "grid", x1: LEFT, x2: WIDTH - 8, y1: y(value), y2: y(value) }),
    svg("text", { class: "tick", x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, value ? bytes(value) : "0"),
  ]);
  const times = (WIDTH < 560 ? [0, 1] : [0, 0.25, 0.5, 0.75, 1]).map((share) => {
    const at = from + (to - from) * share;
    return svg(
      "text",
      { class: "tick", x: x(at), y: HEIGHT - 6, "text-anchor": share === 0 ? "start" : share === 1 ? "end" : "middle" },
      long ? moment(at) : clock(at),
    );
  });
  const cursor = svg("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
  const marked = marks.map((at, order) =>
    at >= from && at <= to
      ? [
          svg("line", { class: "mark", x1: x(at), x2: x(at), y1: TOP, y2: HEIGHT - BOTTOM }),
          // At the right edge the letter stands before its line.
          x(at) > WIDTH - 24
            ? svg("text", { class: "mark", x: x(at) - 4, y: TOP + 12, "text-anchor": "end" }, "AB"[order])
            : svg("text", { class: "mark", x: x(at) + 4, y: TOP + 12 }, "AB"[order]),
        ]
      : null,
  );
  const patterns = svg(
    "defs",
    {},
    svg(
      "pattern",
      { id: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
      svg("rect", { class: "ground pinned", width: 6, height: 6 }),
      svg("rect", { class: "ink", width: 1.6, height: 6 }),
    ),
    svg(
      "pattern",
      { id: "dots", width: 6, height: 6, patternUnits: "userSpaceOnUse" },
      svg("rect", { class: "ground trimmable", width: 6, height: 6 }),
      svg("circle", { class: "ink", cx: 3, cy: 3, r: 1.1 }),
    ),
  );
  picture.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
  picture.setAttribute("aria-label", summary(points));
  put(
    picture,
    patterns,
    grid,
    areas,
    line("extent", (one) => one.steps.extent_bytes),
    points.some((one) => one.rss_bytes) ? line("rss", (one) => one.rss_bytes ?? 0) : null,
    times,
    marked,
    cursor,
  );
  const show = (at) => {
    const one = points[at];
    cursor.setAttribute("x1", x(one.at_unix_s));
    cursor.setAttribute("x2", x(one.at_unix_s));
    cursor.setAttribute("visibility", "visible");
    const cut = cuts[at];
    put(
      reading,
      el("b", {}, instant(one.at_unix_s)),
      ` extent ${bytes(one.steps.extent_bytes)}`,
      STACKED.filter((name) => cut[name] > 0).map((name) =>
        el("span", { title: exact(cut[name]) }, el("span", { class: `swatch ${name}` }), `${STEPS[name].name} ${bytes(cut[name])}`),
      ),
      one.rss_bytes ? el("span", {}, `process ${bytes(one.rss_bytes)}`) : null,
    );
  };
  const nearest = (event) => {
    const box = picture.getBoundingClientRect();
    const share = (((event.clientX - box.left) / box.width) * WIDTH - LEFT) / (WIDTH - LEFT - 8);
    return closest(points, from + share * (to - from));
  };
  return { show, nearest };
}

function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.floor(sorted.length / 2)] ?? 0;
}

function summary(points) {
  const [first, last] = [points[0], points.at(-1)];
  const change = (key) =>
    first.steps[key] === null || last.steps[key] === null ? "not known" : signed(last.steps[key] - first.steps[key]);
  return `From ${moment(first.at_unix_s)} to ${moment(last.at_unix_s)}: resident now ${bytes(last.steps.resident_bytes)} (${change("resident_bytes")}), live ${bytes(last.steps.live_bytes)} (${change("live_bytes")}), pinned ${bytes(last.steps.pinned_bytes)} (${change("pinned_bytes")}), trimmable ${bytes(last.steps.trimmable_bytes)} (${change("trimmable_bytes")})`;
}
