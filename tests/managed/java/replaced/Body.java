import java.util.zip.Deflater;

/** What Redefine replaces it with. */
public class Body {
    static void run(int blocks, Runnable before) {
        int left = blocks;
        if (before != null)
            throw new IllegalStateException();
        while (left > 0) {
            left--;
            new Deflater().end();
        }
    }
}
