/* A parent that waits in vfork, which signals do not interrupt: it is in state D until its child executes or ends. The child waits for
 * the test's byte. */
#include "truth.h"
#include <sys/wait.h>

SITE struct block site_after(size_t n) { void *p = malloc(n); return TOOK(p, n); }

int main(void)
{
	truth_tell("ready", "");
	pid_t child = vfork();
	if (child == 0) {
		truth_await();
		_exit(0);
	}
	REQUIRE(child > 0 && waitpid(child, NULL, 0) == child);
	for (size_t i = 0; i < 100; i++)
		site_after(50 + i);
	truth_rendezvous("done");
	return 0;
}
