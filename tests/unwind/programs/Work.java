import java.util.*;
import java.util.zip.*;

public class Work {
    public static void main(String[] arguments) throws Exception {
        Runnable work = () -> {
            byte[] out = new byte[1 << 16];
            long sum = 0;
            while (sum >= 0) {
                StringBuilder text = new StringBuilder();
                for (int i = 0; i < 2000; i++) text.append(i * 31 % 977).append(',');
                Deflater deflater = new Deflater();
                deflater.setInput(text.toString().getBytes());
                deflater.finish();
                sum += deflater.deflate(out);
                deflater.end();
                List<String> words = new ArrayList<>(Arrays.asList(text.toString().split(",")));
                Collections.sort(words);
                sum += words.size();
            }
        };
        new Thread(work).start();
        work.run();
    }
}
