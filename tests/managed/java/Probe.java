/** Native methods of agent.c. */
final class Probe {
    static {
        System.load(System.getProperty("probe"));
    }

    /** From now on, stacks are taken. */
    static native void start();

    /** Takes the stack of this thread as the JVM knows it, and allocates a block. */
    static native void probe();

    /** Calls back. */
    static native void up(Runnable callee);

    private Probe() {}
}
