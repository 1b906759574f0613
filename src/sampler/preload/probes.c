/* The probe sites. Each is in one function that is never inlined, so each probe has one note and one address. */
#include "probes.h"

volatile unsigned short otel_memory_alloc_semaphore __attribute__((section(".probes"), used)) = 0;
volatile unsigned short otel_memory_free_semaphore __attribute__((section(".probes"), used)) = 0;

/* Tools that move a file's sections after linking (prelink) move this mark too; a reader corrects the notes by its displacement. */
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

/* The registers of the calling convention, as a note names them and as a variable is bound to them. */
#ifdef __x86_64__
#define FIRST "rdi"
#define SECOND "rsi"
#define THIRD "rdx"
#define FOURTH "rcx"
#define NOTED "%%"
#else
#define FIRST "x0"
#define SECOND "x1"
#define THIRD "x2"
#define FOURTH "x3"
#define NOTED
#endif

__attribute__((noinline, noclone)) void emit_alloc(void *pointer, size_t size_bytes, uint64_t weight_bytes, uint64_t interval_bytes)
{
	register void *first __asm__(FIRST) = pointer;
	register size_t second __asm__(SECOND) = size_bytes;
	register uint64_t third __asm__(THIRD) = weight_bytes;
	register uint64_t fourth __asm__(FOURTH) = interval_bytes;

	__asm__ volatile(PROBE("alloc", "otel_memory_alloc_semaphore",
			       "8@" NOTED FIRST " 8@" NOTED SECOND " 8@" NOTED THIRD " 8@" NOTED FOURTH)
			 :
			 : "r"(first), "r"(second), "r"(third), "r"(fourth)
			 : "memory");
}

__attribute__((noinline, noclone)) void emit_free(void *pointer)
{
	register void *first __asm__(FIRST) = pointer;

	__asm__ volatile(PROBE("free", "otel_memory_free_semaphore", "8@" NOTED FIRST) : : "r"(first) : "memory");
}
