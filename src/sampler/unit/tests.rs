#![allow(clippy::unwrap_used)]
use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};

use super::drop_in::{self, Distances, Place};
use super::*;

/// A root directory with a dynamic program and its linker, and units.
struct Tree(tempfile::TempDir);

impl Tree {
    fn new() -> Self {
        let tree = Self(tempfile::tempdir().unwrap());
        let own = fs::read("/proc/self/exe").unwrap();
        tree.put("/usr/bin/own", &own);
        tree.put(fit::interpreter(Path::new("/proc/self/exe")).unwrap().to_str().unwrap(), b"");
        tree
    }

    fn at(&self, path: &str) -> PathBuf {
        self.0.path().join(path.trim_start_matches('/'))
    }

    fn put(&self, path: &str, bytes: &[u8]) {
        fs::create_dir_all(self.at(path).parent().unwrap()).unwrap();
        fs::write(self.at(path), bytes).unwrap();
        fs::set_permissions(self.at(path), fs::Permissions::from_mode(0o755)).unwrap();
    }

    fn unit(&self, name: &str, service: &str) {
        self.put(&format!("/usr/lib/systemd/system/{name}"), format!("[Service]\n{service}\n").as_bytes());
    }

    fn root(&self) -> Root {
        Root::directory(self.0.path())
    }

    fn plan(&self, name: &str) -> Result<Plan, UnitRefusal> {
        Unit::load(&self.root(), &name.parse().unwrap())?.examine(&self.root(), false)
    }

    fn files(&self) -> Vec<PathBuf> {
        fn walk(directory: &Path, found: &mut Vec<PathBuf>) {
            for entry in fs::read_dir(directory).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    walk(&path, found);
                }
                found.push(path);
            }
        }
        let mut found = Vec::new();
        walk(self.0.path(), &mut found);
        found.sort();
        found
    }
}

#[test]
fn what_the_unit_preloads_is_kept_from_wherever_it_counts() {
    let tree = Tree::new();
    tree.unit("a.service", "ExecStart=-@/usr/bin/own name -x\nEnvironment=\"LD_PRELOAD=/x/liba.so /x/libb.so\"");
    let plan = tree.plan("a").unwrap();
    assert_eq!((plan.preloaded.as_deref(), plan.has_files), (Some("/x/liba.so /x/libb.so"), false));
    // An administrator's drop-in counts more, and an environment file more than that.
    tree.put("/etc/systemd/system/a.service.d/10.conf", b"[Service]\nEnvironment=LD_PRELOAD=/x/libc.so\n");
    assert_eq!(tree.plan("a").unwrap().preloaded.as_deref(), Some("/x/libc.so"));
    tree.put("/etc/systemd/system/a.service.d/20.conf", b"[Service]\nEnvironmentFile=-/none\nEnvironmentFile=/etc/default/%p\n");
    tree.put("/etc/default/a", b"LD_PRELOAD=/x/libd.so\n");
    let plan = tree.plan("a").unwrap();
    assert_eq!((plan.preloaded.as_deref(), plan.has_files, plan.doubts.len()), (Some("/x/libd.so"), true, 0));
    let name: UnitName = "a".parse().unwrap();
    let distances = Distances { sample_bytes: Some(4096), samples_per_second: None };
    let (text, environment) = drop_in::texts(&name, &plan, Path::new("/l/libfragprof_sampler.so"), distances, Place::Runtime);
    assert_eq!(
        text.lines().skip(1).collect::<Vec<_>>(),
        [
            "[Service]",
            "Environment=\"LD_PRELOAD=/l/libfragprof_sampler.so:/x/libd.so\"",
            "Environment=FRAGPROF_SAMPLE_BYTES=4096",
            "EnvironmentFile=/run/systemd/system/a.service.d/zz-fragprof-sampler.env",
        ]
    );
    assert_eq!(environment.unwrap().lines().nth(1).unwrap(), "LD_PRELOAD=\"/l/libfragprof_sampler.so:/x/libd.so\"");
    // The drop-ins of a unit apply to its alias.
    symlink("/usr/lib/systemd/system/a.service", tree.at("/etc/systemd/system/alias.service")).unwrap();
    assert_eq!(tree.plan("alias").unwrap().preloaded, plan.preloaded);
    // A file that hides one of the same name.
    symlink("/dev/null", tree.at("/etc/systemd/system/a.service.d/30.conf")).unwrap();
    assert!(tree.plan("a").is_ok());
}

#[test]
fn each_refusal_names_its_reason() {
    let tree = Tree::new();
    let refusal = |name: &str| tree.plan(name).unwrap_err().name();
    tree.put("/usr/bin/text", b"x");
    tree.put("/usr/bin/set", &fs::read("/proc/self/exe").unwrap());
    fs::set_permissions(tree.at("/usr/bin/set"), fs::Permissions::from_mode(0o4755)).unwrap();
    for (name, service, expected) in [
        ("none", "", "no_program"),
        ("text", "ExecStart=/usr/bin/text", "architecture"),
        ("set", "ExecStart=/usr/bin/set", "privileged"),
        ("gone", "ExecStart=/usr/bin/gone", "not_found"),
        ("reset", "ExecStart=/usr/bin/own\nExecStart=", "no_program"),
        ("home", "ExecStart=%h/own", "specifier"),
        ("lib", "ExecStart=/usr/bin/own\nEnvironment=LD_PRELOAD=%h/x.so", "specifier"),
        ("both", "ExecStart=/usr/bin/own\nRootDirectory=/x\nRootImage=", "other_root"),
        ("image", "ExecStart=/usr/bin/own\nRootImage=/x", "other_root"),
        ("unset", "ExecStart=/usr/bin/own\nUnsetEnvironment=LD_PRELOAD", "unset"),
        ("asan", "ExecStart=/usr/bin/own\nEnvironment=LD_PRELOAD=/x/libasan.so.8", "sanitizer"),
        ("bell", "ExecStart=/usr/bin/own\nEnvironment=LD_PRELOAD=a\\nb", "control_character"),
    ] {
        tree.unit(&format!("{name}.service"), service);
        assert_eq!(refusal(name), expected, "{name}");
    }
    assert_eq!(refusal("unknown"), "unknown_unit");
    symlink("/dev/null", tree.at("/usr/lib/systemd/system/masked.service")).unwrap();
    assert_eq!(refusal("masked"), "masked");
    tree.unit("later.service", "ExecStart=own");
    tree.put("/etc/systemd/system/later.service.d/zzz.conf", b"[Service]\nEnvironment=X=1\n");
    assert_eq!(refusal("later"), "later");
}

#[test]
fn what_was_written_is_removed_and_nothing_else() {
    let tree = Tree::new();
    let root = tree.root();
    tree.unit("a@.service", "ExecStart=own");
    tree.unit("b.service", "ExecStart=own\nEnvironmentFile=-/none");
    tree.put("/etc/systemd/system/b.service.d/own.conf", b"[Service]\n");
    let before = tree.files();
    let library = Path::new("/l/libfragprof_sampler.so");
    for (name, place) in [("a@", Place::Persistent), ("a@1", Place::Runtime), ("b", Place::Persistent)] {
        let name: UnitName = name.parse().unwrap();
        let plan = Unit::load(&root, &name).unwrap().examine(&root, false).unwrap();
        for _ in 0..2 {
            drop_in::write(&root, &name, &plan, library, Distances::default(), place).unwrap();
        }
    }
    let listed: Vec<_> = drop_in::list(&root).into_iter().map(|one| (one.unit, one.runtime, one.library)).collect();
    let library = library.display().to_string();
    let expected = [("a@.service", false), ("a@1.service", true), ("b.service", false)];
    assert_eq!(listed, expected.map(|(unit, runtime)| (unit.to_owned(), runtime, library.clone())));
    for name in ["a@", "a@1", "b"] {
        assert_eq!(drop_in::remove(&root, &name.parse().unwrap()).unwrap().len(), 1);
        assert!(matches!(drop_in::remove(&root, &name.parse().unwrap()), Err(UnitRefusal::NotEnabled(_))));
    }
    let left: Vec<_> = tree.files().into_iter().filter(|path| !before.contains(path) && path.is_file()).collect();
    assert_eq!(left, Vec::<PathBuf>::new());
    assert!(!tree.at("/etc/systemd/system/a@.service.d").exists() && tree.at("/etc/systemd/system/b.service.d/own.conf").exists());
}

#[test]
fn a_file_of_somebody_else_is_left_alone() {
    let tree = Tree::new();
    let root = tree.root();
    tree.unit("a.service", "ExecStart=own");
    let name: UnitName = "a".parse().unwrap();
    let plan = tree.plan("a").unwrap();
    let write = |place| drop_in::write(&root, &name, &plan, Path::new("/l"), Distances::default(), place);
    let path = format!("/etc/systemd/system/a.service.d/{}", drop_in::FILE);
    tree.put(&path, b"[Service]\n");
    assert!(matches!(write(Place::Persistent), Err(UnitRefusal::Foreign { .. })));
    assert!(matches!(drop_in::remove(&root, &name), Err(UnitRefusal::Foreign { .. })));
    fs::remove_file(tree.at(&path)).unwrap();
    symlink("/etc/hosts", tree.at(&path)).unwrap();
    tree.put("/etc/hosts", b"# Written by fragprof sampler enable");
    assert!(matches!(write(Place::Persistent), Err(UnitRefusal::Foreign { .. })));
    fs::remove_file(tree.at(&path)).unwrap();
    write(Place::Persistent).unwrap();
    assert!(matches!(write(Place::Runtime), Err(UnitRefusal::Already { .. })));
    // A directory that leads out of the root is followed within it.
    let outside = tempfile::tempdir().unwrap();
    fs::create_dir_all(tree.at("/run/systemd")).unwrap();
    symlink(outside.path(), tree.at("/run/systemd/system")).unwrap();
    drop_in::remove(&root, &name).unwrap();
    assert!(write(Place::Runtime).is_err() || fs::read_dir(outside.path()).unwrap().count() == 0);
}
