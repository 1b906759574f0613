// Makes heaps of many shapes and prints the allocator's own account of them. Commands on standard input, one JSON line each on
// standard output, so that the census is compared while the program waits and nothing moves.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <malloc.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

#ifndef PR_SET_VMA
#define PR_SET_VMA 0x53564d41
#define PR_SET_VMA_ANON_NAME 0
#endif
#ifndef __GLIBC__
#define mallopt(option, value) 0
#endif

#define SLOTS 400000
static void *slots[SLOTS];
static size_t sizes[SLOTS];
static uint64_t seed = 88172645463325252ull;

static uint64_t rnd(void) { seed ^= seed << 13; seed ^= seed >> 7; seed ^= seed << 17; return seed; }

static void put(int i, void *p, size_t n) { slots[i] = p; sizes[i] = n; if (p) memset(p, 0x5a, n); }
static void drop(int i) { free(slots[i]); slots[i] = NULL; sizes[i] = 0; }

static size_t size_of_mix(void) {
    uint64_t r = rnd() % 1000;
    if (r < 700) return 1 + rnd() % 256;
    if (r < 950) return 1 + rnd() % 4096;
    if (r < 998) return 1 + rnd() % 65536;
    return 1 + rnd() % 400000;
}

struct job { int from, to; };
static void *mix(void *arg) {
    struct job *job = arg;
    for (int i = job->from; i < job->to; i++) {
        size_t n = size_of_mix();
        void *p = NULL;
        switch (rnd() % 8) {
        case 0: p = calloc(1, n); break;
        case 1: p = memalign(64, n); break;
        case 2: if (posix_memalign(&p, 4096, n)) p = NULL; break;
        case 3: p = realloc(malloc(n / 2 + 1), n); break;
        default: p = malloc(n);
        }
        put(i, p, n);
        if (i > job->from + 16 && rnd() % 3 == 0) drop(job->from + (int)(rnd() % (uint64_t)(i - job->from)));
    }
    return NULL;
}

static volatile int stop;
static void *idle(void *arg) {
    mix(arg);
    __atomic_add_fetch(&stop, 1, __ATOMIC_SEQ_CST);
    for (;;) pause();
    return NULL;
}

static void scenario(const char *name) {
    if (!strcmp(name, "mix")) {
        struct job main_job = {0, 60000};
        mix(&main_job);
        for (int i = 0; i < 3; i++) {
            static struct job jobs[3];
            jobs[i] = (struct job){60000 * (i + 1), 60000 * (i + 2)};
            pthread_t thread;
            pthread_create(&thread, NULL, idle, &jobs[i]);
        }
        while (__atomic_load_n(&stop, __ATOMIC_SEQ_CST) < 3) usleep(1000);
        // Blocks of other threads, freed here.
        for (int i = 60000; i < 240000; i += 7) drop(i);
    } else if (!strncmp(name, "holes", 5)) {
        // Small blocks of which every n-th stays.
        int keep = atoi(name + 5);
        for (int i = 0; i < SLOTS; i++) put(i, malloc(200), 200);
        for (int i = 0; i < SLOTS; i++) if (i % keep) drop(i);
    } else if (!strcmp(name, "tail")) {
        for (int i = 0; i < SLOTS; i++) put(i, malloc(100), 100);
        for (int i = 0; i < SLOTS - 1; i++) drop(i);
    } else if (!strcmp(name, "large")) {
        mallopt(M_MMAP_THRESHOLD, 1 << 30);
        for (int i = 0; i < 3000; i++) put(i, malloc(70000), 70000);
        for (int i = 0; i < 3000; i += 2) drop(i);
    } else if (!strcmp(name, "mmapped")) {
        mallopt(M_MMAP_THRESHOLD, 128 << 10);
        for (int i = 0; i < 24; i++) put(i, malloc(200000 + 1000 * i), 200000);
        for (int i = 24; i < 28; i++) put(i, memalign(1 << (i - 8), 300000), 300000);
        for (int i = 0; i < 24; i += 3) put(i, realloc(slots[i], 900000), 900000);
    } else if (!strcmp(name, "split")) {
        // Blocks with mappings of their own, of which the program gives parts other settings: the kernel splits the mappings.
        enum { BLOCKS = 9, MIB = 1 << 20 };
        mallopt(M_MMAP_THRESHOLD, 128 << 10);
        char *page[BLOCKS];
        for (int i = 0; i < BLOCKS; i++) {
            put(i, i == 8 ? memalign(2 * MIB, 5 * MIB) : malloc(4 * MIB + 4096 * i), 4 * MIB);
            page[i] = (char *)(((uintptr_t)slots[i] + 4095) & ~4095ul);
        }
        madvise(page[0], 3 * MIB, MADV_HUGEPAGE);
        madvise(page[1] + MIB, MIB, MADV_DONTNEED);
        mprotect(page[2] + MIB, MIB, PROT_READ);
        mprotect(page[3] + MIB, MIB, PROT_NONE);
        mlock(page[4] + MIB, 4096);
        madvise(page[5] + MIB, MIB, MADV_DONTFORK);
        madvise(page[6], 3 * MIB, MADV_NOHUGEPAGE);
        prctl(PR_SET_VMA, PR_SET_VMA_ANON_NAME, page[7] + MIB, MIB, "some name");
        madvise(page[8] + MIB, MIB, MADV_DONTDUMP);
        drop(6);
    } else if (!strcmp(name, "thp")) {
        // One block in huge pages, of which a byte in each is written.
        const size_t bytes = 64 << 20;
        put(0, malloc(bytes), 0);
        char *first = (char *)(((uintptr_t)slots[0] + (2 << 20) - 1) & ~((2ul << 20) - 1));
        madvise(first, bytes - (4 << 20), MADV_HUGEPAGE);
        for (size_t at = 0; at < bytes - (4 << 20); at += 2 << 20) first[at] = 1;
    } else if (!strcmp(name, "fastbins")) {
        for (int i = 0; i < 200000; i++) put(i, malloc(40), 40);
        for (int i = 0; i < 200000; i++) if (i % 2) drop(i);
    } else if (!strcmp(name, "foreign")) {
        for (int i = 0; i < 20000; i++) put(i, malloc(100), 100);
        void *mine = sbrk(12288);
        memset(mine, 0x77, 12288);
        for (int i = 20000; i < 60000; i++) put(i, malloc(100), 100);
    } else if (!strncmp(name, "fill", 4)) {
        // "fill BYTES MIB": so many MiB in blocks of one size, of which every fourth is freed again.
        size_t size = 0, mib = 0;
        sscanf(name + 4, "%zu %zu", &size, &mib);
        size_t count = (mib << 20) / (size + 16);
        void **table = mmap(NULL, count * sizeof *table, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        mallopt(M_MMAP_THRESHOLD, 1 << 30);
        for (size_t i = 0; i < count; i++) { table[i] = malloc(size); memset(table[i], 0x5a, size); }
        for (size_t i = 0; i < count; i += 4) free(table[i]);
        munmap(table, count * sizeof *table);
    } else if (!strcmp(name, "no_brk")) {
        for (int i = 0; i < 20000; i++) put(i, malloc(100), 100);
        // A mapping that blocks brk, as small as possible.
        uintptr_t end = ((uintptr_t)sbrk(0) + 4095) & ~4095ul;
        mmap((void *)end, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
        for (int i = 20000; i < 200000; i++) put(i, malloc(100), 100);
        for (int i = 20000; i < 200000; i++) if (i % 3) drop(i);
    }
}

// The blocks that the program holds; the same with every allocator.
static void answer_own(void) {
    size_t live = 0, usable = 0;
    for (int i = 0; i < SLOTS; i++) if (slots[i]) { live++; usable += malloc_usable_size(slots[i]); }
    printf("{\"live\":%zu,\"usable\":%zu,\"slots\":%zu", live, usable, (size_t)(uintptr_t)slots);
}

#ifdef __GLIBC__
// Linked in, as in redis, perhaps with a prefix; otherwise looked up.
extern int mallctl(const char *, void *, size_t *, void *, size_t) __attribute__((weak));
// mallinfo2 since glibc 2.33; before, mallinfo, whose ints suffice for these heaps.
struct mallinfo2_like { size_t arena, ordblks, smblks, hblks, hblkhd, usmblks, fsmblks, uordblks, fordblks, keepcost; };
static void answer_allocator(void) {
    int (*ctl)(const char *, void *, size_t *, void *, size_t) = mallctl;
    if (!ctl) ctl = (int (*)(const char *, void *, size_t *, void *, size_t))dlsym(RTLD_DEFAULT, "mallctl");
    int (*property)(const char *, size_t *) = (int (*)(const char *, size_t *))dlsym(RTLD_DEFAULT, "MallocExtension_GetNumericProperty");
    if (ctl) {
        uint64_t epoch = 1;
        size_t n = sizeof epoch;
        ctl("epoch", &epoch, &n, &epoch, n);
        const char *names[] = {"stats.allocated", "stats.active", "stats.retained", "stats.resident", "stats.metadata", "stats.mapped"};
        for (int i = 0; i < 6; i++) {
            size_t value = 0;
            n = sizeof value;
            ctl(names[i], &value, &n, NULL, 0);
            printf(",\"%s\":%zu", names[i] + 6, value);
        }
        // Of all arenas together (MALLCTL_ARENAS_ALL), from pages to bytes; and the times of the first.
        size_t page = 0;
        n = sizeof page;
        ctl("arenas.page", &page, &n, NULL, 0);
        const char *pages[] = {"stats.arenas.4096.pdirty", "stats.arenas.4096.pmuzzy"};
        const char *times[] = {"arena.0.dirty_decay_ms", "arena.0.muzzy_decay_ms"};
        for (int i = 0; i < 2; i++) {
            size_t value = 0;
            ssize_t time = 0;
            n = sizeof value;
            ctl(pages[i], &value, &n, NULL, 0);
            ctl(times[i], &time, &n, NULL, 0);
            printf(",\"%s\":%zu,\"%s\":%zd", pages[i] + 18, value * page, times[i] + 8, time);
        }
        // What threads' caches hold is allocated, too, by its account.
        size_t cached = 0;
        n = sizeof cached;
        ctl("stats.arenas.4096.tcache_bytes", &cached, &n, NULL, 0);
        printf(",\"tcache_bytes\":%zu", cached);
    } else if (property) {
        const char *names[] = {"generic.current_allocated_bytes", "generic.heap_size", "tcmalloc.current_total_thread_cache_bytes", "tcmalloc.central_cache_free_bytes",
                               "tcmalloc.transfer_cache_free_bytes", "tcmalloc.thread_cache_free_bytes", "tcmalloc.pageheap_free_bytes", "tcmalloc.pageheap_unmapped_bytes"};
        for (int i = 0; i < 8; i++) {
            size_t value = 0;
            property(names[i], &value);
            printf(",\"%s\":%zu", strchr(names[i], '.') + 1, value);
        }
    } else {
        struct mallinfo2_like (*info2)(void) = (struct mallinfo2_like(*)(void))dlsym(RTLD_DEFAULT, "mallinfo2");
        struct mallinfo2_like m;
        if (info2) m = info2();
        else {
            struct mallinfo i = mallinfo();
            m = (struct mallinfo2_like){(unsigned)i.arena, (unsigned)i.ordblks, (unsigned)i.smblks, (unsigned)i.hblks, (unsigned)i.hblkhd, 0,
                                        (unsigned)i.fsmblks, (unsigned)i.uordblks, (unsigned)i.fordblks, (unsigned)i.keepcost};
        }
        printf(",\"arena\":%zu,\"ordblks\":%zu,\"smblks\":%zu,\"hblks\":%zu,\"hblkhd\":%zu,\"fsmblks\":%zu,\"uordblks\":%zu,\"fordblks\":%zu",
               m.arena, m.ordblks, m.smblks, m.hblks, m.hblkhd, m.fsmblks, m.uordblks, m.fordblks);
    }
}
static void trim(void) { malloc_trim(0); }
#else
static void answer_allocator(void) {}
static void trim(void) {}
#endif

#ifdef __GLIBC__
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
static int faults = -1;

// Half of a large block of the heap becomes memory whose faults this program would have to serve, and never does.
static void serve_faults(void) {
    mallopt(M_MMAP_THRESHOLD, 1 << 30);
    for (int i = 0; i < 1000; i++) put(i, malloc(3000), 3000);
    slots[1000] = malloc(32 << 20);
    for (int i = 1001; i < 2000; i++) put(i, malloc(3000), 3000);
    struct uffdio_api api = {.api = UFFD_API};
    uintptr_t start = ((uintptr_t)slots[1000] + 8191) & ~4095ul;
    struct uffdio_register all = {.range = {start, 31 << 20}, .mode = UFFDIO_REGISTER_MODE_MISSING};
    faults = (int)syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK);
    if (faults < 0 || ioctl(faults, UFFDIO_API, &api) || ioctl(faults, UFFDIO_REGISTER, &all)) { perror("userfaultfd"); _exit(1); }
}

static void answer_faults(void) {
    if (faults < 0) return;
    char message[sizeof(struct uffd_msg)];
    printf(",\"faults\":%d", read(faults, message, sizeof message) > 0);
}
#else
static void serve_faults(void) {}
static void answer_faults(void) {}
#endif

static void answer(void) {
    answer_own();
    answer_faults();
    answer_allocator();
    printf("}\n");
    fflush(stdout);
}

int main(void) {
    static char in[256], out[1 << 16];
    setvbuf(stdin, in, _IOLBF, sizeof in);
    setvbuf(stdout, out, _IOFBF, sizeof out);
    char line[128];
    while (fgets(line, sizeof line, stdin)) {
        line[strcspn(line, "\n")] = 0;
        if (!strcmp(line, "trim")) trim();
        else if (!strcmp(line, "faults")) serve_faults();
        else if (strcmp(line, "stat")) scenario(line);
        answer();
    }
    return 0;
}
