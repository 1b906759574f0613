// A heap that is touched, direct buffers, and some generated code; prints their sizes according to the virtual machine.
import java.lang.management.BufferPoolMXBean;
import java.lang.management.ManagementFactory;
import java.lang.management.MemoryPoolMXBean;
import java.lang.management.MemoryType;
import java.nio.ByteBuffer;
import java.util.ArrayList;
import java.util.List;

public class Sizes {
    static long sum;

    static void busy() {
        for (int i = 0; i < 2_000_000; i++) sum += Integer.toString(i).hashCode();
    }

    public static void main(String[] arguments) throws Exception {
        List<ByteBuffer> buffers = new ArrayList<>();
        for (int i = 0; i < 16; i++) {
            ByteBuffer buffer = ByteBuffer.allocateDirect(4 << 20);
            for (int at = 0; at < buffer.capacity(); at += 1024) buffer.put(at, (byte) 1);
            buffers.add(buffer);
        }
        busy();
        long heap = 0, codeUsed = 0, codeCommitted = 0, direct = 0;
        for (MemoryPoolMXBean pool : ManagementFactory.getMemoryPoolMXBeans()) {
            if (pool.getType() == MemoryType.HEAP) heap += pool.getUsage().getCommitted();
            else if (pool.getName().startsWith("Code")) {
                codeUsed += pool.getUsage().getUsed();
                codeCommitted += pool.getUsage().getCommitted();
            }
        }
        for (BufferPoolMXBean pool : ManagementFactory.getPlatformMXBeans(BufferPoolMXBean.class))
            if (pool.getName().equals("direct")) direct += pool.getMemoryUsed();
        System.out.printf("{\"heap\":%d,\"code_used\":%d,\"code_committed\":%d,\"direct\":%d}%n", heap, codeUsed, codeCommitted, direct);
        System.out.flush();
        System.in.read();
        if (buffers.isEmpty()) System.out.println(sum);
    }
}
