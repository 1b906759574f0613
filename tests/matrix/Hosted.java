// Runs a test program that is a JNI library.
public class Hosted {
    private static native void run();

    public static void main(String[] arguments) {
        System.load(arguments[0]);
        run();
    }
}
