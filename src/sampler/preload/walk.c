/* Walking the stack. See walk.h. The steps are those of bpf/unwind_step.bpf.h, so that both find the same frames.
 *
 * A pc's rule is looked up in a cache of all threads. An entry is two words, the rule and its exclusive or with the pc: a reader that sees
 * halves of two entries finds another pc than its own. A walk ends early where it meets the last one of its thread. */
#include "walk.h"

#include "cfi.h"
#include "system.h"

/* 1 MiB, of which the parts in use are touched. A large program has some ten thousand places from which allocating functions are called. */
#define CACHE_BITS 16
/* User space ends here at most (five-level page tables). */
#define USER_END (1ull << 56)
#define PAGE_BYTES 4096u
/* A frame is not larger; neither is the distance that is checked at once. */
#define FRAME_BYTES_MAX (1ull << 20)
/* Value of a bp that is not known: not aligned, so nothing is read through it. */
#define BP_UNKNOWN 1u

#ifdef __x86_64__
/* struct ucontext and struct sigcontext (Linux, asm/sigcontext.h). */
enum { SIGCONTEXT = 40, SIGCONTEXT_BP = 80, SIGCONTEXT_SP = 120, SIGCONTEXT_PC = 128 };
#else
enum { SIGCONTEXT = 304, SIGCONTEXT_BP = 240, SIGCONTEXT_SP = 256, SIGCONTEXT_PC = 264 };
#endif

/* The library's own code, by the linker. */
extern const char __ehdr_start[] __attribute__((visibility("hidden")));
extern const char etext[] __attribute__((visibility("hidden")));

struct cached {
	uint64_t check;
	uint64_t rule;
};
static struct cached cache[1u << CACHE_BITS] OWN_LINES;
/* Entries of former epochs do not match. */
static uint64_t epoch OWN_LINES;
#define EPOCH_SHIFT 57

struct frame {
	uintptr_t pc, sp, bp;
	/* Of the frame's word. */
	uint64_t flags;
};

static uint64_t packed(struct fp_rule rule)
{
	union {
		struct fp_rule rule;
		uint64_t word;
	} both = { .rule = rule };

	return both.word;
}

static struct fp_rule unpacked(uint64_t word)
{
	union {
		uint64_t word;
		struct fp_rule rule;
	} both = { .word = word };

	return both.rule;
}

/* Rules of the cache alone. */
enum { CFA_GENERATED = 32, CFA_NO_MAPPING = 33 };

RARE static struct fp_rule find_rule(uintptr_t pc, bool is_exact, struct cached *entry, uint64_t key, struct walk *walk)
{
	struct module module = modules_find(pc, &walk->is_new_code);
	struct fp_rule rule = { .cfa = FP_CFA_NONE };

	switch (module.kind) {
	case MODULE_NONE:
		/* Code may be mapped there later. */
		rule.cfa = CFA_NO_MAPPING;
		return rule;
	case MODULE_FILE:
		/* A return address may be the first byte of the next function, or of another row: its call is before it. */
		rule = cfi_rule(&module, pc - !is_exact);
		break;
	case MODULE_GENERATED:
		/* Files may be mapped there later; then their code has a rule. */
		rule.cfa = CFA_GENERATED;
		return rule;
	case MODULE_NO_TABLE:
		break;
	}
	__atomic_store_n(&entry->rule, packed(rule), __ATOMIC_RELAXED);
	__atomic_store_n(&entry->check, key ^ packed(rule), __ATOMIC_RELAXED);
	return rule;
}

static inline struct fp_rule rule_at(uintptr_t pc, bool is_exact, struct walk *walk)
{
	uint64_t key = ((uint64_t)pc << 1 | is_exact) ^ __atomic_load_n(&epoch, __ATOMIC_RELAXED) << EPOCH_SHIFT;
	struct cached *entry = &cache[(key * 0x9e3779b97f4a7c15u) >> (64 - CACHE_BITS)];
	uint64_t rule = __atomic_load_n(&entry->rule, __ATOMIC_RELAXED), check = __atomic_load_n(&entry->check, __ATOMIC_RELAXED);

	/* The rule of an unused entry is none that is stored. */
	if (likely((check ^ rule) == key && check != 0))
		return unpacked(rule);
	return find_rule(pc, is_exact, entry, key, walk);
}

/* Extends what is readable up to an address, if it is. */
RARE static bool extend(struct readable *readable, uintptr_t address)
{
	if (address < readable->begin || (address & 7) || address - readable->end > FRAME_BYTES_MAX)
		return false;
	while (readable->end < address + 8) {
		if (!is_readable(readable->end))
			return false;
		readable->end = (readable->end & ~(uintptr_t)(PAGE_BYTES - 1)) + PAGE_BYTES;
	}
	return true;
}

static inline bool read_word(struct readable *readable, uintptr_t address, uintptr_t *value)
{
	/* Addresses below wrap around. */
	if (unlikely(address - readable->begin >= readable->end - readable->begin || (address & 7)) && !extend(readable, address))
		return false;
	*value = *(const uintptr_t *)address;
	return true;
}

/* The stack from sp on. What was checked before holds if it is of the same stack; otherwise returns false. */
static inline bool begin(struct readable *readable, uintptr_t sp)
{
	uintptr_t page = sp & ~(uintptr_t)(PAGE_BYTES - 1);

	if (likely(sp >= readable->begin && sp < readable->end))
		return true;
	if (sp < readable->begin && readable->begin - page <= FRAME_BYTES_MAX) {
		struct readable below = { page, page + PAGE_BYTES };

		/* Every page up to the known ones, or it is another stack. */
		while (below.end < readable->begin && is_readable(below.end))
			below.end += PAGE_BYTES;
		if (below.end >= readable->begin) {
			readable->begin = page;
			return true;
		}
	}
	readable->begin = page;
	readable->end = page + PAGE_BYTES;
	return false;
}

static inline uintptr_t code_address(uintptr_t pc)
{
#ifdef __aarch64__
	register uintptr_t signed_address __asm__("x30") = pc;

	__asm__("hint #7" : "+r"(signed_address)); /* xpaclri */
	return signed_address;
#else
	return pc;
#endif
}

static uint8_t step_signal(struct readable *readable, struct frame *frame)
{
	uintptr_t context = frame->sp + SIGCONTEXT, pc, sp, bp;

	if (!read_word(readable, context + SIGCONTEXT_BP, &bp) || !read_word(readable, context + SIGCONTEXT_SP, &sp) ||
	    !read_word(readable, context + SIGCONTEXT_PC, &pc))
		return FP_END_READ_FAULT;
	*frame = (struct frame){ .pc = pc, .sp = sp, .bp = bp, .flags = FP_FRAME_EXACT };
	/* A handler may run on a stack of its own. */
	begin(readable, sp);
	return FP_END_NONE;
}

/* By frame pointer, accepted only if it points a little way up the stack and the word next to it into known code. */
static uint8_t step_frame_pointer(struct readable *readable, struct frame *frame, uint64_t flags, uint8_t failed, struct walk *walk)
{
	uintptr_t bp = frame->bp, caller_bp, caller_pc;

	if (bp == 0)
		return FP_END_COMPLETE;
	if ((bp & 7) || bp < frame->sp || bp - frame->sp > FRAME_BYTES_MAX)
		return failed;
	if (!read_word(readable, bp + 8, &caller_pc) || !read_word(readable, bp, &caller_bp))
		return failed;
	caller_pc = code_address(caller_pc);
	if (caller_pc == 0 || caller_pc >= USER_END || rule_at(caller_pc, false, walk).cfa == CFA_NO_MAPPING)
		return failed;
	*frame = (struct frame){ .pc = caller_pc, .sp = bp + 16, .bp = caller_bp, .flags = flags };
	return FP_END_NONE;
}

static inline uint8_t step_rule(struct readable *readable, struct frame *frame, struct fp_rule rule)
{
	uintptr_t base = (rule.registers & 15) == FP_REG_SP ? frame->sp : frame->bp;
	uintptr_t cfa, bp = frame->bp, bp_address = 0, return_slot, pc;

	switch (rule.cfa) {
	case FP_CFA_REGISTER:
		cfa = base + (uintptr_t)(intptr_t)rule.offset;
		break;
	case FP_CFA_DEREF:
		if (!read_word(readable, base + (uintptr_t)(intptr_t)rule.deref_offset, &cfa))
			return FP_END_READ_FAULT;
		cfa += (uintptr_t)(intptr_t)rule.deref_add;
		break;
	case FP_CFA_PLT:
		/* The linkers align a PLT to its entries' size, and files to pages. */
		cfa = frame->sp + 8 + ((frame->pc & 15) >= (uint32_t)rule.offset ? 8 : 0);
		break;
	case FP_CFA_SIGNAL:
		return step_signal(readable, frame);
	case FP_CFA_END:
		return FP_END_COMPLETE;
	default:
		return FP_END_UNSUPPORTED;
	}
	if (cfa < frame->sp + 8)
		return FP_END_NO_PROGRESS;
	switch (rule.saved & 15) {
	case FP_BP_SAME:
		break;
	case FP_BP_AT_CFA:
		bp_address = cfa + (uintptr_t)(8 * (intptr_t)rule.bp_slot);
		break;
	case FP_BP_AT_BP:
		bp_address = frame->bp + (uintptr_t)(8 * (intptr_t)rule.bp_slot);
		break;
	case FP_BP_AT_SP:
		bp_address = frame->sp + (uintptr_t)(8 * (intptr_t)rule.bp_slot);
		break;
	default:
		bp = BP_UNKNOWN;
	}
	switch (rule.saved >> 4) {
	case FP_RA_AT_CFA:
		return_slot = cfa - 8;
		break;
	case FP_RA_BESIDE_BP:
		return_slot = bp_address + 8;
		break;
	case FP_RA_AT_SLOT:
		return_slot = cfa + (uintptr_t)(8 * (intptr_t)rule.bp_slot);
		break;
	case FP_RA_AT_REG:
		return_slot = base + (uintptr_t)(8 * (intptr_t)rule.bp_slot);
		break;
	default:
		return FP_END_UNSUPPORTED;
	}
	if (!read_word(readable, return_slot, &pc))
		return FP_END_READ_FAULT;
	if (bp_address != 0 && !read_word(readable, bp_address, &bp))
		return FP_END_READ_FAULT;
	*frame = (struct frame){ .pc = code_address(pc), .sp = cfa, .bp = bp };
	return FP_END_NONE;
}

static inline uint64_t mix(uint64_t hash, uint64_t word)
{
	hash = (hash ^ word) * 0x9e3779b97f4a7c15u;
	return hash ^ hash >> 32;
}

static inline void append(struct walk *walk, const struct frame *frame, uint64_t flags)
{
	struct walk_frame *to = &walk->frames[walk->len++];

	to->word = frame->pc | flags;
	to->sp = frame->sp;
	to->bp = frame->bp;
	to->return_at = 0;
}

/* The step that was made can be repeated: what it read is at these places. */
static inline void note(struct walk *walk, const struct frame *from, const struct frame *to, struct fp_rule rule)
{
	struct walk_frame *noted = &walk->frames[walk->len - 1];
	intptr_t bp_at = 0;

	switch (rule.saved & 15) {
	case FP_BP_AT_CFA:
		bp_at = rule.bp_slot;
		break;
	case FP_BP_AT_BP:
		bp_at = ((intptr_t)from->bp - (intptr_t)to->sp) / 8 + rule.bp_slot;
		break;
	case FP_BP_AT_SP:
		bp_at = ((intptr_t)from->sp - (intptr_t)to->sp) / 8 + rule.bp_slot;
		break;
	}
	noted->bp_at = (int16_t)bp_at;
	if (noted->bp_at != bp_at)
		return;
	switch (rule.saved >> 4) {
	case FP_RA_AT_CFA:
		noted->return_at = -1;
		break;
	case FP_RA_BESIDE_BP:
		noted->return_at = (int16_t)(bp_at + 1);
		break;
	case FP_RA_AT_SLOT:
		noted->return_at = rule.bp_slot;
		break;
	}
}

static inline uint8_t step(struct walk *walk, struct readable *readable, struct frame *frame)
{
	struct fp_rule rule;
	uint64_t flags = frame->flags;

	if (unlikely(frame->pc == 0 || frame->pc >= USER_END))
		return FP_END_BAD_PC;
	if (unlikely(walk->len == FP_FRAMES_MAX))
		return FP_END_FRAME_LIMIT;
	rule = rule_at(frame->pc, flags & FP_FRAME_EXACT, walk);
	if (likely(rule.cfa == FP_CFA_REGISTER)) {
		struct frame from = *frame;
		uint8_t end;

		append(walk, frame, flags);
		end = step_rule(readable, frame, rule);
		if (likely(end == FP_END_NONE))
			note(walk, &from, frame, rule);
		return end;
	}
	if (rule.cfa == CFA_GENERATED)
		flags |= FP_FRAME_JIT;
	else if (rule.cfa == FP_CFA_SIGNAL)
		flags |= FP_FRAME_SIGNAL;
	append(walk, frame, flags);
	switch (rule.cfa) {
	case CFA_NO_MAPPING:
		return FP_END_NO_MAPPING;
	case CFA_GENERATED:
		return step_frame_pointer(readable, frame, 0, FP_END_JIT, walk);
	case FP_CFA_NONE:
		return step_frame_pointer(readable, frame, FP_FRAME_GUESSED, FP_END_NO_ROW, walk);
	default:
		return step_rule(readable, frame, rule);
	}
}

static inline uintptr_t word_at(uintptr_t sp, int16_t at)
{
	return *(const uintptr_t *)(sp + (uintptr_t)(8 * (intptr_t)at));
}

/* How many of the last walk's outer frames still have the callers that they had: of `from` or fewer. */
static inline uint32_t unchanged(const struct walk_last *last, uint32_t from)
{
	for (uint32_t i = from; i > 0; i--) {
		const struct walk_frame *frame = &last->frames[i], *caller = &last->frames[i - 1];

		if (unlikely(frame->return_at == 0) ||
		    code_address(word_at(caller->sp, frame->return_at)) != (caller->word & FP_FRAME_ADDR_MASK) ||
		    (frame->bp_at != 0 && word_at(caller->sp, frame->bp_at) != caller->bp))
			return i;
	}
	return 0;
}

/* Keeps the walk for the next one, and computes its hash. */
static void keep(struct walk *walk, struct walk_last *last)
{
	uint32_t at = walk->tail;
	uint64_t hash = at > 0 ? last->hashes[at - 1] : walk->end;
	bool fits = walk->end == FP_END_COMPLETE && at + walk->len <= LAST_FRAMES_MAX;

	for (uint32_t i = walk->len; i > 0; i--, at++) {
		struct walk_frame *frame = &walk->frames[i - 1];

		hash = mix(hash, frame->word);
		if (likely(fits)) {
			last->frames[at] = *frame;
			last->hashes[at] = hash;
		}
	}
	/* Without room, the tail is still there for walk_words. */
	last->len = fits ? at : 0;
	walk->hash = hash;
}

void walk_take(struct walk *walk, struct readable *readable, struct walk_last *last, const struct caller *caller, const void *function)
{
	struct frame frame = { .pc = code_address(caller->pc), .sp = caller->sp, .bp = caller->bp };
	uint64_t now = __atomic_load_n(&epoch, __ATOMIC_RELAXED);
	uint32_t known;

	walk->len = 0;
	walk->tail = 0;
	walk->is_new_code = false;
	walk->end = FP_END_NONE;
	if (unlikely(!begin(readable, frame.sp)) || last->epoch != now)
		last->len = 0;
	last->epoch = now;
	known = last->len;
	/* The library's own frames: operator new may call malloc here. They have no other rules than this one. */
	while (unlikely(frame.pc - (uintptr_t)__ehdr_start < (uintptr_t)(etext - __ehdr_start)) && walk->end == FP_END_NONE) {
		struct fp_rule rule = rule_at(frame.pc, false, walk);

		walk->end = rule.cfa == FP_CFA_REGISTER ? step_rule(readable, &frame, rule) : FP_END_UNSUPPORTED;
	}
	while (walk->end == FP_END_NONE) {
		while (known > 0 && last->frames[known - 1].sp < frame.sp)
			known--;
		if (known > 0 && last->frames[known - 1].sp == frame.sp && last->frames[known - 1].bp == frame.bp &&
		    last->frames[known - 1].word == (frame.pc | frame.flags)) {
			uint32_t from = unchanged(last, known - 1);

			if (likely(from == 0)) {
				walk->tail = known;
				walk->end = FP_END_COMPLETE;
				break;
			}
			/* Up to a frame whose caller is another one now: that step is made anew. */
			while (known - 1 > from && walk->len < FP_FRAMES_MAX)
				walk->frames[walk->len++] = last->frames[--known];
			known = from;
			frame = (struct frame){ .pc = last->frames[from].word & FP_FRAME_ADDR_MASK, .sp = last->frames[from].sp,
						.bp = last->frames[from].bp, .flags = last->frames[from].word & ~FP_FRAME_ADDR_MASK };
		}
		walk->end = step(walk, readable, &frame);
	}
	keep(walk, last);
	walk->hash = mix(walk->hash, (uintptr_t)function);
	if (walk->hash == 0)
		walk->hash = 1;
	walk->function = (uintptr_t)function;
}

uint32_t walk_words(const struct walk *walk, const struct walk_last *last, unsigned long long *words)
{
	uint32_t len = 0;

	if (walk->function != 0)
		words[len++] = walk->function | FP_FRAME_EXACT;
	for (uint32_t i = 0; i < walk->len && len < FP_FRAMES_MAX; i++)
		words[len++] = walk->frames[i].word;
	for (uint32_t i = walk->tail; i > 0 && len < FP_FRAMES_MAX; i--)
		words[len++] = last->frames[i - 1].word;
	return len;
}

void walk_forget(void)
{
	modules_forget();
	__atomic_add_fetch(&epoch, 1, __ATOMIC_RELAXED);
}
