//! Static fields of the JDK's own classes: a class of the boot loader by its name, where its fields lie, and what they hold.

use super::packed::Packing;
use crate::census::Memory;
use crate::census::memory::{is_user_address, word_at, word16_at, word32_at};
use crate::census::runtime::hotspot::structs::{FlagPlace, Structs};

/// Structures that are described.
pub const WANTED: [&str; 15] = [
    "Array<u1>",
    "Array<u2>",
    "ClassLoaderData",
    "ClassLoaderDataGraph",
    "CompressedOops",
    "ConstantPool",
    "Flag",
    "InstanceKlass",
    "JVMFlag",
    "Klass",
    "OopHandle",
    "Symbol",
    "Universe",
    "ZGlobalsForVMStructs",
    "Abstract_VM_Version",
];

/// Class loaders of a JVM that are searched for the boot loader: it is the first that is made, and the last in the list.
const LOADERS_MAX: usize = 1 << 16;
/// Classes of the boot loader that are searched: a large service has some 15,000.
const CLASSES_MAX: usize = 1 << 16;
/// Fields of a class that are searched.
const FIELDS_MAX: u32 = 1024;
/// Bytes that are read of a class at once: the fields up to the next class.
const HEAD_BYTES_MAX: u64 = 512;
/// Bytes of a list of fields.
const LIST_BYTES_MAX: usize = 16 << 10;
/// Longest name that is compared.
const NAME_BYTES_MAX: usize = 128;
/// A class's object is not larger than this.
const MIRROR_BYTES_MAX: u32 = 1 << 16;

/// How a class lists its fields.
#[derive(Debug, Clone, Copy)]
enum Fields {
    /// Six 16-bit numbers for each, until JDK 20: flags, name, type, value, and the offset in two.
    Table {
        /// The list, and the field with the number of entries.
        list: u64,
        count: u64,
    },
    /// Packed numbers: number of fields, number of those that the JVM has added; of each name, type, offset, flags, kind, and what the kind says.
    Packed {
        /// The list.
        list: u64,
    },
}

/// Where a build of HotSpot keeps what is read here.
#[derive(Debug, Clone)]
pub struct Layout {
    packing: Packing,
    loaders: u64,
    loader_object: u64,
    loader_next: u64,
    loader_classes: u64,
    class_name: u64,
    class_next: u64,
    class_mirror: u64,
    class_pool: u64,
    fields: Fields,
    list_data: u64,
    pool_bytes: u64,
    symbol_length: u64,
    symbol_body: u64,
    narrow_base: Option<u64>,
    narrow_shift: Option<u64>,
    colours: Option<(u64, u64)>,
    has_narrow: Option<FlagPlace>,
    base: u64,
}

/// A class that was found.
#[derive(Debug, Clone, Copy)]
pub struct Class(u64);

impl Layout {
    /// Reads it. `None` if the JVM does not describe all that is needed.
    pub fn read(structs: &Structs<'_>, major: u32, has_narrow: Option<FlagPlace>, base: u64) -> Option<Self> {
        let offset = |owner: &str, field: &str| structs.offset(owner, field);
        let variable = |owner: &str, field: &str| structs.address(owner, field);
        let fields = match offset("InstanceKlass", "_fieldinfo_stream") {
            Some(list) => Fields::Packed { list },
            None => Fields::Table { list: offset("InstanceKlass", "_fields")?, count: offset("InstanceKlass", "_java_fields_count")? },
        };
        let narrow = |old: &str, new: &str| {
            let owners = [("CompressedOops", new), ("CompressedOops", old), ("Universe", old)];
            owners.into_iter().find_map(|(owner, field)| variable(owner, field))
        };
        let layout = Self {
            packing: Packing::of_version(major),
            loaders: variable("ClassLoaderDataGraph", "_head")?,
            loader_object: offset("ClassLoaderData", "_class_loader")?,
            loader_next: offset("ClassLoaderData", "_next")?,
            loader_classes: offset("ClassLoaderData", "_klasses")?,
            class_name: offset("Klass", "_name")?,
            class_next: offset("Klass", "_next_link")?,
            class_mirror: offset("Klass", "_java_mirror")?,
            class_pool: offset("InstanceKlass", "_constants")?,
            list_data: match fields {
                Fields::Table { .. } => offset("Array<u2>", "_data")?,
                Fields::Packed { .. } => offset("Array<u1>", "_data")?,
            },
            fields,
            pool_bytes: structs.size("ConstantPool")?,
            symbol_length: offset("Symbol", "_length")?,
            symbol_body: offset("Symbol", "_body")?,
            narrow_base: narrow("_narrow_oop._base", "_base"),
            narrow_shift: narrow("_narrow_oop._shift", "_shift"),
            colours: variable("ZGlobalsForVMStructs", "_instance_p").zip(offset("ZGlobalsForVMStructs", "_ZPointerLoadShift")),
            has_narrow,
            base,
        };
        (layout.class_name.max(layout.class_next) + 8 <= HEAD_BYTES_MAX).then_some(layout)
    }

    /// The boot loader's classes.
    fn boot_loader(&self, memory: &dyn Memory) -> Option<u64> {
        let mut loader = memory.word(self.loaders)?;
        let mut found = None;
        for _ in 0..LOADERS_MAX {
            if !is_user_address(loader) {
                break;
            }
            // The place of its object, which it does not have; hidden classes of it have loaders of their own before it.
            let object = memory.word(loader.wrapping_add(self.loader_object))?;
            if object == 0 || memory.word(object) == Some(0) {
                found = Some(loader);
            }
            loader = memory.word(loader.wrapping_add(self.loader_next))?;
        }
        found
    }

    /// The boot loader's classes of these names, as the JVM writes them (`java/nio/Bits`).
    pub fn find<const N: usize>(&self, memory: &dyn Memory, names: [&str; N]) -> [Option<Class>; N] {
        let mut found = [None; N];
        let Some(loader) = self.boot_loader(memory) else { return found };
        let Some(mut class) = memory.word(loader.wrapping_add(self.loader_classes)) else { return found };
        let at = |field: u64| usize::try_from(field).unwrap_or(usize::MAX);
        let head_bytes = at(self.class_name.max(self.class_next)) + 8;
        for _ in 0..CLASSES_MAX {
            if !is_user_address(class) || found.iter().all(Option::is_some) {
                break;
            }
            let Some(head) = memory.bytes(class, head_bytes) else { break };
            if let Some(name) = self.symbol(memory, word_at(&head, at(self.class_name)))
                && let Some(place) = names.iter().position(|wanted| wanted.as_bytes() == name)
                && let Some(place) = found.get_mut(place)
            {
                *place = Some(Class(class));
            }
            class = word_at(&head, at(self.class_next));
        }
        found
    }

    fn symbol(&self, memory: &dyn Memory, address: u64) -> Option<Vec<u8>> {
        if !is_user_address(address) {
            return None;
        }
        let length = usize::from(word16_at(&memory.bytes(address.wrapping_add(self.symbol_length), 2)?, 0));
        if length == 0 || length > NAME_BYTES_MAX {
            return None;
        }
        memory.bytes(address.wrapping_add(self.symbol_body), length)
    }

    /// The offset of a class's field in its objects, or of a static one in the class's own object.
    pub fn offset_of(&self, memory: &dyn Memory, class: Class, field: &str) -> Option<u32> {
        let pool = memory.word(class.0.wrapping_add(self.class_pool)).filter(|&pool| is_user_address(pool))?;
        let is_named = |index: u32| {
            let entry = memory.word(pool.wrapping_add(self.pool_bytes).wrapping_add(8 * u64::from(index)))?;
            Some(self.symbol(memory, entry)? == field.as_bytes())
        };
        let list = |at: u64| {
            let list = memory.word(class.0.wrapping_add(at)).filter(|&list| is_user_address(list))?;
            // An array begins with the number of its elements.
            let length = word32_at(&memory.bytes(list, 4)?, 0) as usize;
            Some((list.wrapping_add(self.list_data), length))
        };
        let offset = match self.fields {
            Fields::Table { list: at, count } => {
                /// Bytes of an entry, and places in it.
                const ENTRY: usize = 12;
                const NAME: usize = 2;
                const LOW: usize = 8;
                const HIGH: usize = 10;
                /// The lowest two bits of an offset say what it is.
                const TAG_BITS: u32 = 2;
                let (data, length) = list(at)?;
                let count = usize::from(word16_at(&memory.bytes(class.0.wrapping_add(count), 2)?, 0));
                let bytes = memory.bytes(data, (ENTRY * count).min(2 * length).min(LIST_BYTES_MAX))?;
                let entry = bytes.chunks_exact(ENTRY).find(|entry| is_named(u32::from(word16_at(entry, NAME))) == Some(true))?;
                ((u32::from(word16_at(entry, HIGH)) << 16) | u32::from(word16_at(entry, LOW))) >> TAG_BITS
            }
            Fields::Packed { list: at } => {
                /// Kinds of a field with one more number each: a value at first, a generic type, a group of its own.
                const MORE: u32 = 0b10101;
                let (data, length) = list(at)?;
                let bytes = memory.bytes(data, length.min(LIST_BYTES_MAX))?;
                let mut place = 0;
                let mut next = || self.packing.number(&bytes, &mut place);
                let (count, _) = (next()?, next()?);
                let mut found = None;
                for _ in 0..count.min(FIELDS_MAX) {
                    let (name, _, offset, _, kind) = (next()?, next()?, next()?, next()?, next()?);
                    for _ in 0..(kind & MORE).count_ones() {
                        next()?;
                    }
                    if is_named(name) == Some(true) {
                        found = Some(offset);
                        break;
                    }
                }
                found?
            }
        };
        (offset < MIRROR_BYTES_MAX).then_some(offset)
    }

    /// The bytes of a static field.
    pub fn static_bytes<const N: usize>(&self, memory: &dyn Memory, class: Class, field: &str) -> Option<[u8; N]> {
        let place = self.mirror(memory, class)?.wrapping_add(u64::from(self.offset_of(memory, class, field)?));
        memory.bytes(place, N)?.try_into().ok()
    }

    /// The object that a static field refers to.
    pub fn static_object(&self, memory: &dyn Memory, class: Class, field: &str) -> Option<u64> {
        let is_narrow =
            self.has_narrow.and_then(|place| memory.bytes(self.base.wrapping_add(place.value), 1)).is_some_and(|flag| flag == [1]);
        let object = if is_narrow {
            let narrow = u64::from(u32::from_le_bytes(self.static_bytes(memory, class, field)?));
            let shift = word32_at(&memory.bytes(self.narrow_shift?, 4)?, 0);
            memory.word(self.narrow_base?)?.wrapping_add(narrow.checked_shl(shift)?)
        } else {
            self.plain(memory, u64::from_le_bytes(self.static_bytes(memory, class, field)?))
        };
        is_user_address(object).then_some(object)
    }

    /// The class's own object, in which its static fields lie.
    fn mirror(&self, memory: &dyn Memory, class: Class) -> Option<u64> {
        let handle = memory.word(class.0.wrapping_add(self.class_mirror)).filter(|&handle| is_user_address(handle))?;
        Some(self.plain(memory, memory.word(handle)?)).filter(|&object| is_user_address(object))
    }

    /// An object's address without the bits in which the generational ZGC keeps an object's state.
    fn plain(&self, memory: &dyn Memory, pointer: u64) -> u64 {
        let shift = || {
            let (instance, field) = self.colours?;
            let place = memory.word(memory.word(instance)?.wrapping_add(field))?;
            memory.word(place).filter(|&shift| shift < 64)
        };
        if is_user_address(pointer) { pointer } else { pointer >> shift().unwrap_or(0) }
    }
}
