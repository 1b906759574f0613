// The facts of a process: the verdict with its numbers, and where the memory is.

import { el, put, visible } from "./dom.js";
import { bar, legend, stepsOf } from "./ladder.js";
import { chip, home, pairs, source, verdictOf, workloadOf } from "./parts.js";
import { amount, bytes, count, duration, exact, interval, percent, signed } from "./units.js";
import { NOT_MALLOC, VERDICTS } from "./words.js";

// What earlier predictions of a remedy were worth, in words; empty if it was never applied and checked.
function kept(records, remedy) {
  const record = records?.find((one) => one.action === remedy.action);
  if (!record) return "";
  const low = percent(record.saved_ratio_min);
  const high = percent(record.saved_ratio_max);
  const shares = low === high ? low : `${low} to ${high}`;
  return (
    ` Checked ${record.checked === 1 ? "once" : `${count(record.checked)} times`} on ${record.of_workload ? "this workload" : "other workloads of this node"}:` +
    ` it saved ${shares} of ${record.at_most ? "the upper limit" : "what was predicted"}.`
  );
}

// The verdict in words, with the numbers it rests on. `said` is the agent's detailed verdict, null = none.
export function drawVerdict(head, one, said) {
  const short = verdictOf(one);
  const verdict = said ?? short;
  const steps = one.ladder ? stepsOf(one.ladder) : null;
  const limit = one.memory_limit;
  put(
    head,
    el(
      "div",
      { class: "head" },
      el("h1", {}, visible(one.comm) || "(no name)"),
      verdict ? chip(verdict) : null,
      verdict?.confidence ? el("span", { class: "quiet" }, `confidence ${visible(verdict.confidence)}`) : null,
    ),
    el(
      "p",
      { class: "facts-line" },
      el("span", {}, `pid ${one.pid}`),
      el("span", {}, `uid ${one.uid}`),
      home(one) ? el("span", {}, home(one)) : null,
      workloadOf(one) ? el("span", {}, workloadOf(one)) : null,
      (one.heaps ?? []).map((heap) => el("span", {}, visible(heap.allocator))),
      one.state !== "watched"
        ? el("span", {}, `${visible(one.state).replace("_", " ")}${one.reason ? `: ${visible(one.reason)}` : ""}`)
        : null,
    ),
    verdict?.summary
      ? el("p", { class: "said" }, visible(verdict.summary))
      : el(
          "p",
          { class: "said quiet" },
          VERDICTS[verdict?.verdict]?.text ?? "No verdict yet: it comes with the first full census.",
        ),
    (said?.findings ?? [])
      .slice(1)
      .map((other) => el("p", { class: "quiet" }, "Also ", chip(other), ` (confidence ${visible(other.confidence)}): ${visible(other.summary)}`)),
    limit
      ? el(
          "p",
          { class: limit.used_ratio > 0.9 ? "notice" : "quiet" },
          `Its limit is ${bytes(limit.limit_bytes)}, of which ${percent(limit.used_ratio)} is used`,
          limit.seconds_to_limit_est != null ? `; at this growth it is reached in about ${duration(limit.seconds_to_limit_est)}` : "",
          limit.oom_kills ? `; ${count(limit.oom_kills)} killed there so far` : "",
          ".",
        )
      : null,
    one.unreached?.blocks
      ? el("p", { class: "notice" }, visible(one.unreached.summary), " Programs that hide pointers look the same.")
      : null,
    said || steps
      ? el(
          "div",
          { class: "columns" },
          el("div", {}, el("h3", {}, "The numbers it rests on"), evidence(one, said, steps)),
          said?.remedies?.length
            ? el(
                "div",
                {},
                el("h3", {}, "What would help"),
                el(
                  "ul",
                  { class: "remedies" },
                  said.remedies.map((remedy) =>
                    el(
                      "li",
                      {},
                      el(
                        "b",
                        {},
                        remedy.predicted_bytes === null
                          ? el("span", { class: "unknown", title: "not known" }, "?")
                          : [
                              remedy.at_most ? el("span", { title: "an upper limit: the actual saving is not known" }, "≤ ") : null,
                              amount(remedy.predicted_bytes, "predicted"),
                            ],
                      ),
                      el(
                        "span",
                        {},
                        visible(remedy.action),
                        el("span", { class: "quiet" }, ` (${visible(remedy.basis)})${kept(said.track_record, remedy)}`),
                      ),
                    ),
                  ),
                ),
              )
            : null,
          said?.unknowns?.length
            ? el(
                "div",
                {},
                el("h3", {}, "Not known"),
                el(
                  "ul",
                  { class: "doubts quiet" },
                  said.unknowns.map((text) => el("li", {}, visible(text))),
                ),
              )
            : null,
          said?.sources?.length
            ? el(
                "div",
                {},
                el("h3", {}, "Where the numbers come from"),
                el(
                  "ul",
                  { class: "doubts quiet" },
                  said.sources.map((one) => el("li", {}, el("b", {}, visible(one.figures)), `: ${visible(one.source)}`)),
                ),
              )
            : null,
        )
      : null,
    el("p", { class: "source" }, source("census"), one.growth ? source("history") : null),
  );
}

function evidence(one, said, steps) {
  const from = said?.evidence ?? { rss_bytes: one.rss_bytes, ...steps, fragmentation_ratio: one.fragmentation_ratio };
  const change = from.change ?? null;
  const growth = one.growth;
  return pairs([
    ["Process resident", amount(from.rss_bytes)],
    from.not_malloc_bytes !== undefined ? ["Outside malloc", amount(from.not_malloc_bytes)] : null,
    ["Heap extent", amount(from.extent_bytes)],
    ["Heap resident", amount(from.resident_bytes)],
    from.live_bytes_est != null
      ? ["Live, estimated", ["≈ ", amount(from.live_bytes_est), ` ${interval(from.live_bytes_stderr)}`]]
      : ["Live", amount(from.live_bytes)],
    ["Trimmable", amount(from.trimmable_bytes)],
    ["Pinned", amount(from.pinned_bytes)],
    from.kept_bytes ? ["Kept", amount(from.kept_bytes)] : null,
    from.swapped_bytes ? ["Swapped", amount(from.swapped_bytes)] : null,
    from.huge_bytes ? ["In huge pages", amount(from.huge_bytes)] : null,
    from.fragmentation_ratio != null
      ? [
          "Fragmentation ratio",
          el("data", { value: from.fragmentation_ratio, title: "1 − resident live / resident" }, from.fragmentation_ratio.toFixed(3)),
        ]
      : null,
    growth
      ? [
          `Live over ${duration(growth.seconds)}`,
          el(
            "data",
            {
              value: growth.live_bytes_delta,
              title: `${exact(growth.live_bytes_delta)}, low-water marks of ${count(growth.censuses)} censuses`,
            },
            signed(growth.live_bytes_delta),
          ),
        ]
      : change
        ? [`Live over ${duration(change.seconds)}`, signed(change.live_bytes_delta)]
        : null,
  ]);
}

// The process's resident memory, and the contents of its heaps.
export function drawWhere(part, one) {
  const steps = one.ladder ? stepsOf(one.ladder) : null;
  const rows = [];
  const scale = Math.max(one.rss_bytes, steps?.extent_bytes ?? 0, 1);
  const track = (pieces) =>
    el(
      "div",
      { class: "track" },
      pieces.map(([name, value, title]) =>
        el("span", { class: name, style: { width: `${((value / scale) * 100).toFixed(3)}%` }, title: `${title}: ${exact(value)}` }),
      ),
    );
  const row = (name, value, pieces, title) =>
    rows.push(el("span", { class: "name", title }, name), track(pieces), el("span", { class: "value" }, amount(value)));
  const besides = [...(one.not_malloc ?? [])].sort((a, b) => b.resident_bytes - a.resident_bytes);
  row(
    "Process",
    one.rss_bytes,
    [
      ["resident", steps ? Math.min(steps.resident_bytes, one.rss_bytes) : 0, "malloc's heaps"],
      ["other", Math.max(0, one.rss_bytes - (steps?.resident_bytes ?? 0)), "outside malloc"],
    ],
    "All resident bytes, the kernel's figure",
  );
  if (steps) {
    row(
      "Heap extent",
      steps.extent_bytes,
      [["extent", steps.extent_bytes, "address space that the allocators hold"]],
      "Address space that the allocators hold",
    );
    row(
      "Heap resident",
      steps.resident_bytes,
      [["resident", steps.resident_bytes, "the part of the extent in RAM"]],
      "The part of the extent in RAM",
    );
  }
  const ladders = (one.heaps ?? []).map((heap) => {
    const own = stepsOf(heap);
    const full = el("div", { class: "tall" });
    bar(full, own, own.extent_bytes, true);
    return el(
      "div",
      {},
      el(
        "h3",
        {},
        visible(heap.allocator),
        el(
          "span",
          { class: "quiet" },
          ` extent ${bytes(own.extent_bytes)}, resident ${bytes(own.resident_bytes)}, ${count(heap.arenas)} ${heap.arenas === 1 ? "arena" : "arenas"}`,
        ),
      ),
      full,
      legend(own),
    );
  });
  put(
    part.body,
    el("div", { class: "waterfall" }, rows),
    ladders,
    besides.length
      ? [
          el("h3", {}, "Resident outside malloc"),
          el(
            "table",
            { class: "plain" },
            el(
              "tbody",
              {},
              besides.map((kind) =>
                el(
                  "tr",
                  {},
                  el("td", {}, NOT_MALLOC[kind.kind] ?? visible(kind.kind)),
                  el("td", { class: "number" }, amount(kind.resident_bytes)),
                  el("td", { class: "number quiet" }, `${count(kind.mappings)} ${kind.mappings === 1 ? "mapping" : "mappings"}`),
                ),
              ),
            ),
          ),
        ]
      : null,
  );
  const newest = [...(one.censuses ?? [])].sort((a, b) => a.age_s - b.age_s)[0];
  put(part.from, source("kernel"), source("census", newest ? `${visible(newest.level)}, ${duration(newest.age_s)} ago` : "none yet"));
}
