//! The cache, the thread and the symbolizer against servers with right, wrong and huge answers. Names are compared with binutils'.
#![allow(clippy::unwrap_used)]

use std::io::Write as _;
use std::net::TcpListener;
use std::path::Path;
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::Ordering;

use super::testing::{FakeServer, Stripped, found, names_in, run, status};
use super::*;
use crate::bpf::FRAME_EXACT;
use crate::process::elf::BuildId;
use crate::symbol::{AddressSpace, Backing, Module, Region, Symbolizer};

/// Far longer than an answer on this machine takes.
const LONG: Duration = Duration::from_secs(60);
/// Much shorter than that.
const SHORT: Duration = Duration::from_millis(500);

fn debuginfod(directory: &Path, servers: &[&FakeServer]) -> Debuginfod {
    with(directory, servers, FILE_BYTES_MAX * 2, None)
}

fn with(directory: &Path, servers: &[&FakeServer], cache_bytes_max: u64, patience: Option<Patience>) -> Debuginfod {
    Debuginfod::new(Settings { cache_bytes_max, patience, ..settings(directory, servers) }).unwrap()
}

fn settings(directory: &Path, servers: &[&FakeServer]) -> Settings {
    Settings {
        urls: servers.iter().map(|server| server.url.clone()).collect(),
        authorities: None,
        cache_directory: directory.join("cache"),
        cache_bytes_max: FILE_BYTES_MAX * 2,
        open_bytes_max: OPEN_BYTES_DEFAULT,
        patience: None,
    }
}

fn wanted(build_id: &BuildId) -> Separate {
    Separate { build_id: build_id.clone(), of: "/usr/bin/program".into() }
}

/// Waits until nothing is being fetched.
fn settled(debuginfod: &Debuginfod) -> Counted {
    let began = Instant::now();
    while debuginfod.counted().waiting > 0 {
        assert!(began.elapsed() < LONG);
        std::thread::yield_now();
    }
    debuginfod.counted()
}

/// What becomes of a request for a program's debug file that is answered with these bytes. Nothing may be left in the cache's directory.
fn refused(directory: &Path, stripped: &Stripped, answer: impl Into<Vec<u8>>) -> Counted {
    let server = FakeServer::with(answer);
    let debuginfod = with(directory, &[&server], 4 << 20, None);
    assert_eq!(debuginfod.find(&wanted(&stripped.build_id)), Lookup::NotYet);
    let counted = settled(&debuginfod);
    assert!(matches!(debuginfod.find(&wanted(&stripped.build_id)), Lookup::NotUntil(_)));
    assert_eq!((server.asked(), counted.requests, counted.fetched), (1, 1, 0));
    assert_eq!(names_in(&directory.join("cache")), Vec::<String>::new());
    counted
}

#[test]
fn the_right_file_is_asked_for_once_and_then_found_in_the_cache() {
    let place = tempfile::tempdir().unwrap();
    let stripped = Stripped::build(place.path());
    let server = FakeServer::with(found(&stripped.debug));
    let debuginfod = debuginfod(place.path(), &[&server]);
    assert_eq!(debuginfod.find(&wanted(&stripped.build_id)), Lookup::NotYet);
    let counted = settled(&debuginfod);
    let Lookup::Found(path) = debuginfod.find(&wanted(&stripped.build_id)) else { panic!() };
    assert_eq!(std::fs::read(path).unwrap(), stripped.debug);
    assert_eq!(*server.requests.lock().unwrap(), [format!("GET /buildid/{}/debuginfo HTTP/1.1", stripped.build_id)]);
    assert_eq!((counted.requests, counted.fetched, counted.bytes), (1, 1, stripped.debug.len() as u64));
    assert_eq!((debuginfod.counted().asked, debuginfod.counted().cached), (2, 1));
    // Another process finds it too.
    let later = self::debuginfod(place.path(), &[&server]);
    assert!(matches!(later.find(&wanted(&stripped.build_id)), Lookup::Found(_)));
    assert_eq!(server.asked(), 1);
}

#[test]
fn a_debug_file_with_the_program_headers_of_its_program_is_right() {
    // So eu-strip writes it: the notes are not where the program headers say.
    let place = tempfile::tempdir().unwrap();
    let stripped = Stripped::build(place.path());
    let mut debug = stripped.debug.clone();
    let word = |bytes: &[u8], at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()) as usize;
    // Elf64_Ehdr: e_phoff and e_phnum; Elf64_Phdr: p_type and p_offset.
    let (table, count) = (word(&debug, 32), usize::from(debug[56]));
    for header in (0..count).map(|number| table + number * 56).filter(|at| stripped.debug[*at] == 4) {
        let moved = word(&debug, header + 8) as u64 + 32;
        debug[header + 8..header + 16].copy_from_slice(&moved.to_le_bytes());
    }
    assert_ne!(debug, stripped.debug);
    let server = FakeServer::with(found(&debug));
    let debuginfod = debuginfod(place.path(), &[&server]);
    debuginfod.find(&wanted(&stripped.build_id));
    assert_eq!(settled(&debuginfod).fetched, 1);
}

#[test]
fn an_answer_that_is_another_file_is_wrong() {
    let place = tempfile::tempdir().unwrap();
    let stripped = Stripped::build(place.path());
    let other = Stripped::build_with(place.path(), "other", &["-DOTHER", "-O2"]);
    assert_ne!(stripped.build_id, other.build_id);
    let no_symbols = std::fs::read(&stripped.path).unwrap();
    let truncated = &stripped.debug[..stripped.debug.len() - 100];
    for wrong in [&other.debug, b"<html>welcome</html>".as_slice(), b"", truncated, &stripped.debug[..70], &no_symbols] {
        let counted = refused(place.path(), &stripped, found(wrong));
        assert_eq!((counted.wrong, counted.bytes), (1, wrong.len() as u64));
    }
}

#[test]
fn an_answer_beyond_the_limits_is_too_large() {
    let place = tempfile::tempdir().unwrap();
    let stripped = Stripped::build(place.path());
    // Its length says so.
    let announced = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", 5 << 20);
    let counted = refused(place.path(), &stripped, announced);
    assert_eq!((counted.too_large, counted.bytes), (1, 0));
    // It has no length and does not end.
    let server = FakeServer::start(|_, stream| {
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n");
        while stream.write_all(&[0x7f; 1 << 16]).is_ok() {}
    });
    let endless = with(place.path(), &[&server], 4 << 20, None);
    endless.find(&wanted(&stripped.build_id));
    let counted = settled(&endless);
    assert_eq!((counted.too_large, counted.fetched), (1, 0));
    assert!(counted.bytes <= 4 << 20);
    assert_eq!(names_in(&place.path().join("cache")), Vec::<String>::new());
    // A few bytes that decompress to more memory than a machine has: the header of a section claims it.
    let bomb = place.path().join("bomb");
    std::fs::write(&bomb, &stripped.debug).unwrap();
    run(Command::new("objcopy").arg("--compress-debug-sections=zlib").arg(&bomb));
    let mut bytes = std::fs::read(&bomb).unwrap();
    let sections = run(Command::new("readelf").arg("-SW").arg(&bomb));
    let line = sections.lines().find(|line| line.contains(".debug_str ") && line.contains('C')).unwrap();
    let offset = usize::from_str_radix(line.split_whitespace().rev().nth(6).unwrap(), 16).unwrap();
    // Elf64_Chdr: type, reserved, size.
    assert_eq!(bytes[offset], 1, "{line}");
    bytes[offset + 8..offset + 16].copy_from_slice(&(1u64 << 40).to_le_bytes());
    assert_eq!(refused(place.path(), &stripped, found(&bytes)).too_large, 1);
}

#[test]
fn a_server_without_the_file_is_not_asked_again_for_ten_minutes() {
    let place = tempfile::tempdir().unwrap();
    let stripped = Stripped::build(place.path());
    assert_eq!(refused(place.path(), &stripped, status(404)).not_known, 1);
    let server = FakeServer::with(status(404));
    let debuginfod = debuginfod(place.path(), &[&server]);
    debuginfod.find(&wanted(&stripped.build_id));
    settled(&debuginfod);
    let Lookup::NotUntil(at) = debuginfod.find(&wanted(&stripped.build_id)) else { panic!() };
    let left = at.saturating_duration_since(Instant::now());
    assert!(left > Duration::from_secs(540) && left <= Duration::from_secs(600), "{left:?}");
    // Other files are.
    debuginfod.find(&wanted(&BuildId(vec![7; 20])));
    assert_eq!((settled(&debuginfod).not_known, server.asked()), (2, 2));
}

#[test]
fn errors_redirects_and_cut_answers_are_failures() {
    let place = tempfile::tempdir().unwrap();
    let stripped = Stripped::build(place.path());
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    other.set_nonblocking(true).unwrap();
    let redirect = format!("HTTP/1.1 302 x\r\nLocation: http://{}/\r\nContent-Length: 0\r\n\r\n", other.local_addr().unwrap());
    let cut = [b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n", stripped.debug.as_slice()].concat();
    for answer in [status(500), redirect.into_bytes(), cut, b"SSH-2.0-OpenSSH\r\n".to_vec(), Vec::new()] {
        assert_eq!(refused(place.path(), &stripped, answer).failed, 1);
    }
    assert_eq!(other.accept().unwrap_err().kind(), std::io::ErrorKind::WouldBlock, "the redirect was followed");
}

#[test]
fn a_server_that_is_gone_slow_or_overloaded_is_left_alone_for_a_minute() {
    let place = tempfile::tempdir().unwrap();
    let gone = format!("http://{}", TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap());
    let gone = FakeServer { url: gone, requests: Arc::default() };
    let slow = FakeServer::start(|_, stream| {
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n");
        while stream.write_all(b"a").is_ok() {
            std::thread::sleep(SHORT / 50);
        }
    });
    for server in [gone, slow, FakeServer::with(status(503))] {
        let debuginfod = debuginfod(place.path(), &[&server]);
        debuginfod.0.limit_time(SHORT);
        debuginfod.find(&wanted(&BuildId(vec![1; 20])));
        assert_eq!((settled(&debuginfod).requests, debuginfod.counted().failed), (1, 1));
        debuginfod.find(&wanted(&BuildId(vec![2; 20])));
        assert_eq!(settled(&debuginfod).requests, 1, "{} was asked again", server.url);
        let Lookup::NotUntil(at) = debuginfod.find(&wanted(&BuildId(vec![2; 20]))) else { panic!() };
        assert!(at.saturating_duration_since(Instant::now()) <= Duration::from_secs(60));
    }
    assert_eq!(names_in(&place.path().join("cache")), Vec::<String>::new());
}

#[test]
fn servers_are_asked_in_their_order_until_one_has_the_file() {
    let place = tempfile::tempdir().unwrap();
    let stripped = Stripped::build(place.path());
    let (empty, broken) = (FakeServer::with(status(404)), FakeServer::with(found(b"nonsense")));
    let (good, last) = (FakeServer::with(found(&stripped.debug)), FakeServer::with(status(404)));
    let debuginfod = debuginfod(place.path(), &[&empty, &broken, &good, &last]);
    debuginfod.find(&wanted(&stripped.build_id));
    let counted = settled(&debuginfod);
    assert_eq!((counted.not_known, counted.wrong, counted.fetched, last.asked()), (1, 1, 1, 0));
}

#[test]
fn a_file_is_fetched_over_tls_with_the_given_authority() {
    use crate::client::testing::{Authority, VALID, config, serve};
    let place = tempfile::tempdir().unwrap();
    let stripped = Stripped::build(place.path());
    let (authority, answer) = (Authority::new(), found(&stripped.debug));
    let port = serve(config(&authority.sign(&["localhost"], VALID), None), move |_, _| answer.clone());
    for (authorities, is_fetched) in [(authority.certificate, 1), (Authority::new().certificate, 0)] {
        let cache_directory = place.path().join(format!("cache{is_fetched}"));
        let urls = vec![format!("https://localhost:{port}/prefix")];
        let settings = Settings { urls, authorities: Some(authorities.into_bytes()), cache_directory, ..settings(place.path(), &[]) };
        let debuginfod = Debuginfod::new(settings).unwrap();
        debuginfod.find(&wanted(&stripped.build_id));
        let counted = settled(&debuginfod);
        assert_eq!((counted.fetched, counted.failed), (is_fetched, 1 - is_fetched));
    }
}

#[test]
fn files_beyond_the_queue_are_put_off_and_counted() {
    let place = tempfile::tempdir().unwrap();
    let (hold, held) = std::sync::mpsc::channel::<()>();
    let held = Mutex::new(held);
    let server = FakeServer::start(move |_, stream| {
        let _ = held.lock().unwrap().recv();
        let _ = stream.write_all(&status(404));
    });
    let debuginfod = debuginfod(place.path(), &[&server]);
    let build_ids = (0..300u16).map(|number| BuildId(number.to_le_bytes().repeat(10)));
    let looked: Vec<Lookup> = build_ids.map(|id| debuginfod.find(&wanted(&id))).collect();
    let counted = debuginfod.counted();
    // The thread may have taken one from the queue.
    assert!((43..=44).contains(&counted.put_off), "{counted:?}");
    assert_eq!(looked.iter().filter(|one| matches!(one, Lookup::NotUntil(_))).count() as u64, counted.put_off);
    drop(hold);
    assert_eq!(settled(&debuginfod).not_known, 300 - counted.put_off);
}

#[test]
fn a_command_waits_says_for_what_and_no_longer_than_it_may() {
    static SAID: Mutex<Vec<String>> = Mutex::new(Vec::new());
    let place = tempfile::tempdir().unwrap();
    let stripped = Stripped::build(place.path());
    let answer = found(&stripped.debug);
    let known = stripped.build_id.to_string();
    let server = FakeServer::start(move |path, stream| {
        if path.contains(&known) {
            let _ = stream.write_all(&answer);
        } else {
            // Nothing is sent for as long as the client listens.
            let _ = std::io::Read::read(stream, &mut [0]);
        }
    });
    let patience = |time_max| Patience { time_max, waits: Arc::default(), say: |text| SAID.lock().unwrap().push(text.to_owned()) };
    let debuginfod = with(place.path(), &[&server], 1 << 20, Some(patience(SHORT)));
    assert!(matches!(debuginfod.find(&wanted(&stripped.build_id)), Lookup::Found(_)));
    let first = format!("fetching debug information of /usr/bin/program (build id {})", stripped.build_id);
    assert_eq!(*SAID.lock().unwrap(), [first]);
    let began = Instant::now();
    assert_eq!(debuginfod.find(&wanted(&BuildId(vec![1; 20]))), Lookup::NotYet);
    assert_eq!(debuginfod.find(&wanted(&BuildId(vec![2; 20]))), Lookup::NotYet);
    assert!(began.elapsed() < SHORT * 10);
    assert_eq!(SAID.lock().unwrap().len(), 3, "{:?}", SAID.lock().unwrap());
    debuginfod.abandon();
    assert_eq!(names_in(&place.path().join("cache")), [format!("{}.debug", stripped.build_id)]);
    // A signal ends a wait.
    let patience = patience(LONG * 10);
    let waits = Arc::clone(&patience.waits);
    let debuginfod = with(&place.path().join("other"), &[&server], 1 << 20, Some(patience));
    std::thread::scope(|scope| {
        scope.spawn(|| while !waits.swap(false, Ordering::Relaxed) {});
        assert_eq!(debuginfod.find(&wanted(&BuildId(vec![1; 20]))), Lookup::NotYet);
    });
    let began = Instant::now();
    assert_eq!(debuginfod.find(&wanted(&BuildId(vec![2; 20]))), Lookup::NotYet);
    assert!(began.elapsed() < SHORT * 10);
}

/// A process that maps the whole file, as a loader maps one whose offsets and addresses are equal (the test's programs are linked so).
fn mapped(path: &Path, build_id: &BuildId) -> AddressSpace {
    let module =
        Module { path: path.to_string_lossy().into_owned(), open_path: path.to_path_buf(), file: None, build_id: build_id.0.clone() };
    AddressSpace::new(7, vec![Region { start: BASE, end: BASE + (1 << 30), offset: 0, backing: Backing::File(Arc::new(module)) }])
}

const BASE: u64 = 0x7f00_0000_0000;

/// Address of a function, by nm.
fn address_of(path: &Path, function: &str) -> u64 {
    let symbols = run(Command::new("nm").arg(path));
    let line = symbols.lines().find(|line| line.ends_with(&format!(" {function}"))).unwrap();
    u64::from_str_radix(line.split(' ').next().unwrap(), 16).unwrap()
}

/// Function and line, by addr2line on the program before it was stripped.
fn by_addr2line(path: &Path, address: u64) -> (String, u32) {
    let said = run(Command::new("addr2line").args(["-f", "-e"]).arg(path).arg(format!("{address:#x}")));
    let (function, place) = said.trim().split_once('\n').unwrap();
    (function.to_owned(), place.rsplit(':').next().unwrap().parse().unwrap())
}

fn named(symbolizer: &mut Symbolizer, space: &AddressSpace, address: u64) -> (String, u32) {
    let frames = symbolizer.stack(space, &[(BASE + address) | FRAME_EXACT]);
    assert_eq!(frames.len(), 1);
    (frames[0].function.to_string(), frames[0].line)
}

#[test]
fn the_next_naming_has_the_name_and_line_of_a_file_that_was_fetched_meanwhile() {
    let place = tempfile::tempdir().unwrap();
    let stripped = Stripped::build(place.path());
    let (release, released) = std::sync::mpsc::channel::<()>();
    let (answer, released) = (found(&stripped.debug), Mutex::new(released));
    let server = FakeServer::start(move |_, stream| {
        let _ = released.lock().unwrap().recv();
        let _ = stream.write_all(&answer);
    });
    let debuginfod = Arc::new(debuginfod(place.path(), &[&server]));
    let address = address_of(&stripped.whole, "hidden_take") + 4;
    let exported = address_of(&stripped.whole, "exported_take") + 4;
    let expected = [by_addr2line(&stripped.whole, address), by_addr2line(&stripped.whole, exported)];
    assert!(expected[0].0 == "hidden_take" && (4..=5).contains(&expected[0].1), "{expected:?}");
    let space = mapped(&stripped.path, &stripped.build_id);

    // Nobody waits for the server, which has not answered.
    let mut symbolizer = Symbolizer::with_debuginfod(Arc::clone(&debuginfod), Default::default());
    assert_eq!(named(&mut symbolizer, &space, address), (format!("[program+{address:#x}]"), 0));
    assert_eq!(named(&mut symbolizer, &space, exported), ("exported_take".into(), 0));
    let known = symbolizer.into_known();
    release.send(()).unwrap();
    settled(&debuginfod);
    let mut symbolizer = Symbolizer::with_debuginfod(Arc::clone(&debuginfod), known);
    assert_eq!([address, exported].map(|address| named(&mut symbolizer, &space, address)), expected);
    // These names are kept: nothing is looked up or asked for again.
    let looked_up = symbolizer.counters().lookups;
    let mut symbolizer = Symbolizer::with_debuginfod(Arc::clone(&debuginfod), symbolizer.into_known());
    assert_eq!(named(&mut symbolizer, &space, address), expected[0]);
    assert_eq!((symbolizer.counters().lookups, server.asked(), debuginfod.counted().asked), (looked_up, 1, 2));
}

#[test]
fn names_of_a_file_that_no_server_has_are_kept_until_it_is_asked_for_again() {
    let place = tempfile::tempdir().unwrap();
    let stripped = Stripped::build(place.path());
    let server = FakeServer::with(status(404));
    let debuginfod = Arc::new(debuginfod(place.path(), &[&server]));
    let address = address_of(&stripped.whole, "hidden_take") + 4;
    let space = mapped(&stripped.path, &stripped.build_id);
    let mut known = crate::symbol::Known::default();
    let mut lookups = Vec::new();
    for _ in 0..4 {
        let mut symbolizer = Symbolizer::with_debuginfod(Arc::clone(&debuginfod), known);
        assert_eq!(named(&mut symbolizer, &space, address), (format!("[program+{address:#x}]"), 0));
        lookups.push(symbolizer.counters().lookups);
        settled(&debuginfod);
        known = symbolizer.into_known();
    }
    assert_eq!((lookups, server.asked()), (vec![1, 2, 2, 2], 1));
}

#[test]
fn debug_files_that_do_not_fit_into_memory_together_have_their_turn_one_after_the_other() {
    let place = tempfile::tempdir().unwrap();
    let programs = ["one", "two"].map(|name| Stripped::build_with(place.path(), name, &[]));
    let bodies: Vec<(String, Vec<u8>)> = programs.iter().map(|program| (program.build_id.to_string(), found(&program.debug))).collect();
    let server = FakeServer::start(move |path, stream| {
        let (_, body) = bodies.iter().find(|(id, _)| path.contains(id)).unwrap();
        let _ = stream.write_all(body);
    });
    let larger = programs.iter().map(|program| program.debug.len() as u64).max().unwrap();
    let of = |open_bytes_max| Arc::new(Debuginfod::new(Settings { open_bytes_max, ..settings(place.path(), &[&server]) }).unwrap());
    // One that would not even fit alone is not used.
    let tight = of(larger / 2);
    tight.find(&wanted(&programs[0].build_id));
    assert_eq!((settled(&tight).too_large, names_in(&place.path().join("cache"))), (1, Vec::new()));
    let debuginfod = of(larger + larger / 2);
    programs.iter().for_each(|program| drop(debuginfod.find(&wanted(&program.build_id))));
    assert_eq!(settled(&debuginfod).fetched, 2);
    let spaces = programs.each_ref().map(|program| mapped(&program.path, &program.build_id));
    let addresses = programs.each_ref().map(|program| address_of(&program.whole, "hidden_take") + 4);
    let mut known = crate::symbol::Known::default();
    let mut rounds = Vec::new();
    for _ in 0..3 {
        let mut symbolizer = Symbolizer::with_debuginfod(Arc::clone(&debuginfod), known);
        rounds.push([0, 1].map(|at| named(&mut symbolizer, &spaces[at], addresses[at]).0 == "hidden_take"));
        known = symbolizer.into_known();
    }
    assert_eq!((rounds, debuginfod.counted().put_off), (vec![[true, false], [true, true], [true, true]], 1));
}

#[test]
fn functions_that_the_debug_file_does_not_have_are_named_by_the_file_itself() {
    let place = tempfile::tempdir().unwrap();
    let stripped = Stripped::build(place.path());
    let partial = place.path().join("partial");
    std::fs::write(&partial, &stripped.debug).unwrap();
    run(Command::new("objcopy").args(["--strip-debug", "--strip-symbol=exported_take"]).arg(&partial));
    let server = FakeServer::with(found(&std::fs::read(&partial).unwrap()));
    let debuginfod = Arc::new(debuginfod(place.path(), &[&server]));
    debuginfod.find(&wanted(&stripped.build_id));
    assert_eq!(settled(&debuginfod).fetched, 1);
    let mut symbolizer = Symbolizer::with_debuginfod(debuginfod, Default::default());
    let space = mapped(&stripped.path, &stripped.build_id);
    let of = |function| address_of(&stripped.whole, function) + 4;
    assert_eq!(named(&mut symbolizer, &space, of("hidden_take")), ("hidden_take".into(), 0));
    assert_eq!(named(&mut symbolizer, &space, of("exported_take")), ("exported_take".into(), 0));
}

#[test]
fn nothing_is_asked_about_files_with_symbols_a_debug_link_or_no_build_id_nor_about_the_vdso() {
    let place = tempfile::tempdir().unwrap();
    let stripped = Stripped::build(place.path());
    let linked = place.path().join("linked");
    let debug = place.path().join("linked.debug");
    std::fs::write(&debug, &stripped.debug).unwrap();
    run(Command::new("objcopy").arg(format!("--add-gnu-debuglink={}", debug.display())).args([&stripped.path, &linked]));
    let without_id = Stripped::build_with(place.path(), "without_id", &["-Wl,--build-id=0x01020304"]);
    let server = FakeServer::with(status(404));
    let debuginfod = Arc::new(debuginfod(place.path(), &[&server]));
    let mut symbolizer = Symbolizer::with_debuginfod(Arc::clone(&debuginfod), Default::default());
    let address = address_of(&stripped.whole, "hidden_take") + 4;
    for path in [&stripped.whole, &linked] {
        let space = mapped(path, &stripped.build_id);
        assert_eq!(named(&mut symbolizer, &space, address), by_addr2line(&stripped.whole, address), "{}", path.display());
    }
    symbolizer.stack(&mapped(&without_id.path, &without_id.build_id), &[(BASE + address) | FRAME_EXACT]);
    let vdso = AddressSpace::new(7, vec![Region { start: BASE, end: BASE + (1 << 20), offset: 0, backing: Backing::Vdso }]);
    symbolizer.stack(&vdso, &[(BASE + 0xa00) | FRAME_EXACT]);
    assert_eq!(debuginfod.counted().asked, 0);
    // A link to another program's debug file is no debug file.
    std::fs::write(&debug, Stripped::build_with(place.path(), "other", &["-O2"]).debug).unwrap();
    let mut symbolizer = Symbolizer::with_debuginfod(Arc::clone(&debuginfod), Default::default());
    symbolizer.stack(&mapped(&linked, &stripped.build_id), &[(BASE + address) | FRAME_EXACT]);
    assert_eq!((settled(&debuginfod).asked, server.asked()), (1, 1));
}

#[test]
fn servers_are_separated_by_blanks_and_unusable_ones_are_named() {
    let (urls, notes) = words(" https://debuginfod.debian.net\thttp://h:8002/x\nftp://h unix:/run/x file:///x ");
    assert_eq!(urls, ["https://debuginfod.debian.net", "http://h:8002/x"]);
    assert!(notes.len() == 3 && notes.iter().all(|note| note.starts_with("DEBUGINFOD_URLS: ")), "{notes:?}");
    assert_eq!(words(""), (Vec::new(), Vec::new()));
    // Signatures are not checked, so that servers whose files need them cannot be used (debuginfod-client-config(7)).
    let (urls, notes) = words("ima:enforcing http://a ima:ignore http://b ima:permissive http://c");
    assert_eq!((urls.as_slice(), notes.len()), (["http://b".to_owned(), "http://c".to_owned()].as_slice(), 1));
    assert!(Debuginfod::new(Settings { urls: vec!["unix:/x".into()], ..Settings::default() }).is_err());
}

#[test]
fn the_cache_of_a_command_is_in_the_users_cache_directory() {
    let path = |xdg: Option<&str>, home: Option<&str>| user_cache(xdg.map(AsRef::as_ref), home.map(AsRef::as_ref));
    assert_eq!(path(Some("/c"), Some("/h")), Some("/c/fragprof/debuginfod".into()));
    assert_eq!(path(Some("relative"), Some("/h")), Some("/h/.cache/fragprof/debuginfod".into()));
    assert_eq!((path(None, None), path(Some(""), Some(""))), (None, None));
}
