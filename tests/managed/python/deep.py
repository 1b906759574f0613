"""A block of malloc below a recursion, many times: for each line of the input, `DEPTH ROUNDS`."""

import sys

sys.setrecursionlimit(5000)


def down(depth, rounds):
    if depth:
        return down(depth - 1, rounds)
    for _ in range(rounds):
        bytearray(1000)
    return 0


print("ready", flush=True)
for line in sys.stdin:
    down(*map(int, line.split()))
    print("done", flush=True)
