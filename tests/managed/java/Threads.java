import java.io.DataInputStream;
import java.io.InputStream;
import java.lang.management.BufferPoolMXBean;
import java.lang.management.ManagementFactory;
import java.nio.ByteBuffer;
import java.util.ArrayList;
import java.util.Collections;
import java.util.List;
import java.util.zip.Deflater;

/**
 * Many threads that keep direct buffers and Deflaters; and a class that is loaded, used and unloaded again and again. At the end, what the
 * JDK counts of its direct buffers.
 */
public class Threads {
    static final int THREADS = 24;
    static final int ROUNDS = 40;
    static final List<Object> KEPT = Collections.synchronizedList(new ArrayList<>());

    /** Loaded anew by each loader. */
    public static class Unloaded implements Runnable {
        public void run() {
            new Deflater().end();
        }
    }

    static class Loader extends ClassLoader {
        Class<?> load(byte[] code) {
            return defineClass("Threads$Unloaded", code, 0, code.length);
        }
    }

    static void keep(int number) {
        // Whole words: the JDK counts what was asked for, and allocates so much.
        KEPT.add(ByteBuffer.allocateDirect(10_000 + 8 * number));
        KEPT.add(new Deflater());
        ByteBuffer.allocateDirect(96);
    }

    static void unload() throws Exception {
        byte[] code;
        try (InputStream in = Threads.class.getResourceAsStream("Threads$Unloaded.class")) {
            code = new byte[in.available()];
            new DataInputStream(in).readFully(code);
        }
        for (int i = 0; i < 30; i++) {
            Runnable unloaded = (Runnable) new Loader().load(code).getDeclaredConstructor().newInstance();
            for (int round = 0; round < 20; round++)
                unloaded.run();
            unloaded = null;
            if (i % 5 == 0)
                System.gc();
        }
    }

    public static void main(String[] arguments) throws Exception {
        // Loads its library: stacks through one that was just loaded may end there, until its tables are known.
        new Deflater().end();
        System.out.println("ready");
        System.in.read();
        List<Thread> threads = new ArrayList<>();
        for (int t = 0; t < THREADS; t++) {
            Thread thread = new Thread(() -> {
                for (int i = 0; i < ROUNDS; i++)
                    keep(i);
            });
            threads.add(thread);
            thread.start();
        }
        for (Thread thread : threads)
            thread.join();
        unload();
        for (BufferPoolMXBean pool : ManagementFactory.getPlatformMXBeans(BufferPoolMXBean.class))
            if (pool.getName().equals("direct"))
                System.out.printf("{\"bytes\": %d, \"count\": %d}%n", pool.getMemoryUsed(), pool.getCount());
        System.in.read();
        System.in.read();
    }
}
