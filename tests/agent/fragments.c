// Makes a heap of many small blocks of which every n-th stays, changes its name if one is given, and waits to be killed.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

int main(int argc, char **argv) {
    int keep = argc > 1 ? atoi(argv[1]) : 16;
    if (argc > 2) prctl(PR_SET_NAME, argv[2]);
    static void *blocks[100000];
    for (int i = 0; i < 100000; i++) memset(blocks[i] = malloc(200), 1, 200);
    for (int i = 0; i < 100000; i++) if (i % keep) free(blocks[i]);
    void *large = malloc(3 << 20);
    memset(large, 1, 3 << 20);
    // Unbuffered: a buffer would be a block that the census finds.
    (void)!write(1, "ready\n", 6);
    for (;;) pause();
}
