/* An allocator with strdup and strndup of its own, which call nothing by name, as mimalloc's. It takes from one piece of memory and puts
 * nothing back. */
#include <errno.h>
#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))
#define BYTES ((size_t)64 << 20)
/* Before each block, its size. */
#define HEADER 16u

static char memory[BYTES] __attribute__((aligned(4096)));
static _Atomic size_t used;

static void copy(char *to, const char *from, size_t size)
{
	for (size_t i = 0; i < size; i++)
		to[i] = from[i];
}

static void *take(size_t alignment, size_t size)
{
	if (size > BYTES || alignment > BYTES)
		return NULL;
	size_t room = (HEADER + alignment + size + 15) & ~(size_t)15, at = used;
	do {
		if (room > BYTES - at)
			return NULL;
	} while (!__atomic_compare_exchange_n(&used, &at, at + room, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
	uintptr_t block = ((uintptr_t)memory + at + HEADER + alignment - 1) & ~(alignment - 1);
	((size_t *)block)[-1] = size;
	return (void *)block;
}

EXPORT void *malloc(size_t size)
{
	return take(16, size);
}

EXPORT void free(void *block)
{
	(void)block;
}

EXPORT void *calloc(size_t count, size_t size)
{
	size_t total;
	return __builtin_mul_overflow(count, size, &total) ? NULL : take(16, total);
}

EXPORT void *realloc(void *block, size_t size)
{
	char *moved = take(16, size);
	size_t old = block ? ((size_t *)block)[-1] : 0;
	if (moved && block)
		copy(moved, block, old < size ? old : size);
	return moved;
}

EXPORT void *memalign(size_t alignment, size_t size)
{
	return take(alignment < 16 ? 16 : alignment, size);
}

EXPORT void *aligned_alloc(size_t alignment, size_t size)
{
	return take(alignment < 16 ? 16 : alignment, size);
}

EXPORT int posix_memalign(void **out, size_t alignment, size_t size)
{
	*out = take(alignment < 16 ? 16 : alignment, size);
	return *out ? 0 : ENOMEM;
}

EXPORT size_t malloc_usable_size(void *block)
{
	return block ? ((size_t *)block)[-1] : 0;
}

EXPORT char *strndup(const char *text, size_t length_max)
{
	size_t length = 0;
	while (length < length_max && text[length])
		length++;
	char *made = take(16, length + 1);
	if (made) {
		copy(made, text, length);
		made[length] = '\0';
	}
	return made;
}

EXPORT char *strdup(const char *text)
{
	size_t length = 0;
	while (text[length])
		length++;
	char *made = take(16, length + 1);
	if (made)
		copy(made, text, length + 1);
	return made;
}
