/* Copies of strings, by an allocator that has functions for them itself: mimalloc's, since 2.2, call nothing that is interposed. A C
 * library's call malloc, which is; they are passed on. */
#include "next.h"
#ifdef FRAGPROF_ATTACHED
#include "attach.h"
#endif
#ifdef FRAGPROF_RECORDER
#include "record.h"
#else
#include "sample.h"
#endif

static char *(*next_strdup)(const char *text);
static char *(*next_strndup)(const char *text, size_t length_max);
/* Whether they are an allocator's. */
static bool strdup_counts, strndup_counts;

/* Only C libraries have `exit`. */
static bool is_allocators(struct definition found)
{
	return found.by_allocator && found.object != next_definition("exit").object;
}

void strings_resolve(void)
{
	struct definition strdup_found = next_definition("strdup"), strndup_found = next_definition("strndup");

	strdup_counts = is_allocators(strdup_found);
	strndup_counts = is_allocators(strndup_found);
	next_strndup = strndup_found.address;
	next_strdup = strdup_found.address;
}

static size_t bytes_of_copy(const char *text, size_t length_max)
{
	size_t length = 0;

	while (length < length_max && text[length] != '\0')
		length++;
	return length + 1;
}

EXPORT char *strdup(const char *text)
{
	if (unlikely(next_strdup == NULL))
		next_resolve();
	if (strdup_counts && listening_alloc())
		return SAMPLE_INNER(bytes_of_copy(text, SIZE_MAX), next_strdup(text));
	return next_strdup(text);
}

EXPORT char *strndup(const char *text, size_t length_max)
{
	if (unlikely(next_strdup == NULL))
		next_resolve();
	if (strndup_counts && listening_alloc())
		return SAMPLE_INNER(bytes_of_copy(text, length_max), next_strndup(text, length_max));
	return next_strndup(text, length_max);
}

#ifdef FRAGPROF_ATTACHED
/* A C library's call malloc through a word of the C library. */
void strings_each(attach_function *each)
{
	if (strdup_counts)
		each("strdup", strdup, next_strdup);
	if (strndup_counts)
		each("strndup", strndup, next_strndup);
}
#endif
