/* The files whose code is mapped, with their unwind tables, as /proc/self/maps lists them.
 *
 * Not through the dynamic linker: its functions take locks and differ between C libraries, and its list does not have the vDSO and may change
 * while it is read. The list is read at the start, and again when code is found that it does not have. */
#ifndef FRAGPROF_MODULES_H
#define FRAGPROF_MODULES_H

#include "platform.h"

/* What a piece of executable memory is. */
enum module_kind {
	MODULE_NONE = 0,      /* nothing is mapped there */
	MODULE_FILE = 1,      /* has a table */
	MODULE_NO_TABLE = 2,  /* a file without one that can be searched */
	MODULE_GENERATED = 3, /* of no file */
};

struct module {
	uintptr_t begin, end;
	enum module_kind kind;
	/* .eh_frame_hdr, and the memory in which it and the table lie. */
	const uint8_t *header;
	const uint8_t *low, *high;
};

/* The memory that contains a pc. If it is not known, the list is read again, but not more than once in a while; `*is_new` is set if that
 * found it. */
struct module modules_find(uintptr_t pc, bool *is_new);
/* The list is read again at the next need. */
void modules_forget(void);
/* In a child: whoever held the lock does not exist there. */
void modules_forked(void);

#endif
