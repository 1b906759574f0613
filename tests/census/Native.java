// A native store used from Java: the library allocates in several threads, each in an arena of its own.
public class Native {
    private static native void fill(int thread, int blocks);
    private static native String answer();

    public static void main(String[] arguments) throws Exception {
        System.load(arguments[0]);
        Thread[] threads = new Thread[4];
        for (int i = 0; i < threads.length; i++) {
            final int number = i;
            threads[i] = new Thread(() -> fill(number, 20000));
            threads[i].start();
        }
        for (Thread thread : threads) thread.join();
        System.out.println(answer());
        System.in.read();
    }
}
