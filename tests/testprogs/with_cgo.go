// A Go program whose C side allocates: from the main thread and from goroutines, which run C on the threads' system stacks.
package main

/*
#include "truth.h"

SITE static struct block site_called_from_go(size_t n) { void *p = malloc(n); return TOOK(p, n); }

static void ready(void) { truth_rendezvous("ready"); }
static void done(void) { truth_rendezvous("done"); }
static void some(int n)
{
	for (int i = 0; i < n; i++) {
		struct block b = site_called_from_go(16 + i % 900);
		if (i % 3)
			block_free(b);
	}
}
*/
import "C"
import "sync"

func main() {
	C.ready()
	C.some(1000)
	var all sync.WaitGroup
	for i := 0; i < 8; i++ {
		all.Add(1)
		go func() {
			defer all.Done()
			C.some(500)
		}()
	}
	all.Wait()
	C.done()
}
