"""Allocations under Python frames: `frames.py ROUNDS DEPTH`. Each round builds rows of text below a recursion of DEPTH calls."""

import json
import sys


def down(depth):
    if depth:
        return down(depth - 1) + 1
    rows = [{"name": "row %d" % i, "text": "x" * (600 + i)} for i in range(20)]
    return len(json.dumps(rows))


def main():
    rounds, depth = int(sys.argv[1]), int(sys.argv[2])
    print(sum(down(depth) for _ in range(rounds)))


main()
