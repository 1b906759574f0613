//! objdump's listing of a file, and a model of what its instructions do to registers: written from the text alone, so that it shares
//! nothing with the decoder under test.

use std::collections::{BTreeMap, HashSet};
use std::path::Path;
use std::process::Command;

use fragprof::allocator::functions::{Op, Shape};
use fragprof::probe::placement::{Placement, Reason};

/// An instruction as text.
struct Line {
    mnemonic: String,
    operands: Vec<String>,
}

/// A file's instructions by virtual address.
pub struct Listing {
    path: String,
    lines: BTreeMap<u64, Line>,
    targets: HashSet<u64>,
}

/// The relevant effects of an instruction.
#[derive(Default)]
struct Effect {
    /// Registers written, by canonical name.
    writes: Vec<&'static str>,
    /// A copy of a whole 64-bit register: (to, from).
    copy: Option<(&'static str, &'static str)>,
    /// Bytes by which the stack pointer decreases; `Some(None)` = it changes in another way.
    stack: Option<Option<u64>>,
    /// Execution does not simply continue at the next instruction.
    flow: bool,
}

const REGISTERS: [[&str; 4]; 16] = [
    ["rax", "eax", "ax", "al"],
    ["rdx", "edx", "dx", "dl"],
    ["rcx", "ecx", "cx", "cl"],
    ["rbx", "ebx", "bx", "bl"],
    ["rsi", "esi", "si", "sil"],
    ["rdi", "edi", "di", "dil"],
    ["rbp", "ebp", "bp", "bpl"],
    ["rsp", "esp", "sp", "spl"],
    ["r8", "r8d", "r8w", "r8b"],
    ["r9", "r9d", "r9w", "r9b"],
    ["r10", "r10d", "r10w", "r10b"],
    ["r11", "r11d", "r11w", "r11b"],
    ["r12", "r12d", "r12w", "r12b"],
    ["r13", "r13d", "r13w", "r13b"],
    ["r14", "r14d", "r14w", "r14b"],
    ["r15", "r15d", "r15w", "r15b"],
];

/// The canonical name of an operand that is a general-purpose register, and whether it is the full register.
fn register(operand: &str) -> Option<(&'static str, bool)> {
    let name = operand.strip_prefix('%')?;
    let high = match name {
        "ah" => Some("rax"),
        "bh" => Some("rbx"),
        "ch" => Some("rcx"),
        "dh" => Some("rdx"),
        _ => None,
    };
    if let Some(whole) = high {
        return Some((whole, false));
    }
    REGISTERS.iter().find_map(|forms| forms.iter().position(|form| *form == name).map(|at| (forms[0], at == 0)))
}

/// Operands are separated by commas outside of parentheses.
fn split_operands(text: &str) -> Vec<String> {
    let mut operands = vec![String::new()];
    let mut depth = 0;
    for c in text.chars() {
        match c {
            '(' => depth += 1,
            ')' => depth -= 1,
            ',' if depth == 0 => {
                operands.push(String::new());
                continue;
            }
            _ => {}
        }
        operands.last_mut().unwrap().push(c);
    }
    operands.retain(|o| !o.is_empty());
    operands
}

impl Line {
    fn parse(text: &str) -> Self {
        let text = text.split('#').next().unwrap().trim();
        let mut words = text.split_whitespace().peekable();
        let mut mnemonic = words.next().unwrap_or_default().to_owned();
        let is_prefix = |word: &str| {
            [
                "lock", "rep", "repz", "repnz", "bnd", "notrack", "data16", "addr32", "cs", "ds", "es", "ss", "fs", "gs", "xacquire",
                "xrelease",
            ]
            .contains(&word)
                || word.starts_with("rex")
        };
        while is_prefix(&mnemonic) && words.peek().is_some() {
            mnemonic = words.next().unwrap().to_owned();
        }
        // `jmp 1234 <symbol+0x5>`: the symbol is not an operand.
        let rest = words.take_while(|word| !word.starts_with('<')).collect::<Vec<_>>().join(" ");
        Self { mnemonic, operands: split_operands(&rest) }
    }

    fn is_branch(&self) -> bool {
        self.mnemonic.starts_with('j')
            || self.mnemonic.starts_with("call")
            || self.mnemonic.starts_with("loop")
            || self.mnemonic == "xbegin"
    }

    /// Target of a direct branch.
    fn target(&self) -> Option<u64> {
        self.is_branch().then(|| u64::from_str_radix(self.operands.first()?, 16).ok())?
    }

    /// Whether it pushes a register, as `push %r12`.
    fn is_push_of_register(&self) -> bool {
        self.mnemonic == "push" && self.operands.first().is_some_and(|o| register(o).is_some_and(|(_, whole)| whole))
    }

    fn effect(&self) -> Effect {
        let mut effect = Effect::default();
        let last = self.operands.last().and_then(|o| register(o));
        match self.mnemonic.as_str() {
            m if self.is_branch()
                || m.starts_with("ret")
                || ["(bad)", "ud2", "hlt", "int3", "int", "syscall", "sysenter", "iretq", "leave", "enter"].contains(&m) =>
            {
                effect.flow = true;
            }
            m if m.starts_with("cmp") && !m.starts_with("cmpxchg") || m.starts_with("test") || m.starts_with("nop") => {}
            "endbr64" | "pause" | "lfence" | "mfence" | "sfence" | "bt" | "btl" | "btq" => {}
            m if m.starts_with("push") => effect.stack = Some(Some(8)),
            m if m.starts_with("pop") && !m.starts_with("popcnt") => {
                effect.stack = Some(None);
                effect.writes.extend(last.map(|(name, _)| name));
            }
            "sub" | "subq" if self.operands.len() == 2 && self.operands[1] == "%rsp" => {
                let bytes = self.operands[0].strip_prefix("$0x").and_then(|hex| u64::from_str_radix(hex, 16).ok());
                effect.stack = Some(bytes.filter(|bytes| *bytes < 1 << 20));
            }
            "mul" | "mulq" | "mull" | "div" | "divq" | "divl" | "idiv" | "idivq" | "idivl" => effect.writes.extend(["rax", "rdx"]),
            "imul" | "imulq" | "imull" if self.operands.len() == 1 => effect.writes.extend(["rax", "rdx"]),
            "cqto" | "cltd" | "cwtd" => effect.writes.push("rdx"),
            "cltq" | "cwtl" | "lahf" => effect.writes.push("rax"),
            "cpuid" => effect.writes.extend(["rax", "rbx", "rcx", "rdx"]),
            "xgetbv" | "rdtsc" | "rdtscp" => effect.writes.extend(["rax", "rdx", "rcx"]),
            m if m.starts_with("stos") => effect.writes.extend(["rdi", "rcx"]),
            m if m.starts_with("movs") && self.operands.iter().any(|o| o.contains("%es:")) => {
                effect.writes.extend(["rdi", "rsi", "rcx"]);
            }
            m if m.starts_with("scas") || m.starts_with("cmps") || m.starts_with("lods") => {
                effect.writes.extend(["rdi", "rsi", "rcx", "rax"]);
            }
            m if m.starts_with("cmpxchg") => {
                effect.writes.push("rax");
                // cmpxchg8b and 16b compare with rdx:rax.
                effect.writes.extend(m.ends_with('b').then_some("rdx"));
                effect.writes.extend(last.map(|(name, _)| name));
            }
            m if m.starts_with("xchg") || m.starts_with("xadd") || m.starts_with("mulx") => {
                effect.writes.extend(self.operands.iter().filter_map(|o| register(o)).map(|(name, _)| name));
            }
            "mov" => {
                let from = self.operands.first().and_then(|o| register(o));
                if let (Some((from, true)), Some((to, true))) = (from, last) {
                    effect.copy = Some((to, from));
                }
                effect.writes.extend(last.map(|(name, _)| name));
            }
            // In this syntax the last operand is the destination.
            _ => effect.writes.extend(last.map(|(name, _)| name)),
        }
        if effect.writes.contains(&"rsp") {
            effect.stack = Some(None);
        }
        effect
    }
}

impl Listing {
    /// Disassembles a file with objdump.
    pub fn of(path: &Path) -> Self {
        let output = Command::new("objdump").args(["-d", "-w", "--no-show-raw-insn"]).arg(path).output().unwrap();
        assert!(output.status.success());
        let text = String::from_utf8_lossy(&output.stdout);
        let mut lines = BTreeMap::new();
        let mut targets = HashSet::new();
        for line in text.lines() {
            let Some((address, instruction)) = line.split_once(":\t") else { continue };
            let Ok(address) = u64::from_str_radix(address.trim(), 16) else { continue };
            let line = Line::parse(instruction);
            targets.extend(line.target());
            lines.insert(address, line);
        }
        Self { path: path.display().to_string(), lines, targets }
    }

    /// Whether an instruction starts at `vaddr`.
    pub fn has(&self, vaddr: u64) -> bool {
        self.lines.contains_key(&vaddr)
    }

    /// Panics unless the placement is correct according to this listing.
    pub fn confirm(&self, entry: u64, shape: Shape, placement: &Placement) {
        let site = entry + u64::from(placement.offset);
        let context = || format!("{} entry {entry:#x} {shape:?} {placement:?}", self.path);
        assert_eq!(placement.has_return, shape.op != Op::Free, "{}", context());
        let at_site = self.lines.get(&site).unwrap_or_else(|| panic!("no instruction at the site: {}", context()));
        if placement.reason.is_emulated() {
            let direct = at_site.target().is_some();
            assert!(
                direct || at_site.is_push_of_register() || at_site.mnemonic.starts_with("nop") || at_site.mnemonic == "xchg",
                "{}",
                context()
            );
        } else {
            assert_eq!(placement.offset, 0, "{}", context());
        }
        assert!(!(entry + 1..=site).any(|vaddr| self.targets.contains(&vaddr)), "a jump leads between entry and site: {}", context());

        // The arguments by name, in the registers of the calling convention.
        let mut holds: BTreeMap<&str, &str> =
            [("rdi", "0"), ("rsi", "1"), ("rdx", "2"), ("rcx", "3"), ("r8", "4"), ("r9", "5")].into_iter().collect();
        let mut pushed_bytes = 0;
        let mut null_checks = 0;
        let mut previous: Option<&Line> = None;
        for (_, line) in self.lines.range(entry..site) {
            let effect = line.effect();
            if effect.flow {
                let tests_pointer = previous.is_some_and(|p| {
                    p.mnemonic == "test"
                        && p.operands[0] == p.operands[1]
                        && register(&p.operands[0]).is_some_and(|(name, whole)| whole && holds.get(name) == Some(&"0"))
                });
                let allowed = line.mnemonic == "je" && tests_pointer && shape.op == Op::Free;
                assert!(allowed, "{} is before the site: {}", line.mnemonic, context());
                null_checks += 1;
            }
            match effect.stack {
                Some(Some(bytes)) => pushed_bytes += bytes,
                Some(None) => panic!("the stack pointer changes in an untracked way: {}", context()),
                None => {}
            }
            let copied = effect.copy.and_then(|(to, from)| Some((to, *holds.get(from)?)));
            for written in &effect.writes {
                holds.remove(written);
            }
            if let Some((to, argument)) = copied {
                holds.insert(to, argument);
            }
            previous = Some(line);
        }
        assert_eq!(null_checks, u32::from(placement.reason == Reason::EmulatedAfterNullCheck), "{}", context());
        assert_eq!(pushed_bytes, 8 * u64::from(placement.sp_words), "{}", context());
        assert!(!placement.has_return || pushed_bytes == 0, "{}", context());
        for (index, held_in) in [(shape.size, placement.size), (shape.count, placement.count), (shape.pointer, placement.pointer)] {
            assert_eq!(index.is_some(), held_in.is_some(), "{}", context());
            if let (Some(index), Some(held_in)) = (index, held_in) {
                let argument = ["0", "1", "2", "3", "4", "5"][usize::from(index)];
                assert_eq!(holds.get(held_in.name()), Some(&argument), "{}", context());
            }
        }
    }
}
