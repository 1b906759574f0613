# A list that is never emptied, of strings allocated by malloc (above CPython's own limit of 512 bytes), 4 MiB per second by the clock. For
# each line of input it prints the bytes that malloc counts as in use.
import ctypes, select, sys, time


class Mallinfo2(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]


mallinfo2 = ctypes.CDLL(None).mallinfo2
mallinfo2.restype = Mallinfo2
kept = []
print("ready", flush=True)
since = time.monotonic()
while True:
    wanted = int((time.monotonic() - since) * 4 * 1024 * 1024 / 1000)
    while len(kept) < wanted:
        kept.append(b"%d" % len(kept) + bytes(1000))
    if select.select([sys.stdin], [], [], 0.005)[0]:
        if not sys.stdin.readline():
            break
        own = mallinfo2()
        print(own.uordblks + own.hblkhd, flush=True)
