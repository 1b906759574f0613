/*
 * The test programs' own ledger and their rendezvous with the test.
 *
 * A *site* is a function, named site_* (or early_* for what a program allocates before it is ready), that makes one kind of
 * allocation. Each allocation is entered for the function that made it, each free is entered before it is made, so at a rendezvous
 * the sites' live bytes and counts are the truth that a recording must equal. The ledger is in static arrays and is printed with
 * write(2): nothing here passes through the traced allocator.
 *
 * Rendezvous: truth_rendezvous("ready") sends one line of JSON and waits for one byte. With TRUTH_SOCKET=PATH in the environment it
 * uses that unix stream socket; without it the line goes to standard output and nothing is awaited, so that every program also
 * runs alone.
 *
 * Valid C11 and C++17, with glibc and musl.
 */
#ifndef TRUTH_H
#define TRUTH_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

/* Sites of one program. The largest program has about 60. */
#define TRUTH_SITES_MAX 128

/* A function whose frame must be found: never inlined, cloned or merged with an identical one. */
#define SITE __attribute__((noipa))

struct truth_site {
	const char *name;
	long long live_bytes;
	long long live_count;
	long long allocated_bytes;
	long long allocations;
	int live_only; /* the number of allocations depends on the C library: allocated_* are not valid */
};

/* A block and the site that owns it. ptr == NULL: no block. */
struct block {
	void *ptr;
	size_t size;
	struct truth_site *site;
};

static struct truth_site truth_sites[TRUTH_SITES_MAX];
static int truth_sites_len;
static int truth_lock;
static int truth_fd = -1;

__attribute__((noreturn, unused)) static void truth_fail(const char *what)
{
	char line[512];
	int len = snprintf(line, sizeof line, "truth: %s: %s\n", what, strerror(errno));
	if (write(2, line, (size_t)len) < 0)
		_exit(98);
	_exit(97);
}

/* Ends the program with a message if an assumption of the test program does not hold. */
#define REQUIRE(condition) ((condition) ? (void)0 : truth_fail(#condition))

static struct truth_site *truth_site_named(const char *name)
{
	struct truth_site *site = NULL;
	while (__atomic_exchange_n(&truth_lock, 1, __ATOMIC_ACQUIRE))
		;
	for (int i = 0; i < truth_sites_len; i++)
		if (strcmp(truth_sites[i].name, name) == 0)
			site = &truth_sites[i];
	if (!site) {
		if (truth_sites_len == TRUTH_SITES_MAX)
			truth_fail("too many sites");
		site = &truth_sites[truth_sites_len];
		site->name = name;
		__atomic_store_n(&truth_sites_len, truth_sites_len + 1, __ATOMIC_RELEASE);
	}
	__atomic_store_n(&truth_lock, 0, __ATOMIC_RELEASE);
	return site;
}

__attribute__((unused)) static struct block truth_enter(struct truth_site *site, void *ptr, size_t size)
{
	struct block block = { ptr, size, site };
	if (!ptr)
		return block;
	__atomic_fetch_add(&site->live_bytes, (long long)size, __ATOMIC_RELAXED);
	__atomic_fetch_add(&site->live_count, 1, __ATOMIC_RELAXED);
	__atomic_fetch_add(&site->allocated_bytes, (long long)size, __ATOMIC_RELAXED);
	__atomic_fetch_add(&site->allocations, 1, __ATOMIC_RELAXED);
	return block;
}

/* Enters a block for the function that uses the macro. PTR is what the allocator returned; NULL enters nothing. */
#define TOOK(ptr, size)                                                                                                           \
	(__extension__({                                                                                                          \
		static struct truth_site *truth_cache;                                                                            \
		struct truth_site *truth_mine = __atomic_load_n(&truth_cache, __ATOMIC_ACQUIRE);                                  \
		if (!truth_mine) {                                                                                                \
			truth_mine = truth_site_named(__func__);                                                                  \
			__atomic_store_n(&truth_cache, truth_mine, __ATOMIC_RELEASE);                                             \
		}                                                                                                                 \
		truth_enter(truth_mine, (ptr), (size));                                                                           \
	}))

/* As TOOK, if only the live block is known: a libc function that resizes its block an unknown number of times. */
#define TOOK_LIVE_ONLY(ptr, size)                                                                                                 \
	(__extension__({                                                                                                          \
		struct block truth_block = TOOK(ptr, size);                                                                       \
		truth_block.site->live_only = 1;                                                                                  \
		truth_block;                                                                                                      \
	}))

/* As TOOK_LIVE_ONLY, for a site that may not return. */
__attribute__((unused)) static void truth_live_only(const char *name)
{
	truth_site_named(name)->live_only = 1;
}

/* Enters a block for a function of another object, by its name. */
__attribute__((unused)) static struct block truth_took_by(const char *name, void *ptr, size_t size)
{
	return truth_enter(truth_site_named(name), ptr, size);
}

/* Removes a block. Called before the free, so that another thread that gets the address again cannot be entered first. */
__attribute__((unused)) static void truth_strike(struct block block)
{
	if (!block.ptr)
		return;
	__atomic_fetch_sub(&block.site->live_bytes, (long long)block.size, __ATOMIC_RELAXED);
	__atomic_fetch_sub(&block.site->live_count, 1, __ATOMIC_RELAXED);
}

/* Reverts a removal: the block is still live (a realloc that failed). Not a new allocation. */
__attribute__((unused)) static void truth_restore(struct block block)
{
	if (!block.ptr)
		return;
	__atomic_fetch_add(&block.site->live_bytes, (long long)block.size, __ATOMIC_RELAXED);
	__atomic_fetch_add(&block.site->live_count, 1, __ATOMIC_RELAXED);
}

__attribute__((unused)) static void block_free(struct block block)
{
	truth_strike(block);
	free(block.ptr);
}

/* Clears the ledger: for a process whose heap no longer exists or is a copy (the child after a fork). */
__attribute__((unused)) static void truth_forget(void)
{
	for (int i = 0; i < truth_sites_len; i++) {
		truth_sites[i].live_bytes = truth_sites[i].live_count = 0;
		truth_sites[i].allocated_bytes = truth_sites[i].allocations = 0;
	}
}

/* Leaves the rendezvous to the other process: a forked child calls it. */
__attribute__((unused)) static void truth_disown(void)
{
	if (truth_fd >= 0)
		close(truth_fd);
	truth_fd = -2;
}

static void truth_connect(void)
{
	const char *path = getenv("TRUTH_SOCKET");
	struct sockaddr_un addr;
	if (truth_fd != -1)
		return;
	if (!path) {
		truth_fd = -2;
		return;
	}
	memset(&addr, 0, sizeof addr);
	addr.sun_family = AF_UNIX;
	if (strlen(path) >= sizeof addr.sun_path)
		truth_fail("TRUTH_SOCKET too long");
	strcpy(addr.sun_path, path);
	truth_fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (truth_fd < 0)
		truth_fail("socket");
	if (connect(truth_fd, (struct sockaddr *)&addr, sizeof addr) < 0)
		truth_fail("connect");
}

static void truth_write(int fd, const char *from, size_t len)
{
	while (len > 0) {
		ssize_t n = write(fd, from, len);
		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			truth_fail("write");
		from += n;
		len -= (size_t)n;
	}
}

/* Prints the ledger as one line of JSON, without waiting. EXTRA: further members, each starting with a comma, or "". */
__attribute__((unused)) static void truth_tell(const char *phase, const char *extra)
{
	static char line[TRUTH_SITES_MAX * 192 + 1024];
	size_t len = 0;
	truth_connect();
	len += (size_t)snprintf(line, sizeof line, "{\"phase\":\"%s\",\"pid\":%d%s,\"sites\":[", phase, (int)getpid(), extra);
	for (int i = 0; i < truth_sites_len; i++)
		len += (size_t)snprintf(line + len, sizeof line - len,
					"%s{\"site\":\"%s\",\"live_bytes\":%lld,\"live_count\":%lld,\"allocated_bytes\":%lld,\"allocations\":%lld,\"live_only\":%s}",
					i ? "," : "", truth_sites[i].name, truth_sites[i].live_bytes, truth_sites[i].live_count,
					truth_sites[i].allocated_bytes, truth_sites[i].allocations,
					truth_sites[i].live_only ? "true" : "false");
	len += (size_t)snprintf(line + len, sizeof line - len, "]}\n");
	truth_write(truth_fd >= 0 ? truth_fd : 1, line, len);
}

/* Waits for the test's byte; ends if the test has ended. */
__attribute__((unused)) static void truth_await(void)
{
	char byte;
	ssize_t n;
	if (truth_fd < 0)
		return;
	do
		n = read(truth_fd, &byte, 1);
	while (n < 0 && errno == EINTR);
	if (n != 1)
		_exit(96);
}

/* Prints the ledger and waits. */
__attribute__((unused)) static void truth_rendezvous(const char *phase)
{
	truth_tell(phase, "");
	truth_await();
}

#endif
