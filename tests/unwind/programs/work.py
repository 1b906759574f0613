import json, re, threading, zlib


def nested(depth):
    return {"depth": depth, "inner": nested(depth - 1)} if depth else [1.5, "x", None]


def work():
    while True:
        # Four native frames a level, far fewer than a walk has.
        text = json.dumps([nested(12) for _ in range(20)])
        sorted(re.findall(r"\w+", text), key=lambda word: (len(word), word))
        zlib.decompress(zlib.compress(text.encode()))


threading.Thread(target=work, daemon=True).start()
work()
