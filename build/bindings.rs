//! Generates Rust for the types that the BPF programs and the daemon share, from the type information (BTF) of `bpf/shared.bpf.c`.
//!
//! That file sorts the types into four structs: `structs`, `live`, `choices`, `numbers`. Names follow a rule: `struct fp_free_stack` is
//! `FreeStack`, `FP_VM_MMAP` of `enum fp_vm_op` is `VmOp::Mmap`, the number `FP_TARGETS_MAX` is `TARGETS_MAX`.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Context as _, Result, bail, ensure};
use libbpf_rs::HasSize as _;
use libbpf_rs::btf::types::{Array, Composite, CompositeMember, Enum, EnumMember, Int, IntEncoding, MemberAttr};
use libbpf_rs::btf::{Btf, BtfType};

/// Derives of structs that are copied. They reject padding.
const COPIED: &str =
    "Clone, Copy, Debug, PartialEq, Eq, zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::KnownLayout, zerocopy::Immutable";
/// Derives of structs of atomics.
const LIVE: &str = "Debug, Default";

/// The Rust source for an object.
///
/// # Errors
/// If the object has no type information, or a type has a form that is not supported.
pub fn generate(object: &Path) -> Result<String> {
    let btf = Btf::from_path(object).context("cannot read the type information")?;
    let mut rust = Rust { btf: &btf, done: BTreeSet::new(), text: String::new() };
    for (list, derives, is_live) in [("structs", COPIED, false), ("live", LIVE, true)] {
        for ty in rust.listed(list)? {
            rust.structure(ty, derives, is_live)?;
        }
    }
    for ty in rust.listed("choices")? {
        rust.choice(ty)?;
    }
    for ty in rust.listed("numbers")? {
        rust.numbers(ty)?;
    }
    Ok(rust.text)
}

struct Rust<'a> {
    btf: &'a Btf<'a>,
    /// Structs written so far.
    done: BTreeSet<String>,
    text: String,
}

impl<'a> Rust<'a> {
    /// The types of the members of one of the four structs.
    fn listed(&self, list: &str) -> Result<Vec<BtfType<'a>>> {
        let list: Composite<'_> = self.btf.type_by_name::<BtfType<'_>>(list).and_then(|ty| ty.try_into().ok()).context(list.to_owned())?;
        list.iter().map(|member| self.ty(&member)).collect()
    }

    fn ty(&self, member: &CompositeMember<'_>) -> Result<BtfType<'a>> {
        Ok(self.btf.type_by_id::<BtfType<'_>>(member.ty).context("a member without a type")?.skip_mods_and_typedefs())
    }

    /// Writes a struct, after the structs that it contains.
    fn structure(&mut self, ty: BtfType<'a>, derives: &str, is_live: bool) -> Result<()> {
        let c_name = text(ty.name())?;
        if !self.done.insert(c_name.clone()) {
            return Ok(());
        }
        let composite = Composite::try_from(ty).ok().with_context(|| format!("{c_name} is not a struct"))?;
        let (mut fields, mut end) = (String::new(), 0);
        for member in composite.iter() {
            let MemberAttr::Normal { offset } = member.attr else { bail!("struct {c_name} has a bit field") };
            let ty = self.ty(&member)?;
            // A tail of variable length, which is read separately.
            if Array::try_from(ty).is_ok_and(|array| array.capacity() == 0) {
                continue;
            }
            let name = self.field_name(&member, ty)?;
            let place = || format!("struct {c_name}, {name}");
            ensure!(offset / 8 == end, "{}: {} bytes of padding before it: declare them as a member", place(), offset / 8 - end);
            let (rust, size) = self.field(ty, derives, is_live).with_context(place)?;
            end += size;
            writeln!(fields, "    /// `{name}` of `struct {c_name}`.\n    pub {name}: {rust},")?;
        }
        let (name, size) = (camel(&c_name), composite.size());
        ensure!(end as usize == size, "struct {c_name}: {} bytes of padding at its end: declare them as a member", size - end as usize);
        writeln!(self.text, "/// `struct {c_name}`.\n#[derive({derives})]\n#[repr(C)]\npub struct {name} {{\n{fields}}}")?;
        writeln!(self.text, "const _: () = assert!(size_of::<{name}>() == {size});\n")?;
        Ok(())
    }

    /// A field's name. An unnamed union takes that of its first member.
    fn field_name(&self, member: &CompositeMember<'_>, ty: BtfType<'a>) -> Result<String> {
        let first = || Composite::try_from(ty).ok().and_then(|union| text(union.get(0)?.name).ok());
        text(member.name).ok().or_else(first).context("a member without a name")
    }

    /// A field's type, and its bytes.
    fn field(&mut self, ty: BtfType<'a>, derives: &str, is_live: bool) -> Result<(String, u32)> {
        if let Ok(int) = Int::try_from(ty) {
            // The text of the kernel in a `char` may be any byte.
            let is_signed = matches!(int.encoding, IntEncoding::Signed) && int.name() != Some(OsStr::new("char"));
            return Ok(match is_live {
                false => (format!("{}{}", if is_signed { 'i' } else { 'u' }, int.bits), u32::from(int.bits) / 8),
                true => (format!("std::sync::atomic::AtomicU{}", int.bits), u32::from(int.bits) / 8),
            });
        }
        if let Ok(array) = Array::try_from(ty) {
            let (of, size) = self.field(array.contained_type().skip_mods_and_typedefs(), derives, is_live)?;
            return Ok((format!("[{of}; {}]", array.capacity()), size * u32::try_from(array.capacity())?));
        }
        let composite = Composite::try_from(ty).ok().context("neither a number nor an array, a struct or a union")?;
        let size = u32::try_from(composite.size())?;
        if !composite.is_struct {
            // Its reader knows which of its members applies.
            return Ok((format!("[u8; {size}]"), size));
        }
        self.structure(ty, derives, is_live)?;
        Ok((camel(&text(ty.name())?), size))
    }

    /// Writes an enum.
    fn choice(&mut self, ty: BtfType<'a>) -> Result<()> {
        let (c_name, values) = enumerators(ty)?;
        let prefix = common_prefix(&values);
        ensure!(prefix > 0, "enum {c_name}: the names of its values have no common beginning");
        let is_variant = |name: &str| !matches!(&name[prefix..], "NONE" | "MAX");
        let values: Vec<_> = values.into_iter().filter(|(name, _)| is_variant(name)).collect();
        let name = camel(&c_name);
        let (mut variants, mut all, mut arms) = (String::new(), String::new(), String::new());
        for (c_variant, number) in values {
            let variant = camel(&c_variant[prefix - 1..]);
            ensure!(u8::try_from(number).is_ok(), "enum {c_name}: {c_variant} does not fit into a byte");
            writeln!(variants, "    /// `{c_variant}`.\n    {variant} = {number},")?;
            write!(all, "Self::{variant}, ")?;
            writeln!(arms, "            {number} => Some(Self::{variant}),")?;
        }
        writeln!(
            self.text,
            "/// `enum {c_name}`.\n#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]\n#[repr(u8)]\n\
             pub enum {name} {{\n{variants}}}\n\n\
             impl {name} {{\n    /// All of them, in the order of `enum {c_name}`.\n    pub const ALL: &[Self] = &[{all}];\n\n    \
             /// The one with this number; `None` if there is none.\n    #[must_use]\n    \
             pub fn from_wire(number: impl Into<u32>) -> Option<Self> {{\n        match number.into() {{\n{arms}            \
             _ => None,\n        }}\n    }}\n}}\n"
        )?;
        Ok(())
    }

    /// Writes the enumerators of an enum as constants.
    fn numbers(&mut self, ty: BtfType<'a>) -> Result<()> {
        let (c_name, values) = enumerators(ty)?;
        for (c_number, number) in values {
            let number = u32::try_from(number).with_context(|| format!("enum {c_name}: {c_number}"))?;
            let name = c_number.strip_prefix("FP_").with_context(|| format!("enum {c_name}: {c_number} does not begin with FP_"))?;
            writeln!(self.text, "/// `{c_number}`.\npub const {name}: u32 = {number};")?;
        }
        Ok(())
    }
}

/// An enum's name, and its enumerators' with their values.
fn enumerators(ty: BtfType<'_>) -> Result<(String, Vec<(String, i64)>)> {
    let name = text(ty.name())?;
    let all = Enum::try_from(ty).ok().with_context(|| format!("{name} is not an enum of 32 bits"))?;
    let values = all.iter().map(|EnumMember { name, value }| Ok((text(name)?, value))).collect::<Result<_>>()?;
    Ok((name, values))
}

/// Length of the beginning that all names share, up to an underscore.
fn common_prefix(values: &[(String, i64)]) -> usize {
    let Some(((first, _), others)) = values.split_first() else { return 0 };
    let shared = |name: &str| first.bytes().zip(name.bytes()).take_while(|(a, b)| a == b).count();
    let bytes = others.iter().map(|(name, _)| shared(name)).min().unwrap_or(0);
    first[..bytes].rfind('_').map_or(0, |at| at + 1)
}

/// `fp_free_stack` and `X_FREE_STACK` to `FreeStack`.
fn camel(name: &str) -> String {
    let words = name.split('_').skip(1);
    words.map(|word| word[..1].to_ascii_uppercase() + &word[1..].to_ascii_lowercase()).collect()
}

fn text(name: Option<&OsStr>) -> Result<String> {
    Ok(name.and_then(OsStr::to_str).context("a type without a name")?.to_owned())
}
