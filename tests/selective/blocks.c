/* Allocates a known number of blocks: ROUNDS rounds in each of two threads, after the same rounds with a single thread.
 *
 * No start-up code and no versioned symbol, so that the same file runs under every glibc (see link_program in mod.rs). */
typedef unsigned long size_t;
void *malloc(size_t);
void *calloc(size_t, size_t);
void free(void *);
int pthread_create(unsigned long *, void *, void *(*)(void *), void *);
int pthread_join(unsigned long, void **);
void _exit(int) __attribute__((noreturn));

enum { LIVE = 16, SMALL_PAIRS = 50 };

static unsigned rounds;

/* Large sizes up to 300,000 bytes, most of them close to the minimum. */
static size_t large(unsigned *state)
{
	*state = *state * 1664525u + 1013904223u;
	unsigned kind = *state >> 28, more = *state >> 8 & 0xffff;
	return 1033 + (kind < 12 ? more % 4000 : kind < 15 ? more : 4 * more);
}

/* A round: LIVE / 2 of malloc, LIVE / 2 of calloc, all freed; and cached pairs of small blocks in between. */
static void *run(void *seed)
{
	unsigned state = (unsigned)(size_t)seed;
	void *volatile blocks[LIVE];
	for (unsigned round = 0; round < rounds; round++) {
		for (unsigned n = 0; n < LIVE; n++) {
			size_t bytes = large(&state);
			blocks[n] = n % 2 ? malloc(bytes) : calloc(1, bytes);
			if (!blocks[n])
				_exit(3);
		}
		for (unsigned n = 0; n < SMALL_PAIRS; n++) {
			void *volatile small = malloc(100);
			free(small);
		}
		for (unsigned n = 0; n < LIVE; n++)
			free(blocks[n * 7 % LIVE]);
	}
	return 0;
}

__attribute__((used)) static void start(long *stack)
{
	if (stack[0] != 2)
		_exit(2);
	for (const char *digit = (const char *)stack[2]; *digit; digit++)
		rounds = rounds * 10 + (unsigned)(*digit - '0');
	run((void *)1);
	unsigned long threads[2];
	for (unsigned n = 0; n < 2; n++)
		if (pthread_create(&threads[n], 0, run, (void *)(size_t)(n + 2)))
			_exit(4);
	for (unsigned n = 0; n < 2; n++)
		pthread_join(threads[n], 0);
	_exit(0);
}

__asm__(".text\n"
        ".globl _start\n"
        "_start:\n"
        "	mov %rsp, %rdi\n"
        "	and $-16, %rsp\n"
        "	call start\n"
        ".section .note.GNU-stack, \"\", @progbits\n"
        ".text\n");
