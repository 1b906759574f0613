/* The probe sites. Each is in one function that is never inlined, so each probe has one note and one address. */
#include "probes.h"

volatile unsigned short otel_memory_alloc_semaphore __attribute__((section(".probes"), used)) = 0;
volatile unsigned short otel_memory_free_semaphore __attribute__((section(".probes"), used)) = 0;

/* Tools that move a file's sections after the link (prelink) shift this mark with them; a reader corrects the notes by its distance. */
__asm__(".pushsection .stapsdt.base,\"aG\",\"progbits\",.stapsdt.base,comdat\n"
	".weak _.stapsdt.base\n"
	".hidden _.stapsdt.base\n"
	"_.stapsdt.base: .space 1\n"
	".size _.stapsdt.base, 1\n"
	".popsection\n");

#define PROBE(name, semaphore, arguments)                 \
	"990: nop\n"                                      \
	".pushsection .note.stapsdt,\"\",\"note\"\n"      \
	".balign 4\n"                                     \
	".4byte 992f - 991f, 994f - 993f, 3\n"            \
	"991: .asciz \"stapsdt\"\n"                       \
	"992: .balign 4\n"                                \
	"993: .8byte 990b, _.stapsdt.base, " semaphore "\n" \
	".asciz \"otel_memory\"\n"                        \
	".asciz \"" name "\"\n"                           \
	".asciz \"" arguments "\"\n"                      \
	"994: .balign 4\n"                                \
	".popsection\n"

__attribute__((noinline, noclone)) void emit_alloc(void *pointer, size_t size_bytes, uint64_t weight_bytes, uint64_t interval_bytes)
{
	__asm__ volatile(PROBE("alloc", "otel_memory_alloc_semaphore", "8@%%rdi 8@%%rsi 8@%%rdx 8@%%rcx")
			 :
			 : "D"(pointer), "S"(size_bytes), "d"(weight_bytes), "c"(interval_bytes)
			 : "memory");
}

__attribute__((noinline, noclone)) void emit_free(void *pointer)
{
	__asm__ volatile(PROBE("free", "otel_memory_free_semaphore", "8@%%rdi") : : "D"(pointer) : "memory");
}
