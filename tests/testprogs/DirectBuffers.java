import java.lang.management.BufferPoolMXBean;
import java.lang.management.ManagementFactory;
import java.nio.ByteBuffer;
import java.util.ArrayList;
import java.util.List;

/** Allocates direct buffers on request, drops some of them, and prints the virtual machine's statistics of them. */
public final class DirectBuffers {
    private static BufferPoolMXBean pool() {
        for (BufferPoolMXBean pool : ManagementFactory.getPlatformMXBeans(BufferPoolMXBean.class)) {
            if (pool.getName().equals("direct")) {
                return pool;
            }
        }
        throw new IllegalStateException("no pool of direct buffers");
    }

    public static void main(String[] args) throws Exception {
        List<ByteBuffer> kept = new ArrayList<>();
        BufferPoolMXBean pool = pool();
        // All classes and libraries that this uses are loaded before the recording.
        kept.add(ByteBuffer.allocateDirect(1));
        kept.clear();
        System.gc();
        System.out.println("ready");
        System.in.read();
        // The launcher's own blocks are allocated before the recording.
        long countBefore = pool.getCount();
        long bytesBefore = pool.getMemoryUsed();
        for (int i = 0; i < 200; i++) {
            kept.add(ByteBuffer.allocateDirect(1_000_003 + i));
            ByteBuffer.allocateDirect(500_000);
        }
        for (int i = 0; i < 50; i++) {
            kept.set(i, null);
        }
        // The collector passes unreachable buffers to a cleaner: wait until only the kept ones are counted.
        while (pool.getCount() - countBefore > 150) {
            System.gc();
            Thread.sleep(20);
        }
        System.out.println("direct " + (pool.getCount() - countBefore) + " " + (pool.getMemoryUsed() - bytesBefore));
        System.in.read();
    }
}
