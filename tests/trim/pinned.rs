//! Where nothing can be given back because it is pinned: by what, and what a change there would give back.

use std::io::Write as _;
use std::process::Command;

use serde_json::Value;

use super::{Target, build, refused, trim};
use crate::support::LIMIT;
use crate::support::process::run;
use crate::support::recording::fragprof;

#[test]
fn what_pins_is_named_with_what_could_be_given_back_if_only_it_were_elsewhere() {
    let mut target = Target::start(&mut Command::new(build("held.c", "held", &["-g"])));
    let report = trim(target.pid(), &["--yes"]);
    assert_eq!(refused(&report), "nothing", "{report}");
    let held = &report["pinned_by"];
    let groups = held["groups"].as_array().unwrap_or_else(|| panic!("{report}"));
    let of = |name: &str| {
        let part = groups.iter().find(|part| part["words"].as_str().unwrap().contains(name));
        part.unwrap_or_else(|| panic!("no {name}: {held}")).clone()
    };
    let (crimson, azure) = (of("crimson"), of("azure"));
    let number = |part: &Value, key: &str| part[key].as_u64().unwrap();
    // What lies on pages of both would stay if one of them went.
    assert!(number(&crimson, "pinned_alone_bytes") < number(&crimson, "bytes"), "{held}");
    assert!(number(&azure, "pinned_alone_bytes") < number(&azure, "bytes") / 10, "{held}");

    let plain = run(fragprof().args(["trim", &target.pid().to_string(), "--dry-run"]));
    assert!(plain.out.contains("are pinned") && plain.out.contains("if only these were elsewhere"), "{} {}", plain.out, plain.err);
    let explained = run(fragprof().args(["explain", &target.pid().to_string(), "--once", "--json"]));
    let explained: Value = serde_json::from_str(&explained.out).unwrap();
    assert_eq!(explained["held_by"]["groups"][0]["pinned_alone_bytes"], groups[0]["pinned_alone_bytes"], "{explained}");

    // The program does it: what it gives back is the free bytes of those pages, and its own blocks on them.
    let before = target.resident_bytes();
    let mut input = target.process.input();
    writeln!(input, "drop").unwrap();
    assert!(target.process.out.wait_for(LIMIT, |line| line == "dropped").is_some());
    let given = before - target.resident_bytes();
    let alone = number(&crimson, "pinned_alone_bytes");
    let own = number(&crimson, "blocks") * 416;
    // Some of its last blocks stay in a cache.
    assert!(given + (128 << 10) >= alone && given <= alone + own, "{alone} predicted, {given} given back with {own} of its own");
}
