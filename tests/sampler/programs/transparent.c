/* Everything that a program can observe of its allocator: errno after each call, alignment, usable size, failure, defined symbols; but no
 * addresses. */
#define _GNU_SOURCE
#include <errno.h>
#include <malloc.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Programs use these to detect their allocator. */
extern void *mallocx(size_t, int) __attribute__((weak));
extern int mallctl(const char *, void *, size_t *, void *, size_t) __attribute__((weak));
extern void sdallocx(void *, size_t, int) __attribute__((weak));
extern void *tc_malloc(size_t) __attribute__((weak));
extern void *mi_malloc(size_t) __attribute__((weak));

/* An aligned block's usable size depends on its address. Not every allocator aligns correctly. */
static void show_aligned(const char *what, size_t size, size_t alignment, void *p)
{
	printf("%s %zu: %s errno %d aligned to %zu %d enough %d\n", what, size, p ? "block" : "NULL", errno, alignment,
	       !((uintptr_t)p & (alignment - 1)), p && malloc_usable_size(p) >= size);
	errno = 0;
}

static void show(const char *what, size_t size, void *p)
{
	uintptr_t a = (uintptr_t)p;

	printf("%s %zu: %s errno %d aligned %d usable %zu\n", what, size, p ? "block" : "NULL", errno, a && !(a & 15), p ? malloc_usable_size(p) : 0);
	errno = 0;
}

int main(void)
{
	static const size_t sizes[] = { 0, 1, 24, 100, 1000, 5000, 70000, 300000, 5000000 };
	static const size_t alignments[] = { 16, 64, 256, 4096 };
	volatile size_t huge = (size_t)PTRDIFF_MAX - 8192;
	static char buffer[1 << 16];

	setvbuf(stdout, buffer, _IOFBF, sizeof buffer);
	printf("mallocx %d mallctl %d sdallocx %d tc %d mi %d\n", !!mallocx, !!mallctl, !!sdallocx, !!tc_malloc, !!mi_malloc);
	for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
		size_t n = sizes[i];
		errno = 0;
		void *p = malloc(n);
		show("malloc", n, p);
		p = realloc(p, 2 * n + 1);
		show("realloc", 2 * n + 1, p);
		free(p);
		show("free", n, NULL);
		p = calloc(3, n);
		for (size_t j = 0; j < 3 * n; j++)
			if (((char *)p)[j])
				return 1;
		show("calloc", n, p);
		free(p);
		for (size_t j = 0; j < sizeof alignments / sizeof *alignments; j++) {
			size_t a = alignments[j];
			void *q = NULL;
			int error = posix_memalign(&q, a, n);
			printf("%d ", error);
			show_aligned("posix_memalign", n, a, q);
			free(q);
			q = aligned_alloc(a, (n + a - 1) & ~(a - 1));
			show_aligned("aligned_alloc", n, a, q);
			free(q);
			q = memalign(a, n);
			show_aligned("memalign", n, a, q);
			free(q);
		}
	}
	/* The compiler's warning applies to a realloc that succeeds; this one fails. */
	void *volatile keep = malloc(100);
	strcpy(keep, "whole");
	errno = 0;
	show("malloc", huge, malloc(huge));
	show("calloc", huge, calloc(huge, 4));
	show("realloc", huge, realloc(keep, huge));
	show("reallocarray", huge, reallocarray(keep, huge, 16));
	show("aligned_alloc", huge, aligned_alloc(4096, huge & ~(size_t)4095));
	void *out = (void *)123;
	int error = posix_memalign(&out, 64, huge);
	printf("posix_memalign %d out %d errno %d\n", error, out == (void *)123, errno);
	error = posix_memalign(&out, 3, 10);
	printf("posix_memalign %d out %d errno %d\n", error, out == (void *)123, errno);
	if (strcmp(keep, "whole"))
		return 1;
	errno = 5;
	void *none = realloc(keep, 0);
	printf("realloc to 0: %d errno %d\n", none != NULL, errno);
	free(none);
	free(NULL);
	fflush(stdout);
	return 0;
}
