//! Where a build of HotSpot keeps what is read of it: offsets and sizes of its structures and addresses of its variables, all from its own
//! description of itself.

use super::Refusal;
use super::code::word32;
use super::packed::Packing;
use crate::bpf::{HOTSPOT_HEAD_BYTES, HOTSPOT_METHOD_BYTES, HOTSPOT_NONE};
use crate::census::Memory;
use crate::census::memory::is_user_address;
use crate::census::runtime::hotspot::structs::{Library, Structs};
use crate::machine::Machine;

/// The slot of an interpreted frame with the bytecode's address, in bytes below bp (frame_x86.hpp and frame_aarch64.hpp,
/// `interpreter_frame_bcp_offset`; in JDK 8 `interpreter_frame_bcx_offset`: the frame has no slot for the class's mirror). arm64's frames have
/// one more slot, which was for their alignment at first and is for the stack pointer since JDK 20.
const fn bytecode_below(machine: Machine, major: u32) -> u64 {
    match (machine, major) {
        (_, ..=8) => 56,
        (Machine::X86_64, _) => 64,
        (Machine::Aarch64, _) => 72,
    }
}

/// The structures that are described.
const WANTED: [&str; 22] = [
    "Abstract_VM_Version",
    "AbstractInterpreter",
    "CodeBlob",
    "CodeCache",
    "CodeHeap",
    "CompiledMethod",
    "ConstMethod",
    "ConstantPool",
    "ContinuationEntry",
    "GenericGrowableArray",
    "GrowableArray<int>",
    "GrowableArrayBase",
    "HeapBlock",
    "InstanceKlass",
    "Klass",
    "Method",
    "PcDesc",
    "StubQueue",
    "StubRoutines",
    "Symbol",
    "VirtualSpace",
    "nmethod",
];

/// An array of addresses: the variable with its own address, and the fields with its length and with the address of its data.
#[derive(Debug, Clone, Copy)]
pub struct AddressArray {
    pub variable: u64,
    pub length: u64,
    pub data: u64,
}

impl AddressArray {
    /// Its first addresses, at most `len_max`; `None` in place of one that cannot be. `None` if it is not there, or cannot be read.
    #[must_use]
    pub fn read(self, memory: &dyn Memory, len_max: u32) -> Option<Vec<Option<u64>>> {
        let array = address_at(memory, self.variable)?;
        let length = word32(memory, array.wrapping_add(self.length))?.min(len_max);
        let data = address_at(memory, array.wrapping_add(self.data))?;
        Some((0..length).map(|index| address_at(memory, data.wrapping_add(8 * u64::from(index)))).collect())
    }
}

/// The address at an address.
#[must_use]
pub fn address_at(memory: &dyn Memory, place: u64) -> Option<u64> {
    memory.word(place).filter(|&word| is_user_address(word))
}

/// Where the heaps of the code cache are found.
#[derive(Debug, Clone, Copy)]
pub enum CodeHeaps {
    /// The variable with the address of the only one (JDK 8).
    One(u64),
    /// All of them.
    All(AddressArray),
}

impl CodeHeaps {
    /// Reads it.
    ///
    /// # Errors
    /// What is not described.
    pub fn read(structs: &Structs<'_>) -> Result<Self, Refusal> {
        let need = |owner: &'static str, field: &'static str| structs.offset(owner, field).ok_or(Refusal::Missing { owner, field });
        if let Some(variable) = structs.address("CodeCache", "_heap") {
            return Ok(Self::One(variable));
        }
        Ok(Self::All(AddressArray {
            variable: structs.address("CodeCache", "_heaps").ok_or(Refusal::Missing { owner: "CodeCache", field: "_heaps" })?,
            length: structs.offset("GrowableArrayBase", "_len").map_or_else(|| need("GenericGrowableArray", "_len"), Ok)?,
            data: need("GrowableArray<int>", "_data")?,
        }))
    }

    /// The addresses of the heaps, at most `heaps_max`; empty before the JVM has made them.
    #[must_use]
    pub fn addresses(&self, memory: &dyn Memory, heaps_max: u32) -> Vec<u64> {
        match *self {
            Self::One(variable) => address_at(memory, variable).into_iter().collect(),
            Self::All(array) => array.read(memory, heaps_max).and_then(|heaps| heaps.into_iter().collect()).unwrap_or_default(),
        }
    }
}

/// The major version of the JDK. HotSpot had versions of its own until JDK 8, in which it was 25.
///
/// # Errors
/// If it is older, or not known yet.
pub fn version(structs: &Structs<'_>, memory: &dyn Memory) -> Result<u32, Refusal> {
    const HOTSPOT_OF_8: u32 = 25;
    let place = structs.address("Abstract_VM_Version", "_vm_major_version");
    let place = place.ok_or(Refusal::Missing { owner: "Abstract_VM_Version", field: "_vm_major_version" })?;
    let major = word32(memory, place).filter(|&major| major > 0).ok_or(Refusal::Starting)?;
    match structs.address("CodeCache", "_heap") {
        None => Ok(major),
        Some(_) if major == HOTSPOT_OF_8 => Ok(8),
        Some(_) => Err(Refusal::TooOld),
    }
}

/// Where a compiled method keeps its tables of inlined methods.
#[derive(Debug, Clone, Copy)]
pub enum Scopes {
    /// In the method itself, one part behind the other: metadata, data, pcs, dependencies (until JDK 22).
    Inside {
        /// The field with the offset of the metadata, likewise the others.
        metadata: u64,
        data: ScopesData,
        pcs: u64,
        dependencies: u64,
    },
    /// In memory of their own (JDK 23 on).
    Outside {
        /// The field with the address of the immutable data, and with its bytes.
        immutable: u64,
        immutable_bytes: u64,
        /// Fields with offsets in it.
        pcs: u64,
        data: u64,
        metadata: Metadata,
    },
}

/// Where the data of the tables begins in the method itself.
#[derive(Debug, Clone, Copy)]
pub enum ScopesData {
    /// A field with its address.
    Address(u64),
    /// A field with its offset from the method (JDK 8).
    Offset(u64),
}

/// Where the metadata lies that the tables refer to.
#[derive(Debug, Clone, Copy)]
pub enum Metadata {
    /// In the blob, behind its code and data: fields with the offset of the data, of the metadata from there on (16 bits), and the blob's size.
    InBlob { data: u64, metadata: u64, size: u64 },
    /// In memory of its own, behind the relocations: fields with its address, its bytes, and the bytes of the relocations.
    Mutable { address: u64, bytes: u64, relocations: u64 },
}

/// Where a class's source file is named.
#[derive(Debug, Clone, Copy)]
pub enum SourceFile {
    /// A field of the constant pool.
    Pool(u64),
    /// A field of the class.
    Class(u64),
}

/// Offsets, in bytes from the begin of the structure whose name stands first; and addresses of variables.
#[derive(Debug, Clone)]
pub struct Layout {
    pub major: u32,
    pub packing: Packing,
    // Variables.
    pub heaps: CodeHeaps,
    /// First address of the code cache; `None` = that of its only heap.
    pub low_bound: Option<u64>,
    pub interpreter: u64,
    pub call_stub_return: u64,
    pub continuation_return: Option<u64>,
    // Containers.
    pub space_low: u64,
    pub space_high: u64,
    pub heap_memory: u64,
    pub heap_segments: u64,
    pub heap_segment_shift: u64,
    pub heap_block_bytes: u64,
    pub queue_buffer: u64,
    /// Slot of an interpreted frame with the bytecode's address, in bytes below bp.
    pub bytecode_below: u64,
    // Blobs.
    pub blob_name: u64,
    pub blob_frame_size: u64,
    pub blob_code_begin: u64,
    pub blob_code_end: u64,
    pub relative: bool,
    // Compiled methods.
    pub method_of_code: u64,
    pub compile_id: u64,
    pub original_pc: u64,
    pub deopt: u64,
    pub deopt_mh: Option<u64>,
    pub scopes: Scopes,
    pub pc_desc_bytes: u64,
    pub pc_desc_pc: u64,
    pub pc_desc_scope: u64,
    // Methods.
    pub method_const: u64,
    pub const_bytes: u64,
    pub const_pool: u64,
    pub const_words: u64,
    pub const_flags: u64,
    pub const_code_bytes: u64,
    pub const_name: u64,
    pub pool_bytes: u64,
    pub pool_holder: u64,
    pub source_file: SourceFile,
    pub klass_name: u64,
    pub symbol_length: u64,
    pub symbol_body: u64,
}

impl Layout {
    /// Reads it from a library in a process.
    ///
    /// # Errors
    /// If the library does not describe itself, or not all that is needed.
    pub fn read(library: &Library<'_>) -> Result<Self, Refusal> {
        let structs = Structs::read(library, &WANTED).ok_or(Refusal::Missing { owner: "gHotSpotVMStructs", field: "entries" })?;
        let found = |owner: &'static str, field: &'static str| structs.offset(owner, field);
        let need = |owner: &'static str, field: &'static str| found(owner, field).ok_or(Refusal::Missing { owner, field });
        let variable = |owner: &'static str, field: &'static str| structs.address(owner, field).ok_or(Refusal::Missing { owner, field });
        let size = |owner: &'static str| structs.size(owner).ok_or(Refusal::Missing { owner, field: "size" });
        // Both were one structure from JDK 23 on.
        let code = |field: &'static str| found("nmethod", field).or_else(|| found("CompiledMethod", field));
        let need_code = |field: &'static str| code(field).ok_or(Refusal::Missing { owner: "nmethod", field });

        let major = version(&structs, library.memory)?;
        let relative = found("CodeBlob", "_code_begin").is_none();
        let layout = Self {
            major,
            packing: Packing::of_version(major),
            heaps: CodeHeaps::read(&structs)?,
            low_bound: (major > 8).then(|| variable("CodeCache", "_low_bound")).transpose()?,
            interpreter: variable("AbstractInterpreter", "_code")?,
            call_stub_return: variable("StubRoutines", "_call_stub_return_address")?,
            continuation_return: structs.address("ContinuationEntry", "_return_pc").filter(|&address| address != 0),
            space_low: need("VirtualSpace", "_low_boundary")?,
            space_high: need("VirtualSpace", "_high_boundary")?,
            heap_memory: need("CodeHeap", "_memory")?,
            heap_segments: need("CodeHeap", "_segmap")?,
            heap_segment_shift: need("CodeHeap", "_log2_segment_size")?,
            heap_block_bytes: size("HeapBlock")?,
            queue_buffer: need("StubQueue", "_stub_buffer")?,
            bytecode_below: bytecode_below(Machine::HOST, major),
            blob_name: need("CodeBlob", "_name")?,
            blob_frame_size: need("CodeBlob", "_frame_size")?,
            blob_code_begin: need("CodeBlob", if relative { "_code_offset" } else { "_code_begin" })?,
            blob_code_end: need("CodeBlob", if relative { "_data_offset" } else { "_code_end" })?,
            relative,
            method_of_code: need_code("_method")?,
            compile_id: need_code("_compile_id")?,
            original_pc: need_code("_orig_pc_offset")?,
            deopt: {
                let offsets = ["_deopt_handler_offset", "_deopt_handler_entry_offset", "_deoptimize_offset"];
                let names = if relative { offsets } else { ["_deopt_handler_begin"; 3] };
                names.into_iter().find_map(code).ok_or(Refusal::Missing { owner: "nmethod", field: names[0] })?
            },
            deopt_mh: match relative {
                true => code("_deopt_mh_handler_offset").or_else(|| code("_deoptimize_mh_offset")),
                false => code("_deopt_mh_handler_begin"),
            },
            scopes: match code("_immutable_data") {
                None => Scopes::Inside {
                    metadata: need_code("_metadata_offset")?,
                    data: match code("_scopes_data_begin") {
                        Some(field) => ScopesData::Address(field),
                        None => ScopesData::Offset(need_code("_scopes_data_offset")?),
                    },
                    pcs: need_code("_scopes_pcs_offset")?,
                    dependencies: need_code("_dependencies_offset")?,
                },
                Some(immutable) => Scopes::Outside {
                    immutable,
                    immutable_bytes: need_code("_immutable_data_size")?,
                    pcs: need_code("_scopes_pcs_offset")?,
                    data: need_code("_scopes_data_offset")?,
                    metadata: match found("CodeBlob", "_mutable_data") {
                        Some(address) => Metadata::Mutable {
                            address,
                            bytes: need("CodeBlob", "_mutable_data_size")?,
                            relocations: need("CodeBlob", "_relocation_size")?,
                        },
                        None => Metadata::InBlob {
                            data: need("CodeBlob", "_data_offset")?,
                            metadata: need_code("_metadata_offset")?,
                            size: need("CodeBlob", "_size")?,
                        },
                    },
                },
            },
            pc_desc_bytes: size("PcDesc")?,
            pc_desc_pc: need("PcDesc", "_pc_offset")?,
            pc_desc_scope: need("PcDesc", "_scope_decode_offset")?,
            method_const: need("Method", "_constMethod")?,
            const_bytes: size("ConstMethod")?,
            const_pool: need("ConstMethod", "_constants")?,
            const_words: need("ConstMethod", "_constMethod_size")?,
            const_flags: found("ConstMethod", "_flags").map_or_else(|| need("ConstMethod", "_flags._flags"), Ok)?,
            const_code_bytes: need("ConstMethod", "_code_size")?,
            const_name: need("ConstMethod", "_name_index")?,
            pool_bytes: size("ConstantPool")?,
            pool_holder: need("ConstantPool", "_pool_holder")?,
            source_file: match found("ConstantPool", "_source_file_name_index") {
                Some(field) => SourceFile::Pool(field),
                None => SourceFile::Class(need("InstanceKlass", "_source_file_name_index")?),
            },
            klass_name: need("Klass", "_name")?,
            symbol_length: need("Symbol", "_length")?,
            symbol_body: need("Symbol", "_body")?,
        };
        layout.check()
    }

    /// Whether the unwinder can read what it needs in the pieces that it reads.
    fn check(self) -> Result<Self, Refusal> {
        let head = [self.blob_name, self.blob_code_begin, self.blob_code_end, self.blob_frame_size];
        let first = self.first_of_code();
        let code = [self.compile_id, self.original_pc, self.deopt, self.deopt_mh.unwrap_or(first)];
        let fits = |fields: &[u64], from: u64, bytes: u32| fields.iter().all(|&field| field - from + 8 <= u64::from(bytes));
        let is_sized = |bytes: u64| (1..4096).contains(&bytes);
        if !fits(&head, 0, HOTSPOT_HEAD_BYTES)
            || !fits(&code, first, HOTSPOT_METHOD_BYTES)
            || ![self.heap_block_bytes, self.pc_desc_bytes, self.const_bytes, self.pool_bytes].into_iter().all(is_sized)
        {
            return Err(Refusal::Unknown);
        }
        Ok(self)
    }

    /// The first of a compiled method's fields that the unwinder reads in one piece.
    #[must_use]
    pub fn first_of_code(&self) -> u64 {
        let fields = [self.compile_id, self.original_pc, self.deopt].into_iter().chain(self.deopt_mh);
        fields.min().unwrap_or(0)
    }

    /// The record for the unwinder, without what differs between processes.
    #[must_use]
    pub fn record(&self) -> crate::bpf::Hotspot {
        // Offsets are below 2^16.
        let number = |offset: u64| u32::try_from(offset).unwrap_or(u32::MAX);
        let first = self.first_of_code();
        crate::bpf::Hotspot {
            code_begin: 0,
            interpreter_begin: 0,
            interpreter_end: 0,
            name_nmethod: 0,
            name_native: 0,
            call_stub_return: 0,
            barrier_begin: 0,
            barrier_end: 0,
            barrier_frame_bytes: 0,
            segment_shift: 0,
            block_bytes: number(self.heap_block_bytes),
            relative: u32::from(self.relative),
            at_name: number(self.blob_name),
            at_frame_size: number(self.blob_frame_size),
            at_code_begin: number(self.blob_code_begin),
            at_code_end: number(self.blob_code_end),
            at_method: number(first),
            at_compile_id: number(self.compile_id - first),
            at_original_pc: number(self.original_pc - first),
            at_deopt: number(self.deopt - first),
            at_deopt_mh: self.deopt_mh.map_or(HOTSPOT_NONE, |field| number(field - first)),
            bytecode_below: number(self.bytecode_below),
        }
    }
}
