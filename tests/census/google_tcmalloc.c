// Makes heaps of Google's tcmalloc in several threads and prints two accounts of them: the program's list of blocks, and tcmalloc's own
// properties. It runs with tcmalloc preloaded or linked in. Commands on standard input, a line of JSON each on standard output. Nothing is
// allocated between two commands.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <malloc.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static bool (*get_property)(const char *name, size_t length, size_t *value);
static void (*set_sampling)(int64_t bytes);
static size_t (*release)(size_t bytes);

enum { THREADS = 4, BLOCKS = 40000, LARGE = 6, ALL = BLOCKS + LARGE };
static void *slots[THREADS][ALL];
static volatile int done;

static uint64_t next(uint64_t *seed) { *seed ^= *seed << 13; *seed ^= *seed >> 7; *seed ^= *seed << 17; return *seed; }

static size_t size_of(uint64_t r) {
    if (r % 1000 < 800) return 1 + r / 1000 % 300;
    if (r % 1000 < 980) return 1 + r / 1000 % 8000;
    return 1 + r / 1000 % 300000;
}

static void fill(int thread) {
    uint64_t seed = 88172645463325252ull + thread;
    for (int i = 0; i < BLOCKS; i++) {
        uint64_t r = next(&seed);
        if (r % 64 == 0) {
            if (posix_memalign(&slots[thread][i], 16 << r / 64 % 10, size_of(next(&seed)))) abort();
        } else {
            slots[thread][i] = malloc(size_of(r));
        }
        *(char *)slots[thread][i] = 1;
        // Holes, some of them filled again.
        if (r % 3 == 0) {
            int other = (int)(r / 3 % (i + 1));
            free(slots[thread][other]);
            slots[thread][other] = NULL;
        }
    }
    for (int i = 0; i < LARGE; i++) slots[thread][BLOCKS + i] = malloc((size_t)1 << (17 + 2 * i));
}

static void *run(void *arg) {
    int thread = (int)(intptr_t)arg;
    fill(thread);
    __atomic_add_fetch(&done, 1, __ATOMIC_SEQ_CST);
    // The last one ends.
    if (thread == THREADS - 1) return NULL;
    for (;;) pause();
}

static void say(const char *format, ...) {
    char line[1000];
    va_list list;
    __builtin_va_start(list, format);
    int length = vsnprintf(line, sizeof line, format, list);
    __builtin_va_end(list);
    if (write(1, line, (size_t)length) != length) _exit(1);
}

static size_t property(const char *name) {
    size_t value = 0;
    return get_property(name, strlen(name), &value) ? value : 0;
}

static void account(void) {
    uint64_t bytes = 0, blocks = 0;
    for (int t = 0; t < THREADS; t++)
        for (int i = 0; i < ALL; i++)
            if (slots[t][i]) bytes += malloc_usable_size(slots[t][i]), blocks++;
    say("{\"held_bytes\":%lu,\"held_blocks\":%lu,\"slots\":%lu,\"count\":%lu,\"live_bytes\":%lu,\"cpu_free\":%lu,\"thread_free\":%lu,"
        "\"transfer_free\":%lu,\"sharded_free\":%lu,\"central_free\":%lu,\"heap_bytes\":%lu,\"unmapped_bytes\":%lu,\"page_heap_free\":%lu}\n",
        bytes, blocks, (unsigned long)(uintptr_t)slots, (unsigned long)(sizeof slots / sizeof(void *)),
        property("generic.current_allocated_bytes"), property("tcmalloc.cpu_free"), property("tcmalloc.thread_cache_free"),
        property("tcmalloc.transfer_cache_free"), property("tcmalloc.sharded_transfer_cache_free"), property("tcmalloc.central_cache_free"),
        property("generic.heap_size"), property("tcmalloc.pageheap_unmapped_bytes"), property("tcmalloc.pageheap_free_bytes"));
}

int main(void) {
    char line[64];
    get_property = dlsym(RTLD_DEFAULT, "MallocExtension_Internal_GetNumericProperty");
    set_sampling = dlsym(RTLD_DEFAULT, "MallocExtension_Internal_SetProfileSamplingInterval");
    if (!set_sampling) set_sampling = dlsym(RTLD_DEFAULT, "MallocExtension_Internal_SetProfileSamplingRate");
    release = dlsym(RTLD_DEFAULT, "MallocExtension_Internal_ReleaseMemoryToSystem");
    if (!get_property || !set_sampling || !release) return 1;
    for (;;) {
        size_t length = 0;
        while (length < sizeof line - 1 && read(0, line + length, 1) == 1 && line[length] != '\n') length++;
        if (length == 0) return 0;
        line[length] = 0;
        if (!strcmp(line, "unsampled")) {
            set_sampling(0);
            // The distance to the next sample was drawn before: this allocation goes beyond it.
            void *volatile far = malloc(256 << 20);
            free(far);
        } else if (!strcmp(line, "alone")) {
            fill(0);
        } else if (!strcmp(line, "threads")) {
            fill(0);
            pthread_t thread[THREADS];
            for (int t = 1; t < THREADS; t++) pthread_create(&thread[t], NULL, run, (void *)(intptr_t)t);
            while (__atomic_load_n(&done, __ATOMIC_SEQ_CST) < THREADS - 1) usleep(1000);
            pthread_join(thread[THREADS - 1], NULL);
            // Blocks of other threads, freed here.
            for (int t = 1; t < THREADS; t++)
                for (int i = 0; i < BLOCKS; i += 5) free(slots[t][i]), slots[t][i] = NULL;
        } else if (!strcmp(line, "peak")) {
            // Most of what was held is freed.
            for (int t = 0; t < THREADS; t++)
                for (int i = 0; i < ALL; i++) if (i % 997) free(slots[t][i]), slots[t][i] = NULL;
        } else if (!strcmp(line, "release")) {
            release(SIZE_MAX);
        }
        account();
    }
}
