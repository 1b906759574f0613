import json, re, threading, zlib


def nested(depth):
    return {"depth": depth, "inner": nested(depth - 1)} if depth else [1.5, "x", None]


def work():
    while True:
        text = json.dumps([nested(20) for _ in range(20)])
        sorted(re.findall(r"\w+", text), key=lambda word: (len(word), word))
        zlib.decompress(zlib.compress(text.encode()))


threading.Thread(target=work, daemon=True).start()
work()
