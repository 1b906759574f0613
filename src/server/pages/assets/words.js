// The description of each figure, used by legends, titles and column heads.

export const STEPS = {
  live: { name: "Live", key: "live", text: "blocks in use, with the allocator's rounding" },
  pinned: { name: "Pinned", key: "pinned", text: "free bytes on pages that also hold a live byte: no trim releases them" },
  trimmable: { name: "Trimmable", key: "trimmable", text: "whole free pages: what malloc_trim(0), or a purge, releases now" },
  kept: { name: "Kept", key: "kept", text: "whole free pages that a trim leaves: thread caches, tops of other arenas" },
  rest: {
    name: "Allocator's own",
    key: "rest",
    text: "the allocator's data, what was not understood, and live blocks that are not resident",
  },
  unseen: { name: "Not examined", key: "unseen", text: "resident, but not examined by this census: live or free is not known yet" },
  absent: {
    name: "Not resident",
    key: "absent",
    text: "address space that the allocator holds without memory behind it: it costs no RAM",
  },
};

export const COLUMNS = {
  rss: "All resident memory of the process, the kernel's figure",
  heap: "The part of the heap's address space in RAM",
  live: STEPS.live.text,
  pinned: STEPS.pinned.text,
  trimmable: STEPS.trimmable.text,
  ratio: "1 − resident live / resident: 0 is perfect. Consider the bytes as well",
  age: "Age of the newest full or sampled census",
};

export const VERDICTS = {
  leak: { name: "Leak", text: "live bytes have grown for long without slowing down", tone: "bad" },
  growing: { name: "Growing", text: "memory grows: a leak, a cache that fills, or a load that rises", tone: "warn" },
  fragmentation: { name: "Fragmentation", text: "free bytes are on pages that also hold live ones", tone: "bad" },
  hoarding: { name: "Hoarding", text: "the allocator keeps whole free pages", tone: "warn" },
  cache: { name: "Cache", text: "thread caches and fastbins keep what was freed", tone: "warn" },
  arena_blow_up: { name: "Arena blow-up", text: "many arenas, each with free memory of its own", tone: "bad" },
  huge_page_bloat: { name: "Huge-page bloat", text: "huge pages hold mostly zeros", tone: "bad" },
  not_malloc: { name: "Not malloc", text: "most resident memory, not counting programs and libraries, is outside malloc", tone: "info" },
  healthy: { name: "Healthy", text: "little is free, and it does not grow", tone: "good" },
  unknown: { name: "Unknown", text: "the census does not allow a verdict", tone: "info" },
};

// Shapes in addition to the colour, so that verdicts are distinguishable without it.
export const TONES = { good: "●", info: "◆", warn: "▲", bad: "■" };

export const SOURCES = {
  census: "census: the allocator's own metadata, read from outside; every chunk at level full",
  exact: "exact: every allocation and free was recorded",
  governed: "governed: windows under a budget; rates are estimates with standard errors",
  emitter: "emitter: sampled inside the process; estimates with standard errors",
  kernel: "kernel: figures from /proc",
  history: "history: stored samples of the census",
};

export const KINDS = [
  { key: "live", name: "Live", text: "bytes of the stack's live blocks; under a budget those of blocks above 1 KiB, or a lower bound of those confirmed live" },
  { key: "pinned", name: "Pinned", text: "free bytes that the stack's live bytes keep from being returned" },
  { key: "blocked", name: "Blocked", text: "whole free pages below the stack's block at the top of a heap" },
  { key: "allocated", name: "Allocated", text: "bytes requested during the recording" },
  { key: "survivors", name: "Survivors", text: "bytes of the allocations that outlived the windows' survivor age" },
  { key: "growth", name: "Growth", text: "bytes by which the stack made the heap grow while enough free bytes were available" },
];

export const EVENTS = {
  oom_kill: "Killed for lack of memory",
  memory_limit: "Memory limit nearly reached",
  exit: "Ended",
  trim: "Memory given back",
  setting: "Advised setting compared",
};

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
