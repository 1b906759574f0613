// What each figure is, once: legends, titles and column heads take it from here.

export const STEPS = {
  live: { name: "Live", key: "live", text: "blocks in use, with the allocator's rounding" },
  pinned: { name: "Pinned", key: "pinned", text: "free bytes on pages that also hold a live byte: no trim gives them back" },
  trimmable: { name: "Trimmable", key: "trimmable", text: "whole free pages: what malloc_trim(0), or a purge, gives back now" },
  kept: { name: "Kept", key: "kept", text: "whole free pages that a trim leaves: thread caches, ends of other arenas" },
  rest: {
    name: "Allocator's own",
    key: "rest",
    text: "the allocator's data, and what was not understood or is not resident of the live blocks",
  },
  unseen: { name: "Not looked into", key: "unseen", text: "resident, but this census did not look inside: live or free is not known yet" },
  absent: {
    name: "Not resident",
    key: "absent",
    text: "address space that the allocator holds and that is not in memory: it costs no RAM",
  },
};

export const COLUMNS = {
  rss: "All that the process has in memory, the kernel's figure",
  heap: "Of the heap's address space, what is in memory",
  live: STEPS.live.text,
  pinned: STEPS.pinned.text,
  trimmable: STEPS.trimmable.text,
  ratio: "1 − live / resident: 0 is perfect. Look at the bytes beside it too",
  age: "How old the newest look inside the heap is",
};

export const VERDICTS = {
  leak: { name: "Leak", text: "live bytes grow, and have not slackened for long", tone: "bad" },
  growing: { name: "Growing", text: "memory grows: a leak, a cache that fills, or a load that rises", tone: "warn" },
  fragmentation: { name: "Fragmentation", text: "free bytes lie between live ones", tone: "bad" },
  hoarding: { name: "Hoarding", text: "the allocator keeps whole free pages", tone: "warn" },
  cache: { name: "Cache", text: "thread caches keep what was freed", tone: "warn" },
  arena_blow_up: { name: "Arena blow-up", text: "many arenas, each with free memory of its own", tone: "bad" },
  huge_page_bloat: { name: "Huge-page bloat", text: "huge pages hold mostly free memory", tone: "bad" },
  not_malloc: { name: "Not malloc", text: "most resident memory, programs and libraries apart, is not malloc's", tone: "info" },
  healthy: { name: "Healthy", text: "little is free, and it does not grow", tone: "good" },
  unknown: { name: "Unknown", text: "the census does not allow a verdict", tone: "info" },
};

// Shapes beside the colour, so that a verdict is told apart without it.
export const TONES = { good: "●", info: "◆", warn: "▲", bad: "■" };

export const SOURCES = {
  census: "census: the allocator's own metadata, read from outside; every chunk at level full",
  exact: "exact: every allocation and free was recorded",
  governed: "governed: windows within a budget; rates are estimates with their errors",
  emitter: "emitter: sampled inside the process; estimates with their errors",
  kernel: "kernel: the process's own account in /proc",
  history: "history: kept samples of the census",
};

export const KINDS = [
  { key: "live", name: "Live", text: "bytes that the stack's blocks hold; under a budget those of blocks above 1 KiB, or those confirmed to live, at least" },
  { key: "pinned", name: "Pinned", text: "free bytes that the stack's live bytes keep from going back" },
  { key: "blocked", name: "Blocked", text: "whole free pages under the stack's block at the top of a heap" },
  { key: "allocated", name: "Allocated", text: "bytes asked for during the recording" },
  { key: "survivors", name: "Survivors", text: "bytes of the allocations that outlived the windows' survivor age" },
  { key: "growth", name: "Growth", text: "bytes by which the stack made the heap grow while free ones were there" },
];

export const EVENTS = { oom_kill: "Killed for want of memory", memory_limit: "Memory limit nearly reached", exit: "Ended" };

export const NOT_MALLOC = {
  thread_stacks: "thread stacks",
  main_stack: "main stack",
  java_heap: "Java heap",
  code_cache: "code cache",
  file_mappings: "files",
  program_files: "program and libraries",
  shared_memory: "shared memory",
  kernel_mappings: "the kernel's own mappings",
  other_anonymous: "other anonymous",
};
