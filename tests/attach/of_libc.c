/* Allocations that the C library makes on behalf of its callers. */
#define _GNU_SOURCE
#include "truth.h"
#include <malloc.h>
#include <stdio.h>
#include <string.h>

SITE struct block site_strdup(const char *text)
{
	void *p = strdup(text);
	return TOOK(p, strlen(text) + 1);
}

SITE struct block site_strndup(const char *text, size_t n)
{
	void *p = strndup(text, n);
	return TOOK(p, n + 1);
}

SITE struct block site_asprintf(int n)
{
	char *p = NULL;
	int length = asprintf(&p, "%0*d", n, 7);
	REQUIRE(length == n);
	/* The C library allocates more than once on the way. */
	return TOOK_LIVE_ONLY(p, (size_t)n + 1);
}

int main(void)
{
	truth_rendezvous("ready");
	static char text[5000];
	memset(text, 'a', sizeof text - 1);
	for (int i = 0; i < 200; i++) {
		struct block a = site_strdup(text + 4900 - i), b = site_strndup(text, 100 + (size_t)i), c = site_asprintf(300 + i);
		if (i % 2) {
			truth_strike(a);
			free(a.ptr);
		}
		if (i % 3) {
			truth_strike(b);
			free(b.ptr);
		}
		if (i % 5) {
			truth_strike(c);
			free(c.ptr);
		}
	}
	truth_rendezvous("done");
	return 0;
}
