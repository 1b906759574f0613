import java.lang.invoke.MethodHandle;
import java.lang.invoke.MethodHandles;
import java.lang.invoke.MethodType;
import java.lang.reflect.Method;
import java.lang.reflect.Proxy;
import java.nio.ByteBuffer;
import java.util.Arrays;
import java.util.HashMap;
import java.util.Map;
import java.util.function.IntUnaryOperator;
import java.util.function.Supplier;
import java.util.stream.Collectors;
import java.util.stream.IntStream;
import java.util.zip.Deflater;

/** Calls a probe through every kind of frame that Java compilers and the JVM make; the probe is a native method that allocates. */
public class Shapes {
    /** Depth of some stacks, 0 = none. */
    static final int DEEP = Integer.getInteger("deep", 0);
    static boolean probing;
    static volatile long sink;

    static void leaf() {
        if (probing)
            Probe.probe();
        else
            sink++;
    }

    interface Shape {
        int go(int depth);
    }

    /** Megamorphic: nothing can be inlined here. */
    static final Shape[] SHAPES = {new Plain(), new Loop(), new Locked(), new Wide(), new Guarded()};

    static int next(int depth, int step) {
        if (depth == 0) {
            leaf();
            return 1;
        }
        return SHAPES[(depth * 7 + step) % SHAPES.length].go(depth - 1) + depth;
    }

    static class Plain implements Shape {
        public int go(int depth) {
            return next(depth, 1);
        }
    }

    static class Loop implements Shape {
        public int go(int depth) {
            int sum = 0;
            for (int i = 0; i < 2; i++)
                sum += i == 1 ? next(depth, 2) : i;
            return sum;
        }
    }

    static class Locked implements Shape {
        public synchronized int go(int depth) {
            return next(depth, 3);
        }
    }

    static class Wide implements Shape {
        public int go(int depth) {
            return (int) wide(depth, 1L, 2.0, depth * 3L, depth * 0.5, 5, 6, 7L, "eight");
        }

        static double wide(int depth, long b, double c, long d, double e, int f, int g, long h, Object o) {
            double r = next(depth, 4);
            return r + b * c + d * e + f - g + h + o.hashCode();
        }
    }

    static class Guarded implements Shape {
        public int go(int depth) {
            try {
                return next(depth, 5);
            } finally {
                sink++;
            }
        }
    }

    static int recursive(int depth) {
        if (depth == 0) {
            leaf();
            return 0;
        }
        return recursive(depth - 1) + 1;
    }

    /** Small enough to be inlined into each other. */
    static int outer(int n) {
        return middle(n) + 1;
    }

    static int middle(int n) {
        return inner(n) + 1;
    }

    static int inner(int n) {
        leaf();
        return n;
    }

    static int lambda(int n) {
        Supplier<IntUnaryOperator> supplier = () -> x -> {
            leaf();
            return x + n;
        };
        return supplier.get().applyAsInt(3);
    }

    static int stream(int n) {
        return IntStream.range(0, n).boxed().map(i -> {
            if (i == 1)
                leaf();
            return i + 1;
        }).filter(i -> i > 0).collect(Collectors.toList()).size();
    }

    static int sorted(int n) {
        Integer[] all = new Integer[20];
        for (int i = 0; i < all.length; i++)
            all[i] = (i * 7919 + n) % 20;
        int[] calls = {0};
        Arrays.sort(all, (a, b) -> {
            if (calls[0]++ == 5)
                leaf();
            return Integer.compare(a, b);
        });
        return all[0];
    }

    static int map(int n) {
        Map<String, Integer> map = new HashMap<>();
        return map.computeIfAbsent("key" + n, key -> {
            leaf();
            return key.length();
        });
    }

    /** Compiled while it runs. */
    static int replaced(int n) {
        int sum = 0;
        for (int i = 0; i < n; i++) {
            sum += i * 31;
            if (i == n - 1)
                leaf();
        }
        return sum;
    }

    static int caught(int n) {
        try {
            if (n >= 0)
                throw new IllegalStateException("expected");
            return 1;
        } catch (IllegalStateException e) {
            leaf();
            return 2;
        }
    }

    public static int reflected(int n) {
        leaf();
        return n;
    }

    static int handled(int n, String s) {
        leaf();
        return s.length() + n;
    }

    public static class Made {
        final int value;

        public Made(int value) {
            this.value = value;
            leaf();
        }
    }

    static final Method REFLECTED;
    static final MethodHandle HANDLE;
    static final MethodHandle BOUND;
    static final Shape PROXY = (Shape) Proxy.newProxyInstance(Shapes.class.getClassLoader(), new Class<?>[] {Shape.class}, (proxy, method, arguments) -> {
        leaf();
        return arguments[0];
    });

    static {
        try {
            REFLECTED = Shapes.class.getDeclaredMethod("reflected", int.class);
            HANDLE = MethodHandles.lookup().findStatic(Shapes.class, "handled", MethodType.methodType(int.class, int.class, String.class));
            BOUND = MethodHandles.insertArguments(HANDLE, 1, "bound");
        } catch (ReflectiveOperationException e) {
            throw new ExceptionInInitializerError(e);
        }
    }

    /** A class that is loaded while its callers are on the stack makes the code that was compiled without it invalid. */
    static class Assumed {
        int value(int n) {
            return n + 1;
        }
    }

    static class Late0 extends Assumed {
        int value(int n) {
            return n + 2;
        }
    }

    static class Late1 extends Assumed {
        int value(int n) {
            return n + 3;
        }
    }

    static Assumed assumed = new Assumed();

    static int deoptimized(int depth, int late) {
        if (depth == 0) {
            if (late == 0)
                assumed = new Late0();
            if (late == 1)
                assumed = new Late1();
            leaf();
            return 0;
        }
        return deoptimized(depth - 1, late) + assumed.value(depth);
    }

    static void all(int i, int late) throws Throwable {
        recursive(3 + i % 20);
        if (DEEP > 0 && i % 10 == 0) {
            recursive(DEEP + i % 20);
            SHAPES[i % SHAPES.length].go(DEEP / 2);
        }
        for (int first = 0; first < SHAPES.length; first++)
            SHAPES[first].go(5 + i % 15);
        outer(i);
        lambda(i);
        stream(3);
        sorted(i);
        map(i);
        replaced(50);
        caught(i);
        sink += (Integer) REFLECTED.invoke(null, i);
        sink += (int) HANDLE.invokeExact(i, "exact");
        sink += (int) BOUND.invoke((Object) i);
        sink += Made.class.getDeclaredConstructor(int.class).newInstance(i).value;
        sink += PROXY.go(i);
        deoptimized(4, late);
        if (probing) {
            Probe.up(() -> recursive(3));
            Probe.up(() -> Probe.up(() -> SHAPES[1].go(5)));
        }
        // Allocations by the JDK's own native methods.
        Deflater deflater = new Deflater();
        deflater.end();
        sink += ByteBuffer.allocateDirect(2000).capacity();
    }

    public static void main(String[] arguments) throws Throwable {
        int warm = Integer.getInteger("warm"), rounds = Integer.getInteger("rounds");
        // Compilers must have seen the probe's call.
        probing = true;
        for (int i = 0; i < warm; i++)
            all(i, -1);
        Thread.sleep(500);
        System.out.println("ready");
        System.in.read();
        Probe.start();
        for (int i = 0; i < rounds; i++)
            all(i, i - rounds / 2);
        replaced(20_000_000);
        Thread[] threads = new Thread[3];
        for (int t = 0; t < threads.length; t++) {
            threads[t] = new Thread(() -> {
                try {
                    for (int i = 0; i < rounds / 4; i++)
                        all(i, -1);
                } catch (Throwable e) {
                    throw new Error(e);
                }
            });
            threads[t].start();
        }
        for (Thread thread : threads)
            thread.join();
        System.out.println("done");
        System.in.read();
    }
}
