/* Writing events into the shared memory. See record.h and ring.h. */
#include "record.h"

#include "clock.h"
#include "modules.h"
#include "next.h"
#include "stacks.h"
#include "system.h"

/* A reader that has not looked for so long has been killed: it looks every few milliseconds. */
#define READER_GONE_NS 30000000000u
/* One that has not for so long gives way to another one that wants to begin. */
#define READER_REPLACED_NS 5000000000u
/* Longest wait of a process for the reader, and the longest between two looks whether it is still there. */
#define WAIT_MAX_NS 2000000000u
#define WAIT_STEP_NS 20000000u
/* Longest wait for the reader to look at new code. */
#define LOOK_MAX_NS 200000000u
/* Events of signal handlers that are lost before a call in progress counts as left by a jump. */
#define NESTED_MAX 64
/* Events lost between two looks whether the reader is still there. */
#define LOST_BETWEEN_LOOKS 4096u
#define PATH_BYTES 128

static const volatile uint32_t record_off;
const volatile uint32_t *record_state OWN_LINES = &record_off;

/* Written when the process attaches. */
static struct {
	struct fp_ring *ring;
	struct fp_ring_process *process;
	uint32_t *states;
	uint8_t *chunks;
	uint32_t count;
	uint32_t shift;
	uint32_t flags;
	/* Entry of the process, plus 1, and above 16 bits how many entries the process and those that it was forked from had: never 0. */
	uint32_t owner;
	volatile uint32_t *state;
} shared OWN_LINES;

enum { UNTRIED, ATTACHING, ATTACHED, OFF };
#ifdef FRAGPROF_ATTACHED
/* Until record_begin. */
static uint32_t attachment = OFF;
#else
static uint32_t attachment;
#endif
static char path[PATH_BYTES];
static bool is_path_known;
static bool is_in_front, is_in_front_known;
static uint64_t early;

/* Drawn by all threads. In private memory: a forked child has a copy, and begins anew. */
static struct { uint64_t next; } tickets OWN_LINES;
static uint64_t serials OWN_LINES;

static void count(unsigned long long *counter)
{
	__atomic_add_fetch(counter, 1, __ATOMIC_RELAXED);
}

static void turn_off(void)
{
	__atomic_store_n(&attachment, (uint32_t)OFF, __ATOMIC_RELEASE);
	__atomic_store_n(&record_state, &record_off, __ATOMIC_RELEASE);
}

static bool reader_is_silent(uint64_t since_ns)
{
	uint64_t now_ns;

	return clock_now(&now_ns) && now_ns > since_ns && __atomic_load_n(&shared.ring->alive_ns, __ATOMIC_RELAXED) < now_ns - since_ns;
}

static bool reader_is_gone(void)
{
	return reader_is_silent(READER_GONE_NS);
}

/* Waits until the reader has changed a word. */
static void wait_for_reader(uint32_t *word, uint32_t while_value, uint64_t most_ns)
{
	for (uint64_t waited_ns = 0; waited_ns < most_ns; waited_ns += WAIT_STEP_NS) {
		if (__atomic_load_n(word, __ATOMIC_ACQUIRE) != while_value || __atomic_load_n(&shared.ring->closed, __ATOMIC_RELAXED) != 0)
			return;
		__atomic_add_fetch(&shared.ring->bell, 1, __ATOMIC_RELEASE);
		wake(&shared.ring->bell);
		wait_on(word, while_value, WAIT_STEP_NS);
		if (reader_is_gone())
			return;
	}
}

void record_set_path(const char *text)
{
	size_t length = 0;

	if (text == NULL || is_path_known)
		return;
	while (text[length] != '\0')
		length++;
	if (length >= PATH_BYTES)
		return;
	for (size_t i = 0; i <= length; i++)
		path[i] = text[i];
	is_path_known = true;
}

void record_set_in_front(bool in_front)
{
	is_in_front = in_front;
	is_in_front_known = true;
	if (shared.process != NULL)
		shared.process->in_front = in_front ? 1 : 2;
}

/* Bytes before the chunks. */
static size_t head_bytes(uint32_t chunks)
{
	size_t bytes = FP_RING_HEADER_BYTES + FP_RING_PROCESSES * sizeof(struct fp_ring_process) + chunks * sizeof(uint32_t);

	return (bytes + FP_RING_CHUNK_BYTES - 1) & ~(size_t)(FP_RING_CHUNK_BYTES - 1);
}

/* Maps the shared memory. */
static bool map(int file)
{
	const struct fp_ring *header;
	uint32_t chunks = 0;
	uint8_t *memory = NULL;

	if (file < 0)
		return false;
	header = map_memory(FP_RING_HEADER_BYTES, PROT_READ_, MAP_SHARED_, file);
	if (header != NULL) {
		if (header->magic == FP_RING_MAGIC && header->version == FP_RING_VERSION && header->closed == 0)
			chunks = header->chunks;
		system_call(CALL_MUNMAP, (long)header, FP_RING_HEADER_BYTES, 0, 0, 0, 0);
	}
	if (chunks > 0 && chunks <= FP_RING_CHUNKS_MAX)
		memory = map_memory(head_bytes(chunks) + (size_t)chunks * FP_RING_CHUNK_BYTES, PROT_READ_ | PROT_WRITE_, MAP_SHARED_, file);
	system_call(CALL_CLOSE, file, 0, 0, 0, 0, 0);
	if (memory == NULL)
		return false;
	shared.ring = (struct fp_ring *)memory;
	shared.states = (uint32_t *)(memory + FP_RING_HEADER_BYTES + FP_RING_PROCESSES * sizeof(struct fp_ring_process));
	shared.chunks = memory + head_bytes(chunks);
	shared.count = chunks;
	shared.shift = shared.ring->counter_shift & 63;
	shared.flags = shared.ring->flags;
	return true;
}

/* Memory that a forked child finds empty. */
static bool map_state(void)
{
	volatile uint32_t *state;

	if (shared.state != NULL)
		return true;
	state = map_memory(4096, PROT_READ_ | PROT_WRITE_, MAP_PRIVATE_ | MAP_ANONYMOUS_, -1);
	if (state == NULL)
		return false;
	if (failed(system_call(CALL_MADVISE, (long)state, 4096, MADV_WIPEONFORK_, 0, 0, 0)))
		return false;
	shared.state = state;
	return true;
}

/* Takes an entry for this process, and waits until the reader has looked at it. */
static bool announce(uint32_t origin, uint32_t parent)
{
	struct fp_ring_process *all = (struct fp_ring_process *)((uint8_t *)shared.ring + FP_RING_HEADER_BYTES);

	for (uint32_t i = 0; i < FP_RING_PROCESSES; i++) {
		struct fp_ring_process *process = &all[i];
		uint32_t expected = FP_RING_PROCESS_FREE;

		if (!__atomic_compare_exchange_n(&process->state, &expected, FP_RING_PROCESS_CLAIMED, false, __ATOMIC_ACQUIRE,
						 __ATOMIC_RELAXED))
			continue;
		process->pid = (uint32_t)system_call(CALL_GETPID, 0, 0, 0, 0, 0, 0);
		process->origin = origin;
		process->parent = parent;
		process->in_front = is_in_front_known ? (is_in_front ? 1 : 2) : 0;
		process->early = early;
		shared.process = process;
		shared.owner = (shared.owner & 0xffff0000u) + 0x10000u + i + 1;
		if (shared.owner < 0x10000u)
			shared.owner += 0x10000u;
		__atomic_store_n(&process->state, FP_RING_PROCESS_ANNOUNCED, __ATOMIC_RELEASE);
		wait_for_reader(&process->state, FP_RING_PROCESS_ANNOUNCED, WAIT_MAX_NS);
		return true;
	}
	__atomic_add_fetch(&shared.ring->refused, 1, __ATOMIC_RELAXED);
	return false;
}

/* Announces the process; its calls are recorded from now on. */
static bool turn_on(uint32_t origin, uint32_t parent)
{
	if (__atomic_load_n(&shared.ring->closed, __ATOMIC_RELAXED) != 0 || !announce(origin, parent))
		return false;
	*shared.state = RECORD_ON;
	__atomic_store_n(&attachment, (uint32_t)ATTACHED, __ATOMIC_RELEASE);
	__atomic_store_n(&record_state, shared.state, __ATOMIC_RELEASE);
	return true;
}

/* In a forked child, or before the first event. */
static bool attach(bool is_child)
{
	uint32_t parent = 0, origin = FP_RING_ORIGIN_IMAGE;

	if (is_child) {
		bool is_forking = recorder_thread_known() && this_thread.is_forking;

		origin = is_forking ? FP_RING_ORIGIN_FORK : FP_RING_ORIGIN_UNKNOWN_FORK;
		parent = shared.owner & 0xffff;
		tickets.next = 0;
		serials = 0;
		early = 0;
		modules_forked();
	} else if (!map(open_file(path, O_RDWR_)) || !map_state()) {
		return false;
	}
	return turn_on(origin, parent);
}

RARE bool record_attach(void)
{
	uint32_t was = __atomic_load_n(&attachment, __ATOMIC_ACQUIRE);

	if (was == OFF || was == ATTACHING) {
		/* Another thread attaches: before the first event there is only one, unless a constructor starts others. */
		early += was == ATTACHING;
		return false;
	}
	if (was == UNTRIED) {
		next_read_settings();
		if (!is_path_known) {
			early++;
			return false;
		}
	} else if (*record_state == RECORD_ON) {
		return true;
	}
	if (!__atomic_compare_exchange_n(&attachment, &was, ATTACHING, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED))
		return false;
	if (attach(was == ATTACHED))
		return true;
	turn_off();
	return false;
}

#ifdef FRAGPROF_ATTACHED
bool record_has_reader(void)
{
	return *record_state == RECORD_ON && __atomic_load_n(&shared.ring->closed, __ATOMIC_RELAXED) == 0 && !reader_is_silent(READER_REPLACED_NS);
}

/* Called while no word leads to the library, or after the last reader has gone. A thread that is still in a call of the last recording writes
 * into that one's memory, which stays mapped, and claims nothing of the new one (claim). */
bool record_begin(int file)
{
	turn_off();
	/* A reader that gave way and is there all the same tells that it misses calls. */
	if (shared.process != NULL)
		shared.process->in_front = 2;
	__atomic_store_n(&attachment, (uint32_t)ATTACHING, __ATOMIC_RELEASE);
	shared.owner &= 0xffff0000u;
	tickets.next = 0;
	serials = 0;
	early = 0;
	stacks_forget();
	walk_forget();
	if (map(file) && map_state() && turn_on(FP_RING_ORIGIN_ATTACHED, 0))
		return true;
	turn_off();
	return false;
}

void record_end(void)
{
	turn_off();
}
#endif

RARE bool record_without_thread(bool is_free)
{
	count(is_free ? &shared.process->lost_frees : &shared.process->lost_allocs);
	return false;
}

/* The chunk's owner has left it. */
static void leave(struct recorder_thread *thread)
{
	if (thread->chunk != NULL)
		__atomic_store_n(&shared.states[thread->chunk_number], FP_RING_CHUNK_FULL | (shared.owner & 0xffff) << FP_RING_STATE_BITS,
				 __ATOMIC_RELEASE);
	thread->chunk = NULL;
	thread->next = thread->end = NULL;
}

/* Takes a free chunk. */
RARE static bool claim(struct recorder_thread *thread)
{
	uint32_t owner = (shared.owner & 0xffff) << FP_RING_STATE_BITS;
	uint32_t returned = __atomic_load_n(&shared.ring->returned, __ATOMIC_RELAXED);

	/* It is still in a call of an earlier recording. */
	if (thread->owner != shared.owner)
		return false;
	if (thread->full_at == returned + 1) {
		if (++thread->refused % LOST_BETWEEN_LOOKS == 0 && reader_is_gone())
			turn_off();
		return false;
	}
	leave(thread);
	if (__atomic_load_n(&shared.ring->closed, __ATOMIC_RELAXED) != 0) {
		turn_off();
		return false;
	}
	for (uint32_t i = 0; i < shared.count; i++) {
		uint32_t expected = FP_RING_CHUNK_FREE;

		if (__atomic_load_n(&shared.states[i], __ATOMIC_RELAXED) != FP_RING_CHUNK_FREE ||
		    !__atomic_compare_exchange_n(&shared.states[i], &expected, FP_RING_CHUNK_CLAIMED | owner, false, __ATOMIC_ACQUIRE,
						 __ATOMIC_RELAXED))
			continue;
		thread->chunk = (struct fp_ring_chunk *)(shared.chunks + (size_t)i * FP_RING_CHUNK_BYTES);
		thread->chunk_number = i;
		thread->chunk->tid = thread->tid;
		thread->chunk->cells = 0;
		thread->chunk->serial = __atomic_fetch_add(&serials, 1, __ATOMIC_RELAXED);
		thread->next = (struct fp_ring_event *)((uint8_t *)thread->chunk + FP_RING_CELL_BYTES);
		thread->end = (struct fp_ring_event *)((uint8_t *)thread->chunk + FP_RING_CHUNK_BYTES);
		thread->full_at = 0;
		__atomic_store_n(&shared.states[i], FP_RING_CHUNK_OPEN | owner, __ATOMIC_RELEASE);
		return true;
	}
	thread->full_at = returned + 1;
	return false;
}

/* The thread's first event, or the first of a forked child. */
RARE static void begin_thread(struct recorder_thread *thread)
{
	thread->owner = shared.owner;
	/* A forked child must not write into its parent's chunk. */
	thread->chunk = NULL;
	thread->next = thread->end = NULL;
	thread->full_at = 0;
	thread->tid = (uint32_t)system_call(CALL_GETTID, 0, 0, 0, 0, 0, 0);
}

/* Begins to record a call; false if the thread is in the middle of one. */
static inline bool enter(struct recorder_thread *thread)
{
	if (unlikely(thread->is_busy != 0) && ++thread->nested <= NESTED_MAX) {
		count(&shared.process->nested);
		return false;
	}
	thread->is_busy = 1;
	thread->nested = 0;
	__asm__ volatile("" : : : "memory"); /* a handler on this thread sees it */
	if (unlikely(thread->owner != shared.owner))
		begin_thread(thread);
	return true;
}

static inline void leave_call(struct recorder_thread *thread)
{
	__asm__ volatile("" : : : "memory");
	thread->is_busy = 0;
}

/* So many free cells in one chunk; NULL = there are none. */
static inline struct fp_ring_event *reserve(struct recorder_thread *thread, uint32_t cells)
{
	if (unlikely((size_t)((uint8_t *)thread->end - (uint8_t *)thread->next) < (size_t)cells * FP_RING_CELL_BYTES) && !claim(thread))
		return NULL;
	return thread->next;
}

/* The reader sees the cells. */
static inline void commit(struct recorder_thread *thread, uint32_t cells)
{
	thread->next += cells;
	__atomic_store_n(&thread->chunk->cells, (uint32_t)((struct fp_ring_event *)thread->next - (struct fp_ring_event *)thread->chunk) - 1,
			 __ATOMIC_RELEASE);
}

static inline bool put(struct recorder_thread *thread, uint32_t kind, uint64_t address, uint64_t size, uint32_t stack)
{
	struct fp_ring_event *event = reserve(thread, 1);

	if (unlikely(event == NULL))
		return false;
	event->head = __atomic_fetch_add(&tickets.next, 1, __ATOMIC_RELAXED) << FP_RING_TICKET_SHIFT | kind;
	/* Complements, so that no search for leaks takes this memory for a place from which the program points to its blocks. */
	event->address = ~address;
	event->size = size;
	event->when = (uint32_t)(counter() >> shared.shift);
	event->stack = stack;
	commit(thread, 1);
	thread->recorded++;
	return true;
}

/* Sends a stack's frames. */
RARE static void define(struct recorder_thread *thread, const struct walk *walk, uint32_t number)
{
	unsigned long long words[FP_FRAMES_MAX];
	uint32_t len = walk_words(walk, &thread->last, words);
	uint32_t cells = 1 + (len * 8 + FP_RING_CELL_BYTES - 1) / FP_RING_CELL_BYTES;
	struct fp_ring_stack *stack = (struct fp_ring_stack *)reserve(thread, cells);

	if (stack == NULL) {
		count(&shared.process->lost_stacks);
		return;
	}
	stack->head = FP_RING_STACK;
	stack->stack = number;
	stack->len = (unsigned short)len;
	stack->end = walk->end;
	for (uint32_t i = 0; i < len; i++)
		stack->frames[i] = words[i];
	commit(thread, cells);
	stacks_set_sent(number);
}

/* The number of the current stack. Not inline: the buffer is large. */
__attribute__((noinline)) static uint32_t take_stack(struct recorder_thread *thread, const void *function, const struct caller *caller)
{
	struct walk walk;
	uint32_t number;
	bool is_sent;

	walk_take(&walk, &thread->readable, &thread->last, caller, function);
	if (unlikely(walk.is_new_code)) {
		uint32_t looked = __atomic_load_n(&shared.process->looked, __ATOMIC_RELAXED);

		__atomic_add_fetch(&shared.process->look, 1, __ATOMIC_RELEASE);
		wait_for_reader(&shared.process->looked, looked, LOOK_MAX_NS);
	}
	number = stacks_number(walk.hash, &is_sent);
	if (unlikely(!is_sent)) {
		if (number != 0)
			define(thread, &walk, number);
		else
			count(&shared.process->lost_stacks);
	}
	return number;
}

void record_alloc(void *pointer, size_t size_bytes, uint32_t how, const void *function, const struct caller *caller)
{
	struct recorder_thread *thread = &this_thread;
	uint32_t stack = 0;

	if (!enter(thread)) {
		count(&shared.process->lost_allocs);
		return;
	}
	if (shared.flags & FP_RING_STACKS)
		stack = take_stack(thread, function, caller);
	if (unlikely(!put(thread, FP_RING_ALLOC, (uintptr_t)pointer | (uint64_t)how << FP_RING_ADDRESS_BITS, size_bytes, stack)))
		count(&shared.process->lost_allocs);
	leave_call(thread);
}

void record_free(void *pointer, const void *function, const struct caller *caller)
{
	struct recorder_thread *thread = &this_thread;
	uint32_t stack = 0;

	if (!enter(thread)) {
		count(&shared.process->lost_frees);
		return;
	}
	if (unlikely(shared.flags & FP_RING_FREE_STACKS))
		stack = take_stack(thread, function, caller);
	if (unlikely(!put(thread, FP_RING_FREE, (uintptr_t)pointer, 0, stack)))
		count(&shared.process->lost_frees);
	leave_call(thread);
}

static void record_other(uint32_t kind, uint64_t address, unsigned long long *lost)
{
	struct recorder_thread *thread = &this_thread;

	if (!enter(thread)) {
		count(lost);
		return;
	}
	if (!put(thread, kind, address, 0, 0))
		count(lost);
	leave_call(thread);
}

void record_realloc_free(void *pointer)
{
	record_other(FP_RING_REALLOC_FREE, (uintptr_t)pointer, &shared.process->lost_frees);
}

void record_realloc_fail(void *pointer)
{
	record_other(FP_RING_REALLOC_FAIL, (uintptr_t)pointer, &shared.process->lost_others);
}

void record_failed(void)
{
	count(&shared.process->failed);
}

/* A child that is not recorded from here begins with an empty ledger, which the reader tells. */
EXPORT int fork(void)
{
	static int (*next_fork)(void);
	struct recorder_thread *thread;
	bool is_on = recording(false);
	int pid;

	if (next_fork == NULL)
		next_fork = next_definition("fork").address;
	if (next_fork == NULL)
		return -1;
	if (!is_on)
		return next_fork();
	thread = &this_thread;
	thread->is_forking = 1;
	pid = next_fork();
	if (pid == 0)
		record_attach();
	thread->is_forking = 0;
	if (pid > 0)
		record_other(FP_RING_FORK, (uint32_t)pid, &shared.process->lost_others);
	return pid;
}

/* Other code may be mapped where the library's was. */
EXPORT int dlclose(void *handle)
{
	static int (*next_dlclose)(void *handle);
	int result;

	if (next_dlclose == NULL)
		next_dlclose = next_definition("dlclose").address;
	if (next_dlclose == NULL)
		return -1;
	result = next_dlclose(handle);
	walk_forget();
	return result;
}
