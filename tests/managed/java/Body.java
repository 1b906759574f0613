import java.util.zip.Deflater;

/** The class that Redefine replaces. */
public class Body {
    static void run(int blocks, Runnable before) {
        if (before != null)
            before.run();
        for (int i = 0; i < blocks; i++)
            new Deflater().end();
    }
}
