// Pieces that the views share: cards, sources of numbers, pairs of names and numbers.

import { Refused } from "./api.js";
import { el, put, visible } from "./dom.js";
import { amount, exact, instant } from "./units.js";
import { EVENTS, SOURCES, TONES, VERDICTS } from "./words.js";

// Most rows shown of a table; the rest is summed in a line.
export const ROWS_MAX = 24;
// The names of the API's tiers, as the pages show them.
export const TIERS = { exact: "exact", sampled: "emitter", governed: "governed", imported: "exact", census: "census" };

export const source = (name, ...more) =>
  el("span", { class: "source", title: SOURCES[name], "data-source": name }, el("b", {}, name), more);
export const section = (id, title, said) => {
  const body = el("div");
  const from = el("span", { class: "source" });
  return {
    node: el(
      "section",
      { class: "card", id, "aria-label": title },
      el("header", {}, el("h2", {}, title), said ? el("span", { class: "quiet" }, said) : null, from),
      body,
    ),
    body,
    from,
  };
};
export const sorry = (body, error) =>
  put(body, el("p", { class: "quiet" }, error instanceof Refused ? error.message : `This part failed: ${error.message}`));
export const pairs = (list) =>
  el(
    "dl",
    { class: "evidence" },
    list.filter(Boolean).map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]),
  );

// A table that scrolls by itself on narrow screens. `isNumber(column)`: which columns are right-aligned.
export const table = (heads, rows, { isNumber = (column) => column > 1, name = "" } = {}) =>
  el(
    "div",
    { class: "scroll" },
    el(
      "table",
      { class: `plain ${name}` },
      el(
        "thead",
        {},
        el(
          "tr",
          {},
          heads.map((head, column) => el("th", { scope: "col", class: isNumber(column) ? "number" : "" }, head)),
        ),
      ),
      el("tbody", {}, rows),
    ),
  );

// Live and free bytes of a row, on the scale of the largest.
export const liveAndFree = (live, free, most) =>
  el(
    "div",
    { class: "ladder inline" },
    [
      ["live", live],
      ["free", free],
    ].map(([name, value]) =>
      el("span", { class: `part ${name}`, title: `${name}: ${exact(value)}`, style: { width: `${((value / most) * 100).toFixed(3)}%` } }),
    ),
  );

// Where a process runs: container labels are in the answer only for processes in containers.
export function home(one) {
  const container = one.container ?? one.labels ?? {};
  const names = [container.namespace, container.pod, container.container ?? container.name].filter(
    (name) => typeof name === "string" && name,
  );
  return names.map(visible).join(" / ");
}

// What a process belongs to; empty for a plain command, which has no other name.
export function workloadOf(one) {
  const workload = one.workload;
  if (!workload?.name || workload.kind === "command") return "";
  const service = workload.service_name === workload.name ? "" : ` (${visible(workload.service_name)})`;
  const version = workload.service_version ? ` ${visible(workload.service_version)}` : "";
  return `${visible(workload.kind)} ${visible(workload.name)}${service}${version}`;
}

export function verdictOf(one) {
  const said = one.verdict;
  if (!said) return null;
  return typeof said === "string" ? { verdict: said } : said;
}

export function chip(verdict) {
  if (!verdict) return null;
  const word = VERDICTS[verdict.verdict] ?? { name: visible(verdict.verdict), text: "", tone: "info" };
  return el(
    "span",
    { class: `chip ${word.tone}`, title: verdict.summary ? visible(verdict.summary) : word.text },
    el("span", { "aria-hidden": "true" }, `${TONES[word.tone]} `),
    word.name,
  );
}

// What happened, in words.
export const what = (event) => EVENTS[event.kind] ?? visible(event.kind);

// Flight records as a list of links.
export const eventList = (events) =>
  el(
    "ul",
    { class: "events" },
    events.map((event) =>
      el(
        "li",
        { "data-event": event.id },
        el("span", { class: "quiet" }, `${instant(event.at_unix_s)} `),
        el("a", { href: `#/e/${event.id}` }, `${what(event)}: ${visible(event.process.comm)} ${event.process.pid}`),
        " ",
        amount(event.process.rss_bytes, "resident"),
        " ",
        chip(event.process.verdict),
        el("div", { class: "quiet" }, visible(event.summary)),
      ),
    ),
  );
