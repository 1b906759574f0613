"""Allocates, checks and frees blocks until its standard input ends; a timer's signal arrives every few milliseconds."""

import json
import os
import random
import signal
import sys
import threading

signals = 0


def on_timer(*_):
    global signals
    signals += 1


def work(seed, ending, counts):
    rng = random.Random(seed)
    blocks = {}
    while not ending.is_set():
        for _ in range(400):
            key = rng.randrange(3000)
            block = blocks.pop(key, None)
            if block is None:
                fill = rng.randrange(256)
                blocks[key] = (fill, bytearray([fill]) * rng.choice([200, 900, 9000, 40000]))
            else:
                fill, data = block
                if data.count(fill) != len(data):
                    print("WRONG: a block was changed", file=sys.stderr)
                    sys.stderr.flush()
                    os.abort()
        counts[seed] += 1
        ending.wait(0.003)


ending = threading.Event()
counts = [0, 0]
signal.signal(signal.SIGALRM, on_timer)
threads = [threading.Thread(target=work, args=(seed, ending, counts)) for seed in range(2)]
for thread in threads:
    thread.start()
signal.setitimer(signal.ITIMER_REAL, 0.005, 0.005)
print("ready", flush=True)
while sys.stdin.read(1):
    pass
signal.setitimer(signal.ITIMER_REAL, 0)
ending.set()
for thread in threads:
    thread.join()
print(json.dumps({"rounds": sum(counts), "signals": signals}), flush=True)
