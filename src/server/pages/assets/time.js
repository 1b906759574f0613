// The ladder of a process over time, and what changed between two times.

import * as api from "./api.js";
import { chart } from "./chart.js";
import { el, put, visible } from "./dom.js";
import { stepsOf } from "./ladder.js";
import { ROWS_MAX, sorry, source, table } from "./parts.js";
import { stackCell } from "./stacks.js";
import { amount, bytes, count, duration, exact, instant, signed } from "./units.js";

// Points requested for the time axis: one per two or three pixels of a wide screen.
const POINTS = 400;
const SPANS = [
  ["1h", 3600],
  ["6h", 21600],
  ["24h", 86400],
  ["7d", 604800],
];

export function overTime(part, { pid, signal, settings, set }) {
  let points = [];
  // The times that are compared, at most two, in ascending order.
  let marks = [];
  let span = SPANS.find(([name]) => name === settings.get("span")) ?? SPANS[0];
  const picture = el("div");
  const plot = chart(picture, {
    onpick: (index) => {
      const at = points[index].at_unix_s;
      marks = marks.length >= 2 ? [at] : [...marks, at].sort((a, b) => a - b);
      draw();
      compare();
    },
  });
  const difference = el("div", { "aria-live": "polite" });
  const spans = el(
    "div",
    { class: "switch", role: "group", "aria-label": "Time shown" },
    SPANS.map((one) =>
      el(
        "button",
        {
          type: "button",
          "data-span": one[0],
          "aria-pressed": String(one === span),
          onclick: () => {
            span = one;
            set("span", one[0]);
            for (const button of spans.children) button.setAttribute("aria-pressed", String(button.dataset.span === one[0]));
            marks = [];
            compare();
            refresh();
          },
        },
        one[0],
      ),
    ),
  );
  put(
    part.body,
    el(
      "div",
      { class: "tools" },
      spans,
      el(
        "span",
        { class: "quiet" },
        "solid areas: resident; dashed: extent; dotted: the process. Click two times, or press Enter, to compare them.",
      ),
    ),
    picture,
    difference,
  );

  const draw = () => plot.draw(points, marks);
  const compare = () => drawDifference(difference, marks, { pid, signal, by: settings.get("by") ?? "live" });

  // The chart is drawn for its present width.
  let width = 0;
  const observer = new ResizeObserver(() => {
    if (picture.clientWidth === width) return;
    width = picture.clientWidth;
    if (points.length) draw();
  });
  observer.observe(part.body);
  signal.addEventListener("abort", () => observer.disconnect());

  async function refresh() {
    let got;
    try {
      got = await api.history(pid, { from: -span[1], points: POINTS }, signal);
    } catch (error) {
      if (error.name === "AbortError") throw error;
      sorry(picture, error);
      return;
    }
    points = pointsOf(got);
    put(part.from, source("history", `${count(points.length)} samples`));
    draw();
  }
  return { refresh };
}

// The answer of `/history`, which is in columns, as points.
function pointsOf(got) {
  const columns = Object.keys(got).filter(
    (key) => key !== "at_unix_s" && Array.isArray(got[key]) && got[key].length === got.at_unix_s.length,
  );
  return got.at_unix_s.map((at_unix_s, index) => {
    const row = Object.fromEntries(columns.map((key) => [key, got[key][index]]));
    return {
      at_unix_s,
      rss_bytes: row.rss_bytes ?? null,
      steps: { ...stepsOf(row), extent_bytes: row.extent_bytes ?? 0, resident_bytes: row.resident_bytes ?? 0 },
    };
  });
}

const STEP_NAMES = [
  ["rss_bytes", "Process resident"],
  ["extent_bytes", "Heap extent"],
  ["resident_bytes", "Heap resident"],
  ["live_bytes", "Live"],
  ["pinned_bytes", "Pinned"],
  ["trimmable_bytes", "Trimmable"],
  ["kept_bytes", "Kept"],
];

function drawDifference(node, marks, { pid, signal, by }) {
  if (marks.length < 2) {
    put(node, marks.length ? el("p", { class: "quiet" }, `A is ${instant(marks[0])}; choose another time.`) : null);
    return;
  }
  const [a, b] = marks;
  api.diff(pid, { from: a, to: b, by }, signal).then(
    (got) => {
      const rows = STEP_NAMES.filter(([key]) => key in got.delta_bytes).map(([key, name]) =>
        el(
          "tr",
          { "data-step": key },
          el("th", { scope: "row" }, name),
          [got.from[key], got.to[key]].map((value) => el("td", { class: "number" }, amount(value))),
          el(
            "td",
            { class: "number" },
            el("data", { value: got.delta_bytes[key], title: exact(got.delta_bytes[key]) }, signed(got.delta_bytes[key])),
          ),
        ),
      );
      put(
        node,
        el("h3", {}, `Difference over ${duration(got.to.at_unix_s - got.from.at_unix_s)}`),
        table([" ", `A ${instant(got.from.at_unix_s)}`, `B ${instant(got.to.at_unix_s)}`, "Change"], rows, {
          isNumber: (column) => column > 0,
          name: "difference",
        }),
        got.stacks
          ? stackDifference(got.stacks)
          : el("p", { class: "quiet" }, "No comparison by stack: there are no profiles of these two times."),
      );
    },
    (error) => error.name === "AbortError" || put(node, el("p", { class: "quiet" }, error.message)),
  );
}

function stackDifference(got) {
  const left = got.stacks_changed - Math.min(got.stacks.length, ROWS_MAX);
  return [
    el("h3", {}, `By stack, ${visible(got.by)}: ${bytes(got.old_total)} then, ${bytes(got.new_total)} by now`),
    el(
      "table",
      { class: "plain stacktable" },
      el(
        "tbody",
        {},
        got.stacks
          .slice(0, ROWS_MAX)
          .map((row) =>
            el(
              "tr",
              {},
              el("td", { class: "number" }, el("data", { value: row.delta, title: exact(row.delta) }, signed(row.delta))),
              el("td", {}, stackCell(row.frames, row.title)),
            ),
          ),
      ),
    ),
    left > 0 ? el("p", { class: "quiet" }, `and ${count(left)} stacks more`) : null,
  ];
}
