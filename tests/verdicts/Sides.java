// A malloc heap with free pages and a Java heap, or a full Java heap. Prints "ready" and waits for the end of its input.
//
// Usage: Sides native|full
import java.lang.reflect.Field;
import java.util.ArrayList;
import java.util.List;
import sun.misc.Unsafe;

public class Sides {
    static final int BLOCKS = 150_000;
    static final int BLOCK_BYTES = 1000;

    public static void main(String[] arguments) throws Exception {
        List<byte[]> live = new ArrayList<>();
        if (arguments[0].equals("native")) {
            fillJava(live, 0.7);
            Field field = Unsafe.class.getDeclaredField("theUnsafe");
            field.setAccessible(true);
            Unsafe unsafe = (Unsafe) field.get(null);
            long[] blocks = new long[BLOCKS];
            for (int i = 0; i < BLOCKS; i++) {
                blocks[i] = unsafe.allocateMemory(BLOCK_BYTES);
                unsafe.setMemory(blocks[i], BLOCK_BYTES, (byte) 1);
            }
            // The blocks at the end stay: malloc shrinks a heap only by the free memory at its end.
            for (int i = 0; i < BLOCKS / 2; i++) unsafe.freeMemory(blocks[i]);
        } else {
            fillJava(live, 0.95);
        }
        System.out.println("ready");
        System.out.flush();
        while (System.in.read() >= 0) {}
        System.out.println(live.size());
    }

    // Until this share of its maximum size is in use.
    static void fillJava(List<byte[]> live, double share) {
        Runtime runtime = Runtime.getRuntime();
        while (runtime.totalMemory() - runtime.freeMemory() < runtime.maxMemory() * share) {
            byte[] block = new byte[256 << 10];
            java.util.Arrays.fill(block, (byte) 1);
            live.add(block);
        }
    }
}
