/* Reading the mapped files. See modules.h. */
#include "modules.h"

#include <elf.h>

#include "clock.h"
#include "system.h"

/* Executable mappings. Browsers have some hundred. */
#define MODULES_MAX 1024
/* After a reading that did not find what was looked for: each takes some 50 us. */
#define PAUSE_NS 10000000u
/* Attempts to take the lock, each of some ten nanoseconds: the list is read in less than a millisecond. */
#define SPINS_MAX 1000000u
/* A line with a path of PATH_MAX fits. */
#define BUFFER_BYTES 8192
#define SEGMENTS_MAX 64

static struct module modules[MODULES_MAX];
static uint32_t known;
static uint32_t held;
static uint64_t not_before_ns;
static bool was_read;
/* Used under the lock. */
static char buffer[BUFFER_BYTES];

static bool take(void)
{
	for (uint32_t i = 0; i < SPINS_MAX; i++) {
		uint32_t expected = 0;

		if (__atomic_compare_exchange_n(&held, &expected, 1, true, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED))
			return true;
	}
	return false;
}

static void give(void)
{
	__atomic_store_n(&held, 0, __ATOMIC_RELEASE);
}

void modules_forked(void)
{
	give();
}

/* One line of the list. */
struct line {
	uintptr_t begin, end, offset, inode;
	uint32_t device;
	bool readable, executable, named;
};

static const char *number(const char *text, unsigned base, uintptr_t *value)
{
	*value = 0;
	for (;; text++) {
		unsigned digit = *text >= '0' && *text <= '9' ? (unsigned)(*text - '0') :
				 *text >= 'a' && *text <= 'f' ? (unsigned)(*text - 'a') + 10 : 16;

		if (digit >= base)
			return text;
		*value = *value * base + digit;
	}
}

/* "begin-end rwxp offset major:minor inode   path" (proc_pid_maps(5)). */
static struct line parse(const char *text)
{
	struct line line = { 0 };
	uintptr_t major, minor;

	text = number(text, 16, &line.begin);
	text = number(text + (*text == '-'), 16, &line.end);
	text += *text == ' ';
	line.readable = text[0] == 'r';
	line.executable = text[0] != '\0' && text[1] != '\0' && text[2] == 'x';
	while (*text != ' ' && *text != '\0')
		text++;
	text = number(text + (*text == ' '), 16, &line.offset);
	text = number(text + (*text == ' '), 16, &major);
	text = number(text + (*text == ':'), 16, &minor);
	text = number(text + (*text == ' '), 10, &line.inode);
	line.device = (uint32_t)(major << 20 | minor);
	while (*text == ' ')
		text++;
	/* The vDSO is a file without an inode. */
	line.named = text[0] == '[' && text[1] == 'v' && text[2] == 'd';
	return line;
}

/* The table of the file whose first page is mapped at `start`. */
static void find_table(struct module *module, uintptr_t start)
{
	const Elf64_Ehdr *file = (const Elf64_Ehdr *)start;
	const Elf64_Phdr *segment = (const Elf64_Phdr *)(start + sizeof(*file));
	const Elf64_Phdr *header = NULL;
	uintptr_t bias = start;

	if (!is_readable(start) || *(const uint32_t *)start != 0x464c457f || file->e_phoff != sizeof(*file) || file->e_phnum > SEGMENTS_MAX)
		return;
	for (uint32_t i = 0; i < file->e_phnum; i++) {
		if (segment[i].p_type == PT_LOAD && segment[i].p_offset == 0)
			bias = start - segment[i].p_vaddr;
		else if (segment[i].p_type == PT_GNU_EH_FRAME)
			header = &segment[i];
	}
	if (header == NULL)
		return;
	for (uint32_t i = 0; i < file->e_phnum; i++) {
		const Elf64_Phdr *load = &segment[i];

		if (load->p_type != PT_LOAD || header->p_vaddr < load->p_vaddr || header->p_vaddr - load->p_vaddr >= load->p_filesz)
			continue;
		module->header = (const uint8_t *)(bias + header->p_vaddr);
		module->low = (const uint8_t *)(bias + load->p_vaddr);
		module->high = module->low + load->p_filesz;
		/* Another mapping may lie there by now. */
		if (is_readable((uintptr_t)module->header & ~(uintptr_t)7))
			module->kind = MODULE_FILE;
		return;
	}
}

/* Takes a line. `first` is where the last file with a first page has it. */
static void take_line(const struct line *line, struct line *first)
{
	struct module *module;

	if ((line->inode != 0 || line->named) && line->offset == 0 && line->readable)
		*first = *line;
	if (!line->executable || known == MODULES_MAX)
		return;
	module = &modules[known++];
	*module = (struct module){ .begin = line->begin, .end = line->end, .kind = MODULE_GENERATED };
	if (line->inode == 0 && !line->named)
		return;
	module->kind = MODULE_NO_TABLE;
	if (first->inode == line->inode && first->device == line->device && first->named == line->named)
		find_table(module, first->begin);
}

static void read_all(void)
{
	struct line first = { 0 };
	uint32_t filled = 0;
	int file = open_file("/proc/self/maps", O_RDONLY_);

	if (file < 0)
		return;
	known = 0;
	for (;;) {
		long count = system_call(CALL_READ, file, (long)(buffer + filled), BUFFER_BYTES - 1 - filled, 0, 0, 0);
		uint32_t begin = 0;

		if (count <= 0)
			break;
		filled += (uint32_t)count;
		for (uint32_t at = 0; at < filled; at++) {
			struct line line;

			if (buffer[at] != '\n')
				continue;
			buffer[at] = '\0';
			line = parse(buffer + begin);
			take_line(&line, &first);
			begin = at + 1;
		}
		/* A line that does not fit is none of the kernel's. */
		if (begin == 0 && filled == BUFFER_BYTES - 1)
			break;
		for (uint32_t at = begin; at < filled; at++)
			buffer[at - begin] = buffer[at];
		filled -= begin;
	}
	system_call(CALL_CLOSE, file, 0, 0, 0, 0, 0);
	was_read = true;
}

void modules_forget(void)
{
	if (!take())
		return;
	known = 0;
	was_read = false;
	give();
}

static struct module find(uintptr_t pc)
{
	uint32_t low = 0, high = known;

	while (low < high) {
		uint32_t middle = (low + high) / 2;

		if (modules[middle].end <= pc)
			low = middle + 1;
		else
			high = middle;
	}
	if (low < known && modules[low].begin <= pc)
		return modules[low];
	return (struct module){ .kind = MODULE_NONE };
}

struct module modules_find(uintptr_t pc, bool *is_new)
{
	struct module found = { .kind = MODULE_NONE };
	uint64_t now_ns = 0;

	if (!take())
		return found;
	found = find(pc);
	if (found.kind == MODULE_NONE && (!was_read || !clock_now(&now_ns) || now_ns >= not_before_ns)) {
		bool is_first = !was_read;

		read_all();
		found = find(pc);
		if (found.kind == MODULE_NONE)
			not_before_ns = now_ns + PAUSE_NS;
		else if (!is_first)
			*is_new = true;
	}
	give();
	return found;
}
