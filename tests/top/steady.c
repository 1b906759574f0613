// Allocates at a steady rate: from the second round on, 100 blocks of 1,000 bytes of `steady_site` are live, and every 10 ms each of them
// is freed and allocated again. An earlier block of 8 MiB, or of the MiB given as argument, is live too. Ends with its standard input.
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BLOCKS = 100, BLOCK_BYTES = 1000 };

static void *held[BLOCKS];
static char *volatile old;

__attribute__((noinline)) void *steady_site(void)
{
    void *volatile block = malloc(BLOCK_BYTES);
    memset(block, 1, BLOCK_BYTES);
    return block;
}

int main(int argc, char **argv)
{
    size_t bytes = (size_t)(argc > 1 ? atoi(argv[1]) : 8) << 20;
    old = malloc(bytes);
    memset(old, 1, bytes);
    struct pollfd input = { .fd = 0, .events = POLLIN };
    puts("ready");
    fflush(stdout);
    while (poll(&input, 1, 10) == 0) {
        for (int i = 0; i < BLOCKS; i++) {
            free(held[i]);
            held[i] = steady_site();
        }
    }
    return 0;
}
