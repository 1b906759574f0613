// Call stacks as a flame graph and as a table, by kind of value.

import { el, put, visible } from "./dom.js";
import * as flame from "./flame.js";
import { ROWS_MAX, TIERS, sorry, source } from "./parts.js";
import { amount, bytes, clock, count, duration, exact, percent } from "./units.js";
import { KINDS } from "./words.js";

// Longest recording that is requested here, in seconds.
const RECORD_S = 10;

// The title function and its callers. `title` is its index: before it are the allocator's own.
export const stackCell = (names, title = 0) => [
  el("b", { title: names.slice(0, title).map(visible).join(" ← ") || null }, visible(names[title] ?? "[no stack]")),
  names.length > title + 1
    ? el(
        "div",
        { class: "path" },
        names
          .slice(title + 1)
          .map(visible)
          .join(" ← "),
      )
    : null,
];

// `ask({by, …})` returns the agent's answer. `seconds_max` is the longest recording allowed; null = none.
export function callStacks(part, { ask, settings, set, seconds_max = null, absent = "" }) {
  let kind = KINDS.find((one) => one.key === settings.get("by")) ?? KINDS[0];
  let chosen = settings.get("by") === kind.key;
  let shown = "";
  const area = el("div");
  const kinds = el(
    "div",
    { class: "switch", role: "group", "aria-label": "By what" },
    KINDS.map((one) =>
      el(
        "button",
        {
          type: "button",
          "data-by": one.key,
          title: one.text,
          "aria-pressed": String(one === kind),
          onclick: () => {
            chosen = true;
            choose(one);
            set("by", one.key);
            shown = "";
            load().catch((error) => error.name === "AbortError" || sorry(area, error));
          },
        },
        one.name,
      ),
    ),
  );
  function choose(one) {
    kind = one;
    for (const button of kinds.children) button.setAttribute("aria-pressed", String(button.dataset.by === one.key));
  }

  const seconds = Math.min(RECORD_S, seconds_max ?? 0);
  const record = el(
    "button",
    {
      hidden: !seconds,
      type: "button",
      class: "record",
      title: "Records every allocation and free with its stack, for some seconds. Costs the process about 2 µs per malloc/free pair meanwhile.",
    },
    `Record ${seconds} s`,
  );
  put(part.body, el("div", { class: "tools" }, kinds, record), area);

  // `more` are parameters in addition to the kind: `seconds` requests a recording, which is shown until another is chosen. Returns whether
  // there was anything to show.
  async function load(more = {}) {
    const wanted = kind;
    let got;
    try {
      got = await ask({ by: wanted.key, ...more });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      put(area, el("p", { class: "quiet" }, error.message), absent ? el("p", { class: "quiet" }, absent) : null);
      return false;
    }
    if (wanted === kind) draw(got);
    return got.total !== 0;
  }

  // The first measured kind that has anything to show, or the first, unless the user chooses meanwhile.
  async function loadFirst(measured) {
    for (const one of [...measured, ...measured.slice(0, 1)]) {
      choose(one);
      if ((await load()) || chosen) return;
    }
  }

  function draw(got) {
    const { tree } = got;
    const unit = got.unit === "count" ? count : bytes;
    const tier = TIERS[got.mode] ?? visible(got.mode);
    put(part.from, source(tier, `${clock(got.at_unix_s)}, over ${duration(got.duration_s)}`));
    const said = got.source ? el("p", { class: "quiet" }, `Source: ${visible(got.source)}.`) : null;
    const graph = el("div");
    const { rows, more } = flame.leaves(tree.root, ROWS_MAX);
    const lost = Object.entries(got.losses).filter(([, value]) => value > 0);
    put(
      area,
      el(
        "p",
        { class: "quiet" },
        `${kind.name}: ${kind.text}. Total `,
        el("data", { value: got.total, title: got.unit === "count" ? "" : exact(got.total), class: "total" }, unit(got.total)),
        ".",
      ),
      el("p", { class: "quiet" }, `Coverage: ${visible(got.coverage)}.`),
      el(
        "p",
        { class: lost.length ? "notice" : "quiet" },
        lost.length
          ? `Lost: ${lost.map(([name, value]) => `${visible(name).replaceAll("_", " ")} ${count(value)}`).join(", ")}`
          : "Losses: none.",
      ),
      said,
      got.doubts.map((text) => el("p", { class: "notice" }, `In doubt: ${visible(text)}`)),
      got.limits.map((text) => el("p", { class: "quiet" }, visible(text))),
      graph,
      tree.pruned_nodes
        ? el(
            "p",
            { class: "quiet" },
            `${count(tree.pruned_nodes)} small frames were left out by the agent; their bytes are in their callers.`,
          )
        : null,
      el(
        "details",
        { open: innerWidth > 640 },
        el("summary", {}, "The same as a table"),
        el(
          "table",
          { class: "plain stacktable" },
          el(
            "tbody",
            {},
            rows.map((row) =>
              el(
                "tr",
                {},
                el("td", { class: "number" }, got.unit === "count" ? count(row.value) : amount(row.value)),
                el("td", { class: "number quiet" }, percent(row.value / Math.max(1, got.total), 1)),
                el("td", {}, stackCell(row.names, row.title)),
              ),
            ),
          ),
        ),
        more ? el("p", { class: "quiet" }, `and ${count(more)} stacks more`) : null,
      ),
    );
    flame.graph(graph, tree.root, { unit });
  }

  record.addEventListener("click", async () => {
    record.disabled = true;
    record.textContent = `Recording ${seconds} s…`;
    try {
      await load({ seconds });
    } catch {
      // Left for another page.
    }
    record.disabled = false;
    record.textContent = `Record ${seconds} s`;
  });

  return {
    async refresh(profiles) {
      const key = profiles.map((profile) => `${profile.mode}${profile.at_unix_s}`).join() || "none";
      if (key === shown) return;
      shown = key;
      // What none of the tiers at hand measured cannot be chosen.
      const measured = new Set(profiles.flatMap((profile) => profile.by));
      for (const button of kinds.children) button.disabled = measured.size > 0 && !measured.has(button.dataset.by);
      if (measured.size === 0 || chosen) await load();
      else await loadFirst(KINDS.filter((one) => measured.has(one.key)));
    },
  };
}
