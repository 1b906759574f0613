/* Children of vfork allocate and free in their parent's memory until they execute a program, as dash's do; some end without one. The
 * program, which is this one, has a thread. */
#include "truth.h"
#include <pthread.h>
#include <sys/wait.h>

SITE struct block site_parent(size_t n) { void *p = malloc(n); return TOOK(p, n); }
SITE struct block site_vfork_child(size_t n) { void *p = malloc(n); return TOOK(p, n); }

SITE struct block site_executed(size_t n) { void *p = malloc(n); return TOOK(p, n); }

enum { CHILDREN = 6, BLOCKS = 20 };

static struct block kept[CHILDREN][BLOCKS];

static void *executed(void *unused)
{
	for (int i = 0; i < BLOCKS; i++)
		site_executed(50);
	return unused;
}

int main(int argc, char **argv)
{
	if (argc > 1) {
		pthread_t thread;
		REQUIRE(pthread_create(&thread, NULL, executed, NULL) == 0 && pthread_join(thread, NULL) == 0);
		return 0;
	}
	struct block before = site_parent(300);
	for (int child = 0; child < CHILDREN; child++) {
		pid_t pid = vfork();
		if (pid == 0) {
			if (child == 0)
				block_free(before);
			for (int i = 0; i < BLOCKS; i++)
				kept[child][i] = site_vfork_child(100 + 10 * i);
			for (int i = 0; i < BLOCKS; i += 2)
				block_free(kept[child][i]);
			if (child % 2)
				_exit(0);
			execl(argv[0], argv[0], "executed", (char *)NULL);
			_exit(1);
		}
		int status;
		REQUIRE(pid > 0 && waitpid(pid, &status, 0) == pid && status == 0);
		for (int i = 1; i < BLOCKS; i += 4)
			block_free(kept[child][i]);
		site_parent(400);
	}
	truth_rendezvous("done");
	return 0;
}
