/* Finding the next definitions.
 *
 * dlsym(RTLD_NEXT) is not used: it may allocate (so that the first malloc would call itself), it takes the loader's lock, and its symbol
 * has a version that differs between versions of glibc. The dynamic linker's list of objects, which debuggers read too, has the objects
 * loaded at the start in the order in which names are searched (System V ABI; both glibc and musl); names are looked up in each object's
 * hash table. */
#include "next.h"

#include <elf.h>

#include "clock.h"
#ifdef FRAGPROF_RECORDER
#include "record.h"
#else
#include "sample.h"
#endif

#define WEAK __attribute__((weak))

/* <link.h>, the part that debuggers rely on: the same in glibc and musl. */
struct object {
	uintptr_t bias;
	const char *name;
	const Elf64_Dyn *dynamic;
	struct object *next, *previous;
};
struct debug {
	int version;
	struct object *objects;
};

/* glibc's variable is the list itself, musl's points to it. No reference has a version, so one library works with every libc. */
extern WEAK struct debug _r_debug;
extern WEAK struct debug *_dl_debug_addr;
extern WEAK unsigned long getauxval(unsigned long type);
extern WEAK char **__environ;
extern WEAK int *__errno_location(void);
/* This library's own dynamic section. */
extern const Elf64_Dyn _DYNAMIC[] __attribute__((visibility("hidden")));

/* An object's tables for looking up a name. */
struct symbols {
	const Elf64_Sym *symbols;
	const char *strings;
	const uint32_t *gnu_hash;
	const uint32_t *hash;
	const Elf64_Half *versions;
	const char *soname;
};

static struct object *objects(void)
{
	if (&_dl_debug_addr != NULL && _dl_debug_addr != NULL)
		return _dl_debug_addr->objects;
	if (&_r_debug != NULL)
		return _r_debug.objects;
	return NULL;
}

/* glibc relocates the addresses in a loaded dynamic section, musl does not: values below the load bias are not relocated. */
static const void *at(const struct object *object, uintptr_t value)
{
	return (const void *)(value < object->bias ? object->bias + value : value);
}

static struct symbols symbols_of(const struct object *object)
{
	struct symbols found = { 0 };
	uintptr_t soname = 0;

	for (const Elf64_Dyn *entry = object->dynamic; entry != NULL && entry->d_tag != DT_NULL; entry++) {
		switch (entry->d_tag) {
		case DT_SYMTAB:
			found.symbols = at(object, entry->d_un.d_ptr);
			break;
		case DT_STRTAB:
			found.strings = at(object, entry->d_un.d_ptr);
			break;
		case DT_GNU_HASH:
			found.gnu_hash = at(object, entry->d_un.d_ptr);
			break;
		case DT_HASH:
			found.hash = at(object, entry->d_un.d_ptr);
			break;
		case DT_VERSYM:
			found.versions = at(object, entry->d_un.d_ptr);
			break;
		case DT_SONAME:
			soname = entry->d_un.d_val;
			break;
		}
	}
	if (found.strings != NULL && soname != 0)
		found.soname = found.strings + soname;
	return found;
}

static bool same(const char *a, const char *b)
{
	while (*a != '\0' && *a == *b)
		a++, b++;
	return *a == *b;
}

static bool starts_with(const char *text, const char *start)
{
	while (*start != '\0' && *text == *start)
		text++, start++;
	return *start == '\0';
}

/* Whether it is a definition, and not one that exists only for programs linked against an old version. */
static bool is_definition(const struct symbols *in, uint32_t index, const char *name)
{
	const Elf64_Sym *symbol = &in->symbols[index];
	unsigned char type = ELF64_ST_TYPE(symbol->st_info);

	if (symbol->st_shndx == SHN_UNDEF || symbol->st_value == 0)
		return false;
	if (type != STT_FUNC && type != STT_GNU_IFUNC && type != STT_NOTYPE)
		return false;
	if (in->versions != NULL && (in->versions[index] & 0x8000))
		return false;
	return same(in->strings + symbol->st_name, name);
}

static void *address_of(const struct object *object, const Elf64_Sym *symbol)
{
	uintptr_t address = object->bias + symbol->st_value;

	if (ELF64_ST_TYPE(symbol->st_info) == STT_GNU_IFUNC)
		return ((void *(*)(void))address)();
	return (void *)address;
}

/* Layout: "DT_GNU_HASH", binutils' documentation; a Bloom filter, buckets, then chains of hashes whose lowest bit marks an end. */
static void *find_gnu(const struct object *object, const struct symbols *in, const char *name)
{
	const uint32_t *table = in->gnu_hash;
	uint32_t buckets = table[0], first = table[1], bloom_words = table[2], bloom_shift = table[3];
	const uint64_t *bloom = (const uint64_t *)(table + 4);
	const uint32_t *bucket = (const uint32_t *)(bloom + bloom_words);
	const uint32_t *chain = bucket + buckets;
	uint32_t hash = 5381;

	if (buckets == 0 || bloom_words == 0)
		return NULL;
	for (const char *c = name; *c != '\0'; c++)
		hash = hash * 33 + (unsigned char)*c;
	uint64_t word = bloom[(hash / 64) % bloom_words];
	if (!((word >> (hash % 64)) & (word >> ((hash >> bloom_shift) % 64)) & 1))
		return NULL;
	uint32_t index = bucket[hash % buckets];
	if (index < first)
		return NULL;
	for (;; index++) {
		if ((chain[index - first] | 1) == (hash | 1) && is_definition(in, index, name))
			return address_of(object, &in->symbols[index]);
		if (chain[index - first] & 1)
			return NULL;
	}
}

/* System V ABI, "Hash Table": the buckets hold the heads of lists of symbol numbers. */
static void *find_sysv(const struct object *object, const struct symbols *in, const char *name)
{
	const uint32_t *table = in->hash;
	uint32_t buckets = table[0];
	const uint32_t *bucket = table + 2;
	const uint32_t *chain = bucket + buckets;
	uint32_t hash = 0;

	if (buckets == 0)
		return NULL;
	for (const char *c = name; *c != '\0'; c++) {
		hash = (hash << 4) + (unsigned char)*c;
		hash ^= (hash >> 24) & 0xf0;
		hash &= 0x0fffffff;
	}
	for (uint32_t index = bucket[hash % buckets]; index != 0; index = chain[index])
		if (is_definition(in, index, name))
			return address_of(object, &in->symbols[index]);
	return NULL;
}

static void *find(const struct object *object, const struct symbols *in, const char *name)
{
	if (in->symbols == NULL || in->strings == NULL)
		return NULL;
	if (in->gnu_hash != NULL)
		return find_gnu(object, in, name);
	if (in->hash != NULL)
		return find_sysv(object, in, name);
	return NULL;
}

/* The first object whose definitions come after this library's. An attached library stands behind all others: those that any other object
 * calls are the first. */
static struct object *first_after_own(void)
{
	struct object *object = objects();

#ifndef FRAGPROF_ATTACHED
	while (object != NULL && object->dynamic != _DYNAMIC)
		object = object->next;
	object = object != NULL ? object->next : NULL;
#endif
	return object;
}

struct definition next_definition(const char *name)
{
	for (struct object *object = first_after_own(); object != NULL; object = object->next) {
		struct symbols in = symbols_of(object);
		void *address = object->dynamic != _DYNAMIC ? find(object, &in, name) : NULL;

		if (address == NULL)
			continue;
		return (struct definition){
			.address = address,
			.object = object,
			.by_allocator = find(object, &in, "malloc") != NULL,
			.by_cxx_runtime = in.soname != NULL && (starts_with(in.soname, "libstdc++.so") ||
								starts_with(in.soname, "libc++.so") ||
								starts_with(in.soname, "libc++abi.so")),
		};
	}
	return (struct definition){ 0 };
}

void *next_function_in(uintptr_t bias, const void *dynamic, const char *name)
{
	struct object object = { .bias = bias, .dynamic = dynamic };
	struct symbols in = symbols_of(&object);

	return find(&object, &in, name);
}

bool next_is_in_front(const char *name)
{
	for (struct object *object = objects(); object != NULL; object = object->next) {
		struct symbols in = symbols_of(object);

		if (find(object, &in, name) != NULL)
			return object->dynamic == _DYNAMIC;
	}
	return false;
}

static void fail_memory(void)
{
	if (__errno_location != NULL)
		*__errno_location() = 12; /* ENOMEM */
}

/* Substitutes for functions that this libc does not have. Defining them must not break a program with weak references to them. */
static void *pvalloc_by_memalign(size_t size)
{
	const size_t page = 4096;

	if (size > SIZE_MAX - page) {
		fail_memory();
		return NULL;
	}
	return next.memalign(page, size == 0 ? page : (size + page - 1) & ~(page - 1));
}

static void *valloc_by_memalign(size_t size)
{
	return next.memalign(4096, size);
}

static void *memalign_by_posix(size_t alignment, size_t size)
{
	void *pointer = NULL;

	return next.posix_memalign(&pointer, alignment < sizeof(void *) ? sizeof(void *) : alignment, size) == 0 ? pointer : NULL;
}

static void *reallocarray_overflow(void *pointer, size_t count, size_t size)
{
	(void)pointer, (void)count, (void)size;
	fail_memory();
	return NULL;
}

static void free_sized_by_free(void *pointer, size_t size)
{
	(void)size;
	next.free(pointer);
}

static void free_aligned_sized_by_free(void *pointer, size_t alignment, size_t size)
{
	(void)alignment, (void)size;
	next.free(pointer);
}

static void *or_else(const char *name, void *instead)
{
	void *address = next_definition(name).address;

	return address != NULL ? address : instead;
}

/* An allocator may lack an entry point that the next libc has (jemalloc: pvalloc). The allocator's free would not accept the libc's
 * block, so if `by` is the allocator's own, the block is allocated with that. */
static void *own_or_else(const char *name, const void *allocator, const char *by, void *instead)
{
	struct definition found = next_definition(name);

	if (found.address != NULL && (found.object == allocator || next_definition(by).object != allocator))
		return found.address;
	return instead;
}

void next_resolve(void)
{
	struct definition malloc_found = next_definition("malloc");
	const void *allocator = malloc_found.object;

	/* No libc: nothing can be passed on or reported. */
	if (malloc_found.address == NULL) {
#ifdef FRAGPROF_ATTACHED
		return;
#endif
		__builtin_trap();
	}
	next.calloc = next_definition("calloc").address;
	next.realloc = next_definition("realloc").address;
	next.free = next_definition("free").address;
	next.posix_memalign = next_definition("posix_memalign").address;
	next.aligned_alloc = own_or_else("aligned_alloc", allocator, "posix_memalign", memalign_by_posix);
	next.memalign = own_or_else("memalign", allocator, "posix_memalign", memalign_by_posix);
	next.valloc = own_or_else("valloc", allocator, "posix_memalign", valloc_by_memalign);
	next.pvalloc = own_or_else("pvalloc", allocator, "posix_memalign", pvalloc_by_memalign);
	next.reallocarray = or_else("reallocarray", reallocarray_overflow);
	next.free_sized = or_else("free_sized", free_sized_by_free);
	next.free_aligned_sized = or_else("free_aligned_sized", free_aligned_sized_by_free);
	next.malloc = malloc_found.address;
	operators_resolve();
	strings_resolve();
#ifdef FRAGPROF_ALLOCX
	allocx_resolve();
#endif
}

#ifndef FRAGPROF_ATTACHED
static const char *value_of(const char *entry, const char *name)
{
	return starts_with(entry, name) ? entry + __builtin_strlen(name) : NULL;
}

static void read_settings(char **environment)
{
	for (; environment != NULL && *environment != NULL; environment++) {
#ifdef FRAGPROF_RECORDER
		record_set_path(value_of(*environment, "FRAGPROF_RING="));
#else
		sample_set_interval(value_of(*environment, "FRAGPROF_SAMPLE_BYTES="));
		sample_set_by_site(value_of(*environment, "FRAGPROF_SAMPLE_BY_SITE="));
		sample_set_limit(value_of(*environment, "FRAGPROF_SAMPLES_PER_SECOND="));
#endif
	}
}
#endif

void next_read_settings(void)
{
#ifndef FRAGPROF_ATTACHED
	static bool known;

	if (known || &__environ == NULL || __environ == NULL)
		return;
	known = true;
	read_settings(__environ);
#endif
}

/* Runs before the program's main, perhaps after the first allocations. glibc passes the arguments
 * of main; musl does not, but has set __environ by then. */
__attribute__((constructor)) static void start(int argc, char **argv, char **environment)
{
	uint64_t seed = (uintptr_t)&argc;

	(void)argv;
	next_resolve();
	if (&_dl_debug_addr != NULL)
		environment = &__environ != NULL ? __environ : NULL;
#ifdef FRAGPROF_ATTACHED
	/* A program that runs may be writing its environment: the settings are arguments of fragprof_attach. */
	(void)environment;
#else
	read_settings(environment);
#endif
	if (getauxval != NULL) {
		clock_resolve(getauxval(AT_SYSINFO_EHDR));
		/* 16 random bytes from the kernel. The first eight belong to the stack protector and are not used. */
		const uint64_t *random = (const uint64_t *)getauxval(AT_RANDOM);

		if (random != NULL)
			seed ^= random[1];
	}
#ifdef FRAGPROF_RECORDER
	(void)seed;
	record_set_in_front(next_is_in_front("malloc"));
	record_attach();
#else
	sample_set_seed(seed);
#ifndef FRAGPROF_ATTACHED
	fragprof_sampler_stats.in_front = next_is_in_front("malloc");
#endif
#endif
}
