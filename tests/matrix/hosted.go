// Runs a test program that is a library, on a thread of the Go runtime.
package main

/*
#cgo LDFLAGS: -ldl
#include <dlfcn.h>
#include <stdio.h>

static int run(const char *path)
{
	void *library = dlopen(path, RTLD_NOW);
	void (*hosted_run)(void) = library ? (void (*)(void))dlsym(library, "hosted_run") : NULL;

	if (hosted_run)
		hosted_run();
	else
		fprintf(stderr, "%s\n", dlerror());
	return hosted_run ? 0 : 1;
}
*/
import "C"
import "os"

func main() {
	os.Exit(int(C.run(C.CString(os.Args[1]))))
}
