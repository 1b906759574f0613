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

// `points`: [{at_unix_s, rss_bytes, steps}], rising. `marks`: the two times that are compared. `onpick(index)` is called for a chosen one.
export function draw(node, points, { marks = [], onpick } = {}) {
  if (points.length < 2) {
    put(
      node,
      el(
        "p",
        { class: "quiet" },
        points.length ? "One sample so far: the picture begins with the second." : "No samples kept of this time.",
      ),
    );
    return;
  }
  // One unit of the drawing is one pixel, so that letters keep their shape at any width.
  const WIDTH = Math.max(300, node.clientWidth || 1000);
  const from = points[0].at_unix_s;
  const to = points.at(-1).at_unix_s;
  const most = Math.max(1, ...points.map((one) => Math.max(one.steps.extent_bytes, one.rss_bytes ?? 0)));
  const x = (at) => LEFT + ((at - from) / Math.max(1e-9, to - from)) * (WIDTH - LEFT - 8);
  const y = (value) => TOP + (1 - value / (most * 1.04)) * (HEIGHT - TOP - BOTTOM);
  const cuts = points.map((one) => parts(one.steps));
  // A hole in the record is a hole in the picture: neighbours further apart than this are not joined.
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
  const marked = marks.map((index, order) =>
    points[index]
      ? [
          svg("line", { class: "mark", x1: x(points[index].at_unix_s), x2: x(points[index].at_unix_s), y1: TOP, y2: HEIGHT - BOTTOM }),
          svg("text", { class: "mark", x: x(points[index].at_unix_s) + 4, y: TOP + 12 }, "AB"[order]),
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
  const picture = svg(
    "svg",
    { class: "chart", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", tabindex: 0, "aria-label": summary(points) },
    patterns,
    grid,
    areas,
    line("extent", (one) => one.steps.extent_bytes),
    points.some((one) => one.rss_bytes) ? line("rss", (one) => one.rss_bytes ?? 0) : null,
    times,
    marked,
    cursor,
  );
  const reading = el("output", { class: "reading" });

  let at = points.length - 1;
  const show = (index) => {
    at = Math.max(0, Math.min(points.length - 1, index));
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
    const wanted = from + ((((event.clientX - box.left) / box.width) * WIDTH - LEFT) / (WIDTH - LEFT - 8)) * (to - from);
    let best = 0;
    points.forEach((one, index) => {
      if (Math.abs(one.at_unix_s - wanted) < Math.abs(points[best].at_unix_s - wanted)) best = index;
    });
    return best;
  };
  picture.addEventListener("pointermove", (event) => show(nearest(event)));
  picture.addEventListener("click", (event) => {
    show(nearest(event));
    onpick?.(at);
  });
  picture.addEventListener("focus", () => show(at));
  picture.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -points.length, End: points.length }[event.key];
    if (by !== undefined) {
      event.preventDefault();
      show(at + by);
    }
    if (event.key === "Enter") onpick?.(at);
  });
  put(node, picture, reading);
  show(points.length - 1);
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
