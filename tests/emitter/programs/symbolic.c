/* An emitter whose third argument is addressed by a symbol: its address is in no register. */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

long the_weight = 4096;

int main(void)
{
	char command;

	while (read(0, &command, 1) == 1) {
		void *pointer = malloc(100);

		__asm__ volatile("990: nop\n"
				 ".pushsection .note.stapsdt,\"\",\"note\"\n"
				 ".balign 4\n.4byte 992f-991f, 994f-993f, 3\n"
				 "991: .asciz \"stapsdt\"\n992: .balign 4\n"
				 "993: .8byte 990b, 0, 0\n"
				 ".asciz \"otel_memory\"\n.asciz \"alloc\"\n.asciz \"8@%%rdi 8@%%rsi 8@the_weight(%%rip)\"\n"
				 "994: .balign 4\n.popsection\n"
				 :
				 : "D"(pointer), "S"(100l));
		printf("told %p\n", pointer);
		fflush(stdout);
	}
	return 0;
}
