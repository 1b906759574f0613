/* A test program as a library in a process of another language. PROGRAM is its source. Python and Go call it by name, Java and Node
 * through their interfaces for extensions. */
#define main hosted_main
#include PROGRAM
#undef main

void hosted_run(void)
{
	static char *arguments[] = { "hosted", NULL };

	/* Some programs take no arguments; they ignore the registers of these two. */
	((int (*)(int, char **))hosted_main)(1, arguments);
}

/* JNI: the native method `run` of the class Hosted. */
void Java_Hosted_run(void *environment, void *class)
{
	(void)environment, (void)class;
	hosted_run();
}

/* Node-API: called when the library is loaded. */
void *napi_register_module_v1(void *environment, void *exports)
{
	(void)environment;
	hosted_run();
	return exports;
}
