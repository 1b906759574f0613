// Flight records: the state of a process when it was killed, came near its limit, or ended.

import * as api from "./api.js";
import { el, put, visible } from "./dom.js";
import { drawVerdict, drawWhere } from "./facts.js";
import { section, what } from "./parts.js";
import { callStacks } from "./stacks.js";
import { duration, instant } from "./units.js";

export function open({ main, trail, signal, settings, argument: id }) {
  const said = el("section", { class: "card", "aria-label": "What happened" }, el("p", { class: "quiet" }, "Loading…"));
  const head = el("section", { class: "card verdict", "aria-label": "Verdict" });
  const where = section("where", "Where the memory was", "from the last complete census");
  const stacks = section("stacks", "Call stacks", "of the memory it held");
  put(main, said, head, where.node, stacks.node);
  let view = null;
  return {
    async refresh() {
      // A record does not change.
      if (view) return view;
      const event = await api.event(id, signal);
      put(trail, el("span", {}, what(event)));
      document.title = `${what(event)}: ${visible(event.process.comm)} – fragprof`;
      put(
        said,
        el("h1", {}, `${what(event)}: ${visible(event.process.comm)} (pid ${event.process.pid})`),
        el("p", { class: "said" }, visible(event.summary)),
        el(
          "p",
          { class: "quiet" },
          `Noticed ${instant(event.at_unix_s)}. ${visible(event.evidence)}`,
          event.sample_age_s === null ? "" : ` Its newest sample was ${duration(event.sample_age_s)} old.`,
        ),
        el("p", {}, el("a", { href: `#/p/${event.process.pid}` }, "This process over time")),
      );
      drawVerdict(head, event.process, null);
      drawWhere(where, event.process);
      await callStacks(stacks, {
        settings,
        set: () => {},
        ask: (values) => api.eventProfile(id, values, signal),
        absent: "No tier that knows call stacks watched this process.",
      }).refresh([]);
      view = `recorded ${instant(event.at_unix_s)}`;
      return view;
    },
    failed(error) {
      put(said, el("p", { class: "notice" }, error.message));
    },
  };
}
