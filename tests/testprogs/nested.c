/* Entry points that call one another, and libc functions that allocate on the caller's behalf: each block counts once. */
#include "truth.h"
#include <malloc.h>

SITE struct block site_realloc_null(size_t n) { void *p = realloc(NULL, n); return TOOK(p, n); }
SITE struct block site_reallocarray_null(size_t c, size_t n) { void *p = reallocarray(NULL, c, n); return TOOK(p, c * n); }
SITE struct block site_calloc(size_t c, size_t n) { void *p = calloc(c, n); return TOOK(p, c * n); }
SITE struct block site_strdup(const char *s) { void *p = strdup(s); return TOOK(p, strlen(s) + 1); }
SITE struct block site_strndup(const char *s, size_t n) { void *p = strndup(s, n); return TOOK(p, strnlen(s, n) + 1); }

SITE struct block site_posix_memalign(size_t n)
{
	void *p;
	REQUIRE(posix_memalign(&p, 64, n) == 0);
	return TOOK(p, n);
}

SITE struct block site_asprintf(int n)
{
	char *s = NULL;
	int len = asprintf(&s, "%0*d", n, 7);
	REQUIRE(len == n);
	return TOOK_LIVE_ONLY(s, (size_t)len + 1);
}

SITE struct block site_getline(FILE *from)
{
	char *line = NULL;
	size_t size = 0;
	rewind(from);
	REQUIRE(getline(&line, &size, from) > 0);
	return TOOK_LIVE_ONLY(line, size);
}

int main(void)
{
	char text[] = "one line\nand another\n";
	FILE *from = fmemopen(text, sizeof text - 1, "r");
	REQUIRE(from);
	/* The stream allocates its buffer with the first seek, outside of any site. */
	rewind(from);
	truth_rendezvous("ready");
	for (int i = 0; i < 50; i++) {
		block_free(site_realloc_null(33));
		site_realloc_null(44);
		block_free(site_reallocarray_null(3, 21));
		site_reallocarray_null(4, 21);
		block_free(site_calloc(9, 9));
		site_calloc(10, 10);
		block_free(site_posix_memalign(55));
		site_posix_memalign(66);
		block_free(site_strdup("gone"));
		site_strdup("kept for good");
		site_strndup("cut off here", 3 + (size_t)i % 5);
		block_free(site_asprintf(20));
		site_asprintf(10 + 7 * i);
		block_free(site_getline(from));
		site_getline(from);
	}
	truth_rendezvous("done");
	return 0;
}
