import java.util.zip.Deflater;

/**
 * Native allocations under Java frames: `java Frames.java ROUNDS DEPTH`. Each round makes and ends a Deflater (two blocks of the library
 * and some of the JDK), and compresses a little, below a recursion of DEPTH calls.
 */
public class Frames {
    static final byte[] INPUT = "native allocations under Java frames".repeat(20).getBytes();
    static final byte[] OUTPUT = new byte[1 << 12];

    static int down(int depth) {
        if (depth > 0)
            return down(depth - 1) + 1;
        Deflater deflater = new Deflater(1);
        deflater.setInput(INPUT);
        deflater.finish();
        int bytes = deflater.deflate(OUTPUT);
        deflater.end();
        return bytes;
    }

    public static void main(String[] arguments) {
        int rounds = Integer.parseInt(arguments[0]), depth = Integer.parseInt(arguments[1]);
        long sum = 0;
        for (int i = 0; i < rounds; i++)
            sum += down(depth);
        System.out.println(sum);
    }
}
