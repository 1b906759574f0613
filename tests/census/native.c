// The native half of Native.java.
#include <malloc.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// The types of jni.h that are needed, so that the test does not depend on where a JDK keeps its headers.
typedef void *JNIEnv;
struct functions { void *slots[167]; void *NewStringUTF; };

#define BLOCKS 20000
static void *slots[4 * BLOCKS];

void Java_Native_fill(JNIEnv *env, void *class, int thread, int blocks) {
    (void)env; (void)class;
    for (int i = 0; i < blocks; i++) {
        size_t n = 16 + (size_t)(i * 37 % 2000);
        slots[thread * BLOCKS + i] = malloc(n);
        memset(slots[thread * BLOCKS + i], 0x5a, n);
    }
    for (int i = 0; i < blocks; i += 3) { free(slots[thread * BLOCKS + i]); slots[thread * BLOCKS + i] = NULL; }
}

void *Java_Native_answer(JNIEnv *env, void *class) {
    (void)class;
    char text[128];
    size_t live = 0;
    for (int i = 0; i < 4 * BLOCKS; i++) live += slots[i] != NULL;
    snprintf(text, sizeof text, "{\"live\":%zu,\"slots\":%zu}", live, (size_t)(uintptr_t)slots);
    return ((void *(*)(JNIEnv, const char *))(*(struct functions **)env)->NewStringUTF)(env, text);
}
