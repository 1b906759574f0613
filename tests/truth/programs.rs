//! The programs of the truth matrix: what each is, what it needs, and how it is run. One row per program; nothing here measures.

/// A program from a distribution's packages, with work to do.
#[derive(Debug, Clone, Copy)]
pub struct Program {
    /// Short name, for `make truth PROGRAMS=…`.
    pub name: &'static str,
    /// Language and allocator, for the table.
    pub what: &'static str,
    /// Shell text that creates its files in the working directory, once.
    pub setup: &'static str,
    /// Shell text before each run.
    pub before: &'static str,
    /// The command. In each word `%w` is the working directory, `%n` the number of rounds.
    pub command: &'static [&'static str],
    /// Environment of the command, `NAME=value`.
    pub environment: &'static [&'static str],
    /// Library with another allocator, preloaded after the ledger.
    pub allocator: &'static str,
    /// File in the working directory that is the standard input.
    pub input: &'static str,
    /// For a server: shell text that waits for the server and runs the load. The server is then ended with a signal.
    pub load: &'static str,
    /// Whether children do the work, so that each process is compared with its own ledger, and nothing is estimated.
    pub is_tree: bool,
    /// Rounds if every call is recorded.
    pub rounds: u64,
    /// Rounds for estimates: some seconds of work. 0: it cannot run longer, and nothing is estimated.
    pub rounds_long: u64,
}

const PLAIN: Program = Program {
    name: "",
    what: "C, glibc",
    setup: "",
    before: "",
    command: &[],
    environment: &[],
    allocator: "",
    input: "",
    load: "",
    is_tree: false,
    rounds: 1,
    rounds_long: 0,
};

const JEMALLOC: &str = "libjemalloc.so.2";
const TCMALLOC: &str = "libtcmalloc_minimal.so.4";
const PERL: &str = "my (%h,@k); for my $i (1..%n) { my %r=(id=>$i,text=>'x'x($i%200)); $h{$i%3000}=\\%r; push @k,\"kept $i\" if $i%200==0; \
    my @p=split /,/,join(',',1..8) }";
const PYTHON: &str = "import json,sys\nkept=[];cache={}\nfor i in range(%n):\n cache[i%3000]={'id':i,'tags':[str(i+j) for j in range(4)]}\n \
    if i%100==0: kept.append(json.loads(json.dumps(cache[i%3000])))\n";
/// Waits for a socket in the working directory.
const UNTIL_SOCKET: &str = "for i in $(seq 600); do [ -S %w/s ] && break; sleep 0.05; done; ";

/// Every program, in the table's order.
pub const PROGRAMS: &[Program] = &[
    Program {
        name: "bash",
        command: &["bash", "-c", "for ((i=0;i<%n;i++)); do a[i%500]=\"value $i\"; s=${s:0:200}$i; p=(${a[i%500]}); done"],
        rounds: 10_000,
        rounds_long: 80_000,
        ..PLAIN
    },
    Program {
        name: "zsh",
        command: &["zsh", "-fc", "typeset -A h; for ((i=0;i<%n;i++)); do h[k$((i%500))]=\"value $i\"; p=(${=h[k$((i%500))]}); done"],
        rounds: 8_000,
        rounds_long: 60_000,
        ..PLAIN
    },
    Program {
        name: "sh-children",
        what: "C, ten children in Perl",
        command: &["sh", "-c", "for i in 1 2 3 4 5 6 7 8 9 10; do perl -e 'my @a=map{\"x$_\"}1..20000; print scalar(@a)' >/dev/null; done"],
        is_tree: true,
        ..PLAIN
    },
    Program {
        name: "gawk",
        command: &[
            "gawk",
            "BEGIN{for(i=0;i<%n;i++){k=\"k\" (i%3000);c[k]=i \":\" rand() \":\" i;n=split(c[k],p,\":\");if(i%100==0)l[++m]=\"kept\" i}}",
        ],
        rounds: 60_000,
        rounds_long: 2_000_000,
        ..PLAIN
    },
    Program {
        name: "gawk-tcmalloc",
        what: "C, tcmalloc preloaded",
        command: &[
            "gawk",
            "BEGIN{for(i=0;i<%n;i++){k=\"k\" (i%3000);c[k]=i \":\" rand() \":\" i;n=split(c[k],p,\":\");if(i%100==0)l[++m]=\"kept\" i}}",
        ],
        allocator: TCMALLOC,
        rounds: 60_000,
        rounds_long: 2_000_000,
        ..PLAIN
    },
    Program {
        name: "jq",
        command: &["jq", "-n", "[range(%n)|{id:.,tags:[tostring,\"x\"]}]|group_by(.id%10)|map(length)|add"],
        rounds: 10_000,
        rounds_long: 80_000,
        ..PLAIN
    },
    Program {
        name: "sqlite3",
        command: &[
            "sqlite3",
            ":memory:",
            "CREATE TABLE t(a,b); CREATE INDEX i ON t(b); WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x+1 FROM c WHERE x<%n) \
             INSERT INTO t SELECT x%9000,hex(randomblob(40)) FROM c; SELECT count(*),max(length(g)) FROM (SELECT a,group_concat(b) AS g FROM t GROUP BY a);",
        ],
        rounds: 20_000,
        rounds_long: 300_000,
        ..PLAIN
    },
    Program {
        name: "tclsh",
        setup: "cat >t.tcl <<'E'\nset kept {}\nfor {set i 0} {$i < [lindex $argv 0]} {incr i} { dict set d [expr {$i%1000}] \"value $i\"; \
            lappend parts {*}[split [dict get $d [expr {$i%1000}]]]; if {$i%50==0} {lappend kept \"kept $i\"; set parts {}} }\nE",
        command: &["tclsh", "%w/t.tcl", "%n"],
        rounds: 20_000,
        rounds_long: 500_000,
        ..PLAIN
    },
    Program {
        name: "lua",
        command: &[
            "lua5.4",
            "-e",
            "local c,k={},{} for i=1,%n do c[i%3000]={id=i,t='x'..i,u={i,i+1}} if i%100==0 then k[#k+1]='kept '..i end end",
        ],
        rounds: 40_000,
        rounds_long: 2_000_000,
        ..PLAIN
    },
    Program {
        name: "vim",
        command: &[
            "vim",
            "-u",
            "NONE",
            "-i",
            "NONE",
            "-n",
            "-es",
            "-c",
            "let d={} | for i in range(%n) | let d[i%1000]=split('a b '.i) | endfor",
            "-c",
            "qa!",
        ],
        rounds: 8_000,
        rounds_long: 300_000,
        ..PLAIN
    },
    Program {
        name: "gnuplot",
        command: &[
            "gnuplot",
            "-e",
            "set terminal svg; set output '/dev/null'; set samples 500; do for [i=1:%n] { s=sprintf('%d %d',i,i*2); plot sin(x*i) }",
        ],
        rounds: 20,
        rounds_long: 600,
        ..PLAIN
    },
    Program {
        name: "bc",
        setup: "echo 'n=0; for(i=1;i<150000;i++){n=(n*3+i*i)%1000003}; n; quit' >t.bc",
        command: &["bc", "-q"],
        input: "t.bc",
        ..PLAIN
    },
    Program {
        name: "m4",
        setup: "printf '%s\\n' 'define(`loop'\"'\"',`ifelse($1,0,,`define(`v'\"'\"'eval($1%500),`value $1'\"'\"')loop(decr($1))'\"'\"')'\"'\"')dnl' 'loop(NUMBER)dnl' >t.m4",
        command: &["m4", "-L0", "-DNUMBER=%n", "%w/t.m4"],
        rounds: 8_000,
        rounds_long: 0,
        ..PLAIN
    },
    Program {
        name: "xsltproc",
        setup: "awk 'BEGIN{print \"<r>\";for(i=0;i<15000;i++)print \"<e id=\\\"\" i \"\\\"><n>name \" i \"</n></e>\";print \"</r>\"}' >d.xml\n\
            echo '<xsl:stylesheet version=\"1.0\" xmlns:xsl=\"http://www.w3.org/1999/XSL/Transform\"><xsl:template match=\"/r\"><o><xsl:for-each \
            select=\"e\"><xsl:sort select=\"n\"/><i><xsl:value-of select=\"concat(@id,n)\"/></i></xsl:for-each></o></xsl:template></xsl:stylesheet>' >s.xsl",
        command: &["xsltproc", "-o", "/dev/null", "%w/s.xsl", "%w/d.xml"],
        ..PLAIN
    },
    Program {
        name: "dot",
        what: "C, graphviz",
        setup: "awk 'BEGIN{print \"digraph g{\";for(i=1;i<250;i++)print \"n\" i \" -> n\" int(i/3) \"; n\" i \" -> n\" int(i/7);print \"}\"}' >g.dot",
        command: &["dot", "-Tsvg", "-o", "/dev/null", "%w/g.dot"],
        ..PLAIN
    },
    Program {
        name: "git-gc",
        what: "C, children",
        setup: "git init -q seed && cd seed && git config user.email a@b && git config user.name a && for i in $(seq 60); do seq $i 400 >f$i; git add .; \
            git commit -qm $i; done",
        before: "rm -rf work && cp -r seed work",
        command: &["git", "-C", "%w/work", "gc", "-q"],
        is_tree: true,
        ..PLAIN
    },
    Program {
        name: "git-log",
        setup: "git init -q seed && cd seed && git config user.email a@b && git config user.name a && for i in $(seq 60); do seq $i 400 >f$i; git add .; \
            git commit -qm $i; done",
        command: &["git", "-C", "%w/seed", "--no-pager", "log", "-p", "--stat", "-M", "--output=/dev/null"],
        ..PLAIN
    },
    Program {
        name: "pdftotext",
        what: "C++, poppler",
        setup: "awk 'BEGIN{print \"digraph g{\";for(i=1;i<150;i++)print \"n\" i \" -> n\" int(i/3) \";\";print \"}\"}' | dot -Tpdf -o g.pdf",
        command: &["pdftotext", "%w/g.pdf", "/dev/null"],
        ..PLAIN
    },
    Program {
        name: "sassc",
        what: "C++, glibc",
        setup: "{ echo '@for $i from 1 through 1500 { .a-#{$i} { width: percentage(1/$i); .b & { color: mix(#ff0000, #0000ff, $i*0.05%); } } }'; } >t.scss",
        command: &["sassc", "%w/t.scss", "/dev/null"],
        ..PLAIN
    },
    Program {
        name: "cmake",
        what: "C++, glibc",
        setup: "cat >t.cmake <<'E'\nforeach(i RANGE ${N})\n math(EXPR m \"${i} % 500\")\n set(v${m} \"value ${i};more\")\n list(APPEND kept ${i})\n \
            string(REPLACE value x y \"${v${m}}\")\n if(m EQUAL 0)\n  set(kept)\n endif()\nendforeach()\nE",
        command: &["cmake", "-DN=%n", "-P", "%w/t.cmake"],
        rounds: 4_000,
        rounds_long: 150_000,
        ..PLAIN
    },
    Program {
        name: "protoc",
        what: "C++, glibc",
        setup: "{ echo 'syntax = \"proto3\";'; for i in $(seq 80); do echo \"message M$i { string a = 1; map<string, int64> b = 2; repeated int32 c = 3; }\"; \
            done; } >t.proto",
        command: &["protoc", "-I%w", "--cpp_out=%w", "%w/t.proto"],
        ..PLAIN
    },
    Program {
        name: "g++",
        what: "C++, driver, cc1plus, as",
        setup: "{ echo '#include <map>'; echo '#include <string>'; echo '#include <vector>'; for i in $(seq 60); do echo \"int f$i(int n) { \
            std::map<std::string, std::vector<int>> m; m[std::to_string(n)].push_back($i); return m.size(); }\"; done; } >t.cpp",
        command: &["g++", "-O1", "-c", "%w/t.cpp", "-o", "%w/t.o"],
        is_tree: true,
        ..PLAIN
    },
    Program {
        name: "rustc",
        what: "Rust, LLVM, threads",
        setup: "{ echo '#![allow(dead_code)]'; for i in $(seq 150); do echo \"pub struct S$i(pub Vec<String>); impl S$i { pub fn f(&self) -> usize { \
            self.0.iter().map(|s| s.len()).sum::<usize>() + $i } }\"; done; } >t.rs",
        command: &["/usr/bin/rustc", "--crate-type=lib", "--emit=metadata", "-o", "%w/t.rmeta", "%w/t.rs"],
        is_tree: true,
        ..PLAIN
    },
    Program {
        name: "cargo",
        what: "Rust, children",
        setup: "mkdir -p c/src && printf '[package]\\nname=\"c\"\\nversion=\"0.1.0\"\\nedition=\"2021\"\\n[workspace]\\n' >c/Cargo.toml && echo 'fn main() { println!(\"{}\", 1); }' >c/src/main.rs",
        before: "rm -rf c/target",
        environment: &["RUSTC=/usr/bin/rustc"],
        command: &["/usr/bin/cargo", "build", "-q", "--offline", "--target-dir", "%w/c/target", "--manifest-path", "%w/c/Cargo.toml"],
        is_tree: true,
        ..PLAIN
    },
    Program { name: "ripgrep", what: "Rust, threads", command: &["rg", "-j2", "-c", "size_t [a-z]+\\(", "/usr/include"], ..PLAIN },
    Program { name: "fd", what: "Rust, threads", command: &["fdfind", "-j2", "\\.h$", "/usr/include", "/usr/share"], ..PLAIN },
    Program {
        name: "bat",
        what: "Rust, oniguruma in C",
        setup: "head -300 /usr/include/stdlib.h >t.h",
        command: &["batcat", "--no-config", "--color=always", "--paging=never", "%w/t.h"],
        ..PLAIN
    },
    Program {
        name: "go-sqlite",
        what: "Go with cgo, SQLite",
        setup: "cat >main.go <<'E'\npackage main\nimport (\n\t\"database/sql\"\n\t\"os\"\n\t\"strconv\"\n\t_ \"github.com/mattn/go-sqlite3\"\n)\n\
            func main() {\n\tn, _ := strconv.Atoi(os.Args[1])\n\tdb, _ := sql.Open(\"sqlite3\", \":memory:\")\n\tdb.SetMaxOpenConns(1)\n\
            \tdb.Exec(\"create table t(a,b)\")\n\tfor i := 0; i < n; i++ {\n\t\tdb.Exec(\"insert into t values(?,?)\", i, \"value \"+strconv.Itoa(i))\n\t}\n}\nE\n\
            GO111MODULE=off GOPATH=/usr/share/gocode GOFLAGS= go build -tags libsqlite3 -ldflags=-linkmode=external -o g main.go",
        command: &["%w/g", "%n"],
        rounds: 2_000,
        rounds_long: 60_000,
        ..PLAIN
    },
    Program {
        name: "javac",
        what: "Java virtual machine",
        setup: "{ echo 'class Big {'; for i in $(seq 300); do echo \"int f$i(int n) { java.util.Map<String,Integer> m = new java.util.HashMap<>(); \
            m.put(\\\"x\\\" + n, $i); return m.size(); }\"; done; echo '}'; } >Big.java",
        command: &["javac", "-J-XX:+UseSerialGC", "-d", "%w/out", "%w/Big.java"],
        ..PLAIN
    },
    Program {
        name: "java",
        what: "Java, zip and direct buffers",
        setup: "cat >Z.java <<'E'\nimport java.nio.*;import java.util.*;import java.util.zip.*;\npublic class Z { public static void main(String[] a) throws Exception \
            { List<ByteBuffer> kept = new ArrayList<>(); byte[] in = new byte[4000], out = new byte[8000]; for (int i = 0; i < Integer.parseInt(a[0]); i++) { \
            Deflater d = new Deflater(); d.setInput(in); d.finish(); d.deflate(out); d.end(); if (i % 20 == 0) kept.add(ByteBuffer.allocateDirect(1000)); } } }\nE\n\
            javac Z.java",
        command: &["java", "-XX:+UseSerialGC", "-Xmx64m", "-cp", "%w", "Z", "%n"],
        rounds: 2_000,
        rounds_long: 30_000,
        ..PLAIN
    },
    Program {
        name: "python",
        what: "C, PYTHONMALLOC=malloc",
        command: &["/usr/bin/python3", "-c", PYTHON],
        environment: &["PYTHONMALLOC=malloc"],
        rounds: 10_000,
        rounds_long: 300_000,
        ..PLAIN
    },
    Program {
        name: "python-pymalloc",
        what: "C, pymalloc on glibc",
        command: &["/usr/bin/python3", "-c", PYTHON],
        rounds: 20_000,
        rounds_long: 500_000,
        ..PLAIN
    },
    Program {
        name: "numpy",
        what: "Python with numpy",
        command: &[
            "/usr/bin/python3",
            "-c",
            "import numpy as n\nkept=[]\nfor i in range(%n):\n a=n.arange(100+i%5000,dtype=float);b=a*2+1\n if i%50==0: kept.append(b)\n \
            if i%2000==0: kept.append(n.ones(1<<20))\n",
        ],
        rounds: 10_000,
        rounds_long: 400_000,
        ..PLAIN
    },
    Program {
        name: "php",
        what: "C, Zend on mmap and glibc",
        command: &[
            "php",
            "-r",
            "for($i=0;$i<%n;$i++){$c[$i%3000]=['id'=>$i,'t'=>str_repeat('x',$i%300)];if($i%50==0)$k[]=new DateTime('2020-01-01');}",
        ],
        environment: &["USE_ZEND_ALLOC=0"],
        rounds: 20_000,
        rounds_long: 1_000_000,
        ..PLAIN
    },
    Program {
        name: "ruby",
        what: "C, Ruby heap on glibc",
        command: &["ruby", "--disable-gems", "-e", "c={};k=[];%n.times{|i| c[i%3000]={id: i, t: 'x'*(i%300)}; k << 'kept'*20 if i%50==0}"],
        rounds: 20_000,
        rounds_long: 600_000,
        ..PLAIN
    },
    Program {
        name: "node",
        what: "C++, V8, libuv",
        command: &[
            "node",
            "-e",
            "const z=require('zlib');const k=[];for(let i=0;i<%n;i++){const b=Buffer.allocUnsafeSlow(200+i%3000).fill('x');z.deflateSync(b);\
            if(i%20==0)k.push(b)}",
        ],
        rounds: 500,
        rounds_long: 20_000,
        ..PLAIN
    },
    Program { name: "perl", command: &["perl", "-e", PERL], rounds: 20_000, rounds_long: 500_000, ..PLAIN },
    Program {
        name: "perl-jemalloc",
        what: "C, jemalloc preloaded",
        command: &["perl", "-e", PERL],
        allocator: JEMALLOC,
        rounds: 20_000,
        rounds_long: 500_000,
        ..PLAIN
    },
    Program {
        name: "redis",
        what: "C, jemalloc",
        before: "rm -f s",
        command: &["redis-server", "--port", "0", "--unixsocket", "%w/s", "--save", "", "--dir", "%w"],
        load: "until redis-cli -s %w/s ping 2>/dev/null | grep -q PONG; do sleep 0.05; done; redis-benchmark -s %w/s -n %n -d 200 -t set,lpush,hset -r 5000 -q >/dev/null",
        rounds: 8_000,
        rounds_long: 60_000,
        ..PLAIN
    },
    Program {
        name: "memcached",
        what: "C, threads, slabs",
        before: "rm -f s",
        command: &["memcached", "-u", "root", "-s", "%w/s", "-m", "64", "-t", "2"],
        load: "perl -MIO::Socket::UNIX -e 'for my $c (1..20) { my $s; for (1..600) { last if $s=IO::Socket::UNIX->new(\"%w/s\"); select undef,undef,undef,0.05 } \
            for my $i (1..%n) { my $v=\"x\"x(($i*37)%4000); print $s \"set k$i 0 0 \".length($v).\"\\r\\n$v\\r\\n\"; <$s> } }'",
        rounds: 500,
        rounds_long: 5_000,
        ..PLAIN
    },
    Program {
        name: "postgres",
        what: "C, memory contexts",
        setup: "mkdir db && chown postgres db && setpriv --reuid=postgres --regid=postgres --clear-groups /usr/lib/postgresql/*/bin/initdb -D %w/db >/dev/null\n\
            { echo 'create table t(a int, b text);'; for i in $(seq 300); do echo \"insert into t select g, 'value ' || g from generate_series($i, $i + 60) g; \
            select count(*), max(b) from t where a % 7 = $((i % 7)) group by a % 13;\"; done; } >in.sql",
        command: &[
            "setpriv",
            "--reuid=postgres",
            "--regid=postgres",
            "--clear-groups",
            "/usr/lib/postgresql/15/bin/postgres",
            "--single",
            "-D",
            "%w/db",
            "postgres",
        ],
        before: "setpriv --reuid=postgres --regid=postgres --clear-groups sh -c 'echo drop table if exists t | /usr/lib/postgresql/*/bin/postgres --single -D %w/db postgres' >/dev/null 2>&1",
        input: "in.sql",
        ..PLAIN
    },
    Program {
        name: "mariadb",
        what: "C++, threads",
        setup: "mariadb-install-db --no-defaults --user=root --datadir=%w/db --skip-test-db --auth-root-authentication-method=normal >/dev/null 2>&1",
        before: "rm -f s",
        command: &[
            "mariadbd",
            "--no-defaults",
            "--user=root",
            "--datadir=%w/db",
            "--socket=%w/s",
            "--skip-networking",
            "--pid-file=%w/pid",
            "--innodb-buffer-pool-size=16M",
        ],
        load: "until mariadb-admin --no-defaults -uroot -S %w/s ping >/dev/null 2>&1; do sleep 0.1; done; { echo 'create database if not exists d; use d; \
            drop table if exists t; create table t(a int, b text);'; for i in $(seq %n); do echo \"insert into t select seq, repeat('x', 100) from seq_1_to_20; \
            select count(*), group_concat(b) from t group by a % 7 limit 1;\"; done; } | mariadb --no-defaults -uroot -S %w/s >/dev/null",
        rounds: 30,
        rounds_long: 300,
        ..PLAIN
    },
    Program {
        name: "nginx",
        setup: "mkdir -p www && for i in $(seq 100); do seq $i 300 >www/f$i; done; echo 'daemon off; master_process off; pid %w/pid; error_log %w/err; events {} \
            http { access_log off; gzip on; gzip_types *; server { listen unix:%w/s; root %w/www; autoindex on; } }' >n.conf",
        before: "rm -f s",
        command: &["nginx", "-e", "%w/err", "-c", "%w/n.conf"],
        load: "UNTIL curl -s --compressed --unix-socket %w/s 'http://x/f[1-100]?[1-%n]' -o /dev/null; curl -s --unix-socket %w/s 'http://x/?[1-%n]' -o /dev/null",
        rounds: 5,
        rounds_long: 60,
        ..PLAIN
    },
    Program {
        name: "lighttpd",
        setup: "mkdir -p www && for i in $(seq 100); do seq $i 300 >www/f$i; done; printf '%s\\n' 'server.modules = (\"mod_dirlisting\", \"mod_indexfile\")' \
            'server.document-root = \"%w/www\"' 'server.bind = \"%w/s\"' 'dir-listing.activate = \"enable\"' >l.conf",
        before: "rm -f s",
        command: &["lighttpd", "-D", "-f", "%w/l.conf"],
        load: "UNTIL curl -s --unix-socket %w/s 'http://x/f[1-100]?[1-%n]' -o /dev/null; curl -s --unix-socket %w/s 'http://x/?[1-%n]' -o /dev/null",
        rounds: 5,
        rounds_long: 60,
        ..PLAIN
    },
    Program {
        name: "apache",
        what: "C, prefork, one process",
        setup: "mkdir -p www && chmod 755 www && for i in $(seq 100); do seq $i 300 >www/f$i; done; M=/usr/lib/apache2/modules; printf '%s\\n' \
            \"ServerRoot %w\" 'ServerName x' 'Listen 127.0.0.1:18473' 'PidFile %w/pid' 'ErrorLog %w/err' 'User www-data' 'Group www-data' 'DocumentRoot %w/www' 'Mutex file:%w' \
            \"LoadModule mpm_prefork_module $M/mod_mpm_prefork.so\" \"LoadModule authz_core_module $M/mod_authz_core.so\" \
            \"LoadModule autoindex_module $M/mod_autoindex.so\" \"LoadModule dir_module $M/mod_dir.so\" \"LoadModule mime_module $M/mod_mime.so\" \
            'TypesConfig /etc/mime.types' '<Directory %w/www>' 'Options Indexes' 'Require all granted' '</Directory>' >a.conf",
        command: &["apache2", "-X", "-f", "%w/a.conf"],
        load: "for i in $(seq 600); do curl -s http://127.0.0.1:18473/f1 -o /dev/null && break; sleep 0.05; done; \
            curl -s 'http://127.0.0.1:18473/f[1-100]?[1-%n]' -o /dev/null; curl -s 'http://127.0.0.1:18473/?[1-%n]' -o /dev/null",
        rounds: 5,
        rounds_long: 60,
        ..PLAIN
    },
    Program {
        name: "haproxy",
        what: "C, threads",
        setup: "printf '%s\\n' 'global' ' nbthread 2' 'defaults' ' mode http' ' timeout client 9s' ' timeout connect 9s' ' timeout server 9s' 'frontend f' \
            ' bind unix@%w/s' ' http-request return status 200 content-type text/plain string hello' >h.cfg",
        before: "rm -f s",
        command: &["haproxy", "-db", "-f", "%w/h.cfg"],
        load: "UNTIL for i in 1 2 3 4 5 6 7 8; do curl -s --unix-socket %w/s 'http://x/f?[1-%n]' -o /dev/null; done",
        rounds: 200,
        rounds_long: 2_000,
        ..PLAIN
    },
    Program {
        name: "guile",
        what: "C, collected heap on mmap",
        command: &[
            "guile",
            "--no-auto-compile",
            "-c",
            "(let loop ((i 0) (k '())) (if (< i %n) (loop (+ i 1) (if (= 0 (modulo i 50)) (cons (number->string i) k) k))))",
        ],
        rounds: 100_000,
        ..PLAIN
    },
];

impl Program {
    /// A text of the row for a working directory and a number of rounds.
    pub fn fill(text: &str, directory: &str, rounds: u64) -> String {
        text.replace("UNTIL ", UNTIL_SOCKET).replace("%w", directory).replace("%n", &rounds.to_string())
    }

    /// The program with that name.
    pub fn named(name: &str) -> Option<&'static Program> {
        PROGRAMS.iter().find(|program| program.name == name)
    }
}
