import java.lang.management.BufferPoolMXBean;
import java.lang.management.ManagementFactory;
import java.nio.ByteBuffer;
import java.nio.channels.FileChannel;
import java.nio.file.Paths;
import java.util.ArrayList;
import java.util.List;

/** Memory of several kinds beside the Java heap; says what the JDK counts of its buffers. Each line of the input makes something grow. */
public class Parts {
    static final List<Object> KEPT = new ArrayList<>();

    static void say() {
        StringBuilder text = new StringBuilder("{");
        for (BufferPoolMXBean pool : ManagementFactory.getPlatformMXBeans(BufferPoolMXBean.class))
            if (!pool.getName().contains("non-volatile"))
                text.append(String.format("\"%s\": {\"bytes\": %d, \"count\": %d}, ", pool.getName(), pool.getMemoryUsed(), pool.getCount()));
        System.out.println(text + "\"end\": 0}");
    }

    public static void main(String[] arguments) throws Exception {
        for (int i = 0; i < 5; i++)
            KEPT.add(ByteBuffer.allocateDirect(7_000_000 + i));
        for (int i = 0; i < 3; i++)
            try (FileChannel file = FileChannel.open(Paths.get(arguments[0]))) {
                KEPT.add(file.map(FileChannel.MapMode.READ_ONLY, 0, 3_000_000));
            }
        for (int i = 0; i < 12; i++) {
            Thread thread = new Thread(() -> {
                try {
                    Thread.sleep(1_000_000);
                } catch (InterruptedException e) {
                    throw new IllegalStateException(e);
                }
            });
            thread.setDaemon(true);
            thread.start();
        }
        say();
        while (System.in.read() >= 0)
            for (int i = 0; i < 400; i++) {
                ByteBuffer buffer = ByteBuffer.allocateDirect(1 << 20);
                for (int at = 0; at < buffer.capacity(); at += 4096)
                    buffer.put(at, (byte) 1);
                KEPT.add(buffer);
                Thread.sleep(20);
            }
    }
}
