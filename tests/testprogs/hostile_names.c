/* A process whose name and function names are crafted to do harm where they are displayed. Symbols may contain any byte but 0; the
 * assembler accepts them in quotes. */
#include "truth.h"
#include <sys/prctl.h>

#define HOSTILE "evil\033]0;owned\007\033[2J<script>alert(1)</script>' onload=x; # HELP \342\200\256gpj"

__attribute__((noipa)) void *hostile(size_t n) __asm__("\"" HOSTILE "\"");
__attribute__((noipa)) void *hostile(size_t n)
{
	char *p = malloc(n);
	p[0] = 1;
	return p;
}

int main(void)
{
	prctl(PR_SET_NAME, "\033[31m\"}<b>\n;");
	truth_rendezvous("ready");
	for (int i = 0; i < 500; i++)
		hostile(1000);
	truth_rendezvous("done");
	return 0;
}
