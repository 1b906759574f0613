// Allocates this many MiB in small blocks, reports it, and after a line of input allocates more without end.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void take(long mib) {
    for (long i = 0; i < mib * 1024; i++) memset(malloc(1000), 1, 1000);
}

int main(int argc, char **argv) {
    take(argc > 1 ? atol(argv[1]) : 8);
    (void)!write(1, "ready\n", 6);
    char line[16];
    if (read(0, line, sizeof line) <= 0) return 0;
    for (;;) take(1);
}
