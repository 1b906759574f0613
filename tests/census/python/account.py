"""Builds a heap, writes CPython's own account of it to a file, and then allocates nothing until the next signal.

usage: account.py FILE [fork]

The account goes through descriptor 2, written in C, and `signal.pause` allocates nothing: so the heap stays as it was counted.
"""
import os
import signal
import sys
import threading

keep = [(number, str(number) * 3, {number: [number]}) for number in range(60000)]
# Pools of one size with free blocks, pools that are wholly free, and arenas in which little is left.
del keep[::3]
passing = [bytes(100 + number % 380) for number in range(120000)]
passing = passing[-1000:]


def account(path):
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 2)
    os.close(file)
    pause, stats = signal.pause, sys._debugmallocstats
    while True:
        stats()
        pause()


def churn(ring):
    """Replaces objects by others of random sizes, for as long as the process lives."""
    count, state = len(ring), 12345
    while True:
        for _ in range(10000):
            state = (state * 1103515245 + 12345) & 0x7fffffff
            ring[state % count] = bytes((state >> 8) % 430)


if len(sys.argv) > 2 and sys.argv[2] == "fork":
    for child in range(2):
        if os.fork() == 0:
            del keep[:: 2 + child]
            account(f"{sys.argv[1]}.{child}")
if len(sys.argv) > 2 and sys.argv[2] == "busy":
    # The thread is the first to stop, as it needs the lock, and starts again when the account is written.
    # A handler would run before the next `pause` if the signal comes between the two, which then waits for another one.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    file = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 2)
    ring = [None] * 20000
    threading.Thread(target=churn, args=(ring,), daemon=True).start()
    while True:
        signal.sigwait({signal.SIGUSR1})
        sys._debugmallocstats()
signal.signal(signal.SIGUSR1, lambda *_: None)
account(sys.argv[1])
