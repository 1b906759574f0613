# Keeps objects whose sizes it says, after a line on the standard input: "FUNCTION COUNT BYTES" for each function that allocated some.
import sys

COUNT = 3000


def small(into):
    for i in range(COUNT):
        # Those of one byte or none are not made anew.
        into[i] = bytes(2 + i % 400)


def large(into):
    # Beyond the 512 bytes of the allocator of objects: malloc's.
    for i in range(COUNT):
        into[i] = bytes(600 + i % 3000)


def churn(into):
    for i in range(COUNT):
        into[i] = bytes(2 + i % 200)
    for i in range(0, COUNT, 3):
        into[i] = None


def grown(into):
    # By realloc, from one size to the next and to malloc's.
    for i in range(COUNT // 10):
        text = bytearray()
        for _ in range(i % 70):
            text += b"0123456789"
        into[i] = text


def said(objects):
    objects = [one for one in objects if one is not None]
    return len(objects), sum(sys.getsizeof(one) for one in objects)


print("ready", flush=True)
sys.stdin.readline()
kept = [[None] * COUNT for _ in range(3)]
for function, into in zip((small, large, churn), kept):
    function(into)
    print(function.__name__, *said(into))
texts = [None] * COUNT
grown(texts)
del texts
print("done", flush=True)
sys.stdin.readline()
