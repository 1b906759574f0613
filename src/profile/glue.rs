//! Which frames are the allocator's own and which are allocation code of standard libraries, so that a stack can be shown without the
//! former and titled by the function that allocated the memory. Pure.

use crate::frame::Frame;

/// Exact names of functions of the allocators' interfaces and inside of them; Go's are for its own profiles, the last ones are the allocators
/// that Python and Perl have on top of malloc.
const ALLOCATORS: &[&str] = &[
    "malloc",
    "calloc",
    "realloc",
    "reallocarray",
    "memalign",
    "aligned_alloc",
    "posix_memalign",
    "valloc",
    "pvalloc",
    "__malloc",
    "__calloc",
    "__realloc",
    "__memalign",
    "__posix_memalign",
    "default_malloc",
    "mallocx",
    "rallocx",
    "xallocx",
    "mmap",
    "mmap64",
    "__mmap",
    "brk",
    "sbrk",
    "__sbrk",
    "mremap",
    "tmalloc_large",
    "sysmalloc",
    "runtime.mallocgc",
    "runtime.newobject",
    "runtime.makeslice",
    "runtime.growslice",
    "PyObject_Malloc",
    "PyObject_Calloc",
    "PyObject_Realloc",
    "_PyObject_Malloc",
    "_PyObject_Calloc",
    "_PyObject_Realloc",
    "pymalloc_alloc",
    "pymalloc_realloc",
    "allocate_from_new_pool",
    "new_arena",
    "Perl_safesysmalloc",
    "Perl_safesyscalloc",
    "Perl_safesysrealloc",
];

/// Prefixes of names of allocators' functions.
const ALLOCATOR_PREFIXES: &[&str] = &[
    "operator new",
    "__libc_malloc",
    "__libc_calloc",
    "__libc_realloc",
    "__libc_memalign",
    "__GI___libc_malloc",
    "__GI___libc_calloc",
    "__GI___libc_realloc",
    "__GI___libc_memalign",
    "__default_morecore",
    "__glibc_morecore",
    "_int_malloc",
    "_int_realloc",
    "_int_memalign",
    "_mid_memalign",
    "tcache_",
    "arena_get",
    "je_",
    "_rjem_",
    "_mi_",
    "sn_rust_",
    "snmalloc::",
    "tc_malloc",
    "tc_new",
    "tc_calloc",
    "tc_realloc",
    "tcmalloc::",
    "(anonymous namespace)::do_malloc",
    "__rust_alloc",
    "__rust_realloc",
    "__rustc::__rust_alloc",
    "__rustc::__rust_realloc",
    "__rdl_",
    "__rg_",
    "PyMem_",
    "_PyMem_",
    "fragprof_python_",
];

/// mimalloc's interface: the prefix alone is also that of MyISAM (`mi_open`).
fn is_mimallocs(function: &str) -> bool {
    function
        .strip_prefix("mi_")
        .is_some_and(|rest| rest.contains("alloc") || rest.starts_with("new") || rest.starts_with("heap_") || rest.ends_with("dup"))
}

/// Exact names of functions of the C library that allocate for their caller.
const LIBRARY: &[&str] = &["strdup", "__strdup", "strndup", "__strndup"];

/// Ends of the names of a C program's own wrappers around the allocator: `xmalloc`, `zcalloc`.
const WRAPPER_ENDS: &[&str] = &["malloc", "calloc", "zalloc", "realloc", "reallocarray", "strdup", "strndup", "memdup"];

/// What may follow them in a name, in any number: `ztrymalloc_usable_internal`, `g_malloc0_n`.
const WRAPPER_TAILS: &[&str] = &["_usable", "_internal", "_impl", "_n", "0"];

/// What a compiler appends to the name of a part or a copy of a function.
const COPIES: &[&str] = &[".part.", ".constprop.", ".isra.", ".cold"];

/// Prefixes of names: functions of the C++ and Rust libraries between the allocator and the program.
const LIBRARY_PREFIXES: &[&str] = &[
    "__GI_",
    "__gnu_cxx::new_allocator<",
    "std::__new_allocator<",
    "std::allocator<",
    "std::allocator_traits<",
    "std::_Vector_base<",
    "std::__allocated_ptr",
    "std::__allocate_guarded",
    "std::__cxx11::basic_string<",
    "std::basic_string<",
    "std::__detail::_Hashtable_alloc<",
    "std::_Rb_tree<",
    "std::__cxx11::_List_base<",
    "std::__cxx11::list<",
    "std::_Deque_base<",
    "std::make_unique<",
    "std::make_shared<",
    "std::allocate_shared<",
    "std::__shared_count<",
    "std::__shared_ptr<",
    "std::shared_ptr<",
    "__rust_",
    "alloc::",
    "<alloc::",
    "<std::alloc::",
    "std::alloc::",
    "std::sys::alloc::",
    "hashbrown::raw::",
];

/// Member functions that only grow a container: `std::vector<…>::push_back` and the like. The name starts with the first part and holds
/// the second.
const MEMBERS: &[(&str, &str)] = &[
    ("std::vector<", ">::_M_"),
    ("std::vector<", ">::push_back"),
    ("std::vector<", ">::emplace_back"),
    ("std::vector<", ">::reserve"),
    ("std::vector<", ">::resize"),
    ("std::vector<", ">::vector"),
    ("std::vector<", ">::insert"),
    ("std::deque<", ">::_M_"),
    ("std::deque<", ">::push_back"),
    ("std::map<", ">::operator[]"),
    ("std::unordered_map<", ">::operator[]"),
    ("std::_Hashtable<", ">::"),
    ("std::__detail::_Map_base<", ">::operator[]"),
    ("void std::vector<", ">::_M_"),
    ("void std::__cxx11::basic_string<", ">::_M_"),
];

/// Parts of source paths of standard libraries: their inlined functions often have no full name in the debug information.
const LIBRARY_SOURCES: &[&str] =
    &["/include/c++/", "/c++/v1/", "/library/alloc/src/", "/library/std/src/alloc.rs", "/library/std/src/sys/alloc/"];

/// Functions that start threads and processes: the same at the root of every stack.
const STARTUP: &[&str] = &[
    "_start",
    "__libc_start_main",
    "__libc_start_main_impl",
    "__libc_start_main_alias_2",
    "__libc_start_call_main",
    "start_thread",
    "clone",
    "__clone",
    "clone3",
    "__clone3",
    "__GI___clone3",
];

/// Whether a frame is an allocator's own.
fn is_allocators(frame: &Frame) -> bool {
    let function = &*frame.function;
    ALLOCATORS.contains(&function) || ALLOCATOR_PREFIXES.iter().any(|start| function.starts_with(start)) || is_mimallocs(function)
}

/// Whether a function only wraps the allocator, by its name: who calls it says what the memory is for.
fn is_wrapper(function: &str) -> bool {
    let mut name = COPIES.iter().find_map(|copy| function.split_once(copy)).map_or(function, |(name, _)| name);
    while let Some(shorter) = WRAPPER_TAILS.iter().find_map(|tail| name.strip_suffix(tail)) {
        name = shorter;
    }
    let ends_with =
        |end: &&str| name.len().checked_sub(end.len()).and_then(|at| name.get(at..)).is_some_and(|last| last.eq_ignore_ascii_case(end));
    WRAPPER_ENDS.iter().any(ends_with) && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
}

/// Whether a frame is an allocator's, a standard library's on the way to one, or a wrapper around one.
pub(super) fn is_allocation_code(frame: &Frame) -> bool {
    let function = &*frame.function;
    is_allocators(frame)
        || is_wrapper(function)
        || LIBRARY.contains(&function)
        || LIBRARY_SOURCES.iter().any(|part| frame.file.contains(part))
        || LIBRARY_PREFIXES.iter().any(|start| function.starts_with(start))
        || MEMBERS.iter().any(|(start, part)| function.starts_with(start) && function.contains(part))
}

/// Number of frames at the leaf that are the allocator's own: the same in every stack, so flame graphs and pprof files omit them. 0 if all
/// frames are.
pub fn allocator_frames<'a>(frames: impl ExactSizeIterator<Item = &'a Frame>) -> usize {
    leading(frames, is_allocators)
}

/// Number of frames at the leaf that are allocation code. 0 if all frames are: a stack needs a title.
pub fn leading_frames<'a>(frames: impl ExactSizeIterator<Item = &'a Frame>) -> usize {
    leading(frames, is_allocation_code)
}

fn leading<'a>(frames: impl ExactSizeIterator<Item = &'a Frame>, is_one: impl Fn(&Frame) -> bool) -> usize {
    let all = frames.len();
    let (mut leading, mut inlined) = (0, 0);
    for frame in frames {
        // What is inlined into an allocator's function is the allocator's, whatever its name (`imalloc_fastpath`). Not so with a library's
        // function: a program's constructor may be inlined into it.
        if is_one(frame) && (inlined == 0 || is_allocators(frame)) {
            leading += inlined + 1;
            inlined = 0;
        } else if frame.flags.inlined {
            inlined += 1;
        } else {
            break;
        }
    }
    if leading == all { 0 } else { leading }
}

/// Prefixes of glibc's and musl's internal names of their functions, as a statically linked program shows them.
const INNER_NAMES: [&str; 4] = ["__GI___libc_", "__libc_", "default_", "__"];

/// The allocator's function that the program called, as a programmer knows it, without its parameters: `operator new`, `calloc`.
pub fn allocated_by<'a>(frames: &[&'a Frame]) -> Option<&'a str> {
    let own = allocator_frames(frames.iter().copied());
    let function = &*frames.get(own.checked_sub(1)?)?.function;
    let name = function.split_once('(').map_or(function, |(name, _)| if name.is_empty() { function } else { name });
    let outer = |inner: &&str| name.strip_prefix(*inner).filter(|outer| ALLOCATORS.contains(outer));
    Some(INNER_NAMES.iter().find_map(outer).unwrap_or(name))
}

/// Number of frames at the root that only start the thread or the process. 0 if all frames do.
pub fn startup_frames<'a>(frames: impl DoubleEndedIterator<Item = &'a Frame> + ExactSizeIterator) -> usize {
    let all = frames.len();
    let startup = frames.rev().take_while(|frame| STARTUP.contains(&&*frame.function)).count();
    if startup == all { 0 } else { startup }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::FrameFlags;

    #[test]
    fn an_inlined_library_function_is_known_by_its_source_file() {
        let library = Frame { file: "/usr/include/c++/12/bits/unique_ptr.h".into(), ..Frame::named("make<Product>") };
        let frames = [Frame::named("malloc"), library, Frame::named("load")];
        assert_eq!(leading_frames(frames.iter()), 2);
    }

    #[test]
    fn functions_of_a_static_c_library_are_the_allocators_under_their_inner_names() {
        for (inner, name) in
            [("__realloc", "realloc"), ("default_malloc", "malloc"), ("__libc_calloc", "calloc"), ("__rust_alloc", "__rust_alloc")]
        {
            let frames = [Frame::named(inner), Frame::named("work"), Frame::named("main")];
            assert_eq!(allocator_frames(frames.iter()), 1, "{inner}");
            assert_eq!(allocated_by(&frames.each_ref()), Some(name));
        }
    }

    #[test]
    fn what_is_inlined_into_an_allocators_function_is_the_allocators() {
        let inlined = |name: &str| Frame { flags: FrameFlags { inlined: true, ..FrameFlags::default() }, ..Frame::named(name) };
        let redis = [inlined("imalloc_fastpath"), Frame::named("je_malloc"), inlined("ztrymalloc"), Frame::named("sdsnew")];
        assert_eq!((allocator_frames(redis.iter()), leading_frames(redis.iter())), (2, 3), "and its wrapper is its own, but no title");
        let made = [Frame::named("malloc"), inlined("Item::Item"), Frame::named("std::vector<Item>::emplace_back"), Frame::named("main")];
        assert_eq!((allocator_frames(made.iter()), leading_frames(made.iter())), (1, 1), "a program's constructor");
    }

    #[test]
    fn the_start_of_a_process_or_thread_is_recognised_at_the_root_alone() {
        let frames = |names: &[&str]| names.iter().map(|&n| Frame::named(n)).collect::<Vec<_>>();
        assert_eq!(
            startup_frames(frames(&["malloc", "clone", "main", "__libc_start_call_main", "__libc_start_main_impl", "_start"]).iter()),
            3
        );
        assert_eq!(startup_frames(frames(&["worker", "start_thread", "clone3"]).iter()), 2);
        assert_eq!(startup_frames(frames(&["_start"]).iter()), 0);
    }

    fn title<'a>(functions: &[&'a str]) -> &'a str {
        let frames: Vec<Frame> = functions.iter().map(|&f| Frame::named(f)).collect();
        functions[leading_frames(frames.iter())]
    }

    #[test]
    fn a_stack_is_titled_by_the_function_that_allocated_memory() {
        assert_eq!(title(&["malloc", "operator new(unsigned long)", "shop::create(int)", "main"]), "shop::create(int)");
        assert_eq!(
            title(&[
                "operator new(unsigned long)",
                "std::__new_allocator<int>::allocate(unsigned long, void const*)",
                "void std::vector<int, std::allocator<int> >::_M_realloc_insert<int>(int&&)",
                "std::vector<int, std::allocator<int> >::push_back(int&&)",
                "shop::fill(std::vector<int>&)",
            ]),
            "shop::fill(std::vector<int>&)"
        );
        assert_eq!(title(&["malloc", "__rdl_alloc", "alloc::raw_vec::RawVec<T,A>::grow_one", "cart::fill"]), "cart::fill");
    }

    #[test]
    fn a_wrapper_around_the_allocator_is_no_title_but_what_only_sounds_like_one_is() {
        for wrapper in ["xmalloc", "zcalloc", "ztrymalloc_usable_internal", "g_malloc0_n", "CRYPTO_zalloc", "xmlStrdup", "xrealloc.part.0"]
        {
            assert_eq!(title(&["malloc", wrapper, "load_config", "main"]), "load_config", "{wrapper}");
        }
        for own in ["shop::malloc_all", "buffer_alloc", "mallocator", "com.shop.Strdup", "reallocate"] {
            assert_eq!(title(&["malloc", own, "main"]), own);
        }
        assert_eq!(title(&["malloc", "load", "xmalloc", "main"]), "load", "further up it is a frame like any other");
    }

    #[test]
    fn a_function_of_the_program_is_never_skipped_because_its_arguments_hold_a_container() {
        assert_eq!(title(&["malloc", "shop::index(std::vector<int>::iterator)", "main"]), "shop::index(std::vector<int>::iterator)");
    }

    #[test]
    fn the_allocators_own_frames_are_distinguished_from_a_librarys_and_from_a_programs_of_similar_name() {
        let own = |functions: &[&str]| {
            let frames: Vec<Frame> = functions.iter().map(|&f| Frame::named(f)).collect();
            let own = allocator_frames(frames.iter());
            (own, allocated_by(&frames.iter().collect::<Vec<_>>()).map(str::to_owned))
        };
        let by = |name: &str| Some(name.to_owned());
        assert_eq!(own(&["malloc", "operator new(unsigned long)", "std::make_unique<A>", "load"]), (2, by("operator new")));
        assert_eq!(own(&["__libc_calloc", "main"]), (1, by("calloc")));
        assert_eq!(own(&["_PyMem_RawMalloc", "PyMem_Malloc", "dictresize"]), (2, by("PyMem_Malloc")));
        assert_eq!(own(&["malloc", "mi_open", "main"]), (1, by("malloc")), "MyISAM's");
        assert_eq!(own(&["mi_heap_malloc_aligned", "main"]).0, 1);
        assert_eq!(own(&["strdup", "main"]), (0, None));
        assert_eq!(own(&["malloc", "je_arena_init"]), (0, None), "a stack keeps a frame");
    }

    #[test]
    fn a_stack_of_allocation_code_alone_is_titled_by_its_leaf() {
        assert_eq!(title(&["malloc", "je_arena_init"]), "malloc");
    }
}
