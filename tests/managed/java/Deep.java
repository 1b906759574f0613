/**
 * A native allocation below a recursion, many times: for each line of the input, `DEPTH ROUNDS SAME`. Unless SAME is 1, the stack pointers
 * of all frames of the recursion differ from one allocation to the next.
 */
public class Deep {
    static native void block();

    static int down(int depth) {
        if (depth == 0) {
            block();
            return 0;
        }
        return down(depth - 1) + 1;
    }

    static long low(int depth) {
        return down(depth);
    }

    /** A larger frame. */
    static long high(int depth, long a, long b, long c, long d, long e, long f, long g) {
        return down(depth) + a * b + c * d + e * f + g;
    }

    static long rounds(int depth, int rounds, boolean same) {
        long sum = 0;
        for (int i = 0; i < rounds; i++)
            sum += same || i % 2 == 0 ? low(depth) : high(depth, i, sum, 3L * i, 5L * i, sum + 1, sum + 2, sum + 3);
        return sum;
    }

    public static void main(String[] arguments) throws Exception {
        System.load(System.getProperty("block"));
        for (int i = 0; i < 200; i++)
            rounds(20, 200, i % 2 == 0);
        System.out.println("ready");
        java.util.Scanner input = new java.util.Scanner(System.in);
        while (input.hasNextInt()) {
            long sum = rounds(input.nextInt(), input.nextInt(), input.nextInt() == 1);
            System.out.println("done " + sum);
        }
    }
}
