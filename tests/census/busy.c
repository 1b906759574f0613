// Three threads allocate and free as fast as they can around blocks that are never freed. Commands on standard input: start, count.
#define _GNU_SOURCE
#include <malloc.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define THREADS 3
#define SLOTS 30000
#define PINNED 500
struct state { uint64_t seed; void *slots[SLOTS]; long bytes, operations; void *pinned[PINNED]; int ready; char pad[64]; };
static struct state states[THREADS];

// What a block takes besides its usable bytes: 8 with glibc.
#ifndef HEADER_BYTES
#define HEADER_BYTES 8
#endif
static long chunk(void *p) { return p ? (long)malloc_usable_size(p) + HEADER_BYTES : 0; }

static void *run(void *arg) {
    struct state *s = arg;
    long bytes = 0;
    for (int i = 0; i < PINNED; i++) {
        s->pinned[i] = malloc(24 + (size_t)i);
        bytes += chunk(s->pinned[i]);
        for (int k = 0; k < 8; k++) { int j = i * 8 + k; s->slots[j] = malloc(16 + (size_t)(j % 700)); bytes += chunk(s->slots[j]); }
    }
    for (uint64_t n = 0;; n++) {
        s->seed ^= s->seed << 13; s->seed ^= s->seed >> 7; s->seed ^= s->seed << 17;
        int i = (int)(s->seed % SLOTS);
        bytes -= chunk(s->slots[i]);
        free(s->slots[i]);
        size_t size = (s->seed >> 20) % 100 < 90 ? (s->seed >> 32) % 512 : (s->seed >> 32) % 16384;
        s->slots[i] = malloc(size);
        bytes += chunk(s->slots[i]);
        __atomic_store_n(&s->bytes, bytes, __ATOMIC_RELAXED);
        __atomic_store_n(&s->operations, (long)(2 * n), __ATOMIC_RELAXED);
        if (n == 20 * SLOTS) __atomic_store_n(&s->ready, 1, __ATOMIC_RELEASE);
    }
}

int main(void) {
    static char in[256], out[1 << 16];
    setvbuf(stdin, in, _IOLBF, sizeof in);
    setvbuf(stdout, out, _IOFBF, sizeof out);
    mallopt(M_MMAP_THRESHOLD, 1 << 20);
    char line[64];
    while (fgets(line, sizeof line, stdin)) {
        if (!strncmp(line, "start", 5)) {
            for (int i = 0; i < THREADS; i++) { pthread_t t; states[i].seed = 88172645463325252ull + (uint64_t)i; pthread_create(&t, NULL, run, &states[i]); }
            for (int i = 0; i < THREADS; i++) while (!__atomic_load_n(&states[i].ready, __ATOMIC_ACQUIRE)) sched_yield();
            printf("{\"pinned\":[");
            for (int i = 0; i < THREADS * PINNED; i++) printf("%s%zu", i ? "," : "", (size_t)(uintptr_t)states[i / PINNED].pinned[i % PINNED]);
            // The counters' addresses (live bytes, then operations), so that they can be read without involving this program.
            printf("],\"counters\":[");
            for (int i = 0; i < THREADS; i++) printf("%s%zu", i ? "," : "", (size_t)(uintptr_t)&states[i].bytes);
            printf("]}\n");
        } else {
            long bytes = 0;
            for (int i = 0; i < THREADS; i++) bytes += __atomic_load_n(&states[i].bytes, __ATOMIC_RELAXED);
            printf("{\"live_bytes\":%ld}\n", bytes);
        }
        fflush(stdout);
    }
    return 0;
}
