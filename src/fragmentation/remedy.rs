//! What would help against what a verdict found, with the setting's name and the bytes it would save. Pure.

use super::verdict::{Evidence, Kind, Remedy};
use crate::census::{Census, HeapAccount};
use crate::units::{HumanBytes, counted};

/// Parts of what is not malloc's that are worth a remedy of their own: this share of the resident bytes, in percent.
const PART_PERCENT_MIN: u64 = 10;

/// The remedies for a census: those against the verdict's own cause first, then the others, each by what they save.
pub(super) fn remedies(kind: Kind, census: &Census, evidence: &Evidence) -> Vec<Remedy> {
    let mut own = Vec::new();
    let mut others = Vec::new();
    for heap in &census.heaps {
        match heap.allocator.as_str() {
            "glibc" => glibc(kind, heap, evidence, &mut own, &mut others),
            "jemalloc" => jemalloc(kind, heap, evidence, &mut own, &mut others),
            "tcmalloc" if heap.trimmable_bytes.unwrap_or(0) > 0 => {
                let remedy = Remedy {
                    action: "call MallocExtension_ReleaseFreeMemory(), or set TCMALLOC_RELEASE_RATE=10".into(),
                    predicted_bytes: heap.trimmable_bytes,
                    basis: "resident spans in the page heap's free lists".into(),
                };
                if kind == Kind::Hoarding { own.push(remedy) } else { others.push(remedy) }
            }
            _ => {}
        }
    }
    match kind {
        Kind::Leak => own.insert(0, leak(evidence)),
        Kind::Fragmentation => own.insert(0, fragmentation(evidence)),
        Kind::NotMalloc => own.splice(0..0, not_malloc(evidence)).for_each(drop),
        Kind::HugePageBloat => own.insert(0, huge_pages(evidence)),
        _ => {}
    }
    others.extend(direct_buffers(census, evidence));
    let saved = |remedy: &Remedy| std::cmp::Reverse(remedy.predicted_bytes.unwrap_or(0));
    others.sort_by_key(saved);
    own.extend(others);
    own
}

fn setting(heap: &HeapAccount, name: &str) -> Option<u64> {
    heap.settings.iter().find(|setting| setting.name == name).map(|setting| setting.value)
}

fn leak(evidence: &Evidence) -> Remedy {
    let per_hour = evidence.change.map_or(0, |change| change.live_bytes_per_hour().max(0).unsigned_abs());
    Remedy {
        action: "find the growing stacks: fragprof record -p PID --mode governed -d 60s, then fragprof report --by survivors; or exactly, at a higher \
                 price: fragprof record -p PID -d 60s, then fragprof report --by live"
            .into(),
        predicted_bytes: None,
        basis: format!("live bytes grow by {} an hour at this rate; only a recording tells whose they are", HumanBytes(per_hour)),
    }
}

fn fragmentation(evidence: &Evidence) -> Remedy {
    Remedy {
        action:
            "find the stacks that pin: fragprof record -p PID, then fragprof report --by pinned; allocate their long-lived blocks early \
                 or from a pool of their own"
                .into(),
        predicted_bytes: evidence.ladder.pinned_bytes,
        basis: "free bytes on pages that also hold live blocks, an upper limit of what moving those blocks would free".into(),
    }
}

fn huge_pages(evidence: &Evidence) -> Remedy {
    Remedy {
        action:
            "keep the heap out of huge pages: GLIBC_TUNABLES=glibc.malloc.hugetlb=0 or MALLOC_CONF=thp:never where they are asked for, \
                 and /sys/kernel/mm/transparent_hugepage/enabled at madvise"
                .into(),
        predicted_bytes: evidence.huge_zero_bytes_est,
        basis: "pages of 4 KiB in the heap's huge pages that hold only zeros, estimated from a sample; of these, what the program cleared \
                itself would stay"
            .into(),
    }
}

/// A JVM takes direct buffers from malloc, which gives large ones mappings of their own.
fn direct_buffers(census: &Census, evidence: &Evidence) -> Option<Remedy> {
    let is_java = evidence.not_malloc.iter().any(|part| part.kind == "java_heap");
    let mmapped: u64 = census.heaps.iter().map(|heap| heap.mmapped_bytes).fold(0, u64::saturating_add);
    let count: u64 = census.heaps.iter().map(|heap| heap.mmapped_allocations).sum();
    let is_large = mmapped.saturating_mul(100) >= evidence.rss_bytes.saturating_mul(PART_PERCENT_MIN);
    (is_java && is_large && mmapped > 0).then(|| Remedy {
        action: advice("direct_buffers").into(),
        predicted_bytes: Some(mmapped),
        basis: format!(
            "{} of malloc's with mappings of their own, in a JVM mostly direct buffers; an upper limit of what releasing those would save",
            counted(count, "block")
        ),
    })
}

fn glibc(kind: Kind, heap: &HeapAccount, evidence: &Evidence, own: &mut Vec<Remedy>, others: &mut Vec<Remedy>) {
    let trimmable = heap.trimmable_bytes.unwrap_or(0);
    if kind == Kind::ArenaBlowUp {
        own.push(Remedy {
            action: "set MALLOC_ARENA_MAX=2 (or GLIBC_TUNABLES=glibc.malloc.arena_max=2) and restart".into(),
            predicted_bytes: Some(evidence.other_arenas_free_bytes),
            basis: format!(
                "free resident bytes of all of the {} but the main one; fewer arenas share them, at the price of lock contention",
                counted(evidence.arenas as u64, "arena")
            ),
        });
    }
    if kind == Kind::Cache {
        cache(heap, own);
    }
    if kind != Kind::Healthy && trimmable > 0 {
        let trim = Remedy {
            action: "call malloc_trim(0) now and then, or once after load peaks".into(),
            predicted_bytes: Some(trimmable),
            basis: "resident whole pages inside free chunks, and the end of the brk heap".into(),
        };
        if matches!(kind, Kind::Hoarding | Kind::Cache) { own.push(trim) } else { others.push(trim) }
    }
    if kind == Kind::Hoarding
        && let (Some(trim), Some(mmap)) = (setting(heap, "M_TRIM_THRESHOLD"), setting(heap, "M_MMAP_THRESHOLD"))
    {
        let is_dynamic = setting(heap, "dynamic_threshold_off") == Some(0);
        // A freed mapping of up to 32 MiB raises the mmap threshold to its size and the trim threshold to twice that.
        if is_dynamic && mmap > 128 << 10 {
            own.push(Remedy {
                action: "set GLIBC_TUNABLES=glibc.malloc.mmap_threshold=131072:glibc.malloc.trim_threshold=131072".into(),
                predicted_bytes: heap.occupancy.map(|occupancy| occupancy.top_unpinned_bytes),
                basis: format!(
                    "the thresholds adapted themselves to {} and {}: blocks below stay in the heap, and its end is only lowered above",
                    HumanBytes(mmap),
                    HumanBytes(trim)
                ),
            });
        }
    }
}

/// Freed chunks that caches keep: those of the threads and the fastbins have a setting each.
fn cache(heap: &HeapAccount, own: &mut Vec<Remedy>) {
    let fast = heap.fastbin_bytes.unwrap_or(0);
    let thread = heap.cached_bytes.unwrap_or(0).saturating_sub(fast);
    let mut parts = [
        (
            fast,
            "set GLIBC_TUNABLES=glibc.malloc.mxfast=0 and restart",
            "freed chunks in fastbins, at most: what merges then goes back by itself only from a heap's end",
        ),
        (thread, "set GLIBC_TUNABLES=glibc.malloc.tcache_count=2 and restart", "freed chunks in thread caches"),
    ];
    parts.sort_by_key(|&(bytes, ..)| std::cmp::Reverse(bytes));
    for (bytes, action, basis) in parts.into_iter().filter(|&(bytes, ..)| bytes > 0) {
        own.push(Remedy { action: action.into(), predicted_bytes: Some(bytes), basis: basis.into() });
    }
}

fn jemalloc(kind: Kind, heap: &HeapAccount, evidence: &Evidence, own: &mut Vec<Remedy>, others: &mut Vec<Remedy>) {
    let trimmable = heap.trimmable_bytes.unwrap_or(0);
    if kind == Kind::ArenaBlowUp {
        own.push(Remedy {
            action: "set MALLOC_CONF=narenas:4 and restart".into(),
            predicted_bytes: None,
            basis: format!("{} hold free memory of their own; four are enough for most", counted(evidence.arenas as u64, "arena")),
        });
    }
    if kind != Kind::Healthy && trimmable > 0 {
        let purge = Remedy {
            action: "set MALLOC_CONF=background_thread:true,dirty_decay_ms:1000,muzzy_decay_ms:0, or call mallctl(\"arena.4096.purge\")"
                .into(),
            predicted_bytes: Some(trimmable),
            basis: "resident dirty and muzzy extents".into(),
        };
        if kind == Kind::Hoarding { own.push(purge) } else { others.push(purge) }
    }
}

/// A remedy for each large part of what is not malloc's, the largest first.
fn not_malloc(evidence: &Evidence) -> Vec<Remedy> {
    let large = |bytes: u64| bytes.saturating_mul(100) >= evidence.rss_bytes.saturating_mul(PART_PERCENT_MIN);
    let mut parts: Vec<_> = evidence.not_malloc.iter().filter(|part| large(part.resident_bytes)).collect();
    parts.sort_by_key(|part| std::cmp::Reverse(part.resident_bytes));
    parts
        .into_iter()
        .map(|part| Remedy {
            action: advice(part.kind).into(),
            predicted_bytes: None,
            basis: format!("{} in {} of {}", HumanBytes(part.resident_bytes), counted(part.mappings, "mapping"), part.kind),
        })
        .collect()
}

fn advice(kind: &str) -> &'static str {
    match kind {
        "java_heap" => "set -Xmx or -XX:MaxRAMPercentage; a heap dump (jcmd PID GC.heap_dump) tells what is in it",
        "java_classes" => "limit -XX:MaxMetaspaceSize and -XX:CompressedClassSpaceSize; look for class loaders that leak",
        "code_cache" => "limit generated code: -XX:ReservedCodeCacheSize (JVM)",
        "thread_stacks" => "use fewer threads or smaller stacks: ulimit -s, pthread_attr_setstacksize, -Xss",
        "main_stack" => "the main thread's stack stays as deep as it once was: look for deep recursion or large local arrays",
        "file_mappings" => "mapped files: the kernel drops clean pages by itself under pressure",
        "shared_memory" => "shared memory counts in every process that maps it: look at its size once (ipcs -m, /dev/shm)",
        "direct_buffers" => "limit -XX:MaxDirectMemorySize, and release buffers",
        _ => "anonymous mappings outside malloc: direct buffers, an allocator of the program's own, a language's runtime",
    }
}
