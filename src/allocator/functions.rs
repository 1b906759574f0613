//! The allocators' entry points and the shapes of their calls.
//!
//! Shapes are those of the C standard, POSIX, the Itanium C++ ABI's mangled operators, and the allocators' headers (jemalloc 5.3
//! `jemalloc.h`, gperftools 2.10 to 2.18 `tcmalloc.h`, mimalloc 2.1 and 3.6 `mimalloc.h`, Google's tcmalloc of 2025-08 `tcmalloc.h` and
//! `new_extension.h`, snmalloc 0.7 `override/rust.cc`, CPython's Objects/obmalloc.c, 3.8 to 3.14). Arguments are counted from 0 and all are
//! integers or pointers, so argument n is in the nth register of the System V calling convention. Functions that return a block with its size
//! return the block in the first register.
//!
//! Left out on purpose: `mi_realpath`, `mi_dupenv_s` and their relatives, whose result may be no new block, or where no register holds the
//! size; jemalloc's experimental `smallocx_*` (returns a structure); and `mi_reallocarr` (takes the block through memory).

use serde::Serialize;

use crate::bpf;
use crate::units::page_bytes;

/// What a call does with blocks: those of [`bpf::Op`] that are calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[repr(u8)]
pub enum Op {
    /// Allocates a block; the result is its address, 0 = failed.
    Alloc = bpf::Op::Alloc as u8,
    /// Frees a block.
    Free = bpf::Op::Free as u8,
    /// Frees a block and allocates one with its contents, maybe at the same address; 0 = failed, the old one is still live.
    Realloc = bpf::Op::Realloc as u8,
    /// Allocates a block and stores its address in memory; result 0 = success.
    PosixMemalign = bpf::Op::PosixMemalign as u8,
    /// Resizes a block in place; the result is its usable size.
    Xallocx = bpf::Op::Xallocx as u8,
    /// Allocates a copy of a string; the result is its address, 0 = failed. No argument has its size, but the copy itself.
    AllocString = bpf::Op::AllocString as u8,
}

impl Op {
    /// The op of a number of the wire format.
    #[must_use]
    pub fn from_number(number: u8) -> Option<Self> {
        let all = [Self::Alloc, Self::Free, Self::Realloc, Self::PosixMemalign, Self::Xallocx, Self::AllocString];
        all.into_iter().find(|&op| op as u8 == number)
    }

    /// Whether the record needs what the call returns, hence a return probe.
    #[must_use]
    pub fn needs_return(self) -> bool {
        self != Self::Free
    }
}

/// Which arguments of a call matter, counted from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    /// What the call does.
    pub op: Op,
    /// Bytes requested, or bytes of one element.
    pub size: Option<u8>,
    /// Number of elements; the alignment if `is_aligned`.
    pub count: Option<u8>,
    /// The block, or where the new block's address is stored (posix_memalign).
    pub pointer: Option<u8>,
    /// Whether the call requests an alignment in bytes.
    pub is_aligned: bool,
}

/// The origin of a function.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Family {
    /// The C library's names; jemalloc defines them with its prefix too.
    C,
    /// C++ operators, if the allocator defines them itself.
    Cxx,
    /// jemalloc's own, with its prefix.
    Jemalloc,
    /// gperftools' own.
    Tcmalloc,
    /// The own ones of Google's tcmalloc. The names for arrays are others for the same functions.
    GoogleTcmalloc,
    /// mimalloc's own.
    Mimalloc,
    /// snmalloc's for Rust programs. C and C++ programs have it under the C library's names.
    Snmalloc,
    /// Those that CPython calls for its objects ([`super::cpython`]). No file defines them for others, but for fragprof's own library, which
    /// puts functions in front of them.
    Cpython,
}

/// An entry point.
#[derive(Debug, Clone, Copy)]
pub struct Function {
    /// The symbol, without an allocator's prefix.
    pub symbol: &'static str,
    /// Display name.
    pub name: &'static str,
    /// Its origin.
    pub family: Family,
    /// Its call's shape.
    pub shape: Shape,
}

impl Function {
    /// Whether it fails by a C++ exception: a return probe in its frame would keep the exception from being caught.
    #[must_use]
    pub fn may_throw(&self) -> bool {
        let names = ["_Znw", "_Zna", "tc_new", "mi_new", "TCMallocInternalNew", "__size_returning_new", "tcmalloc_size_returning_"];
        let throws = names.iter().any(|prefix| self.symbol.starts_with(prefix));
        throws && !["nothrow", "Nothrow"].iter().any(|part| self.symbol.contains(part))
    }

    /// Whether the block is to be zeros.
    #[must_use]
    pub fn zeroes(&self) -> bool {
        self.shape.op == Op::Alloc && ["calloc", "zalloc", "Calloc", "alloc_zeroed"].iter().any(|part| self.symbol.contains(part))
    }

    /// log2 of the alignment that it always has; 0 = the allocator's own.
    #[must_use]
    pub fn fixed_alignment_bits(&self) -> u8 {
        if ["valloc", "Valloc"].iter().any(|end| self.symbol.ends_with(end)) { page_bytes().trailing_zeros() as u8 } else { 0 }
    }

    /// Whether a failure frees the block that was to be resized, as `reallocf` does (BSD, mimalloc).
    #[must_use]
    pub fn frees_on_failure(&self) -> bool {
        self.symbol.ends_with("reallocf")
    }
}

/// Index of an entry point in [`FUNCTIONS`]: the `function` byte of each record. Not stable between versions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(transparent)]
pub struct FunctionId(pub u8);

impl FunctionId {
    /// The entry point; `None` for a number beyond the table.
    #[must_use]
    pub fn get(self) -> Option<&'static Function> {
        FUNCTIONS.get(usize::from(self.0))
    }

    /// What people are shown; `?` for a number beyond the table.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.get().map_or("?", |f| f.name)
    }
}

/// The entry point that a symbol (without prefix) names in a family.
#[must_use]
pub fn find(family: Family, symbol: &[u8]) -> Option<FunctionId> {
    let index = FUNCTIONS.iter().position(|f| f.family == family && f.symbol.as_bytes() == symbol)?;
    u8::try_from(index).ok().map(FunctionId)
}

const fn shape(op: Op, size: Option<u8>, count: Option<u8>, pointer: Option<u8>) -> Shape {
    Shape { op, size, count, pointer, is_aligned: false }
}
const fn alloc(size: u8) -> Shape {
    shape(Op::Alloc, Some(size), None, None)
}
const fn alloc_n(count: u8, size: u8) -> Shape {
    shape(Op::Alloc, Some(size), Some(count), None)
}
const fn free(pointer: u8) -> Shape {
    shape(Op::Free, None, None, Some(pointer))
}
const fn realloc(pointer: u8, size: u8) -> Shape {
    shape(Op::Realloc, Some(size), None, Some(pointer))
}
const fn realloc_n(pointer: u8, count: u8, size: u8) -> Shape {
    shape(Op::Realloc, Some(size), Some(count), Some(pointer))
}
const fn alloc_aligned(alignment: u8, size: u8) -> Shape {
    Shape { is_aligned: true, ..alloc_n(alignment, size) }
}
const fn posix(pointer: u8, alignment: u8, size: u8) -> Shape {
    Shape { is_aligned: true, ..shape(Op::PosixMemalign, Some(size), Some(alignment), Some(pointer)) }
}
const fn string() -> Shape {
    shape(Op::AllocString, None, None, None)
}
const fn xallocx(pointer: u8, size: u8) -> Shape {
    shape(Op::Xallocx, Some(size), None, Some(pointer))
}

macro_rules! table {
    ($($family:ident { $($symbol:literal $(as $name:literal)? => $shape:expr;)* })*) => {
        /// Every entry point known. Where several names have one address, the first in this order names it.
        pub const FUNCTIONS: &[Function] = &[$($(
            Function { symbol: $symbol, name: table!(@name $symbol $($name)?), family: Family::$family, shape: $shape },
        )*)*];
    };
    (@name $symbol:literal) => { $symbol };
    (@name $symbol:literal $name:literal) => { $name };
}

table! {
    C {
        "malloc" => alloc(0);
        "calloc" => alloc_n(0, 1);
        "realloc" => realloc(0, 1);
        "reallocarray" => realloc_n(0, 1, 2);
        "free" => free(0);
        "cfree" => free(0);
        "memalign" => alloc_aligned(0, 1);
        "aligned_alloc" => alloc_aligned(0, 1);
        "posix_memalign" => posix(0, 1, 2);
        "valloc" => alloc(0);
        "pvalloc" => alloc(0);
        // C23: (block, size) and (block, alignment, size).
        "free_sized" => free(0);
        "free_aligned_sized" => free(0);
        "reallocf" => realloc(0, 1);
        "vfree" => free(0);
        // The C library's own callers: the same functions, so the same names.
        "__libc_malloc" as "malloc" => alloc(0);
        "__libc_calloc" as "calloc" => alloc_n(0, 1);
        "__libc_realloc" as "realloc" => realloc(0, 1);
        "__libc_reallocarray" as "reallocarray" => realloc_n(0, 1, 2);
        "__libc_free" as "free" => free(0);
        "__libc_cfree" as "cfree" => free(0);
        "__libc_memalign" as "memalign" => alloc_aligned(0, 1);
        "__libc_valloc" as "valloc" => alloc(0);
        "__libc_pvalloc" as "pvalloc" => alloc(0);
    }
    Cxx {
        "_Znwm" as "operator new" => alloc(0);
        "_Znam" as "operator new[]" => alloc(0);
        "_ZnwmRKSt9nothrow_t" as "operator new(nothrow)" => alloc(0);
        "_ZnamRKSt9nothrow_t" as "operator new[](nothrow)" => alloc(0);
        "_ZnwmSt11align_val_t" as "operator new(align)" => alloc_aligned(1, 0);
        "_ZnamSt11align_val_t" as "operator new[](align)" => alloc_aligned(1, 0);
        "_ZnwmSt11align_val_tRKSt9nothrow_t" as "operator new(align, nothrow)" => alloc_aligned(1, 0);
        "_ZnamSt11align_val_tRKSt9nothrow_t" as "operator new[](align, nothrow)" => alloc_aligned(1, 0);
        // Google's tcmalloc (new_extension.h): with a hint how often the block is used.
        "_Znwm12__hot_cold_t" as "operator new(hot_cold)" => alloc(0);
        "_Znam12__hot_cold_t" as "operator new[](hot_cold)" => alloc(0);
        "_ZnwmRKSt9nothrow_t12__hot_cold_t" as "operator new(nothrow, hot_cold)" => alloc(0);
        "_ZnamRKSt9nothrow_t12__hot_cold_t" as "operator new[](nothrow, hot_cold)" => alloc(0);
        "_ZnwmSt11align_val_t12__hot_cold_t" as "operator new(align, hot_cold)" => alloc_aligned(1, 0);
        "_ZnamSt11align_val_t12__hot_cold_t" as "operator new[](align, hot_cold)" => alloc_aligned(1, 0);
        "_ZnwmSt11align_val_tRKSt9nothrow_t12__hot_cold_t" as "operator new(align, nothrow, hot_cold)" => alloc_aligned(1, 0);
        "_ZnamSt11align_val_tRKSt9nothrow_t12__hot_cold_t" as "operator new[](align, nothrow, hot_cold)" => alloc_aligned(1, 0);
        "_ZdlPv" as "operator delete" => free(0);
        "_ZdaPv" as "operator delete[]" => free(0);
        "_ZdlPvm" as "operator delete(size)" => free(0);
        "_ZdaPvm" as "operator delete[](size)" => free(0);
        "_ZdlPvRKSt9nothrow_t" as "operator delete(nothrow)" => free(0);
        "_ZdaPvRKSt9nothrow_t" as "operator delete[](nothrow)" => free(0);
        "_ZdlPvSt11align_val_t" as "operator delete(align)" => free(0);
        "_ZdaPvSt11align_val_t" as "operator delete[](align)" => free(0);
        "_ZdlPvmSt11align_val_t" as "operator delete(size, align)" => free(0);
        "_ZdaPvmSt11align_val_t" as "operator delete[](size, align)" => free(0);
        "_ZdlPvSt11align_val_tRKSt9nothrow_t" as "operator delete(align, nothrow)" => free(0);
        "_ZdaPvSt11align_val_tRKSt9nothrow_t" as "operator delete[](align, nothrow)" => free(0);
    }
    Jemalloc {
        // (size, flags), (block, size, flags), (block, size, extra, flags), (block, size, flags), (block, flags).
        "mallocx" => alloc(0);
        "rallocx" => realloc(0, 1);
        "xallocx" => xallocx(0, 1);
        "sdallocx" => free(0);
        "dallocx" => free(0);
    }
    Tcmalloc {
        "tc_malloc" => alloc(0);
        "tc_malloc_skip_new_handler" => alloc(0);
        "tc_free" => free(0);
        "tc_free_sized" => free(0);
        "tc_free_aligned_sized" => free(0);
        "tc_realloc" => realloc(0, 1);
        "tc_calloc" => alloc_n(0, 1);
        "tc_cfree" => free(0);
        "tc_memalign" => alloc_aligned(0, 1);
        "tc_posix_memalign" => posix(0, 1, 2);
        "tc_valloc" => alloc(0);
        "tc_pvalloc" => alloc(0);
        "tc_new" => alloc(0);
        "tc_new_nothrow" => alloc(0);
        "tc_newarray" => alloc(0);
        "tc_newarray_nothrow" => alloc(0);
        "tc_new_aligned" => alloc_aligned(1, 0);
        "tc_new_aligned_nothrow" => alloc_aligned(1, 0);
        "tc_newarray_aligned" => alloc_aligned(1, 0);
        "tc_newarray_aligned_nothrow" => alloc_aligned(1, 0);
        "tc_delete" => free(0);
        "tc_delete_sized" => free(0);
        "tc_delete_nothrow" => free(0);
        "tc_deletearray" => free(0);
        "tc_deletearray_sized" => free(0);
        "tc_deletearray_nothrow" => free(0);
        "tc_delete_aligned" => free(0);
        "tc_delete_sized_aligned" => free(0);
        "tc_delete_aligned_nothrow" => free(0);
        "tc_deletearray_aligned" => free(0);
        "tc_deletearray_sized_aligned" => free(0);
        "tc_deletearray_aligned_nothrow" => free(0);
    }
    GoogleTcmalloc {
        "TCMallocInternalMalloc" as "malloc" => alloc(0);
        "TCMallocInternalFree" as "free" => free(0);
        "TCMallocInternalFreeSized" as "free_sized" => free(0);
        "TCMallocInternalFreeAlignedSized" as "free_aligned_sized" => free(0);
        "TCMallocInternalSdallocx" as "sdallocx" => free(0);
        "TCMallocInternalRealloc" as "realloc" => realloc(0, 1);
        "TCMallocInternalReallocArray" as "reallocarray" => realloc_n(0, 1, 2);
        "TCMallocInternalCalloc" as "calloc" => alloc_n(0, 1);
        "TCMallocInternalCfree" as "cfree" => free(0);
        "TCMallocInternalMemalign" as "memalign" => alloc_aligned(0, 1);
        "TCMallocInternalAlignedAlloc" as "aligned_alloc" => alloc_aligned(0, 1);
        "TCMallocInternalPosixMemalign" as "posix_memalign" => posix(0, 1, 2);
        "TCMallocInternalValloc" as "valloc" => alloc(0);
        "TCMallocInternalPvalloc" as "pvalloc" => alloc(0);
        "TCMallocInternalNew" as "operator new" => alloc(0);
        "TCMallocInternalNewNothrow" as "operator new(nothrow)" => alloc(0);
        "TCMallocInternalNewAligned" as "operator new(align)" => alloc_aligned(1, 0);
        "TCMallocInternalNewAlignedNothrow" as "operator new(align, nothrow)" => alloc_aligned(1, 0);
        "TCMallocInternalDelete" as "operator delete" => free(0);
        "TCMallocInternalDeleteSized" as "operator delete(size)" => free(0);
        "TCMallocInternalDeleteNothrow" as "operator delete(nothrow)" => free(0);
        "TCMallocInternalDeleteAligned" as "operator delete(align)" => free(0);
        "TCMallocInternalDeleteSizedAligned" as "operator delete(size, align)" => free(0);
        "TCMallocInternalDeleteAlignedNothrow" as "operator delete(align, nothrow)" => free(0);
        "__size_returning_new" => alloc(0);
        "__size_returning_new_aligned" => alloc_aligned(1, 0);
        "__size_returning_new_hot_cold" => alloc(0);
        "__size_returning_new_aligned_hot_cold" => alloc_aligned(1, 0);
        "tcmalloc_size_returning_operator_new" => alloc(0);
        "tcmalloc_size_returning_operator_new_aligned" => alloc_aligned(1, 0);
        "tcmalloc_size_returning_operator_new_hot_cold" => alloc(0);
        "tcmalloc_size_returning_operator_new_aligned_hot_cold" => alloc_aligned(1, 0);
        "tcmalloc_size_returning_operator_new_nothrow" => alloc(0);
        "tcmalloc_size_returning_operator_new_aligned_nothrow" => alloc_aligned(1, 0);
        "tcmalloc_size_returning_operator_new_hot_cold_nothrow" => alloc(0);
        "tcmalloc_size_returning_operator_new_aligned_hot_cold_nothrow" => alloc_aligned(1, 0);
    }
    Mimalloc {
        "mi_malloc" => alloc(0);
        "mi_calloc" => alloc_n(0, 1);
        "mi_realloc" => realloc(0, 1);
        // Returns the same block, or fails and leaves the old one live: a realloc that never moves.
        "mi_expand" => realloc(0, 1);
        "mi__expand" => realloc(0, 1);
        "mi_free" => free(0);
        "mi_malloc_small" => alloc(0);
        "mi_zalloc_small" => alloc(0);
        "mi_zalloc" => alloc(0);
        "mi_mallocn" => alloc_n(0, 1);
        "mi_reallocn" => realloc_n(0, 1, 2);
        "mi_reallocf" => realloc(0, 1);
        "mi_malloc_aligned" => alloc_aligned(1, 0);
        "mi_malloc_aligned_at" => alloc_aligned(1, 0);
        "mi_zalloc_aligned" => alloc_aligned(1, 0);
        "mi_zalloc_aligned_at" => alloc_aligned(1, 0);
        "mi_calloc_aligned" => alloc_n(0, 1);
        "mi_calloc_aligned_at" => alloc_n(0, 1);
        "mi_realloc_aligned" => realloc(0, 1);
        "mi_realloc_aligned_at" => realloc(0, 1);
        "mi_heap_malloc" => alloc(1);
        "mi_heap_zalloc" => alloc(1);
        "mi_heap_calloc" => alloc_n(1, 2);
        "mi_heap_mallocn" => alloc_n(1, 2);
        "mi_heap_malloc_small" => alloc(1);
        "mi_heap_realloc" => realloc(1, 2);
        "mi_heap_reallocn" => realloc_n(1, 2, 3);
        "mi_heap_reallocf" => realloc(1, 2);
        "mi_heap_malloc_aligned" => alloc_aligned(2, 1);
        "mi_heap_malloc_aligned_at" => alloc_aligned(2, 1);
        "mi_heap_zalloc_aligned" => alloc_aligned(2, 1);
        "mi_heap_zalloc_aligned_at" => alloc_aligned(2, 1);
        "mi_heap_calloc_aligned" => alloc_n(1, 2);
        "mi_heap_calloc_aligned_at" => alloc_n(1, 2);
        "mi_heap_realloc_aligned" => realloc(1, 2);
        "mi_heap_realloc_aligned_at" => realloc(1, 2);
        "mi_rezalloc" => realloc(0, 1);
        "mi_recalloc" => realloc_n(0, 1, 2);
        "mi_rezalloc_aligned" => realloc(0, 1);
        "mi_rezalloc_aligned_at" => realloc(0, 1);
        "mi_recalloc_aligned" => realloc_n(0, 1, 2);
        "mi_recalloc_aligned_at" => realloc_n(0, 1, 2);
        "mi_heap_rezalloc" => realloc(1, 2);
        "mi_heap_recalloc" => realloc_n(1, 2, 3);
        "mi_heap_rezalloc_aligned" => realloc(1, 2);
        "mi_heap_rezalloc_aligned_at" => realloc(1, 2);
        "mi_heap_recalloc_aligned" => realloc_n(1, 2, 3);
        "mi_heap_recalloc_aligned_at" => realloc_n(1, 2, 3);
        "mi_cfree" => free(0);
        "mi_posix_memalign" => posix(0, 1, 2);
        "mi_memalign" => alloc_aligned(0, 1);
        "mi_valloc" => alloc(0);
        "mi_pvalloc" => alloc(0);
        "mi_aligned_alloc" => alloc_aligned(0, 1);
        "mi_reallocarray" => realloc_n(0, 1, 2);
        "mi_aligned_recalloc" => realloc_n(0, 1, 2);
        "mi_aligned_offset_recalloc" => realloc_n(0, 1, 2);
        "mi_free_size" => free(0);
        "mi_free_size_aligned" => free(0);
        "mi_free_aligned" => free(0);
        "mi_new" => alloc(0);
        "mi_new_aligned" => alloc_aligned(1, 0);
        "mi_new_nothrow" => alloc(0);
        "mi_new_aligned_nothrow" => alloc_aligned(1, 0);
        "mi_new_n" => alloc_n(0, 1);
        "mi_new_realloc" => realloc(0, 1);
        "mi_new_reallocn" => realloc_n(0, 1, 2);
        // Copies of strings: the allocator's own calls within them are not those of its functions. Since 2.2 it has the C library's names.
        "mi_strdup" => string();
        "mi_strndup" => string();
        "mi_mbsdup" => string();
        "mi_heap_strdup" => string();
        "mi_heap_strndup" => string();
        "strdup" => string();
        "strndup" => string();
        "mi_heap_alloc_new" => alloc(1);
        "mi_heap_alloc_new_n" => alloc_n(1, 2);
        // Since 3.0: blocks whose actual size is returned, frees of small blocks, heaps of one thread.
        "mi_umalloc" => alloc(0);
        "mi_ucalloc" => alloc_n(0, 1);
        "mi_urealloc" => realloc(0, 1);
        "mi_ufree" => free(0);
        "mi_umalloc_aligned" => alloc_aligned(1, 0);
        "mi_uzalloc_aligned" => alloc_aligned(1, 0);
        "mi_umalloc_small" => alloc(0);
        "mi_uzalloc_small" => alloc(0);
        "mi_free_small" => free(0);
        "mi_free_small_nonnull" => free(0);
        "mi_free_small_local" => free(0);
        "mi_free_small_local_nonnull" => free(0);
        "mi_heap_zalloc_small" => alloc(1);
        "mi_theap_malloc" => alloc(1);
        "mi_theap_zalloc" => alloc(1);
        "mi_theap_calloc" => alloc_n(1, 2);
        "mi_theap_malloc_small" => alloc(1);
        "mi_theap_zalloc_small" => alloc(1);
        "mi_theap_malloc_aligned" => alloc_aligned(2, 1);
        "mi_theap_zalloc_aligned" => alloc_aligned(2, 1);
        "mi_theap_realloc" => realloc(1, 2);
        "mi_theap_rezalloc" => realloc(1, 2);
        "mi_theap_alloc_new" => alloc(1);
        "mi_theap_alloc_new_n" => alloc_n(1, 2);
        "mi_theap_alloc_new_nothrow" => alloc(1);
    }
    Snmalloc {
        "sn_rust_alloc" => alloc_aligned(0, 1);
        "sn_rust_alloc_zeroed" => alloc_aligned(0, 1);
        "sn_rust_realloc" => realloc(0, 3);
        "sn_rust_dealloc" => free(0);
    }
    Cpython {
        // The first argument is the allocator's context.
        "_PyObject_Malloc" => alloc(1);
        "_PyObject_Calloc" => alloc_n(1, 2);
        "_PyObject_Realloc" => realloc(1, 2);
        "_PyObject_Free" => free(1);
        // In front of these (src/sampler/preload/python.c).
        "fragprof_python_malloc" as "_PyObject_Malloc" => alloc(1);
        "fragprof_python_calloc" as "_PyObject_Calloc" => alloc_n(1, 2);
        "fragprof_python_realloc" as "_PyObject_Realloc" => realloc(1, 2);
        "fragprof_python_free" as "_PyObject_Free" => free(1);
    }
}

// The record's byte can hold every number.
const _: () = assert!(FUNCTIONS.len() <= 256);

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::collections::{BTreeMap, BTreeSet};

    use super::*;
    use crate::machine::register::argument_register;

    /// Parameter names of each function that a C header declares, in order: an independent description of the shapes.
    fn declared(header: &str, is_function: impl Fn(&str) -> bool) -> BTreeMap<String, Vec<String>> {
        let text = std::fs::read_to_string(header).unwrap();
        let mut functions = BTreeMap::new();
        for statement in text.split(';') {
            let Some(open) = statement.find('(') else { continue };
            // Attributes precede the name on some lines: take the first `name(` that is a function.
            let mut at = open;
            loop {
                let name: String = statement[..at]
                    .chars()
                    .rev()
                    .take_while(|c| c.is_alphanumeric() || *c == '_')
                    .collect::<Vec<_>>()
                    .iter()
                    .rev()
                    .collect();
                if is_function(&name) {
                    let inside = &statement[at + 1..at + statement[at..].find(')').unwrap()];
                    let names = inside
                        .split(',')
                        .map(|p| {
                            p.chars().rev().take_while(|c| c.is_alphanumeric() || *c == '_').collect::<Vec<_>>().iter().rev().collect()
                        })
                        .collect();
                    functions.entry(name).or_insert(names);
                    break;
                }
                match statement[at + 1..].find('(') {
                    Some(next) => at += 1 + next,
                    None => break,
                }
            }
        }
        functions
    }

    fn expect(function: &Function, parameters: &[String], role: impl Fn(&str) -> Option<&'static str>) {
        let index = |wanted: &str| parameters.iter().position(|p| role(p) == Some(wanted)).map(|i| i as u8);
        assert_eq!(function.shape.pointer, index("pointer"), "{} {parameters:?}", function.symbol);
        if function.shape.op == Op::Free {
            return;
        }
        assert_eq!(function.shape.size, index("size"), "{} {parameters:?}", function.symbol);
        // Where there is a number of elements too, or the block is resized, the alignment is not looked at.
        let is_aligned = index("count").is_none() && matches!(function.shape.op, Op::Alloc | Op::PosixMemalign);
        let alignment = index("alignment").filter(|_| is_aligned);
        assert_eq!(function.shape.count, index("count").or(alignment), "{} {parameters:?}", function.symbol);
        assert_eq!(function.shape.is_aligned, alignment.is_some(), "{} {parameters:?}", function.symbol);
    }

    #[test]
    fn mimallocs_shapes_are_those_of_its_header() {
        let header = declared("/usr/include/mimalloc.h", |name| {
            name.starts_with("mi_") && !name.starts_with("mi_attr") && !name.starts_with("mi_decl")
        });
        let mut checked = 0;
        for function in FUNCTIONS.iter().filter(|f| f.family == Family::Mimalloc) {
            let newer = ["mi_theap_", "mi_u", "mi_free_small", "mi_heap_zalloc_small", "str"]
                .iter()
                .any(|start| function.symbol.starts_with(start));
            let Some(parameters) = header.get(function.symbol) else {
                assert!(newer, "{} is not declared", function.symbol);
                continue;
            };
            expect(function, parameters, |name| match name {
                "p" => Some("pointer"),
                "size" | "newsize" => Some("size"),
                "count" | "newcount" => Some("count"),
                "alignment" => Some("alignment"),
                _ => None,
            });
            checked += 1;
        }
        assert!(checked > 60);
    }

    #[test]
    fn tcmallocs_shapes_are_those_of_its_header() {
        let header = declared("/usr/include/gperftools/tcmalloc.h", |name| name.starts_with("tc_"));
        for function in FUNCTIONS.iter().filter(|f| f.family == Family::Tcmalloc) {
            let Some(parameters) = header.get(function.symbol) else {
                // Since 2.17.
                assert_eq!(function.symbol, "tc_free_aligned_sized", "is not declared");
                continue;
            };
            expect(function, parameters, |name| match name {
                "p" | "ptr" => Some("pointer"),
                "size" | "__size" => Some("size"),
                "nmemb" => Some("count"),
                "align" | "al" | "__alignment" | "alignment" => Some("alignment"),
                _ => None,
            });
        }
    }

    #[test]
    fn jemallocs_shapes_are_those_of_its_header() {
        let header = declared("/usr/include/jemalloc/jemalloc.h", |name| name.starts_with("je_"));
        for function in FUNCTIONS.iter().filter(|f| f.family == Family::Jemalloc) {
            let parameters = &header[&format!("je_{}", function.symbol)];
            expect(function, parameters, |name| match name {
                "ptr" => Some("pointer"),
                "size" => Some("size"),
                _ => None,
            });
        }
    }

    #[test]
    fn no_symbol_is_listed_twice() {
        let symbols: BTreeSet<_> = FUNCTIONS.iter().map(|f| f.symbol).collect();
        assert_eq!(symbols.len(), FUNCTIONS.len());
    }

    #[test]
    fn every_argument_that_a_shape_names_is_in_a_register() {
        for function in FUNCTIONS {
            let Shape { op, size, count, pointer, .. } = function.shape;
            for index in [size, count, pointer].into_iter().flatten() {
                assert!(argument_register(index).is_some(), "{}", function.symbol);
            }
            assert_eq!(size.is_some(), !matches!(op, Op::Free | Op::AllocString), "{}", function.symbol);
            assert_eq!(pointer.is_some(), !matches!(op, Op::Alloc | Op::AllocString), "{}", function.symbol);
        }
    }
}
