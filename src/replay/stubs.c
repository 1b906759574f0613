/* Stands for the C library while the player is linked: only the names are used, so that the player asks for no version of them. */
#define STUB(name) void name(void); void name(void) {}

#ifdef THREADS /* libpthread.so.0, which is part of libc.so.6 from glibc 2.34 on */
STUB(pthread_create)
STUB(pthread_join)
STUB(pthread_attr_init)
STUB(pthread_attr_setstack)
#else
STUB(malloc)
STUB(calloc)
STUB(realloc)
STUB(free)
STUB(posix_memalign)
STUB(memset)
STUB(memcpy)
#endif
