/* A heap that cannot shrink: one small block remains above a thousand freed ones. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

void *the_top;

int main(void)
{
	static void *below[1000];
	setvbuf(stdout, NULL, _IONBF, 0);
	for (int i = 0; i < 1000; i++) {
		below[i] = malloc(4000);
		memset(below[i], 1, 4000);
	}
	the_top = malloc(100);
	memset(the_top, 1, 100);
	for (int i = 0; i < 1000; i++) {
		free(below[i]);
		below[i] = NULL;
	}
	puts("ready");
	for (;;)
		pause();
}
