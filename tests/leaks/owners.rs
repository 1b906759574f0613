//! Owners of blocks, compared with programs that know them.

use std::process::Command;

use serde_json::Value;

use super::command::Waiting;
use super::target::build;

fn owners(args: &[&str]) -> Value {
    let output = Command::new(env!("CARGO_BIN_EXE_fragprof")).arg("owners").args(args).arg("--json").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn owner<'a>(found: &'a Value, address: &str) -> &'a Value {
    found["owners"].as_array().unwrap().iter().find(|owner| owner["address"] == address).unwrap_or_else(|| panic!("{address} in {found:#}"))
}

#[test]
fn the_block_that_holds_most_is_found_with_the_variable_that_leads_to_it() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("addresses");
    // Without debug information: the symbol and the offset.
    let mut command = Command::new(build("cc", "owners.c", &["-g0"], "owners-g0"));
    command.arg(&file);
    let target = Waiting::start(command);
    let addresses = std::fs::read_to_string(&file).unwrap();
    let [storage, shared, leaf] = <[&str; 3]>::try_from(addresses.split_whitespace().collect::<Vec<_>>()).unwrap();

    let found = owners(&[&target.pid()]);
    let first = &found["owners"][0];
    assert_eq!((&first["address"], &first["blocks"]), (&Value::from(storage), &Value::from(8194)), "{found:#}");
    // Each entry has 104 usable bytes, the storage 65,544.
    assert_eq!(first["retained_bytes"], 8193 * 104 + 65_544);
    assert_eq!(first["reached_first_from"], "the_catalogue+0x10 (leaks-owners-g0)");
    assert_eq!(first["shared"], false);
    let both = owner(&found, shared);
    assert_eq!((&both["shared"], &both["blocks"]), (&Value::from(true), &Value::from(501)));
    let places = found["roots"].as_array().unwrap();
    assert_eq!(places[0]["reached_first_from"], "the_catalogue+0x10 (leaks-owners-g0)");
    assert_eq!(places[0]["blocks"], 8194);

    let way = owners(&[&target.pid(), "--path", leaf]);
    let steps: Vec<&str> = way["path"].as_array().unwrap().iter().map(|step| step["address"].as_str().unwrap()).collect();
    assert_eq!(steps[1..], [storage, leaf]);
    assert_eq!(way["path"][0]["label"], "the_catalogue+0x10 (leaks-owners-g0)");
}

#[test]
fn pinned_bytes_by_block_add_up_to_the_census() {
    let target = Waiting::start(Command::new(build("cc", "owners.c", &[], "owners")));
    let found = owners(&[&target.pid(), "--by", "pinned"]);
    let census = Command::new(env!("CARGO_BIN_EXE_fragprof")).args(["census", &target.pid(), "--json"]).output().unwrap();
    let census: Value = serde_json::from_slice(&census.stdout).unwrap();
    let (ours, theirs) = (found["pinned_bytes"].as_u64().unwrap(), census["heaps"][0]["pinned_bytes"].as_u64().unwrap());
    assert!(theirs > 1 << 20, "{theirs}");
    // A block's share is rounded down on each page.
    assert!(ours <= theirs && theirs - ours <= found["live_blocks"].as_u64().unwrap() * 2, "{ours} and {theirs}");
}

#[test]
fn types_of_a_stripped_program_are_summed_and_selected() {
    let target = Waiting::start(Command::new(build("g++", "types.cpp", &["-s"], "types")));
    let found = owners(&[&target.pid(), "--type", "cache::ImageEntry"]);
    let sum = |name: &str| found["types"].as_array().unwrap().iter().find(|sum| sum["type"] == name).unwrap()["blocks"].clone();
    assert_eq!((sum("cache::TextEntry"), sum("cache::ImageEntry")), (Value::from(600), Value::from(300)));
    let told = found["owners"].as_array().unwrap();
    assert!(told.iter().all(|owner| owner["type"] == "cache::ImageEntry"), "{found:#}");
}

#[test]
fn with_debug_information_members_are_named_also_through_other_blocks() {
    let target = Waiting::start(Command::new(build("cc", "members.c", &[], "members")));
    let found = owners(&[&target.pid()]);
    let roles: Vec<&str> = found["owners"].as_array().unwrap().iter().filter_map(|owner| owner["role"].as_str()).collect();
    let expected = "what the_shop.shelves[1].first->next->goods[0] (leaks-members) points to";
    assert!(roles.contains(&expected), "{roles:?}");
    assert!(roles.contains(&"what counter.table (main in leaks-members) points to"), "{roles:?}");
}

/// The storage of the demo service's bestsellers, as soon as it holds most of the pinned bytes.
fn storage(flags: &[&str], name: &str) -> Value {
    let program = build("g++", "../../demo/shopd.cpp", &[&["-std=c++17"], flags].concat(), name);
    let child = Command::new(program).stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null()).spawn().unwrap();
    let target = Waiting(child);
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
    loop {
        std::thread::sleep(std::time::Duration::from_millis(500));
        let found = owners(&[&target.pid(), "--by", "pinned", "--top", "1"]);
        let pinned = found["pinned_bytes"].as_u64().unwrap();
        let first = &found["owners"][0];
        // 8,192 pointers, and the word that belongs to the next chunk's header.
        let is_storage = first["size_bytes"] == 65_544 && first["retained_pinned_bytes"].as_u64().unwrap() * 10 > pinned * 8;
        if pinned > 5 << 20 && is_storage {
            assert_eq!(found["main_owner"]["address"], first["address"], "{found:#}");
            return first.clone();
        }
        assert!(std::time::Instant::now() < deadline, "{found:#}");
    }
}

/// A recording names the stack that allocated these blocks; without one, the block that holds them is still known.
#[test]
fn the_demo_services_pinned_bytes_are_held_by_the_storage_of_its_bestsellers() {
    let plain = storage(&["-g0"], "shopd-g0");
    assert_eq!((plain["role"].as_str(), plain["label"].as_str()), (None, Some("pointers")));
    for (flags, name) in [(&["-O2"], "shopd"), (&["-O0"], "shopd-O0")] {
        let named = storage(flags, name);
        assert_eq!(named["role"], format!("the storage of the_shop.catalog_.bestsellers_ (main in leaks-{name})"), "{named:#}");
    }
}

#[test]
fn trait_objects_of_rust_have_the_types_that_the_program_gave_them() {
    for (name, flags) in [("debug", &["-g"][..]), ("optimised", &["-O"]), ("v0", &["-O", "-C", "symbol-mangling-version=v0"])] {
        let program = crate::support::build::output_dir().join(format!("trait_objects-{name}"));
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/testprogs/trait_objects.rs");
        let crate_name = ["--crate-name", "trait_objects", "--edition", "2024", "-o"];
        assert!(Command::new("rustc").args(flags).args(crate_name).arg(&program).arg(source).status().unwrap().success());
        let (target, lines) = Waiting::with_lines(Command::new(&program));
        let found = owners(&[&target.pid()]);
        let blocks = |name: &str| {
            let types = found["types"].as_array().unwrap();
            types.iter().find(|one| one["type"] == name).map_or(0, |one| one["blocks"].as_u64().unwrap())
        };
        let mut expected = lines.iter().map(|line| line.rsplit_once(' ').unwrap());
        assert!(
            expected.clone().count() == 3 && expected.all(|(name, count)| blocks(name).to_string() == count),
            "{name}: {lines:?} {found:#}"
        );
        assert_eq!(blocks("trait_objects::main::{{closure}}") + blocks("trait_objects::main::{closure#0}"), 100, "{name}: {found:#}");
        let only = owners(&[&target.pid(), "--type", "trait_objects::shelf::Stamp"]);
        assert!(only["owners"].as_array().unwrap().iter().all(|owner| owner["type"] == "trait_objects::shelf::Stamp"), "{only:#}");
    }
}
