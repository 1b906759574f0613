/* What a compiler may call for large structures. Hidden: the program has the libc's. */
#include "platform.h"

void *memset(void *to, int byte, size_t count)
{
	for (size_t i = 0; i < count; i++)
		((volatile uint8_t *)to)[i] = (uint8_t)byte;
	return to;
}

void *memcpy(void *to, const void *from, size_t count)
{
	for (size_t i = 0; i < count; i++)
		((volatile uint8_t *)to)[i] = ((const uint8_t *)from)[i];
	return to;
}
