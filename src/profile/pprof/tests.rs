#![allow(clippy::unwrap_used)]

use std::io::Write as _;
use std::path::PathBuf;
use std::process::Command;

use flate2::Compression;
use flate2::write::GzEncoder;
use proptest::prelude::*;
use prost::Message;

use super::*;
use crate::frame::{MODULE_JAVA_COMPILED, MODULE_JIT};
use crate::profile::testing::{frame, shop};
use crate::profile::*;

fn encoded(profile: &Profile) -> Vec<u8> {
    let mut file = Vec::new();
    write(profile, &mut file).unwrap();
    file
}

/// A profile as plain values, in the order it has, to compare two.
fn flat(profile: &Profile) -> Vec<(u32, Vec<Frame>, Option<String>, Values)> {
    let row = |s: &Stack| (s.pid, profile.frames_of(s).cloned().collect(), s.truncated.as_deref().map(str::to_owned), s.values);
    profile.stacks().iter().map(row).collect()
}

#[test]
fn estimates_come_back_with_their_standard_errors() {
    let mut profile = shop();
    profile.meta.mode = Mode::Sampled;
    let values = Values::default().with(ValueKind::InuseSpace, 1 << 30).with(ValueKind::InuseObjects, 77);
    let errors = StandardErrors::default().with(ValueKind::InuseSpace, 23_000_000).with(ValueKind::InuseObjects, 5);
    profile.add_estimate(4242, &[Frame::named("estimated")], None, &values, &errors);
    let mut bytes = Vec::new();
    write(&profile, &mut bytes).unwrap();
    let back = read(&*bytes).unwrap();
    assert_eq!(back.meta.mode, Mode::Sampled);
    assert_eq!(back.stacks().last().unwrap().errors, errors);
    assert_eq!(back.total_errors(), errors);
}

#[test]
fn a_profile_comes_back_from_its_file_without_loss() {
    let before = shop();
    let after = read(encoded(&before).as_slice()).unwrap();
    assert_eq!(after.meta, before.meta);
    assert_eq!(flat(&after), flat(&before));
}

#[test]
fn the_fixed_sample_types_come_first_and_in_their_order() {
    let message = encode(&shop());
    let text = |i: i64| message.string_table[i as usize].as_str();
    let types: Vec<String> = message.sample_type.iter().map(|t| format!("{}/{}", text(t.r#type), text(t.unit))).collect();
    assert_eq!(
        types,
        [
            "alloc_objects/count",
            "alloc_space/bytes",
            "inuse_objects/count",
            "inuse_space/bytes",
            "pinned_space/bytes",
            "blocked_space/bytes",
            "growth_space/bytes",
            "peak_space/bytes",
            "doubtful_space/bytes"
        ]
    );
    assert_eq!(text(message.default_sample_type), "inuse_space");
}

#[test]
fn an_inlined_frame_shares_its_callers_location() {
    let message = encode(&shop());
    let stack = &message.sample[1];
    assert_eq!(stack.location_id.len(), 2, "Buffer::grow in Cache::insert, main; malloc is a label");
    let location = &message.location[stack.location_id[0] as usize - 1];
    let names: Vec<&str> = location
        .line
        .iter()
        .map(|line| message.string_table[message.function[line.function_id as usize - 1].name as usize].as_str())
        .collect();
    assert_eq!(names, ["Buffer::grow(unsigned long)", "Cache::insert(std::string, std::string)"]);
    assert_eq!(location.address, 0x1000 + 61);
}

#[test]
fn samples_go_without_the_allocators_frames_and_a_label_names_the_function_that_was_called() {
    let mut profile = shop();
    let inlined = Frame { flags: FrameFlags { inlined: true, ..FrameFlags::default() }, ..frame("PyMem_Malloc", 3) };
    profile.add(4242, &[frame("malloc", 2), inlined, frame("list_resize", 3), frame("main", 4)], None, &Values::default());
    let message = encode(&profile);
    let text = |i: i64| message.string_table[i as usize].as_str();
    let called: Vec<Vec<&str>> = (message.sample.iter())
        .map(|sample| sample.label.iter().filter(|label| text(label.key) == LABEL_ALLOCATED_BY).map(|label| text(label.str)).collect())
        .collect();
    assert_eq!(called, [vec!["operator new(unsigned long)"], vec!["malloc"], vec!["malloc"], vec![], vec!["PyMem_Malloc"]]);
    let names: Vec<&str> = message.function.iter().map(|function| text(function.name)).collect();
    assert!(!names.iter().any(|name| ["malloc", "PyMem_Malloc", "operator new(unsigned long)"].contains(name)), "{names:?}");
    let back = read(encoded(&profile).as_slice()).unwrap();
    assert_eq!(flat(&back), flat(&profile));
}

#[test]
fn without_its_table_a_file_still_names_the_allocators_function() {
    let mut message = encode(&shop());
    message.comment.truncate(1);
    let back = read(message.encode_to_vec().as_slice()).unwrap();
    let leaf = |at: usize| back.frames_of(&back.stacks()[at]).next().unwrap().clone();
    assert_eq!([leaf(0), leaf(1)], [Frame::named("operator new(unsigned long)"), Frame::named("malloc")]);
}

#[test]
fn the_default_sample_type_is_one_that_has_something_in_it() {
    let default_of = |profile: &Profile| {
        let message = encode(profile);
        message.string_table[message.default_sample_type as usize].clone()
    };
    let mut governed = Profile::new(Metadata { mode: Mode::Governed, ..Metadata::default() });
    let kinds = [ValueKind::AllocSpace, ValueKind::SurvivorSpace, ValueKind::LargeSpace];
    governed.meta.kinds = kinds.into_iter().collect();
    let values = |kind| Values::default().with(ValueKind::AllocSpace, 9).with(kind, 5);
    governed.add(1, &[], None, &values(ValueKind::LargeSpace));
    governed.add(1, &[frame("f", 1)], None, &values(ValueKind::SurvivorSpace));
    assert_eq!(default_of(&governed), "survivor_space", "of large blocks there is only what nobody owns");
    governed.add(1, &[frame("g", 1)], None, &values(ValueKind::LargeSpace));
    assert_eq!(default_of(&governed), "large_space");
    assert_eq!(default_of(&shop()), "inuse_space");
}

#[test]
fn values_beyond_a_signed_number_are_capped() {
    let mut profile = Profile::default();
    profile.add(0, &[frame("f", 1)], None, &Values::default().with(ValueKind::InuseSpace, u64::MAX));
    assert_eq!(encode(&profile).sample[0].value[3], i64::MAX);
}

/// The path of a program, or `None` with a word on standard error.
fn tool(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    let found = std::env::split_paths(&path).map(|dir| dir.join(name)).find(|file| file.is_file());
    if found.is_none() {
        assert!(std::env::var_os("CI").is_none(), "{name} is needed under CI");
        eprintln!("skipped: {name} is not installed");
    }
    found
}

#[test]
fn go_tool_pprof_shows_each_sample_type_with_our_totals() {
    let Some(go) = tool("go") else { return };
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("shop.pb.gz");
    let profile = shop();
    std::fs::write(&path, encoded(&profile)).unwrap();
    for kind in profile.meta.kinds.iter() {
        let total: u64 = profile.stacks().iter().map(|s| s.values.get(kind)).sum();
        let index = format!("-sample_index={}", kind.name());
        let unit = if kind.unit() == "bytes" { "-unit=B" } else { "-unit=minimum" };
        let output = Command::new(&go).args(["tool", "pprof", "-top", "-symbolize=none", unit, &index]).arg(&path).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{index}: {}", String::from_utf8_lossy(&output.stderr));
        assert!(text.contains(&format!("Type: {}", kind.name())), "{index}: {text}");
        assert!(text.contains("Duration: 10.25s"), "{text}");
        if total > 0 {
            let unit = if kind.unit() == "bytes" { "B" } else { "" };
            assert!(text.contains(&format!("of {total}{unit} total")), "{index}: {total} not in {text}");
        }
    }
}

#[test]
fn what_go_tool_pprof_writes_again_still_says_everything() {
    let Some(go) = tool("go") else { return };
    let dir = tempfile::tempdir().unwrap();
    let (path, again) = (dir.path().join("shop.pb.gz"), dir.path().join("again.pb.gz"));
    let before = shop();
    std::fs::write(&path, encoded(&before)).unwrap();
    let output = Command::new(go).args(["tool", "pprof", "-proto", "-symbolize=none", "-output"]).arg(&again).arg(&path).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let after = read_file(&again).unwrap();
    assert_eq!(after.meta, before.meta);
    let sorted = |profile| {
        let mut rows = flat(profile);
        rows.sort_by_key(|(pid, frames, ..)| (*pid, frames.iter().map(|f| f.function.clone()).collect::<Vec<_>>()));
        rows
    };
    assert_eq!(sorted(&after), sorted(&before));
}

#[test]
fn the_rust_messages_are_those_of_the_proto_file() {
    let Some(protoc) = tool("protoc") else { return };
    // Every field of every message has a value of its own, so a wrong number, name or type shows.
    let value_type = proto::ValueType { r#type: 101, unit: 102 };
    let message = proto::Profile {
        sample_type: vec![value_type],
        sample: vec![proto::Sample {
            location_id: vec![103],
            value: vec![104],
            label: vec![proto::Label { key: 105, str: 106, num: 107, num_unit: 108 }],
        }],
        mapping: vec![proto::Mapping {
            id: 109,
            memory_start: 110,
            memory_limit: 111,
            file_offset: 112,
            filename: 113,
            build_id: 114,
            has_functions: true,
            has_filenames: true,
            has_line_numbers: true,
            has_inline_frames: true,
        }],
        location: vec![proto::Location {
            id: 115,
            mapping_id: 116,
            address: 117,
            line: vec![proto::Line { function_id: 118, line: 119, column: 120 }],
            is_folded: true,
        }],
        function: vec![proto::Function { id: 121, name: 122, system_name: 123, filename: 124, start_line: 125 }],
        string_table: vec!["s".into()],
        drop_frames: 126,
        keep_frames: 127,
        time_nanos: 128,
        duration_nanos: 129,
        period_type: Some(proto::ValueType { r#type: 130, unit: 131 }),
        period: 132,
        comment: vec![133],
        default_sample_type: 134,
        doc_url: 135,
    };
    let mut child = Command::new(protoc)
        .args(["--decode=perftools.profiles.Profile", "--proto_path=proto", "proto/profile.proto"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(&message.encode_to_vec()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success());
    let decoded: String = String::from_utf8(output.stdout).unwrap().split_whitespace().collect::<Vec<_>>().join(" ");
    // Rust's own names and numbers, in the same notation.
    let debug = "sample_type { type: 101 unit: 102 } sample { location_id: 103 value: 104 label { key: 105 str: 106 num: 107 \
                 num_unit: 108 } } mapping { id: 109 memory_start: 110 memory_limit: 111 file_offset: 112 filename: 113 build_id: 114 \
                 has_functions: true has_filenames: true has_line_numbers: true has_inline_frames: true } location { id: 115 \
                 mapping_id: 116 address: 117 line { function_id: 118 line: 119 column: 120 } is_folded: true } function { id: 121 \
                 name: 122 system_name: 123 filename: 124 start_line: 125 } string_table: \"s\" drop_frames: 126 keep_frames: 127 \
                 time_nanos: 128 duration_nanos: 129 period_type { type: 130 unit: 131 } period: 132 comment: 133 \
                 default_sample_type: 134 doc_url: 135";
    assert_eq!(decoded, debug);
}

// Foreign profiles.

/// A profile as other tools write it: not symbolized, no labels, runtime addresses.
fn foreign(types: &[(&str, &str)], values: Vec<i64>) -> Vec<u8> {
    let mut strings = vec![String::new(), "/opt/app/bin".into(), "main.work".into(), "work.go".into()];
    let mut id = |text: &str| {
        strings.push(text.into());
        strings.len() as i64 - 1
    };
    let sample_type = types.iter().map(|(t, u)| proto::ValueType { r#type: id(t), unit: id(u) }).collect();
    proto::Profile {
        sample_type,
        sample: vec![proto::Sample { location_id: vec![7, 9], value: values, label: vec![] }],
        mapping: vec![proto::Mapping {
            id: 3,
            memory_start: 0x400000,
            memory_limit: 0x500000,
            file_offset: 0x1000,
            filename: 1,
            ..Default::default()
        }],
        location: vec![
            proto::Location { id: 9, mapping_id: 3, address: 0x400123, line: vec![], is_folded: false },
            proto::Location {
                id: 7,
                mapping_id: 3,
                address: 0x400456,
                line: vec![proto::Line { function_id: 5, line: 33, column: 2 }],
                is_folded: false,
            },
        ],
        function: vec![proto::Function { id: 5, name: 2, filename: 3, ..Default::default() }],
        string_table: strings,
        duration_nanos: 2_000_000_000,
        ..Default::default()
    }
    .encode_to_vec()
}

#[test]
fn a_foreign_heap_profile_is_read_as_far_as_its_sample_types_go() {
    let bytes = foreign(&[("contentions", "count"), ("inuse_space", "bytes"), ("inuse_objects", "count")], vec![5, 4096, 2]);
    let profile = read(bytes.as_slice()).unwrap();
    assert_eq!(profile.meta.mode, Mode::Imported);
    assert_eq!(profile.meta.duration_s, 2.0);
    assert_eq!(profile.meta.kinds.iter().collect::<Vec<_>>(), [ValueKind::InuseObjects, ValueKind::InuseSpace]);
    let stack = &profile.stacks()[0];
    assert_eq!((stack.values.get(ValueKind::InuseSpace), stack.values.get(ValueKind::InuseObjects)), (4096, 2));
    let names: Vec<&str> = profile.frames_of(stack).map(|f| &*f.function).collect();
    assert_eq!(names, ["main.work", "[bin+0x1123]"]);
}

#[test]
fn the_older_names_of_converted_heap_profiles_are_known() {
    let profile = read(foreign(&[("objects", "count"), ("space", "bytes")], vec![3, 300]).as_slice()).unwrap();
    assert_eq!(profile.totals().get(ValueKind::InuseSpace), 300);
    assert_eq!(profile.totals().get(ValueKind::InuseObjects), 3);
}

#[test]
fn a_cpu_profile_is_refused_by_name() {
    let error = read(foreign(&[("samples", "count"), ("cpu", "nanoseconds")], vec![3, 300]).as_slice()).err().unwrap();
    assert_eq!(
        error.to_string(),
        "the profile has no heap values: its sample types are samples/count, cpu/nanoseconds; fragprof reads inuse_space, alloc_space and the like"
    );
}

#[test]
fn a_difference_of_profiles_is_refused() {
    let error = read(foreign(&[("inuse_space", "bytes")], vec![-1]).as_slice()).err().unwrap();
    assert!(error.to_string().contains("negative"), "{error}");
}

#[test]
fn a_go_program_s_own_heap_profile_is_read() {
    let Some(go) = tool("go") else { return };
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("main.go");
    let out = dir.path().join("heap.pb.gz");
    std::fs::write(
        &source,
        "package main\nimport (\"os\"; \"runtime\"; \"runtime/pprof\")\nvar kept [][]byte\n//go:noinline\nfunc keep() { for i := 0; i < \
         100; i++ { kept = append(kept, make([]byte, 65536)) } }\nfunc main() { runtime.MemProfileRate = 1; keep(); runtime.GC(); f, _ := \
         os.Create(os.Args[1]); pprof.Lookup(\"heap\").WriteTo(f, 0); f.Close(); runtime.KeepAlive(kept) }\n",
    )
    .unwrap();
    let run = Command::new(go).arg("run").arg(&source).arg(&out).env("GO111MODULE", "off").output().unwrap();
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    let profile = read_file(&out).unwrap();
    let kept: u64 = profile
        .stacks()
        .iter()
        .filter(|stack| profile.frames_of(stack).any(|f| &*f.function == "main.keep" && f.line == 5))
        .map(|stack| stack.values.get(ValueKind::InuseSpace))
        .sum();
    assert!((100 * 65536..101 * 65536).contains(&kept), "{kept}");
}

// Hostile input.

fn refused(bytes: &[u8]) -> String {
    read(bytes).expect_err("refused").to_string()
}

#[test]
fn files_that_are_something_else_are_named() {
    assert_eq!(refused(b""), "the file is empty");
    assert!(refused(b"heap profile:   1:  16 [ 1: 16] @ heapprofile").contains("text heap profile of gperftools"));
    assert!(refused(b"\x7fELF\x02\x01\x01").contains("an ELF file"));
    assert!(refused(b"{\"totals\":{}}").contains("a JSON file"));
    assert!(refused(b"just some text, nothing else").starts_with("not a valid pprof profile"));
}

#[test]
fn a_file_cut_at_any_byte_is_refused_with_a_reason() {
    let whole = encoded(&shop());
    for len in 0..whole.len() {
        assert!(!refused(&whole[..len]).is_empty(), "cut at {len}");
    }
}

#[test]
fn a_plain_profile_cut_at_any_byte_never_panics() {
    let whole = encode(&shop()).encode_to_vec();
    for len in 0..whole.len() {
        // A cut between two fields may leave a profile that is valid and smaller.
        let _ = read(&whole[..len]);
    }
}

#[test]
fn a_gzip_bomb_is_stopped_at_the_limit() {
    let mut gzip = GzEncoder::new(Vec::new(), Compression::fast());
    gzip.write_all(&vec![0u8; 1 << 20]).unwrap();
    let bomb = gzip.finish().unwrap();
    assert!(bomb.len() < 100_000);
    assert_eq!(read::decompress(&bomb, 1 << 20).unwrap().len(), 1 << 20);
    let error = read::decompress(&bomb, (1 << 20) - 1).unwrap_err();
    assert!(error.to_string().contains("the decompressed size in bytes is above the limit of 1048575"), "{error}");
}

#[test]
fn a_table_of_countless_empty_entries_is_stopped_at_the_limit() {
    let bytes = [0x12, 0x00].repeat(read::TABLE_ENTRIES_MAX + 1);
    assert!(refused(&bytes).contains("number of samples is above the limit"));
}

#[test]
fn a_stack_that_repeats_a_location_of_many_lines_is_stopped_at_the_limit() {
    let mut message = encode(&shop());
    message.location[0].line = vec![message.location[0].line[0]; 10_000];
    message.sample[0].location_id = vec![1; 10_000];
    assert!(refused(&message.encode_to_vec()).contains("frames of a stack"));
}

#[test]
fn broken_references_are_refused() {
    let breakages: [fn(&mut proto::Profile); 6] = [
        |p| p.string_table.clear(),
        |p| p.string_table[0] = "x".into(),
        |p| p.sample_type[0].r#type = -1,
        |p| p.function[0].name = i64::MAX,
        |p| p.sample[0].location_id[0] = 12_345,
        |p| p.sample[0].value.truncate(2),
    ];
    for (i, breakage) in breakages.into_iter().enumerate() {
        let mut message = encode(&shop());
        breakage(&mut message);
        assert!(refused(&message.encode_to_vec()).starts_with("not a valid pprof profile"), "breakage {i}");
    }
}

#[test]
fn unreadable_metadata_leaves_the_values_and_raises_a_doubt() {
    let mut message = encode(&shop());
    let at = message.comment[0] as usize;
    message.string_table[at] = "#fragprof {\"mode\":17}".into();
    let profile = read(message.encode_to_vec().as_slice()).unwrap();
    assert_eq!(profile.meta.mode, Mode::Imported);
    assert!(profile.meta.doubts[0].contains("metadata"), "{:?}", profile.meta.doubts);
    assert_eq!(profile.totals().get(ValueKind::InuseSpace), (15 << 20) + (400 << 10) + 100);
}

fn arbitrary_frame() -> impl Strategy<Value = Frame> {
    ("[a-z;<\u{1b}é]{1,6}", "[a-z/]{0,4}", 0u32..3, 0u8..4, any::<u64>(), any::<bool>()).prop_map(
        |(function, file, line, module, address, inlined)| {
            let module = ["", "/lib/a.so", MODULE_JIT, MODULE_JAVA_COMPILED][usize::from(module)];
            Frame {
                file: file.as_str().into(),
                line,
                module: module.into(),
                build_id: if module.is_empty() { "".into() } else { "ab".into() },
                address,
                flags: FrameFlags { inlined, guessed: false, jit: module == MODULE_JIT },
                ..Frame::named(function)
            }
        },
    )
}

/// What the model asks of a stack: an inlined frame shares address, module and guess with the frame that it was inlined into.
fn made_consistent(mut frames: Vec<Frame>, guessed: bool) -> Vec<Frame> {
    let last = frames.len() - 1;
    frames[last].flags.inlined = false;
    frames[last].flags.guessed = guessed;
    for i in (0..last).rev() {
        if frames[i].flags.inlined {
            let outer = frames[i + 1].clone();
            let flags = FrameFlags { inlined: true, ..outer.flags };
            frames[i] = Frame { module: outer.module, build_id: outer.build_id, address: outer.address, flags, ..frames[i].clone() };
        }
    }
    frames
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn any_profile_comes_back_as_it_was(
        stacks in prop::collection::vec(
            (0u32..3, prop::collection::vec(arbitrary_frame(), 1..6), any::<bool>(), prop::option::of("[a-z_]{1,8}"), prop::array::uniform11(0..=i64::MAX as u64)),
            0..12),
    ) {
        let mut before = Profile::new(Metadata { kinds: ValueKind::ALL.into_iter().collect(), ..Metadata::default() });
        for (pid, frames, guessed, truncated, numbers) in stacks {
            let mut values = Values::default();
            for (kind, number) in ValueKind::ALL.into_iter().zip(numbers) {
                // Equal stacks are added up: stay where a sum fits in a signed number.
                values.set(kind, number >> 5);
            }
            before.add(pid, &made_consistent(frames, guessed), truncated.as_deref(), &values);
        }
        let after = read(encoded(&before).as_slice()).unwrap();
        prop_assert_eq!(&after.meta, &before.meta);
        prop_assert_eq!(flat(&after), flat(&before));
    }

    #[test]
    fn a_mutated_profile_never_panics(
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0u8..3), 1..20),
    ) {
        let mut bytes = encode(&shop()).encode_to_vec();
        for (index, byte, how) in edits {
            if bytes.is_empty() { break; }
            let at = index.index(bytes.len());
            match how {
                0 => bytes[at] = byte,
                1 => { bytes.remove(at); }
                _ => bytes.insert(at, byte),
            }
        }
        let _ = read(bytes.as_slice());
        let mut gzip = GzEncoder::new(Vec::new(), Compression::fast());
        gzip.write_all(&bytes).unwrap();
        let _ = read(gzip.finish().unwrap().as_slice());
    }

    #[test]
    fn random_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ = read(bytes.as_slice());
    }
}
