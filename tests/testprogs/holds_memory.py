"""Holds about 300 MB in large and small blocks and prints their sum according to the C library's own statistics."""

import ctypes
import os


class MallInfo2(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in
                ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]


libc = ctypes.CDLL(None)
libc.mallinfo2.restype = MallInfo2


def in_use():
    """Bytes of chunks in use, mapped ones included. Chunks in the thread cache count as in use."""
    info = libc.mallinfo2()
    return info.uordblks + info.hblkhd


held = []
for i in range(4000):
    # Odd sizes on both sides of the mmap threshold.
    held.append(bytearray(100_003 if i % 2 else 50_021))
# Turnover, so that frees are counted too.
for i in range(0, 4000, 10):
    held[i] = bytearray(150_000)
held.append([str(i) * 3 for i in range(2000)])
print("in use", in_use(), flush=True)
# Skips the interpreter's shutdown, which frees everything.
os._exit(0)
