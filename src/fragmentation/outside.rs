//! Resident memory outside malloc: which kinds count for a verdict, which can grow without a limit of their own, and remedies. Pure.

use super::verdict::{Evidence, Remedy};
use crate::census::Census;
use crate::census::runtime::hotspot::JavaHeap;
use crate::units::{HumanBytes, counted};

/// Smallest part of the memory outside malloc that gets a remedy of its own: a share of the resident bytes, in percent.
pub(super) const PART_PERCENT_MIN: u64 = 10;
/// Kinds that every process has: its program and libraries, and the kernel's mappings.
const ORDINARY: [&str; 2] = ["program_files", "kernel_mappings"];
/// Kinds whose growth is normal: mapped files become resident as they are read; a Java heap, generated code and a database's buffer pool
/// grow up to their limits.
const LIMITED: [&str; 4] = ["file_mappings", "java_heap", "code_cache", "innodb_buffer_pool"];

/// Whether a kind of mapping counts for the verdict "not malloc".
pub(super) fn counts(kind: &str) -> bool {
    !ORDINARY.contains(&kind)
}

/// Whether growth of a kind of mapping is reported.
pub(super) fn grows_by_itself(kind: &str) -> bool {
    counts(kind) && !LIMITED.contains(&kind)
}

/// A remedy for each large part of the memory outside malloc, the largest first.
pub(super) fn remedies(census: &Census, evidence: &Evidence) -> Vec<Remedy> {
    let large = |bytes: u64| bytes.saturating_mul(100) >= evidence.rss_bytes.saturating_mul(PART_PERCENT_MIN);
    let mut parts: Vec<_> = evidence.not_malloc.iter().filter(|part| counts(part.kind) && large(part.resident_bytes)).collect();
    parts.sort_by_key(|part| std::cmp::Reverse(part.resident_bytes));
    parts
        .into_iter()
        .map(|part| Remedy {
            action: java_limit(census).filter(|_| part.kind == "java_heap").unwrap_or_else(|| advice(part.kind)).into(),
            predicted_bytes: None,
            at_most: false,
            basis: format!("{} in {} of {}", HumanBytes(part.resident_bytes), counted(part.mappings, "mapping"), part.kind),
            setting: None,
        })
        .collect()
}

/// The remedy for a Java heap whose limit is set already; `None` if it is not set, or not known.
fn java_limit(census: &Census) -> Option<&'static str> {
    let set_by = census.runtimes.java.as_ref()?.heap.max_set_by?;
    (set_by != "default").then_some(
        "the Java heap's limit is set: lower -Xmx only if the heap needs less after a collection; a heap dump (jcmd PID GC.heap_dump) shows \
         its contents",
    )
}

/// The Java heap relative to its own limit, in words; `None` if there is none, or its limit is not known.
pub(super) fn java_heap(census: &Census) -> Option<String> {
    let heap: &JavaHeap = &census.runtimes.java.as_ref()?.heap;
    let (resident, limit) = (heap.resident_bytes?, heap.max_bytes.filter(|&bytes| bytes > 0)?);
    let share = u128::from(resident) * 100 / u128::from(limit);
    let used = heap.used_bytes.map_or_else(String::new, |used| format!(", {} in use by the JVM's last count", HumanBytes(used)));
    Some(format!("the Java heap has {} resident{used}, {share} % of its limit of {}", HumanBytes(resident), HumanBytes(limit)))
}

/// The remedy for a large part.
pub(super) fn advice(kind: &str) -> &'static str {
    match kind {
        "java_heap" => "set -Xmx or -XX:MaxRAMPercentage; a heap dump (jcmd PID GC.heap_dump) shows its contents",
        "java_classes" | "likely_java_metaspace" => {
            "limit -XX:MaxMetaspaceSize and -XX:CompressedClassSpaceSize; look for class loaders that leak"
        }
        "code_cache" => "limit generated code: -XX:ReservedCodeCacheSize (JVM)",
        "thread_stacks" => "use fewer threads or smaller stacks: ulimit -s, pthread_attr_setstacksize, -Xss",
        "main_stack" => "the main thread's stack stays as large as it once was: look for deep recursion or large local arrays",
        "file_mappings" => "mapped files: the kernel drops clean pages by itself under memory pressure",
        "shared_memory" => "shared memory is counted in every process that maps it: check its size once (ipcs -m, /dev/shm)",
        "pymalloc_arenas" => {
            "Python's small objects: tracemalloc shows where they were allocated; an arena is returned once all of it is free"
        }
        "go_heap" => "set GOMEMLIMIT or GOGC; Go's own heap profile shows its contents",
        "v8_heap" => "set --max-old-space-size; a heap snapshot shows its contents",
        "zend_memory" => "set memory_limit; a worker keeps its largest request's memory until it is restarted (pm.max_requests)",
        "ruby_heap" => "Ruby's objects: ObjectSpace lists them; GC.compact frees pages",
        "innodb_buffer_pool" => "a cache of the configured size: set innodb_buffer_pool_size",
        "direct_buffers" => "limit -XX:MaxDirectMemorySize, and release buffers",
        _ => "anonymous mappings outside malloc: direct buffers, the program's own allocator, or a language runtime",
    }
}
