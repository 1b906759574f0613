/* The native method of Deep.java: a block, freed at once. */
#include <jni.h>
#include <stdlib.h>

JNIEXPORT void JNICALL Java_Deep_block(JNIEnv *env, jclass class)
{
	void *block = malloc(100);

	(void)env, (void)class;
	__asm__ volatile("" : "+r"(block));
	free(block);
}
