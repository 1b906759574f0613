/* A library to preload: stores the time of allocation of every block in a shared file that a test reads. It is the ground truth of live
 * blocks for programs that have no ledger of their own.
 *
 * LEDGER_FILE names the file: ROWS rows of an address and its block's time of allocation (CLOCK_MONOTONIC ns, 0 = free), found by linear
 * probing from the address. A realloc in place keeps the time. The first row is not a block: it holds the pid of the process that the file
 * belongs to (its children do not use it), and the number of blocks for which there was no row. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define ROWS (1UL << 22)

struct row {
	_Atomic uint64_t addr, born_ns;
};

/* Calls are forwarded to the next library: an allocator that is preloaded too, or the C library. While that is looked up, dlsym may allocate
 * with the C library's own functions; it keeps nothing that is freed later. */
#ifdef __GLIBC__
extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t), *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);
#define FIRST(function) = __libc_##function
#else
/* musl's dlsym allocates only to tell of an error. */
#define FIRST(function)
#endif

static void *(*next_malloc)(size_t) FIRST(malloc);
static void *(*next_calloc)(size_t, size_t) FIRST(calloc);
static void *(*next_realloc)(void *, size_t) FIRST(realloc);
static void *(*next_memalign)(size_t, size_t) FIRST(memalign);
static void (*next_free)(void *) FIRST(free);

static struct row *_Atomic table;
static atomic_int state;

/* The table, created by the first call; NULL if there is none. It is opened with system calls alone: nothing here may allocate. */
static struct row *rows(void)
{
	struct row *have = atomic_load_explicit(&table, memory_order_acquire);
	int none = 0, fd;
	const char *path;

	if (have || !atomic_compare_exchange_strong(&state, &none, 1))
		return have;
	next_free = dlsym(RTLD_NEXT, "free");
	next_memalign = dlsym(RTLD_NEXT, "memalign");
	next_realloc = dlsym(RTLD_NEXT, "realloc");
	next_calloc = dlsym(RTLD_NEXT, "calloc");
	next_malloc = dlsym(RTLD_NEXT, "malloc");
	path = getenv("LEDGER_FILE");
	fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
	if (fd >= 0) {
		have = mmap(NULL, ROWS * sizeof(struct row), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
		close(fd);
		if (have != MAP_FAILED) {
			uint64_t nobody = 0;

			atomic_compare_exchange_strong(&have[0].addr, &nobody, (uint64_t)getpid());
			atomic_store_explicit(&table, have, memory_order_release);
		}
	}
	return atomic_load(&table);
}

static void set(void *block, uint64_t born_ns)
{
	struct row *have = rows();
	uint64_t addr = (uint64_t)block, at = (addr >> 4) * 0x9e3779b97f4a7c15UL >> 42;

	if (!have || !block || atomic_load(&have[0].addr) != (uint64_t)getpid())
		return;
	for (int tries = 0; tries < 1024; tries++, at = (at + 1) % ROWS) {
		uint64_t there = atomic_load(&have[at].addr), free_row = 0;

		if (!at)
			continue;
		if (there == addr || (!there && (atomic_compare_exchange_strong(&have[at].addr, &free_row, addr) || free_row == addr))) {
			atomic_store(&have[at].born_ns, born_ns);
			return;
		}
	}
	atomic_fetch_add(&have[0].born_ns, 1);
}

static void *born(void *block)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	set(block, now.tv_sec * 1000000000UL + now.tv_nsec);
	return block;
}

void *malloc(size_t size) { return rows(), born(next_malloc(size)); }
void *calloc(size_t count, size_t size) { return rows(), born(next_calloc(count, size)); }
void *memalign(size_t align, size_t size) { return rows(), born(next_memalign(align, size)); }
void *aligned_alloc(size_t align, size_t size) { return rows(), born(next_memalign(align, size)); }

int posix_memalign(void **out, size_t align, size_t size)
{
	void *block = (rows(), born(next_memalign(align, size)));

	if (!block)
		return ENOMEM;
	*out = block;
	return 0;
}

void free(void *block)
{
	set(block, 0);
	next_free(block);
}

/* The allocators have operators of their own, which would call none of the functions above. They fail where an exception would be thrown. */
static void *made(void *block) { return block ? block : (abort(), NULL); }
void *_Znwm(size_t size) { return made(malloc(size)); }
void *_Znam(size_t size) { return made(malloc(size)); }
void *_ZnwmRKSt9nothrow_t(size_t size, const void *tag) { return (void)tag, malloc(size); }
void *_ZnamRKSt9nothrow_t(size_t size, const void *tag) { return (void)tag, malloc(size); }
void *_ZnwmSt11align_val_t(size_t size, size_t align) { return made(memalign(align, size)); }
void *_ZnamSt11align_val_t(size_t size, size_t align) { return made(memalign(align, size)); }
void _ZdlPv(void *block) { free(block); }
void _ZdaPv(void *block) { free(block); }
void _ZdlPvm(void *block, size_t size) { (void)size, free(block); }
void _ZdaPvm(void *block, size_t size) { (void)size, free(block); }
void _ZdlPvRKSt9nothrow_t(void *block, const void *tag) { (void)tag, free(block); }
void _ZdaPvRKSt9nothrow_t(void *block, const void *tag) { (void)tag, free(block); }
void _ZdlPvSt11align_val_t(void *block, size_t align) { (void)align, free(block); }
void _ZdaPvSt11align_val_t(void *block, size_t align) { (void)align, free(block); }
void _ZdlPvmSt11align_val_t(void *block, size_t size, size_t align) { (void)size, (void)align, free(block); }
void _ZdaPvmSt11align_val_t(void *block, size_t size, size_t align) { (void)size, (void)align, free(block); }

void *realloc(void *old, size_t size)
{
	void *block;

	if (!old)
		return malloc(size);
	block = next_realloc(old, size);
	/* Another thread may have got the old block by now; its time of allocation is then after the start of this call, and is lost. Such
	 * a block counts as free, never the other way round. */
	if (block != old) {
		if (block || !size)
			set(old, 0);
		if (block)
			born(block);
	}
	return block;
}

void *reallocarray(void *old, size_t count, size_t size)
{
	size_t bytes;

	if (__builtin_mul_overflow(count, size, &bytes)) {
		errno = ENOMEM;
		return NULL;
	}
	return realloc(old, bytes);
}
