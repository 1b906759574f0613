/* An attached library that records every call. See attach.h.
 *
 * The process makes the memory that it shares with the reader itself: so neither its user nor its root directory must let it open a file of
 * the reader's, and the reader, which may look into the process, finds it among its descriptors. */
#include "attach.h"

#include "record.h"
#include "system.h"

/* struct stat (Linux, both machines) begins with device and inode. */
struct identity {
	uint64_t device, inode;
};
static struct identity made;

static bool identity_of(long file, struct identity *identity)
{
	uint64_t stat[18]; /* 144 bytes on x86-64, 128 on arm64 */

	if (failed(system_call(CALL_FSTAT, file, (long)stat, 0, 0, 0, 0)))
		return false;
	*identity = (struct identity){ stat[0], stat[1] };
	return true;
}

/* The file that was made; the program may have closed it, and opened another one with its number. */
static long made_file(void)
{
	struct identity found;
	long file = (long)fragprof_attached.memory_file - 1;

	return file >= 0 && identity_of(file, &found) && found.device == made.device && found.inode == made.inode ? file : -1;
}

/* Called from outside: makes the memory, without contents. */
EXPORT void fragprof_prepare(void)
{
	long file = made_file();

	fragprof_attached.memory_file = 0;
	fragprof_attached.refused = record_has_reader() ? ATTACHED_HAS_READER : ATTACHED_NOT_REFUSED;
	/* A reader that was killed before it began has left it. */
	if (file >= 0)
		system_call(CALL_CLOSE, file, 0, 0, 0, 0, 0);
	if (fragprof_attached.refused != ATTACHED_NOT_REFUSED)
		return;
	file = system_call(CALL_MEMFD_CREATE, (long)"fragprof-ring", MFD_CLOEXEC_ | MFD_ALLOW_SEALING_, 0, 0, 0, 0);
	if (!failed(file) && identity_of(file, &made))
		fragprof_attached.memory_file = (uint64_t)file + 1;
}

/* Whether to begin with the memory that was made; otherwise it is one more pass. */
enum attached_refusal attached_begin(const uint64_t arguments[3], bool is_first)
{
	long file = made_file();

	(void)is_first;
	if (arguments[0] == 0)
		return ATTACHED_NOT_REFUSED;
	if (record_has_reader())
		return ATTACHED_HAS_READER;
	if (recorder_thread_number() != (uint32_t)system_call(CALL_GETTID, 0, 0, 0, 0, 0, 0))
		return ATTACHED_UNKNOWN_THREADS;
	record_set_in_front(true);
	/* It closes the file. */
	fragprof_attached.memory_file = 0;
	return file >= 0 && record_begin((int)file) ? ATTACHED_NOT_REFUSED : ATTACHED_NO_MEMORY;
}

void attached_in_front(bool in_front)
{
	record_set_in_front(in_front);
	if (!in_front)
		record_end();
}
