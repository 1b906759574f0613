#!/usr/bin/env python3
"""Prints fragprof's components as a CycloneDX 1.5 bill of materials: every crate that is linked or that builds it, with licence and
checksum, from `cargo metadata` and Cargo.lock; and the C libraries inside them."""
import json
import subprocess
import tomllib

# C code that a crate compiles into the program, or that is linked statically.
NATIVE = [("libbpf", "the sources in the crate libbpf-sys", "LGPL-2.1-only OR BSD-2-Clause"), ("libelf", "elfutils of the build machine", "LGPL-3.0-or-later OR GPL-2.0-or-later"),
          ("zlib", "zlib of the build machine", "Zlib"), ("glibc", "the C library of the build machine", "LGPL-2.1-or-later")]


def main():
    metadata = json.loads(subprocess.check_output(
        ["cargo", "metadata", "--format-version", "1", "--locked", "--filter-platform", "x86_64-unknown-linux-gnu"]))
    with open("Cargo.lock", "rb") as file:
        checksums = {(p["name"], p["version"]): p.get("checksum") for p in tomllib.load(file)["package"]}
    root = metadata["resolve"]["root"]
    nodes = {node["id"]: node for node in metadata["resolve"]["nodes"]}
    # Crates reached by normal and build dependencies; those that only tests use are not delivered.
    reached, queue = set(), [root]
    while queue:
        at = queue.pop()
        if at in reached:
            continue
        reached.add(at)
        queue += [dep["pkg"] for dep in nodes[at]["deps"] if any(kind["kind"] in (None, "build") for kind in dep["dep_kinds"])]
    packages = {package["id"]: package for package in metadata["packages"]}
    ref = lambda package: f"pkg:cargo/{package['name']}@{package['version']}"

    def component(package):
        one = {"type": "library", "bom-ref": ref(package), "name": package["name"], "version": package["version"], "purl": ref(package)}
        if package.get("license"):
            one["licenses"] = [{"expression": package["license"].replace("/", " OR ")}]
        checksum = checksums.get((package["name"], package["version"]))
        if checksum:
            one["hashes"] = [{"alg": "SHA-256", "content": checksum}]
        return one

    libraries = sorted((packages[i] for i in reached if i != root), key=lambda p: (p["name"], p["version"]))
    native = [{"type": "library", "bom-ref": f"native:{name}", "name": name, "description": origin, "licenses": [{"expression": licence}]}
              for name, origin, licence in NATIVE]
    main_component = component(packages[root])
    main_component["type"] = "application"
    bom = {
        "bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1,
        "metadata": {"component": main_component},
        "components": [component(package) for package in libraries] + native,
        "dependencies": [{"ref": ref(packages[i]), "dependsOn": sorted(ref(packages[d["pkg"]]) for d in nodes[i]["deps"] if d["pkg"] in reached)}
                         for i in sorted(reached, key=lambda i: ref(packages[i]))],
    }
    print(json.dumps(bom, indent=1))


main()
