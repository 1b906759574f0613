/* The next definitions: those of each function that the program would have called without the library. */
#ifndef FRAGPROF_NEXT_H
#define FRAGPROF_NEXT_H

#include "platform.h"

/* The flags and references of C++ that are only passed on. */
typedef const void *nothrow_ref;
typedef size_t align_value;

/* Filled at the first call or by the constructor, whichever comes first; not written afterwards. Before that, each entry is a function
 * that fills the table and calls the next definition. */
struct next {
	void *(*malloc)(size_t size);
	void (*free)(void *pointer);
	void *(*calloc)(size_t count, size_t size);
	void *(*realloc)(void *pointer, size_t size);
	int (*posix_memalign)(void **out, size_t alignment, size_t size);
	void *(*aligned_alloc)(size_t alignment, size_t size);
	void *(*memalign)(size_t alignment, size_t size);
	void *(*valloc)(size_t size);
	void *(*pvalloc)(size_t size);
	/* May be NULL: it exists since glibc 2.26 and musl 1.2.2. */
	void *(*reallocarray)(void *pointer, size_t count, size_t size);
	void (*free_sized)(void *pointer, size_t size);
	void (*free_aligned_sized)(void *pointer, size_t alignment, size_t size);
};
extern struct next next __attribute__((visibility("hidden")));

/* Fills `next` and the operators' table. Takes no lock, allocates nothing; may run twice at once, with one result. */
void next_resolve(void);

/* Where a definition was found. */
struct definition {
	void *address;
	/* The object that contains it, for comparisons only. */
	const void *object;
	/* The object that contains it also defines malloc: it is an allocator with entry points of its own. */
	bool by_allocator;
	/* The object is libstdc++ or libc++, whose operators call malloc and free. */
	bool by_cxx_runtime;
};
/* The first definition after this library, in the order of the dynamic linker. */
struct definition next_definition(const char *name);
/* The address of a function in an object that is loaded at `bias`, or NULL. `dynamic` is its dynamic section (Elf64_Dyn). */
void *next_function_in(uintptr_t bias, const void *dynamic, const char *name);
/* True if references to the name bind to this library. */
bool next_is_in_front(const char *name);

/* In operators.c and strings.c, called by next_resolve. */
void operators_resolve(void);
void strings_resolve(void);
#ifdef FRAGPROF_ALLOCX
/* In allocx.c, called by next_resolve. */
void allocx_resolve(void);
#endif

/* Reads the settings from the environment, if the libc has already set it up: before a thread's first draw. */
void next_read_settings(void);

#endif
