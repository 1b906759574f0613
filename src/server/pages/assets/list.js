// All processes with their ladders: sortable, with a filter.

import * as api from "./api.js";
import { el, put, visible } from "./dom.js";
import { ORDER, bar, legend, parts, stepsOf, total } from "./ladder.js";
import { chip, home, verdictOf, eventList } from "./parts.js";
import { amount, bytes, count, duration, interval, percent } from "./units.js";
import { COLUMNS, VERDICTS } from "./words.js";

// Rows drawn first, more than fit a screen; the rest follows once these are shown.
const ROWS_FIRST = 50;
// Most processes named in the line of those that need attention.
const NEED_MAX = 6;
// The filter for all of them, typed or set by the line's last link.
const NEED = "needs-a-look";
// Events shown next to the list.
const EVENTS_MAX = 8;

const STATES = {
  waiting: "no census yet",
  no_heap: "no malloc heap that can be read",
  unreadable: "cannot be read",
};

const SORTS = [
  { key: "name", name: "Process", text: true },
  { key: "verdict", name: "Verdict", text: true },
  { key: "extent", name: "Where the heap's bytes are", title: "Extent ≥ resident ≥ live; sorted by extent" },
  { key: "rss", name: "Resident", title: COLUMNS.rss },
  { key: "heap", name: "Heap", title: COLUMNS.heap },
  { key: "live", name: "Live", title: COLUMNS.live },
  { key: "pinned", name: "Pinned", title: COLUMNS.pinned },
  { key: "trimmable", name: "Trimmable", title: COLUMNS.trimmable },
  { key: "ratio", name: "Free share", title: COLUMNS.ratio },
  { key: "age", name: "Age", title: COLUMNS.age },
];

// The values by which rows are sorted and filtered.
function figures(one) {
  const steps = one.ladder ? stepsOf(one.ladder) : total(one.heaps ?? []);
  const ages = (one.censuses ?? []).filter((census) => census.level !== "top").map((census) => census.age_s);
  const verdict = verdictOf(one);
  return {
    steps,
    verdict,
    name: visible(one.comm),
    home: home(one),
    extent: steps.extent_bytes,
    rss: one.rss_bytes,
    heap: steps.resident_bytes,
    live: steps.live_bytes ?? steps.live_bytes_est,
    pinned: steps.pinned_bytes,
    trimmable: steps.trimmable_bytes,
    ratio: one.fragmentation_ratio ?? null,
    age: ages.length ? Math.min(...ages) : null,
  };
}

// How much a process needs attention: 2 = its verdict is bad, 1 = a warning, 0 = neither.
function urgency(own) {
  return { bad: 2, warn: 1 }[VERDICTS[own.verdict?.verdict]?.tone] ?? 0;
}

export function open({ main, settings, signal }) {
  const rows = new Map();
  let sort = SORTS.some((one) => one.key === settings.get("sort")) ? settings.get("sort") : "rss";
  let rising = settings.get("order") === "rising";
  let scale = settings.get("scale") === "share" ? "share" : "bytes";
  let last = null;

  const filter = el("input", {
    type: "search",
    id: "filter",
    placeholder: "Filter by name, pid, container, verdict",
    "aria-label": "Filter",
    autocomplete: "off",
    spellcheck: "false",
    value: settings.get("q") ?? "",
    oninput: () => {
      keep();
      draw();
    },
  });
  const scales = el(
    "div",
    { class: "switch", role: "group", "aria-label": "Scale of the bars" },
    ["bytes", "share"].map((name) =>
      el(
        "button",
        {
          type: "button",
          "data-scale": name,
          "aria-pressed": String(name === scale),
          title: name === "bytes" ? "All bars on one scale" : "Each bar over the full width",
          onclick: () => {
            scale = name;
            for (const one of scales.children) one.setAttribute("aria-pressed", String(one.dataset.scale === scale));
            keep();
            draw();
          },
        },
        name === "bytes" ? "One scale" : "Shares",
      ),
    ),
  );
  const shown = el("span", { class: "quiet", id: "shown", role: "status" });
  const heads = el("tr");
  const body = el("tbody");
  const node = el("section", { class: "card hero", "aria-label": "The machine" });
  const phoneSort = el(
    "select",
    { "aria-label": "Sort by", onchange: () => order(phoneSort.value) },
    SORTS.map((one) => el("option", { value: one.key }, `Sort by ${one.key === "extent" ? "extent" : one.name.toLowerCase()}`)),
  );
  const quiet = el("div");
  const happened = el("section", { class: "card", hidden: true, "aria-label": "Recent events" });

  function keep() {
    const values = new URLSearchParams();
    if (filter.value) values.set("q", filter.value);
    if (sort !== "rss") values.set("sort", sort);
    if (rising) values.set("order", "rising");
    if (scale !== "bytes") values.set("scale", scale);
    history.replaceState(null, "", values.size ? `#/?${values}` : "#/");
  }

  function order(key) {
    const head = SORTS.find((one) => one.key === key);
    if (sort === key) rising = !rising;
    else [sort, rising] = [key, Boolean(head.text)];
    keep();
    drawHeads();
    draw();
  }

  function drawHeads() {
    phoneSort.value = sort;
    put(
      heads,
      SORTS.map((head) =>
        el(
          "th",
          {
            scope: "col",
            class: head.text || head.key === "extent" ? "" : "number",
            "aria-sort": sort === head.key ? (rising ? "ascending" : "descending") : null,
          },
          el(
            "button",
            {
              type: "button",
              "data-sort": head.key,
              title: head.title,
              onclick: () => {
                order(head.key);
                heads.querySelector(`[data-sort="${head.key}"]`).focus();
              },
            },
            head.name,
            el("span", { class: "arrow", "aria-hidden": "true" }, sort === head.key ? (rising ? " ▲" : " ▼") : ""),
          ),
        ),
      ),
    );
  }

  function makeRow(pid) {
    const row = { cells: {}, tr: el("tr", { "data-pid": pid }), bar: el("div") };
    const cell = (name, label) => (row.cells[name] = el("td", { class: `c-${name}`, "data-label": label }));
    for (const head of SORTS) row.tr.append(cell(head.key, head.key === "extent" ? "" : head.name));
    row.cells.extent.append(row.bar);
    row.note = el("span", { class: "quiet" });
    row.cells.extent.append(row.note);
    row.link = el("a", { href: `#/p/${pid}` });
    row.home = el("span", { class: "home" });
    row.cells.name.append(row.link, el("span", { class: "pid" }, pid), row.home);
    return row;
  }

  function fillRow(row, one, own, scaleBytes) {
    row.link.textContent = own.name || "(no name)";
    row.home.textContent = own.home;
    put(row.cells.verdict, chip(own.verdict));
    const note = one.state === "watched" ? "" : `${STATES[one.state] ?? visible(one.state)}${one.reason ? `: ${visible(one.reason)}` : ""}`;
    row.note.textContent = note;
    row.bar.hidden = !own.extent;
    if (own.extent) bar(row.bar, own.steps, scale === "share" ? own.extent : scaleBytes);
    put(row.cells.rss, amount(own.rss));
    put(row.cells.heap, amount(own.extent ? own.heap : null));
    put(
      row.cells.live,
      own.steps.live_bytes_est
        ? ["≈ ", amount(own.live, `an estimate, ${interval(own.steps.live_bytes_stderr)}`)]
        : amount(own.extent ? own.live : null),
    );
    put(row.cells.pinned, amount(own.extent ? own.pinned : null));
    put(row.cells.trimmable, amount(own.extent ? own.trimmable : null));
    put(
      row.cells.ratio,
      own.ratio === null ? amount(null) : el("data", { value: own.ratio, title: own.ratio.toFixed(4) }, percent(own.ratio)),
    );
    put(row.cells.age, el("span", { title: "time since the newest census" }, duration(own.age)));
  }

  // `most`: rows at most.
  function draw(most = Infinity) {
    if (!last) return;
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const all = last.processes.map((one) => ({ one, own: figures(one) }));
    const chosen = all.filter(({ one, own }) => {
      const text = `${own.name} ${one.pid} ${own.home} ${own.verdict?.verdict ?? ""} ${one.state} ${urgency(own) ? NEED : ""}`.toLowerCase();
      return words.every((word) => text.includes(word));
    });
    const value = ({ own }) => (sort === "verdict" ? (own.verdict?.verdict ?? "") : own[sort]);
    chosen.sort((a, b) => {
      const [x, y] = [value(a), value(b)];
      // Unknown values come last, in either order.
      if (x === null || y === null) return (x === null) - (y === null) || a.one.pid - b.one.pid;
      const less = typeof x === "string" ? x.localeCompare(y) : x - y;
      return (rising ? less : -less) || a.one.pid - b.one.pid;
    });
    const scaleBytes = Math.max(1, ...chosen.map(({ own }) => own.extent));
    const wanted = new Set(chosen.map(({ one }) => one.pid));
    for (const [pid, row] of rows)
      if (!wanted.has(pid)) {
        row.tr.remove();
        rows.delete(pid);
      }
    chosen.slice(0, most).forEach(({ one, own }, index) => {
      let row = rows.get(one.pid);
      if (!row) rows.set(one.pid, (row = makeRow(one.pid)));
      fillRow(row, one, own, scaleBytes);
      if (body.children[index] !== row.tr) body.insertBefore(row.tr, body.children[index] ?? null);
    });
    shown.textContent = words.length ? `${count(chosen.length)} of ${count(all.length)} processes` : `${count(all.length)} processes`;
    drawMachine(all);
  }

  function drawMachine(all) {
    // Parts are added up process by process: memory that was not examined is a part of its own, and hides nothing of the others.
    const cut = all
      .map(({ own }) => parts(own.steps))
      .reduce(
        (sum, one) => Object.fromEntries(ORDER.map((name) => [name, sum[name] + one[name]])),
        Object.fromEntries(ORDER.map((name) => [name, 0])),
      );
    const merged = { extent_bytes: ORDER.reduce((sum, name) => sum + cut[name], 0), cut };
    const looked = all.filter(({ own }) => own.extent && own.live !== null);
    const rss = all.reduce((sum, { own }) => sum + own.rss, 0);
    const withHeap = all.filter(({ own }) => own.extent).length;
    const machineBar = el("div", { class: "tall" });
    bar(machineBar, merged, merged.extent_bytes, true);
    const need = all
      .filter(({ own }) => urgency(own))
      .sort((a, b) => urgency(b.own) - urgency(a.own) || b.own.rss - a.own.rss || a.one.pid - b.one.pid);
    put(
      node,
      el("h1", {}, "Memory of this machine's processes"),
      el(
        "div",
        { class: "tiles" },
        tile("Resident", amount(rss), `${count(all.length)} watched processes; pages that they share count in each`),
        tile("In malloc heaps", amount(merged.extent_bytes - cut.absent), `${count(withHeap)} heaps, extent ${bytes(merged.extent_bytes)}`),
        tile(
          "Live, resident",
          amount(cut.live),
          looked.length < withHeap ? `of ${count(looked.length)} examined so far` : "blocks in use",
        ),
        tile("Pinned", amount(cut.pinned), "free, on pages with live bytes"),
        tile("Trimmable now", amount(cut.trimmable), "whole free pages"),
      ),
      machineBar,
      legend(merged),
      need.length
        ? el(
            "p",
            { class: "need" },
            `${count(need.length)} ${need.length === 1 ? "process needs" : "processes need"} attention: `,
            need
              .slice(0, NEED_MAX)
              .map(({ one, own }) => [el("a", { href: `#/p/${one.pid}` }, own.name || one.pid), " ", chip(own.verdict), " "]),
            need.length > NEED_MAX
              ? el(
                  "button",
                  {
                    type: "button",
                    class: "more",
                    onclick: () => {
                      filter.value = NEED;
                      keep();
                      draw();
                    },
                  },
                  `and ${count(need.length - NEED_MAX)} more`,
                )
              : null,
          )
        : null,
      last.processes_over_limit > 0
        ? el(
            "p",
            { class: "notice" },
            `${count(last.processes_over_limit)} more processes match the rules, but exceed discovery.processes_max and are not watched.`,
          )
        : null,
      last.attribution_unavailable
        ? el(
            "p",
            { class: "notice", id: "no-stacks" },
            `Allocations are not attributed to call stacks here, only the census works: ${visible(last.attribution_unavailable)}`,
          )
        : null,
      looked.length < withHeap
        ? el(
            "p",
            { class: "quiet" },
            `${count(withHeap - looked.length)} heaps were not examined yet: their contents count as “not examined”.`,
          )
        : null,
      el("p", { class: "quiet source" }, "Source: census of each process, and the kernel's resident bytes."),
    );
  }

  function drawEvents(got) {
    happened.hidden = !got?.events.length;
    if (got?.events.length)
      put(
        happened,
        el(
          "header",
          {},
          el("h2", {}, "Recent events"),
          el("span", { class: "quiet" }, "recorded when a process was killed, came near its limit or ended"),
        ),
        eventList(got.events),
        got.events_left_out ? el("p", { class: "quiet" }, `and ${count(got.events_left_out)} more this week`) : null,
      );
  }

  function tile(name, value, note) {
    return el(
      "div",
      { class: "tile", "data-tile": name },
      el("span", { class: "name" }, name),
      el("span", { class: "value" }, value),
      el("span", { class: "quiet" }, note),
    );
  }

  drawHeads();
  put(
    main,
    node,
    el(
      "section",
      { class: "card", "aria-label": "Processes" },
      el("div", { class: "tools" }, filter, el("label", { class: "phone" }, phoneSort), scales, shown),
      el(
        "div",
        { class: "scroll" },
        el(
          "table",
          { class: "processes" },
          el("caption", { class: "hidden" }, "Processes with the ladder of their heaps"),
          el("thead", {}, heads),
          body,
        ),
      ),
      quiet,
    ),
    happened,
  );

  const keys = (event) => {
    if (event.key === "/" && !/^(INPUT|SELECT|TEXTAREA)$/.test(document.activeElement?.tagName ?? "")) {
      event.preventDefault();
      filter.focus();
    }
  };
  addEventListener("keydown", keys, { signal });
  document.title = "fragprof";

  return {
    settings(values) {
      if (values.get("q") !== null && values.get("q") !== filter.value) {
        filter.value = values.get("q");
        draw();
      }
    },
    async refresh() {
      const events = api.events({ limit: EVENTS_MAX }, signal).catch(() => null);
      const isFirst = last === null;
      last = await api.processes(signal);
      // The visible rows do not wait for the others.
      draw(isFirst ? ROWS_FIRST : Infinity);
      if (isFirst && last.processes.length > ROWS_FIRST) setTimeout(() => signal.aborted || draw());
      events.then(drawEvents);
      put(
        quiet,
        last.processes.length
          ? null
          : el(
              "p",
              { class: "notice" },
              last.sequence === 0
                ? "The agent has just started: there is no census yet."
                : "No process matches the agent's rules (discovery in agent.toml).",
            ),
      );
      return last.age_s > 60
        ? `the census thread hangs: it last published ${duration(last.age_s)} ago`
        : `updated ${duration(last.age_s)} ago`;
    },
  };
}
