"""Allocates blocks in Python stacks of many shapes. Each time it takes the stack as the interpreter itself says it (sys._getframe), allocates
a block of a size that no other has, and at the end writes all of that to a file.

shapes.py LIBRARY OUT ROUNDS [SHAPE...]
"""

import asyncio
import collections
import contextlib
import copy
import ctypes
import functools
import gc
import importlib
import json
import os
import pickle
import re
import signal
import sys
import tempfile
import threading
import weakref

LIBRARY = sys.argv[1]
with_lock = ctypes.PyDLL(LIBRARY).truth_block
without_lock = ctypes.CDLL(LIBRARY).truth_block
for function in with_lock, without_lock:
    function.argtypes = [ctypes.c_ulong]
    function.restype = None
CALLBACK = ctypes.CFUNCTYPE(None)
call_back = ctypes.CDLL(LIBRARY).call_back
call_back_in_thread = ctypes.CDLL(LIBRARY).call_back_in_thread
COMPARE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
qsort = ctypes.CDLL(None).qsort

said = []
lock = threading.Lock()


def of_frame(frame):
    code = frame.f_code
    return [getattr(code, "co_qualname", code.co_name), code.co_filename, frame.f_lineno]


def probe(result=None):
    stack = []
    frame = sys._getframe()
    while frame:
        stack.append(of_frame(frame))
        frame = frame.f_back
    with lock:
        size = 40_000 + 8 * len(said)
        said.append([size, stack])
    take = with_lock if size & 8 else without_lock
    stack[0][2] = sys._getframe().f_lineno + 1
    take(size)
    return result


def plain():
    probe()


def nested(depth=4):
    if depth:
        nested(depth - 1)
    else:
        probe()


def recursion():
    nested(120)


def beyond_the_limit():
    nested(400)


def even(n):
    return odd(n - 1) if n else probe(True)


def odd(n):
    return even(n - 1)


def mutual():
    even(20)


def numbers(n):
    for i in range(n):
        yield probe(i)


def generator():
    for _ in numbers(3):
        pass
    list(numbers(2))
    sum(probe(i) for i in range(2))
    next(numbers(1))


def delegated():
    def inner():
        yield probe(1)
        got = yield 2
        probe(got)

    def outer():
        yield from inner()
        yield probe(3)

    for _ in outer():
        pass
    sending = outer()
    next(sending)
    next(sending)
    sending.send(7)
    closing = outer()
    next(closing)
    closing.close()


def throwing():
    def catches():
        try:
            yield 1
        except KeyError:
            probe()
            yield 2

    generator = catches()
    next(generator)
    generator.throw(KeyError("x"))


async def sleeps(n):
    probe()
    await asyncio.sleep(0)
    probe()
    if n:
        await sleeps(n - 1)


async def counted(n):
    for i in range(n):
        await asyncio.sleep(0)
        yield probe(i)


async def work():
    await asyncio.gather(sleeps(2), sleeps(1))
    async for _ in counted(2):
        probe()
    [i async for i in counted(2)]
    async with guarded():
        probe()
    await asyncio.get_running_loop().run_in_executor(None, plain)


class guarded:
    async def __aenter__(self):
        return probe(self)

    async def __aexit__(self, *_):
        probe()


def coroutines():
    asyncio.run(work())


def threads():
    def run(n):
        nested(n)
        with contextlib.suppress(ValueError):
            int("x" + str(probe("")))

    started = [threading.Thread(target=run, args=(n,)) for n in range(4)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()


def class_body():
    class Meta(type):
        def __new__(mcs, name, bases, fields):
            probe()
            return super().__new__(mcs, name, bases, fields)

        def __call__(cls, *arguments):
            probe()
            return super().__call__(*arguments)

    class Body(metaclass=Meta):
        probe()
        value = probe(3)

        class Inner:
            probe()

        def __init__(self):
            probe()

        def method(self):
            return probe(self)

        @property
        def size(self):
            return probe(1)

        @staticmethod
        def fixed():
            probe()

        @classmethod
        def of(cls):
            return probe(cls())

        def __getattr__(self, name):
            return probe(name)

        def __getitem__(self, key):
            return probe(key)

        def __add__(self, other):
            return probe(other)

        def __eq__(self, other):
            return probe(True)

        def __hash__(self):
            return probe(1)

        def __bool__(self):
            return probe(True)

        def __iter__(self):
            probe()
            yield 1

        def __repr__(self):
            return probe("Body")

        def __contains__(self, key):
            return probe(True)

        def __enter__(self):
            return probe(self)

        def __exit__(self, *_):
            probe()

        def __call__(self):
            return probe(self)

        def __len__(self):
            return probe(1)

        def __del__(self):
            probe()

    body = Body()
    body.method().method()
    body.size, body.missing, body[3], body + 1, body == 4, 3 in body
    Body.fixed()
    Body.of()
    {body: 1}
    str(body), f"{body!r}", len(body), body(), list(body)
    if body and not (body != 3):
        with body:
            probe()
    del body
    gc.collect()


class Simple:
    def __init__(self, n):
        self.n = probe(n)

    def __lt__(self, other):
        return probe(self.n < other.n)


def construction():
    for i in range(3):
        Simple(i)
    [Simple(i) for i in range(2)]


def comprehensions():
    [probe(i) for i in range(2)]
    {probe(i) for i in range(2)}
    {probe(i): i for i in range(2)}
    [[probe(i) for i in range(2)] for _ in range(2)]
    (lambda: [probe(i) for i in (lambda: range(2))()])()


def lambdas():
    (lambda value: (lambda: probe(value))())(1)


def called_by_c():
    sorted([3, 1, 2], key=lambda i: probe(-i))
    sorted([Simple(2), Simple(1)])
    list(map(probe, range(2)))
    list(filter(lambda i: probe(i), range(2)))
    functools.reduce(lambda a, b: probe(a + b), range(4))
    functools.partial(probe, 3)()
    max([1, 2], key=probe)
    re.sub("a", lambda match: probe("b"), "aaba")
    json.loads('{"a": {"b": 1}}', object_hook=probe)
    collections.defaultdict(lambda: probe(1))["x"]
    getattr(Simple(1), "n")
    weak = Simple(1)
    watched = weakref.ref(weak, lambda reference: probe())
    del weak
    return watched


class Pickled:
    def __reduce__(self):
        return (probe, (1,))

    def __deepcopy__(self, memo):
        return probe(self)


def pickled():
    pickle.loads(pickle.dumps(Pickled()))
    copy.deepcopy([Pickled()])


def decorated():
    def outer(function):
        probe()

        @functools.wraps(function)
        def wrapper(*arguments, **keywords):
            return function(*arguments, **keywords)

        return wrapper

    @outer
    @outer
    def inner(a, b=2, *, c=3):
        probe()

    inner(1, c=4)

    @functools.lru_cache(maxsize=None)
    def cached(n):
        return probe(n) if n == 0 else cached(n - 1)

    cached(3)

    @contextlib.contextmanager
    def managed():
        probe()
        yield
        probe()

    with managed():
        probe()


def exceptions():
    try:
        try:
            probe()
            raise ValueError("x")
        except ValueError:
            probe()
            raise KeyError("y")
        finally:
            probe()
    except KeyError as error:
        probe(error.__context__)
    else:
        probe()


def lines():
    value = probe(1)
    probe(
        probe(
            2
        ),
    )
    if (
        value == 1
        and probe(True)
        and not probe(
            False
        )
    ):
        pass
    while probe(value) < 3: value += 1
    for _ in range(probe(1)): probe()
    first, second = probe(1), \
        probe(2)
    return [
        probe(first),
        {"a": probe(second)},
    ]


def callbacks():
    callback = CALLBACK(lambda: probe())
    call_back(callback)
    values = (ctypes.c_int * 3)(3, 1, 2)
    qsort(values, ctypes.c_size_t(3), ctypes.c_size_t(4), COMPARE(lambda a, b: probe(0)))


def foreign_threads():
    callback = CALLBACK(lambda: nested(2))
    call_back_in_thread(callback)


def executed():
    exec("def inside():\n    probe()\n\n\ninside()\nprobe()\n", {"probe": probe})
    eval("probe(1)")
    eval(compile("[probe(i) for i in range(2)]", "<a text>", "eval"))


def replaced():
    # Code objects that are freed, and others at their addresses.
    for i in range(40):
        text = "\n" * (i % 7) + "def called_%d():\n" % i + "\n" * (i % 5) + "    probe()\ncalled_%d()\n" % i
        exec(compile(text, "generated %d" % (i % 3), "exec"), {"probe": probe})


def imported():
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "shapes_outer.py")
        with open(path, "w") as file:
            file.write("import builtins\n\nbuiltins.probe()\nimport shapes_inner\n\n\ndef f():\n    builtins.probe()\n\n\nf()\n")
        path = os.path.join(directory, "shapes_inner.py")
        with open(path, "w") as file:
            file.write("import builtins\n" + "x = 1\n" * 3000 + "builtins.probe()\n")
        import builtins

        builtins.probe = probe
        sys.path.insert(0, directory)
        importlib.invalidate_caches()
        try:
            importlib.import_module("shapes_outer")
        finally:
            sys.path.remove(directory)
            sys.modules.pop("shapes_outer", None)
            sys.modules.pop("shapes_inner", None)


def names():
    scope = {"probe": probe}
    for name in "größe", "функция", "函数", "𝒻", "n" * 200, "м" * 100:
        exec(compile("def %s():\n    probe()\n\n\n%s()\n" % (name, name), "/tmp/%s.py" % name, "exec"), scope)


def long_function():
    # The table of lines has more bytes than are sent with the code object.
    text = "def long(a):\n" + "    a = [a, (a,\n     a)]; a = 1\n" * 600 + "    probe()\n\n\nlong(1)\n"
    exec(compile(text, "long.py", "exec"), {"probe": probe})


def signals():
    before = signal.signal(signal.SIGUSR1, lambda number, frame: probe())
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
        for _ in range(10):
            pass
    finally:
        signal.signal(signal.SIGUSR1, before)


def traced():
    def tracer(frame, event, argument):
        if event == "call" and frame.f_code.co_name == "plain":
            probe()
        return None

    sys.settrace(tracer)
    try:
        plain()
    finally:
        sys.settrace(None)


def collected():
    class Cycle:
        def __init__(self):
            self.me = self

        def __del__(self):
            probe()

    Cycle()
    gc.collect()


def with_numpy():
    import numpy

    numpy.vectorize(probe)(numpy.arange(3))
    numpy.apply_along_axis(lambda row: probe(row), 0, numpy.ones((2, 2)))
    numpy.fromfunction(lambda i, j: probe(i + j), (2, 2))


SHAPES = [
    plain, nested, recursion, mutual, generator, delegated, throwing, coroutines, threads, class_body, construction, comprehensions,
    lambdas, called_by_c, pickled, decorated, exceptions, lines, callbacks, foreign_threads, executed, replaced, imported, names,
    long_function, signals, traced, collected, beyond_the_limit,
]


def main():
    rounds, wanted = int(sys.argv[3]), sys.argv[4:]
    shapes = [shape for shape in SHAPES if not wanted or shape.__name__ in wanted]
    try:
        import numpy

        shapes.append(with_numpy)
    except ImportError:
        pass
    print("ready", flush=True)
    sys.stdin.readline()
    for shape in shapes:
        for _ in range(rounds):
            shape()
    with open(sys.argv[2], "w") as out:
        json.dump(said, out)
    print("done", flush=True)
    sys.stdin.readline()


main()
