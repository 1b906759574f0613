/* A pc's unwind rule from .eh_frame, in the form of the tables that the daemon builds (bpf/unwind_table.h). */
#ifndef FRAGPROF_CFI_H
#define FRAGPROF_CFI_H

#include "modules.h"

#include "../../../bpf/unwind_table.h"

/* The rule at `pc`. FP_CFA_NONE: there is no row. FP_CFA_UNSUPPORTED: it has a form that is not evaluated. */
struct fp_rule cfi_rule(const struct module *module, uintptr_t pc);

#endif
