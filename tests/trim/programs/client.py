"""A client of redis or nginx that compares every answer with what it must be, until its standard input ends.

client.py redis SOCKET | client.py nginx SOCKET DIRECTORY
"""

import json
import os
import random
import select
import socket
import sys


def wrong(text):
    print("WRONG:", text, file=sys.stderr, flush=True)
    os._exit(3)


def is_over():
    readable, _, _ = select.select([0], [], [], 0)
    return bool(readable) and not os.read(0, 1)


class Redis:
    def __init__(self, path):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(60)
        self.socket.connect(path)
        self.file = self.socket.makefile("rb")
        self.known = {}
        self.rng = random.Random(1)
        # Free pages, more than the rounds take into use: there is something to give back from the start.
        for index in range(2000):
            self.ask(b"SET", b"first%d" % index, b"f" * 20000)
        for index in range(2000):
            self.ask(b"DEL", b"first%d" % index)

    def ask(self, *words):
        text = b"*%d\r\n" % len(words)
        for word in words:
            text += b"$%d\r\n%s\r\n" % (len(word), word)
        self.socket.sendall(text)
        line = self.file.readline()
        if line[:1] in b"+:":
            return line[1:-2]
        if line[:1] != b"$":
            wrong(f"redis answered {line!r}")
        length = int(line[1:])
        return None if length < 0 else self.file.read(length + 2)[:-2]

    def round(self):
        for _ in range(300):
            key = b"k%d" % self.rng.randrange(4000)
            expected = self.known.pop(key, None)
            if self.ask(b"GET", key) != expected:
                wrong(f"the value of {key!r} is another one")
            if expected is None:
                self.known[key] = bytes([self.rng.randrange(97, 123)]) * self.rng.choice([30, 300, 3000, 20000])
                self.ask(b"SET", key, self.known[key])
            elif self.ask(b"DEL", key) != b"1":
                wrong(f"{key!r} was not deleted once")

    def end(self):
        if int(self.ask(b"DBSIZE")) != len(self.known):
            wrong("the number of keys is another one")


class Nginx:
    def __init__(self, path, directory):
        self.path = path
        self.bodies = {name: open(os.path.join(directory, name), "rb").read() for name in os.listdir(directory)}

    def get(self, connection, name, keep):
        header = "".join(f"X-{i}: {'x' * 400}\r\n" for i in range(12))
        close = "" if keep else "Connection: close\r\n"
        connection.sendall(f"GET /{name} HTTP/1.1\r\nHost: x\r\n{close}{header}\r\n".encode())
        head = b""
        while b"\r\n\r\n" not in head:
            part = connection.recv(65536)
            if not part:
                wrong("nginx closed a connection")
            head += part
        head, body = head.split(b"\r\n\r\n", 1)
        if b" 200 " not in head.split(b"\r\n")[0]:
            wrong(f"nginx answered {head[:60]!r}")
        while len(body) < len(self.bodies[name]):
            part = connection.recv(65536)
            if not part:
                wrong("an answer is cut")
            body += part
        if body != self.bodies[name]:
            wrong(f"{name} has another content")

    def round(self):
        connections = []
        for index in range(60):
            connection = socket.socket(socket.AF_UNIX)
            connection.settimeout(60)
            connection.connect(self.path)
            connections.append(connection)
            self.get(connection, sorted(self.bodies)[index % len(self.bodies)], keep=True)
        for connection in connections[::2]:
            self.get(connection, "a", keep=True)
        for connection in connections:
            connection.close()

    def end(self):
        pass


client = Redis(sys.argv[2]) if sys.argv[1] == "redis" else Nginx(sys.argv[2], sys.argv[3])
rounds = 0
print("ready", flush=True)
try:
    while not is_over():
        client.round()
        rounds += 1
    client.end()
except OSError as error:
    wrong(str(error))
print(json.dumps({"rounds": rounds}), flush=True)
