import java.lang.instrument.ClassDefinition;
import java.lang.instrument.Instrumentation;
import java.nio.file.Files;
import java.nio.file.Paths;
import java.util.zip.Deflater;

/** Replaces the class Body by the class file of its argument, while a method of the one that is replaced runs. */
public class Redefine {
    static Instrumentation instrumentation;

    public static void premain(String arguments, Instrumentation given) {
        instrumentation = given;
    }

    static void replace(String file) {
        try {
            instrumentation.redefineClasses(new ClassDefinition(Body.class, Files.readAllBytes(Paths.get(file))));
        } catch (Exception e) {
            throw new IllegalStateException(e);
        }
    }

    static void warm() {
        for (int i = 0; i < 20_000; i++)
            Body.run(0, null);
    }

    public static void main(String[] arguments) throws Exception {
        new Deflater().end();
        warm();
        System.out.println("ready");
        System.in.read();
        // The method that runs is not the class's any more when it allocates.
        Body.run(1000, () -> replace(arguments[0]));
        warm();
        Body.run(700, null);
        System.out.println("done");
        System.in.read();
        System.in.read();
    }
}
