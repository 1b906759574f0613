//! Real calls of every probed entry point under gdb: at the site, the named registers must hold what the caller passed, and the stack
//! pointer must be where the cookie says.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;

use fragprof::allocator::functions::{FunctionId, Op, Shape};
use fragprof::allocator::in_file::identify;
use fragprof::probe::placement::Emulation;
use fragprof::probe::plan::{SitePlan, Unprobed, place_all};
use serde_json::{Value, json};

/// Runs in gdb with a breakpoint at each entry and at each site. The registers at the entry are compared with those at the site.
const SCRIPT: &str = r#"
import gdb, json, os
plan = json.load(open(os.environ["SITES"]))
ARGUMENTS = ["rdi", "rsi", "rdx", "rcx", "r8", "r9"]
read = lambda name: int(gdb.parse_and_eval("$" + name)) & (2**64 - 1)
at_entry, hits, entries, wrong, handed_on = {}, {}, {}, [], []

class Entry(gdb.Breakpoint):
    def stop(self):
        name = self.site["name"]
        at_entry[name] = ([read(r) for r in ARGUMENTS], read("rsp"))
        if not (self.site["free"] and at_entry[name][0][self.site["arguments"]["pointer"]] == 0):
            entries[name] = entries.get(name, 0) + 1
        if self.site["offset"] == 0:
            check(self.site)
        return False

class Forward(gdb.Breakpoint):
    """An entry point without a probe: the next site must see its arguments."""
    def stop(self):
        passed = [read(r) for r in ARGUMENTS]
        handed_on.append((self.site["name"], {role: passed[index] for role, index in self.site["arguments"].items()}))
        return False

class Site(gdb.Breakpoint):
    def stop(self):
        check(self.site)
        return False

def check(site):
    name = site["name"]
    if name not in at_entry:
        wrong.append(name + ": reached without its entry")
        return
    passed, rsp = at_entry[name]
    for role, register in site["registers"].items():
        want, have = passed[site["arguments"][role]], read(register)
        if want != have:
            wrong.append("%s: %s is %#x in %s, passed was %#x" % (name, role, have, register, want))
    if read("rsp") != rsp - 8 * site["sp_words"]:
        wrong.append("%s: rsp %#x, at the entry %#x" % (name, read("rsp"), rsp))
    hits[name] = hits.get(name, 0) + 1
    # One that hands on may hand on to another that does.
    for forward, values in handed_on:
        seen = {role: read(register) for role, register in site["registers"].items()}
        if seen != values:
            wrong.append("%s forwards to %s: passed %s, seen %s" % (forward, name, values, seen))
        hits[forward] = hits.get(forward, 0) + 1
    handed_on.clear()

gdb.execute("set pagination off")
gdb.execute("set confirm off")
gdb.execute("set breakpoint pending on")
gdb.execute("break main")
gdb.execute("run")
base = next(int(line.split()[0], 16) for line in gdb.execute("info proc mappings", to_string=True).splitlines() if line.rstrip().endswith(plan["library"]))
for site in plan["sites"]:
    for kind, offset in [(Entry, 0)] + ([(Site, site["offset"])] if site["offset"] else []):
        kind("*%#x" % (base + site["entry"] + offset), internal=True).site = site
for site in plan["forwards"]:
    Forward("*%#x" % (base + site["entry"]), internal=True).site = site
gdb.execute("continue")
json.dump({"hits": hits, "entries": entries, "wrong": wrong}, open(os.environ["RESULT"], "w"))
"#;

/// A function that the driver calls.
struct Callee<'a> {
    function: FunctionId,
    name: &'a str,
    shape: Shape,
}

impl<'a> Callee<'a> {
    fn new(function: FunctionId, symbols: &'a [String]) -> Self {
        Self { function, name: &symbols[0], shape: function.get().unwrap().shape }
    }

    fn arguments(&self) -> Value {
        let roles = [("size", self.shape.size), ("count", self.shape.count), ("pointer", self.shape.pointer)];
        roles.into_iter().filter_map(|(role, index)| Some((role.to_owned(), json!(index?)))).collect::<serde_json::Map<_, _>>().into()
    }
}

/// C that calls a function once with arguments it accepts; `block` is from the same allocator.
fn call(callee: &Callee<'_>) -> String {
    let Callee { function, name, shape } = callee;
    let aligned = name.contains("align");
    let sized = name.contains("Pvm") || name.contains("size") || *name == "sdallocx";
    // Arguments other than block, size and count: alignment, flags, offset, a reference to nothrow.
    let other = if aligned { "64" } else { "0" };
    let mut arguments = [other; 6];
    if shape.op == Op::Free && sized {
        arguments[1] = "640";
    }
    if name.starts_with("mi_heap_") {
        arguments[0] = "(long)mi_heap_get_default()";
    }
    for (index, value) in [
        (shape.size, "640"),
        (shape.count, if shape.is_aligned { "64" } else { "3" }),
        (shape.pointer, if shape.op == Op::PosixMemalign { "(long)&block" } else { "(long)block" }),
    ] {
        if let Some(index) = index {
            arguments[usize::from(index)] = value;
        }
    }
    format!("    block = aligned_alloc(64, 640);\n    f{}({});\n", function.0, arguments.join(", "))
}

fn driver(callees: &[Callee<'_>]) -> String {
    let mut source = String::from("#include <stdlib.h>\nvoid *mi_heap_get_default(void);\nvoid *block;\n");
    for callee in callees {
        writeln!(source, "extern long f{}(long, long, long, long, long, long) __asm__(\"{}\");", callee.function.0, callee.name).unwrap();
    }
    source.push_str("int main(void) {\n");
    for callee in callees {
        source.push_str(&call(callee));
    }
    source.push_str("    return 0;\n}\n");
    source
}

fn check(library: &str, compiler: &str, link: &[&str]) {
    let elf = super::open(Path::new(library));
    let found = identify(&elf);
    // `__libc_` names cannot be linked against.
    let is_public = |symbols: &[String]| !symbols[0].starts_with("__libc_");
    let (mut sites, mut forwards) = (Vec::new(), Vec::new());
    for outcome in place_all(&elf, &found.functions, &found.function_starts, Emulation::default()) {
        match outcome {
            Ok(site) if is_public(&site.symbols) => sites.push(site),
            Err(forward) if is_public(&forward.symbols) => forwards.push(forward),
            _ => {}
        }
    }
    let callees: Vec<Callee<'_>> = (sites.iter().map(|s| Callee::new(s.function, &s.symbols)))
        .chain(forwards.iter().map(|f| Callee::new(f.function, &f.symbols)))
        .collect();

    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    std::fs::write(at("driver.c"), driver(&callees)).unwrap();
    let compiled =
        Command::new(compiler).args(["-O0", "-w", "-fno-builtin", "-o"]).arg(at("driver")).arg(at("driver.c")).args(link).output().unwrap();
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));

    let described: Vec<Value> = sites.iter().map(describe).collect();
    let described_forwards: Vec<Value> = forwards.iter().map(describe_forward).collect();
    let file = std::fs::canonicalize(library).unwrap();
    std::fs::write(at("sites.json"), json!({ "library": file, "sites": described, "forwards": described_forwards }).to_string()).unwrap();
    std::fs::write(at("script.py"), SCRIPT).unwrap();
    let gdb = Command::new("gdb")
        .args(["-nx", "-batch", "-x"])
        .arg(at("script.py"))
        .arg(at("driver"))
        .env("SITES", at("sites.json"))
        .env("RESULT", at("result.json"))
        .output()
        .unwrap();
    let result = std::fs::read(at("result.json"))
        .unwrap_or_else(|_| panic!("{}\n{}", String::from_utf8_lossy(&gdb.stdout), String::from_utf8_lossy(&gdb.stderr)));
    let result: Value = serde_json::from_slice(&result).unwrap();
    assert_eq!(result["wrong"], json!([]), "{library}");
    let counts = |key: &str| -> BTreeMap<String, u64> { serde_json::from_value(result[key].clone()).unwrap() };
    let (hits, entries) = (counts("hits"), counts("entries"));
    for site in &sites {
        let name = &site.symbols[0];
        assert!(hits.get(name).is_some_and(|&n| n > 0), "{library}: {name} was never hit");
        assert_eq!(hits.get(name), entries.get(name), "{library}: not every call of {name} passed its site");
    }
    for forward in &forwards {
        let name = &forward.symbols[0];
        assert!(hits.get(name).is_some_and(|&n| n > 0), "{library}: {name} passed no site");
    }
    println!("{library}: {} sites, {} calls confirmed by gdb", sites.len(), hits.values().sum::<u64>());
}

fn describe(site: &SitePlan) -> Value {
    let placement = &site.placement;
    let roles = [("size", placement.size), ("count", placement.count), ("pointer", placement.pointer)];
    let registers: serde_json::Map<_, _> =
        roles.into_iter().filter_map(|(role, register)| Some((role.to_owned(), json!(register?.name())))).collect();
    let callee = Callee::new(site.function, &site.symbols);
    json!({
        "name": callee.name,
        "entry": site.entry_vaddr,
        "offset": placement.offset,
        "sp_words": placement.sp_words,
        "free": callee.shape.op == Op::Free,
        "arguments": callee.arguments(),
        "registers": registers,
    })
}

fn describe_forward(forward: &Unprobed) -> Value {
    let callee = Callee::new(forward.function, &forward.symbols);
    json!({ "name": callee.name, "entry": forward.entry_vaddr, "arguments": callee.arguments() })
}

#[test]
fn gdb_sees_the_arguments_at_every_site_of_glibc() {
    check("/lib/x86_64-linux-gnu/libc.so.6", "cc", &[]);
}

#[test]
fn gdb_sees_the_arguments_at_every_site_of_jemalloc() {
    check("/usr/lib/x86_64-linux-gnu/libjemalloc.so.2", "cc", &["-ljemalloc", "-lstdc++"]);
}

#[test]
fn gdb_sees_the_arguments_at_every_site_of_tcmalloc() {
    check("/usr/lib/x86_64-linux-gnu/libtcmalloc.so.4", "cc", &["-ltcmalloc", "-lstdc++"]);
    check("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4", "cc", &["-ltcmalloc_minimal", "-lstdc++"]);
}

#[test]
fn gdb_sees_the_arguments_at_every_site_of_mimalloc() {
    check("/usr/lib/x86_64-linux-gnu/libmimalloc.so.2", "cc", &["-lmimalloc"]);
}

#[test]
fn gdb_sees_the_arguments_at_every_site_of_musl() {
    check("/usr/lib/x86_64-linux-musl/libc.so", "musl-gcc", &[]);
}
