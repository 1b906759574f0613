/* C++: operator new and delete in all their forms.
 *
 * Which function counts depends on the next definition of the operator, which is determined once, for each form:
 *
 *   next definition                         new and delete here
 *   an allocator's own (its object has      count, then call it: such operators never call malloc
 *     malloc too: jemalloc, tcmalloc, …)
 *   libstdc++'s or libc++'s                 the throwing forms of new and the plain forms of delete are this library's malloc, memalign
 *                                           and free, as in those libraries, except for the size, which they round up; the others
 *                                           are passed on, call one of these in turn, and are counted then
 *   a program's replacement                 passed on: it calls malloc itself
 *   none at the start                       a C program; a library opened later that is C++ gets malloc and free
 *
 * The Itanium C++ ABI gives the names; m is size_t, St11align_val_t a size_t, RKSt9nothrow_t a pointer. */
#include "next.h"
#ifdef FRAGPROF_ATTACHED
#include "attach.h"
#endif
#ifdef FRAGPROF_RECORDER
#include "record.h"
#else
#include "sample.h"
#endif

void *malloc(size_t size);
void free(void *pointer);
void *memalign(size_t alignment, size_t size);

/* Failure of a throwing form: the next definition, or one loaded since, calls the new-handler and throws. */
RARE static void *throwing_failure(const char *name, size_t size)
{
	void *(*function)(size_t) = next_definition(name).address;

	return function != NULL ? function(size) : NULL;
}

RARE static void *throwing_failure_aligned(const char *name, size_t size, align_value alignment)
{
	void *(*function)(size_t, align_value) = next_definition(name).address;

	return function != NULL ? function(size, alignment) : NULL;
}

static void *plain_new(const char *name, size_t size)
{
	NOTE_CALLER_OF_NEW();
	void *pointer = malloc(size != 0 ? size : 1);

	return likely(pointer != NULL) ? pointer : throwing_failure(name, size);
}

static void *plain_new_aligned(const char *name, size_t size, align_value alignment)
{
	NOTE_CALLER_OF_NEW();
	void *pointer = memalign(alignment, size != 0 ? size : 1);

	return likely(pointer != NULL) ? pointer : throwing_failure_aligned(name, size, alignment);
}

/* A form: its slot, through which the exported function jumps; the next definition; the counting variant; and the one without a next.
 *   NAME        the mangled name
 *   (params)    its parameters, (args) as they are passed on */
#define FORM_OF_NEW(NAME, params, args, PLAIN)                                                    \
	static void *first_##NAME params;                                                         \
	static OWN_SLOT void *(*slot_##NAME) params = first_##NAME;                               \
	static void *(*next_##NAME) params;                                                       \
	EXPORT void *NAME params                                                                  \
	{                                                                                         \
		return slot_##NAME args;                                                          \
	}                                                                                         \
	static void *counted_##NAME params                                                        \
	{                                                                                         \
		if (listening_alloc())                                                            \
			return SAMPLE_INNER(size, next_##NAME args);                              \
		return next_##NAME args;                                                          \
	}                                                                                         \
	static void *plain_##NAME params                                                          \
	{                                                                                         \
		return PLAIN;                                                                     \
	}                                                                                         \
	static void *first_##NAME params                                                          \
	{                                                                                         \
		next_resolve();                                                                   \
		return slot_##NAME args;                                                          \
	}

#define FORM_OF_DELETE(NAME, params, args)                        \
	static void first_##NAME params;                          \
	static OWN_SLOT void (*slot_##NAME) params = first_##NAME; \
	static void (*next_##NAME) params;                        \
	EXPORT void NAME params                                   \
	{                                                         \
		slot_##NAME args;                                 \
	}                                                         \
	static void counted_##NAME params                         \
	{                                                         \
		if (listening_free() && set_may_hold(pointer))    \
			sample_free(pointer);                     \
		next_##NAME args;                                 \
	}                                                         \
	static void plain_##NAME params                           \
	{                                                         \
		free(pointer);                                    \
	}                                                         \
	static void first_##NAME params                           \
	{                                                         \
		next_resolve();                                   \
		slot_##NAME args;                                 \
	}

/* The slots are together, separate from anything that is written while the program runs. */
#define OWN_SLOT __attribute__((section(".data.slots")))

/* The plain forms ignore arguments that are only hints. */
#pragma GCC diagnostic ignored "-Wunused-parameter"

FORM_OF_NEW(_Znwm, (size_t size), (size), plain_new("_Znwm", size))
FORM_OF_NEW(_Znam, (size_t size), (size), plain_new("_Znam", size))
FORM_OF_NEW(_ZnwmRKSt9nothrow_t, (size_t size, nothrow_ref nothrow), (size, nothrow), malloc(size != 0 ? size : 1))
FORM_OF_NEW(_ZnamRKSt9nothrow_t, (size_t size, nothrow_ref nothrow), (size, nothrow), malloc(size != 0 ? size : 1))
FORM_OF_NEW(_ZnwmSt11align_val_t, (size_t size, align_value alignment), (size, alignment),
	    plain_new_aligned("_ZnwmSt11align_val_t", size, alignment))
FORM_OF_NEW(_ZnamSt11align_val_t, (size_t size, align_value alignment), (size, alignment),
	    plain_new_aligned("_ZnamSt11align_val_t", size, alignment))
FORM_OF_NEW(_ZnwmSt11align_val_tRKSt9nothrow_t, (size_t size, align_value alignment, nothrow_ref nothrow), (size, alignment, nothrow),
	    memalign(alignment, size != 0 ? size : 1))
FORM_OF_NEW(_ZnamSt11align_val_tRKSt9nothrow_t, (size_t size, align_value alignment, nothrow_ref nothrow), (size, alignment, nothrow),
	    memalign(alignment, size != 0 ? size : 1))

FORM_OF_DELETE(_ZdlPv, (void *pointer), (pointer))
FORM_OF_DELETE(_ZdaPv, (void *pointer), (pointer))
FORM_OF_DELETE(_ZdlPvRKSt9nothrow_t, (void *pointer, nothrow_ref nothrow), (pointer, nothrow))
FORM_OF_DELETE(_ZdaPvRKSt9nothrow_t, (void *pointer, nothrow_ref nothrow), (pointer, nothrow))
FORM_OF_DELETE(_ZdlPvm, (void *pointer, size_t size), (pointer, size))
FORM_OF_DELETE(_ZdaPvm, (void *pointer, size_t size), (pointer, size))
FORM_OF_DELETE(_ZdlPvSt11align_val_t, (void *pointer, align_value alignment), (pointer, alignment))
FORM_OF_DELETE(_ZdaPvSt11align_val_t, (void *pointer, align_value alignment), (pointer, alignment))
FORM_OF_DELETE(_ZdlPvSt11align_val_tRKSt9nothrow_t, (void *pointer, align_value alignment, nothrow_ref nothrow),
	       (pointer, alignment, nothrow))
FORM_OF_DELETE(_ZdaPvSt11align_val_tRKSt9nothrow_t, (void *pointer, align_value alignment, nothrow_ref nothrow),
	       (pointer, alignment, nothrow))
FORM_OF_DELETE(_ZdlPvmSt11align_val_t, (void *pointer, size_t size, align_value alignment), (pointer, size, alignment))
FORM_OF_DELETE(_ZdaPvmSt11align_val_t, (void *pointer, size_t size, align_value alignment), (pointer, size, alignment))

/* The next definition of the operator, which determines the variant. DIRECT names the form that the C++ runtime's own definition would
 * call: if that one is interposed here too, and not replaced by the program, the call can be skipped. "" to pass the call on. */
#define RESOLVE(NAME, DIRECT)                                                                             \
	do {                                                                                              \
		struct definition found = next_definition(#NAME);                                         \
                                                                                                          \
		next_##NAME = found.address;                                                              \
		if (found.address == NULL)                                                                \
			slot_##NAME = plain_##NAME;                                                       \
		else if (found.by_allocator)                                                              \
			slot_##NAME = counted_##NAME;                                                     \
		else if (found.by_cxx_runtime && next_is_in_front(DIRECT) &&                              \
			 next_definition(DIRECT).by_cxx_runtime)                                          \
			slot_##NAME = plain_##NAME;                                                       \
		else                                                                                      \
			slot_##NAME = found.address;                                                      \
	} while (0);

/* Each form, and the form that the C++ runtime's own definition would call: see RESOLVE. */
#define FORMS(EACH) \
	EACH(_Znwm, "_Znwm") \
	EACH(_Znam, "_Znwm") \
	EACH(_ZnwmRKSt9nothrow_t, "") \
	EACH(_ZnamRKSt9nothrow_t, "") \
	EACH(_ZnwmSt11align_val_t, "_ZnwmSt11align_val_t") \
	EACH(_ZnamSt11align_val_t, "_ZnwmSt11align_val_t") \
	EACH(_ZnwmSt11align_val_tRKSt9nothrow_t, "") \
	EACH(_ZnamSt11align_val_tRKSt9nothrow_t, "") \
	EACH(_ZdlPv, "_ZdlPv") \
	EACH(_ZdaPv, "_ZdlPv") \
	EACH(_ZdlPvRKSt9nothrow_t, "_ZdlPv") \
	EACH(_ZdaPvRKSt9nothrow_t, "") \
	EACH(_ZdlPvm, "_ZdlPv") \
	EACH(_ZdaPvm, "") \
	EACH(_ZdlPvSt11align_val_t, "_ZdlPvSt11align_val_t") \
	EACH(_ZdaPvSt11align_val_t, "_ZdlPvSt11align_val_t") \
	EACH(_ZdlPvSt11align_val_tRKSt9nothrow_t, "") \
	EACH(_ZdaPvSt11align_val_tRKSt9nothrow_t, "") \
	EACH(_ZdlPvmSt11align_val_t, "_ZdlPvSt11align_val_t") \
	EACH(_ZdaPvmSt11align_val_t, "")

void operators_resolve(void)
{
	FORMS(RESOLVE)
}

#ifdef FRAGPROF_ATTACHED
/* The others call malloc and free through a word of the C++ runtime. */
#define EACH_THAT_COUNTS(NAME, DIRECT)                     \
	if (slot_##NAME == counted_##NAME)                 \
		each(#NAME, NAME, next_##NAME);

void operators_each(attach_function *each)
{
	FORMS(EACH_THAT_COUNTS)
}
#endif
