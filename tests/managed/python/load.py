"""Allocates until a line comes in; with "fork" in children that it forks."""

import os
import sys
import threading
import time


class Shop:
    def allocate(self):
        return [
            bytearray(200_000),
            bytearray(300_000),
        ]

    def outer(self):
        return [len(block) for block in self.allocate()]


def work(stop):
    while not stop():
        Shop().outer()
        time.sleep(0.001)


def serve():
    children = []
    for _ in range(2):
        child = os.fork()
        if not child:
            end = time.monotonic() + 3
            work(lambda: time.monotonic() > end)
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


def main():
    print("ready", flush=True)
    if "fork" in sys.argv:
        sys.stdin.readline()
        serve()
        return
    done = []
    threading.Thread(target=lambda: done.append(sys.stdin.readline())).start()
    work(lambda: done)


main()
