import java.lang.reflect.Method;
import java.util.ArrayList;
import java.util.List;
import java.util.zip.Deflater;

/** Allocates natively until its input ends: blocks that are freed at once, and some that stay. With an argument, in virtual threads. */
public class Load {
    static final List<Deflater> KEPT = new ArrayList<>();

    static void allocate() {
        Deflater deflater = new Deflater();
        if (KEPT.size() < 50)
            KEPT.add(deflater);
        else
            deflater.end();
    }

    static void outer(int depth) {
        if (depth == 0)
            allocate();
        else
            outer(depth - 1);
    }

    static void work() {
        for (int i = 0; i < 20; i++)
            outer(i % 5);
    }

    /** Parks with more frames than the JVM takes back from the heap at once. */
    static int parks(int depth) throws InterruptedException {
        if (depth == 0) {
            Thread.sleep(1);
            allocate();
            return 0;
        }
        int below = parks(depth - 1);
        if (depth % 4 == 0)
            allocate();
        return below + 1;
    }

    static void virtually() {
        try {
            parks(400);
        } catch (InterruptedException e) {
            throw new IllegalStateException(e);
        }
    }

    public static void main(String[] arguments) throws Exception {
        System.out.println("ready");
        while (System.in.available() == 0) {
            if (arguments.length > 0) {
                Method start = Thread.class.getMethod("startVirtualThread", Runnable.class);
                Thread thread = (Thread) start.invoke(null, (Runnable) Load::virtually);
                thread.join();
            } else {
                work();
                Thread.sleep(1);
            }
        }
        System.out.println(KEPT.size());
    }
}
