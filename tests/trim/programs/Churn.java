import java.nio.ByteBuffer;
import java.util.HashMap;
import java.util.Map;
import java.util.Random;

/** Allocates, checks and frees buffers outside the Java heap until standard input ends, while threads sleep, wait and collect garbage. */
public class Churn {
    static volatile boolean ending;
    static final long[] rounds = new long[2];

    static void work(int seed) {
        Random random = new Random(seed);
        Map<Integer, ByteBuffer> blocks = new HashMap<>();
        while (!ending) {
            for (int i = 0; i < 100; i++) {
                int key = random.nextInt(800);
                ByteBuffer block = blocks.remove(key);
                if (block == null) {
                    block = ByteBuffer.allocateDirect(new int[] {9000, 20000, 60000}[random.nextInt(3)]);
                    for (int at = 0; at < block.capacity(); at += 500) block.put(at, (byte) key);
                    blocks.put(key, block);
                    continue;
                }
                for (int at = 0; at < block.capacity(); at += 500) {
                    if (block.get(at) != (byte) key) {
                        System.err.println("WRONG: a buffer was changed");
                        Runtime.getRuntime().halt(134);
                    }
                }
            }
            rounds[seed]++;
            try {
                Thread.sleep(3);
            } catch (InterruptedException error) {
                System.err.println("WRONG: a sleep was interrupted");
                Runtime.getRuntime().halt(134);
            }
        }
    }

    public static void main(String[] arguments) throws Exception {
        Thread[] threads = new Thread[2];
        for (int i = 0; i < 2; i++) {
            int seed = i;
            threads[i] = new Thread(() -> work(seed));
            threads[i].start();
        }
        Thread collector = new Thread(() -> {
            while (!ending) {
                System.gc();
                try {
                    Thread.sleep(200);
                } catch (InterruptedException error) {
                    return;
                }
            }
        });
        collector.start();
        System.out.println("ready");
        while (System.in.read() >= 0) {}
        ending = true;
        for (Thread thread : threads) thread.join();
        collector.join();
        System.out.println("{\"rounds\":" + (rounds[0] + rounds[1]) + "}");
    }
}
