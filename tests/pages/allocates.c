// Allocates in one function in an endless loop, and keeps every fourth block. The build renames the function to HTML markup.
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* Some microseconds of work: probes take less than half of the time in a window, and the rates are known. */
static void work(void) {
    for (volatile int i = 0; i < 4000; i++) {}
}

__attribute__((noinline)) void *place(void) { return memset(malloc(300), 1, 300); }

int main(void) {
    (void)!write(1, "ready\n", 6);
    static void *kept[1 << 20];
    for (unsigned i = 0;; i++) {
        work();
        void *block = place();
        if (i % 4 == 0 && i / 4 < 1 << 20) kept[i / 4] = block;
        else free(block);
        if (i % 100 == 0) nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
}
