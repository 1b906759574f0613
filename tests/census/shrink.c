// A heap that keeps changing its shape: it grows and is returned, in the main arena, in an arena of a thread, and in mappings. The second
// thread frees nothing of the first, so the only difficulty for a walk is memory that vanishes during it.
#define _GNU_SOURCE
#include <malloc.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void *shrink(void *arg) {
    static __thread void *blocks[20000];
    for (unsigned round = 0;; round++) {
        size_t size = round % 3 ? 900 : 200000;
        int count = round % 3 ? 20000 : 100;
        for (int i = 0; i < count; i++) { blocks[i] = malloc(size); memset(blocks[i], 1, size); }
        for (int i = 0; i < count; i++) free(blocks[i]);
        malloc_trim(0);
    }
    return arg;
}

int main(int argc, char **argv) {
    char line[64];
    setvbuf(stdin, NULL, _IONBF, 0);
    while (fgets(line, sizeof line, stdin)) {
        if (!strncmp(line, "exec", 4)) { puts("{}"); fflush(stdout); execl("/proc/self/exe", argv[0], NULL); }
        pthread_t threads[2];
        for (int i = 0; i < 2; i++) pthread_create(&threads[i], NULL, shrink, NULL);
        puts("{}");
        fflush(stdout);
    }
    return argc > 9;
}
