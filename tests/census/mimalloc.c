// Makes mimalloc heaps in several threads and prints two accounts of them: the program's list of blocks, and what mimalloc itself visits.
// Commands on standard input, a line of JSON each on standard output. Nothing is allocated between two commands.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <malloc.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef bool (*visitor)(const void *heap, const void *area, void *block, size_t size, void *arg);
static void *(*mi_heap_get_default)(void);
static bool (*mi_heap_visit_blocks)(const void *heap, bool blocks, visitor visit, void *arg);
static void (*mi_collect)(bool force);
static void (*mi_heap_collect)(void *heap, bool force);
// Since 3.2 a heap is of all threads; in 3.0 and 3.1 pages without a thread are visited by a call of their own, which passes over full ones.
static void *(*mi_heap_main)(void);
static int (*mi_version)(void);
static void *(*mi_subproc_main)(void);
static bool (*mi_abandoned_visit_blocks)(void *subproc, int tag, bool blocks, visitor visit, void *arg);

enum { THREADS = 4, BLOCKS = 40000, LARGE = 6 };
static void *slots[THREADS][BLOCKS + LARGE];
static volatile int done, turn, visited;
static uint64_t visited_bytes, visited_blocks;

struct sum { uint64_t bytes, blocks; };

static bool add(const void *heap, const void *area, void *block, size_t size, void *arg) {
    struct sum *sum = arg;
    if (block) sum->bytes += size, sum->blocks++;
    return true;
}

static uint64_t next(uint64_t *seed) { *seed ^= *seed << 13; *seed ^= *seed >> 7; *seed ^= *seed << 17; return *seed; }

static size_t size_of(uint64_t r) {
    if (r % 1000 < 800) return 1 + r / 1000 % 300;
    if (r % 1000 < 980) return 1 + r / 1000 % 8000;
    return 1 + r / 1000 % 300000;
}

static void fill(int thread) {
    uint64_t seed = 88172645463325252ull + thread;
    for (int i = 0; i < BLOCKS; i++) {
        slots[thread][i] = malloc(size_of(next(&seed)));
        *(char *)slots[thread][i] = 1;
        if (i > 100 && next(&seed) % 3 == 0) {
            int other = i - 1 - (int)(next(&seed) % 100);
            free(slots[thread][other]);
            slots[thread][other] = NULL;
        }
    }
    // Huge blocks of a thread that ended are not visited by another in 2.1.4 and 2.1.7.
    for (int i = 0; i < (thread == THREADS - 1 ? LARGE - 2 : LARGE); i++) slots[thread][BLOCKS + i] = malloc((size_t)1 << (17 + 2 * i));
}

static void visit(bool all) {
    struct sum sum = {0, 0};
    if (mi_heap_main) {
        if (all) mi_heap_visit_blocks(mi_heap_main(), true, add, &sum);
    } else {
        mi_heap_collect(mi_heap_get_default(), false);
        mi_heap_visit_blocks(mi_heap_get_default(), true, add, &sum);
        if (all && mi_version() >= 300) mi_abandoned_visit_blocks(mi_subproc_main(), -1, true, add, &sum);
    }
    __atomic_add_fetch(&visited_bytes, sum.bytes, __ATOMIC_SEQ_CST);
    __atomic_add_fetch(&visited_blocks, sum.blocks, __ATOMIC_SEQ_CST);
    __atomic_add_fetch(&visited, 1, __ATOMIC_SEQ_CST);
}

static void *run(void *arg) {
    int thread = (int)(intptr_t)arg;
    fill(thread);
    __atomic_add_fetch(&done, 1, __ATOMIC_SEQ_CST);
    // The last one ends: its segments are abandoned.
    if (thread == THREADS - 1) return NULL;
    while (!__atomic_load_n(&turn, __ATOMIC_SEQ_CST)) usleep(1000);
    visit(false);
    for (;;) pause();
}

static void say(const char *format, uint64_t a, uint64_t b) {
    char line[200];
    int length = snprintf(line, sizeof line, format, (unsigned long)a, (unsigned long)b);
    if (write(1, line, (size_t)length) != length) _exit(1);
}

static void ledger(void) {
    struct sum sum = {0, 0};
    for (int t = 0; t < THREADS; t++)
        for (int i = 0; i < BLOCKS + LARGE; i++)
            if (slots[t][i]) sum.bytes += malloc_usable_size(slots[t][i]), sum.blocks++;
    say("{\"held_bytes\":%lu,\"held_blocks\":%lu}\n", sum.bytes, sum.blocks);
}

int main(void) {
    char line[64];
    mi_heap_get_default = dlsym(RTLD_DEFAULT, "mi_heap_get_default");
    mi_heap_visit_blocks = dlsym(RTLD_DEFAULT, "mi_heap_visit_blocks");
    mi_heap_collect = dlsym(RTLD_DEFAULT, "mi_heap_collect");
    mi_heap_main = dlsym(RTLD_DEFAULT, "mi_heap_main");
    mi_version = dlsym(RTLD_DEFAULT, "mi_version");
    mi_subproc_main = dlsym(RTLD_DEFAULT, "mi_subproc_main");
    mi_abandoned_visit_blocks = dlsym(RTLD_DEFAULT, "mi_abandoned_visit_blocks");
    mi_collect = dlsym(RTLD_DEFAULT, "mi_collect");
    if (!mi_heap_visit_blocks) return 1;
    for (;;) {
        size_t length = 0;
        while (length < sizeof line - 1 && read(0, line + length, 1) == 1 && line[length] != '\n') length++;
        if (length == 0) return 0;
        line[length] = 0;
        if (!strcmp(line, "alone")) {
            fill(0);
            ledger();
        } else if (!strcmp(line, "threads")) {
            fill(0);
            pthread_t thread[THREADS];
            for (int t = 1; t < THREADS; t++) pthread_create(&thread[t], NULL, run, (void *)(intptr_t)t);
            while (__atomic_load_n(&done, __ATOMIC_SEQ_CST) < THREADS - 1) usleep(1000);
            pthread_join(thread[THREADS - 1], NULL);
            // Blocks of other threads, freed here: of pages with room, of full ones, of abandoned ones.
            for (int t = 1; t < THREADS; t++)
                for (int i = 0; i < BLOCKS; i += 5) free(slots[t][i]), slots[t][i] = NULL;
            ledger();
        } else if (!strcmp(line, "peak")) {
            // Memory that is given back: most of what was held is freed.
            for (int i = 0; i < BLOCKS; i++) if (i % 997) free(slots[0][i]), slots[0][i] = NULL;
            ledger();
        } else if (!strcmp(line, "collect")) {
            mi_collect(true);
            ledger();
        } else if (!strcmp(line, "visit")) {
            // Takes over the abandoned segments, so that they are visited too.
            mi_collect(true);
            __atomic_store_n(&turn, 1, __ATOMIC_SEQ_CST);
            int others = __atomic_load_n(&done, __ATOMIC_SEQ_CST) - 1;
            visit(true);
            while (__atomic_load_n(&visited, __ATOMIC_SEQ_CST) < (others > 0 ? others : 0) + 1) usleep(1000);
            bool complete = mi_heap_main || mi_version() < 300;
            say(complete ? "{\"visited_bytes\":%lu,\"visited_blocks\":%lu,\"is_complete\":1}\n"
                         : "{\"visited_bytes\":%lu,\"visited_blocks\":%lu,\"is_complete\":0}\n", visited_bytes, visited_blocks);
        }
    }
}
