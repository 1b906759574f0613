import java.lang.foreign.Arena;
import java.lang.foreign.FunctionDescriptor;
import java.lang.foreign.Linker;
import java.lang.foreign.MemorySegment;
import java.lang.foreign.ValueLayout;
import java.lang.invoke.MethodHandle;
import java.lang.invoke.MethodHandles;
import java.lang.invoke.MethodType;

/** Calls C from Java and Java from C without JNI: malloc, and qsort with a comparison that allocates. */
public class Ffm {
    static final Linker LINKER = Linker.nativeLinker();
    static final MethodHandle MALLOC = handle("malloc", FunctionDescriptor.of(ValueLayout.ADDRESS, ValueLayout.JAVA_LONG));
    static final MethodHandle FREE = handle("free", FunctionDescriptor.ofVoid(ValueLayout.ADDRESS));
    static final MethodHandle QSORT = handle("qsort",
        FunctionDescriptor.ofVoid(ValueLayout.ADDRESS, ValueLayout.JAVA_LONG, ValueLayout.JAVA_LONG, ValueLayout.ADDRESS));

    static MethodHandle handle(String name, FunctionDescriptor description) {
        return LINKER.downcallHandle(LINKER.defaultLookup().find(name).orElseThrow(), description);
    }

    static void block(long bytes) {
        try {
            FREE.invokeExact((MemorySegment) MALLOC.invokeExact(bytes));
        } catch (Throwable e) {
            throw new IllegalStateException(e);
        }
    }

    static void down() {
        block(33_333);
    }

    static int compare(MemorySegment one, MemorySegment other) {
        block(44_444);
        return 0;
    }

    static void up(MemorySegment compare, MemorySegment numbers) throws Throwable {
        QSORT.invokeExact(numbers, 2L, 4L, compare);
    }

    public static void main(String[] arguments) throws Throwable {
        FunctionDescriptor description = FunctionDescriptor.of(ValueLayout.JAVA_INT, ValueLayout.ADDRESS, ValueLayout.ADDRESS);
        MethodType type = MethodType.methodType(int.class, MemorySegment.class, MemorySegment.class);
        MethodHandle method = MethodHandles.lookup().findStatic(Ffm.class, "compare", type);
        MemorySegment compare = LINKER.upcallStub(method, description, Arena.global());
        MemorySegment numbers = Arena.global().allocate(8);
        for (int i = 0; i < 20_000; i++) {
            down();
            up(compare, numbers);
        }
        System.out.println("ready");
        System.in.read();
        for (int i = 0; i < 500; i++) {
            down();
            up(compare, numbers);
        }
        System.out.println("done");
        System.in.read();
        System.in.read();
    }
}
