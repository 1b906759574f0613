/* Swapping the words. See attach.h. */
#include "attach.h"

#include <elf.h>

#include "next.h"
#include "system.h"

#define WEAK __attribute__((weak))

#ifdef __x86_64__
enum { WORD_OF_CALL = R_X86_64_JUMP_SLOT, WORD_OF_ADDRESS = R_X86_64_GLOB_DAT, WORD_OF_DATA = R_X86_64_64, CALL_MPROTECT = 10 };
#else
enum { WORD_OF_CALL = R_AARCH64_JUMP_SLOT, WORD_OF_ADDRESS = R_AARCH64_GLOB_DAT, WORD_OF_DATA = R_AARCH64_ABS64, CALL_MPROTECT = 226 };
#endif

/* futex(2): FUTEX_WAKE_OP that ors 0 into a word, and wakes nobody. */
enum { FUTEX_WAKE_OP_PRIVATE_ = 5 | 128, WAKE_OP_OR_NOTHING = 2 << 28 };

/* <link.h>: what dl_iterate_phdr tells of an object; the same in glibc and musl. */
struct loaded {
	Elf64_Addr bias;
	const char *name;
	const Elf64_Phdr *segments;
	Elf64_Half segment_count;
};

/* Holds the dynamic linker's lock on its list: no object is unloaded meanwhile. */
extern WEAK int dl_iterate_phdr(int (*each)(struct loaded *object, size_t size, void *data), void *data);
extern WEAK unsigned long getauxval(unsigned long type);
extern const Elf64_Dyn _DYNAMIC[] __attribute__((visibility("hidden")));

void *malloc(size_t size);
void free(void *pointer);
void cfree(void *pointer);
void *calloc(size_t count, size_t size);
void *realloc(void *pointer, size_t size);
int posix_memalign(void **out, size_t alignment, size_t size);
void *aligned_alloc(size_t alignment, size_t size);
void *memalign(size_t alignment, size_t size);
void *valloc(size_t size);
void *pvalloc(size_t size);
void *reallocarray(void *pointer, size_t count, size_t size);
void free_sized(void *pointer, size_t size);
void free_aligned_sized(void *pointer, size_t alignment, size_t size);
#ifdef FRAGPROF_RECORDER
int fork(void);
int dlclose(void *handle);
#endif

EXPORT OWN_LINES struct fragprof_attached fragprof_attached = { .magic = 0x31415046, .size_bytes = sizeof(struct fragprof_attached) };

/* Functions of C, operators of C++, jemalloc's own. */
#define FUNCTIONS_MAX 64
static struct function {
	const char *name;
	const void *ours, *next;
	/* The program's own entry of it, if the program is not position-independent: addresses that other objects take lead there, and on
	 * through the program's word (System V ABI, "Function Addresses"). */
	const void *entry_of_program;
} functions[FUNCTIONS_MAX];
static uint32_t function_count;

/* The swapped words, and what they held. */
static struct word {
	const void **at;
	const void *held, *ours;
} words[WORDS_MAX];
static uint32_t word_count;

/* An object's parts. */
struct range {
	uintptr_t start, end;
};
struct parts {
	uintptr_t bias;
	const Elf64_Dyn *dynamic;
	/* What the dynamic linker makes read-only after relocation, in whole pages. */
	struct range read_only;
	const Elf64_Phdr *segments;
	uint32_t segment_count;
	/* The read-only part was made writable here. */
	bool is_opened;
	/* Its references bind to the first definition of all: it was loaded at the start, and does not prefer its own. */
	bool binds_to_first;
};
/* The dynamic linker was passed in the list. What comes before was loaded at the start. */
static bool past_loader;


/* A word that is set to the address of one of the functions. `may_be_lazy`: it leads to the function that every object calls, whether the
 * dynamic linker has looked that up yet or not. */
typedef void each_word(struct parts *parts, const struct function *function, const void **at, bool may_be_lazy);

static bool same(const char *a, const char *b)
{
	while (*a != '\0' && *a == *b)
		a++, b++;
	return *a == *b;
}

static void add_function(const char *name, const void *ours, const void *next_one)
{
	if (next_one != NULL && next_one != ours && function_count < FUNCTIONS_MAX)
		functions[function_count++] = (struct function){ .name = name, .ours = ours, .next = next_one };
}

static void list_functions(void)
{
	if (function_count != 0)
		return;
#define ADD(name) add_function(#name, name, next.name)
	ADD(malloc);
	ADD(free);
	ADD(calloc);
	ADD(realloc);
	ADD(posix_memalign);
	ADD(aligned_alloc);
	ADD(memalign);
	ADD(valloc);
	ADD(pvalloc);
	ADD(reallocarray);
	ADD(free_sized);
	ADD(free_aligned_sized);
#undef ADD
	add_function("cfree", cfree, next_definition("cfree").address);
	operators_each(add_function);
	strings_each(add_function);
	allocx_each(add_function);
#ifdef FRAGPROF_RECORDER
	add_function("fork", fork, next_definition("fork").address);
	add_function("dlclose", dlclose, next_definition("dlclose").address);
#endif
}

/* glibc relocates the addresses in a loaded dynamic section, musl does not: values below the load bias are not relocated. */
static const void *at(const struct parts *parts, uintptr_t value)
{
	return (const void *)(value < parts->bias ? parts->bias + value : value);
}

static bool has(const struct parts *parts, const void *address, uint32_t permission)
{
	uintptr_t offset = (uintptr_t)address - parts->bias;

	for (uint32_t i = 0; i < parts->segment_count; i++) {
		const Elf64_Phdr *segment = &parts->segments[i];

		if (segment->p_type == PT_LOAD && (segment->p_flags & permission) && offset >= segment->p_vaddr &&
		    offset - segment->p_vaddr < segment->p_memsz)
			return true;
	}
	return false;
}

static struct parts parts_of(const struct loaded *object)
{
	uintptr_t page = getauxval != NULL ? getauxval(AT_PAGESZ) : 0;
	struct parts parts = { .bias = object->bias, .segments = object->segments, .segment_count = object->segment_count };

	if (page == 0)
		page = 4096;
	for (uint32_t i = 0; i < parts.segment_count; i++) {
		const Elf64_Phdr *segment = &parts.segments[i];

		if (segment->p_type == PT_DYNAMIC) {
			parts.dynamic = (const Elf64_Dyn *)(parts.bias + segment->p_vaddr);
		} else if (segment->p_type == PT_GNU_RELRO) {
			parts.read_only.start = (parts.bias + segment->p_vaddr) & ~(page - 1);
			parts.read_only.end = (parts.bias + segment->p_vaddr + segment->p_memsz) & ~(page - 1);
		}
	}
	return parts;
}

static void each_in_table(struct parts *parts, const Elf64_Rela *table, size_t bytes, const Elf64_Sym *symbols, const char *strings,
			  each_word *each)
{
	for (size_t i = 0; table != NULL && i < bytes / sizeof *table; i++) {
		uint32_t type = (uint32_t)ELF64_R_TYPE(table[i].r_info), symbol = (uint32_t)ELF64_R_SYM(table[i].r_info);
		const void **word = (const void **)(parts->bias + table[i].r_offset);

		if (symbol == 0 || (type != WORD_OF_CALL && type != WORD_OF_ADDRESS && type != WORD_OF_DATA))
			continue;
		if ((type == WORD_OF_DATA && table[i].r_addend != 0) || (uintptr_t)word % sizeof *word != 0 || !has(parts, word, PF_W))
			continue;
		for (uint32_t f = 0; f < function_count; f++) {
			const Elf64_Sym *found = &symbols[symbol];
			/* One that has its own definition may have been loaded so that it calls that (RTLD_DEEPBIND). */
			bool is_other = found->st_shndx != SHN_UNDEF && parts->bias + found->st_value != (uintptr_t)functions[f].next &&
					!parts->binds_to_first;

			if (!same(strings + found->st_name, functions[f].name))
				continue;
			if (found->st_shndx == SHN_UNDEF && found->st_value != 0)
				functions[f].entry_of_program = (const void *)(parts->bias + found->st_value);
			each(parts, &functions[f], word, type == WORD_OF_CALL && !is_other);
			break;
		}
	}
}

static void close_read_only(struct parts *parts)
{
	if (parts->is_opened)
		system_call(CALL_MPROTECT, (long)parts->read_only.start, (long)(parts->read_only.end - parts->read_only.start), PROT_READ_, 0, 0,
			    0);
}

static int each_object(struct loaded *object, size_t size, void *data)
{
	each_word *each = *(each_word **)data;
	struct parts parts = parts_of(object);
	const Elf64_Sym *symbols = NULL;
	const char *strings = NULL;
	const Elf64_Rela *calls = NULL, *others = NULL;
	size_t calls_bytes = 0, others_bytes = 0;
	bool is_symbolic = false;

	(void)size;
	if (getauxval == NULL)
		return 1;
	if (object->bias == getauxval(AT_BASE))
		past_loader = true;
	/* Not this library, the kernel's object, or the dynamic linker itself. */
	if (parts.dynamic == NULL || parts.dynamic == _DYNAMIC || object->bias == getauxval(AT_BASE) ||
	    (uintptr_t)object->segments >> 12 == getauxval(AT_SYSINFO_EHDR) >> 12)
		return 0;
	for (const Elf64_Dyn *entry = parts.dynamic; entry->d_tag != DT_NULL; entry++) {
		switch (entry->d_tag) {
		case DT_SYMTAB:
			symbols = at(&parts, entry->d_un.d_ptr);
			break;
		case DT_STRTAB:
			strings = at(&parts, entry->d_un.d_ptr);
			break;
		case DT_JMPREL:
			calls = at(&parts, entry->d_un.d_ptr);
			break;
		case DT_PLTRELSZ:
			calls_bytes = entry->d_un.d_val;
			break;
		case DT_RELA:
			others = at(&parts, entry->d_un.d_ptr);
			break;
		case DT_RELASZ:
			others_bytes = entry->d_un.d_val;
			break;
		case DT_SYMBOLIC:
			is_symbolic = true;
			break;
		case DT_FLAGS:
			is_symbolic |= (entry->d_un.d_val & DF_SYMBOLIC) != 0;
			break;
		}
	}
	if (symbols == NULL || strings == NULL)
		return 0;
	parts.binds_to_first = !past_loader && !is_symbolic;
	each_in_table(&parts, calls, calls_bytes, symbols, strings, each);
	each_in_table(&parts, others, others_bytes, symbols, strings, each);
	close_read_only(&parts);
	return 0;
}

/* Whether the word can be written: the kernel ors nothing into its lower half. So an object that is being relocated, whose read-only part
 * is still written to, is told from one that is ready. */
static bool is_writable(const void **word)
{
	uint32_t nobody = 0;

	return !failed(system_call(CALL_FUTEX, (long)&nobody, FUTEX_WAKE_OP_PRIVATE_, 0, 0, (long)word, WAKE_OP_OR_NOTHING));
}

static bool open_for(struct parts *parts, const void **word)
{
	const struct range *range = &parts->read_only;

	if (is_writable(word))
		return true;
	if (parts->is_opened || (uintptr_t)word < range->start || (uintptr_t)word >= range->end)
		return false;
	parts->is_opened =
		!failed(system_call(CALL_MPROTECT, (long)range->start, (long)(range->end - range->start), PROT_READ_ | PROT_WRITE_, 0, 0, 0));
	return parts->is_opened;
}

static bool swap(const void **word, const void *from, const void *to)
{
	return __atomic_compare_exchange_n(word, &from, to, false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED);
}

static struct word *entry_of(const void **at)
{
	for (uint32_t i = 0; i < word_count; i++)
		if (words[i].at == at)
			return &words[i];
	return NULL;
}

/* The place where it is kept what a word holds: before it is swapped, so that it can always be put back. */
static struct word *keep(const void **at, const void *held, const void *ours)
{
	struct word *entry = entry_of(at);

	if (entry == NULL && word_count < WORDS_MAX)
		entry = &words[word_count++];
	if (entry != NULL)
		*entry = (struct word){ at, held, ours };
	return entry;
}

static void swap_in(struct parts *parts, const struct function *function, const void **at, bool may_be_lazy)
{
	const void *held = __atomic_load_n(at, __ATOMIC_RELAXED);
	/* Not looked up yet: it leads into the object's own table of calls. */
	bool is_lazy = may_be_lazy && held != function->next && has(parts, held, PF_X);

	if (held == function->ours || (held == function->entry_of_program && !is_lazy))
		return;
	if (held != function->next && !is_lazy) {
		fragprof_attached.foreign++;
		return;
	}
	if (!open_for(parts, at) || keep(at, held, function->ours) == NULL || !swap(at, held, function->ours)) {
		fragprof_attached.failed++;
		return;
	}
	fragprof_attached.words++;
	fragprof_attached.lazy += is_lazy;
}

static void swap_out(struct parts *parts, const struct function *function, const void **at, bool may_be_lazy)
{
	const struct word *entry = entry_of(at);

	(void)may_be_lazy;
	if (entry == NULL || __atomic_load_n(at, __ATOMIC_RELAXED) != function->ours)
		return;
	if (!open_for(parts, at) || !swap(at, function->ours, entry->held))
		fragprof_attached.failed++;
	else
		fragprof_attached.put_back++;
}

static void count_ours(struct parts *parts, const struct function *function, const void **at, bool may_be_lazy)
{
	(void)parts, (void)may_be_lazy;
	fragprof_attached.words += __atomic_load_n(at, __ATOMIC_RELAXED) == function->ours;
}

static void each_word_of_all(each_word *each)
{
	past_loader = false;
	dl_iterate_phdr(each_object, &each);
}

/* One call at a time. That of a parent does not go on in its child. */
static bool begin(void)
{
	uint64_t own = (uint64_t)system_call(CALL_GETPID, 0, 0, 0, 0, 0, 0);
	uint64_t running = __atomic_load_n(&fragprof_attached.runs, __ATOMIC_RELAXED);

	return running != own &&
	       __atomic_compare_exchange_n(&fragprof_attached.runs, &running, own, false, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED);
}

static void end(void)
{
	__atomic_store_n(&fragprof_attached.runs, 0, __ATOMIC_RELEASE);
}

/* Called from outside: swaps all words that hold the allocator's functions. */
EXPORT void fragprof_attach(uint64_t first, uint64_t second, uint64_t third)
{
	uint64_t arguments[3] = { first, second, third };

	if (!begin())
		return;
	fragprof_attached.foreign = fragprof_attached.failed = 0;
	fragprof_attached.refused = ATTACHED_NOT_REFUSED;
	fragprof_attached.without_malloc = next_definition("malloc").address == NULL || dl_iterate_phdr == NULL;
	if (!fragprof_attached.without_malloc) {
		list_functions();
		fragprof_attached.refused = attached_begin(arguments, fragprof_attached.words == 0);
	}
	if (!fragprof_attached.without_malloc && fragprof_attached.refused == ATTACHED_NOT_REFUSED) {
		each_word_of_all(swap_in);
		/* Objects that were unloaded have taken theirs with them. */
		fragprof_attached.words = 0;
		each_word_of_all(count_ours);
		attached_in_front(fragprof_attached.words != 0);
	}
	fragprof_attached.passes++;
	end();
}

/* Called from outside: gives every word what it held. */
EXPORT void fragprof_detach(void)
{
	if (!begin())
		return;
	fragprof_attached.put_back = fragprof_attached.failed = 0;
	if (dl_iterate_phdr != NULL && function_count != 0) {
		attached_in_front(false);
		each_word_of_all(swap_out);
		fragprof_attached.words = 0;
		each_word_of_all(count_ours);
	}
	fragprof_attached.lazy = 0;
	fragprof_attached.detached++;
	end();
}
