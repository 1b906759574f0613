/* The numbers of the stacks seen so far: each is sent once. */
#ifndef FRAGPROF_STACKS_H
#define FRAGPROF_STACKS_H

#include "platform.h"

/* The number of the stack with this hash, from 1 on; 0 = there are too many. A forked child has the same numbers. */
uint32_t stacks_number(uint64_t hash, bool *is_sent);
/* Its frames have been sent. */
void stacks_set_sent(uint32_t number);

/* All numbers are free again, for another reader. */
void stacks_forget(void);

#endif
