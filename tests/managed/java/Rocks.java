import java.util.Random;
import org.rocksdb.BlockBasedTableConfig;
import org.rocksdb.CompressionType;
import org.rocksdb.FlushOptions;
import org.rocksdb.LRUCache;
import org.rocksdb.Options;
import org.rocksdb.RocksDB;
import org.rocksdb.WriteOptions;

/** A store in RocksDB: fills its block cache by reading, and its memtables by writing; says what RocksDB itself counts of both. */
public class Rocks {
    static final int KEYS = 40_000;
    static final byte[] VALUE = new byte[1000];

    static byte[] key(int number) {
        return String.format("key%09d", number).getBytes();
    }

    static void write(RocksDB store, WriteOptions options, int from, int to) throws Exception {
        Random random = new Random(7);
        for (int i = from; i < to; i++) {
            random.nextBytes(VALUE);
            store.put(options, key(i), VALUE);
        }
    }

    static long read(RocksDB store) throws Exception {
        long bytes = 0;
        for (int i = 0; i < KEYS; i++)
            bytes += store.get(key(i)).length;
        return bytes;
    }

    public static void main(String[] arguments) throws Exception {
        RocksDB.loadLibrary();
        System.out.println("ready");
        System.in.read();
        BlockBasedTableConfig table = new BlockBasedTableConfig();
        LRUCache cache = new LRUCache(256 << 20);
        table.setBlockCache(cache).setBlockSize(16 << 10);
        Options options = new Options().setCreateIfMissing(true).setTableFormatConfig(table).setWriteBufferSize(128 << 20);
        options.setCompressionType(CompressionType.NO_COMPRESSION);
        RocksDB store = RocksDB.open(options, arguments[0]);
        WriteOptions writes = new WriteOptions().setDisableWAL(true);
        write(store, writes, 0, KEYS);
        store.flush(new FlushOptions().setWaitForFlush(true));
        long bytes = read(store);
        write(store, writes, KEYS, 2 * KEYS);
        System.out.printf("{\"block_cache\": %d, \"memtables\": %d, \"read\": %d}%n", cache.getUsage(),
            store.getLongProperty("rocksdb.size-all-mem-tables"), bytes);
        System.in.read();
        System.in.read();
    }
}
