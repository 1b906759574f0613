#!/usr/bin/env python3
"""Writes the tables of docs/kernels.md from the logs of kernel-matrix.sh.

usage: table.py LOG... (one a kernel). A kernel without a log keeps its column, unless there is one of the same kind and version.
"""
import json
import os
import re
import sys

DOCUMENT = "docs/kernels.md"
FEATURES = [
    ("BTF", "btf"),
    ("ring buffers", "ring_buffer"),
    ("perf-event uprobes, programs for 5.8 and later", "perf_uprobe_by_address"),
    ("attach cookies", "attach_cookie"),
    ("unwind tables", "unwind_tables"),
    ("task storage", "task_storage"),
    ("bpf_loop", "bpf_loop"),
    ("perf-event uprobes, ordinary programs", "perf_uprobe"),
    ("uprobe_multi", "uprobe_multi"),
    ("uprobe_multi sessions", "uprobe_session"),
]


def read(path):
    """One guest's (or the host's) answers."""
    kernel, page, tests, noise, ended = None, [], {}, [], os.path.basename(path) == "host.log"
    for line in open(path, encoding="utf-8", errors="replace"):
        line = line.rstrip("\n")
        ended |= "reboot: Power down" in line
        at = line.find("@@")
        if at < 0:
            continue
        line = line[at:]
        if line.startswith("@@ kernel "):
            kernel = line.split()[2]
        elif line.startswith("@@doctor "):
            page.append(line[len("@@doctor "):])
        elif line.startswith("@@ test "):
            _, _, result, name, *_ = line.split()
            tests[name] = result
        elif line.startswith("@@ dmesg "):
            noise.append(line[len("@@ dmesg "):])
    if kernel is None:
        sys.exit(f"{path}: the kernel did not boot")
    try:
        answers = json.loads("\n".join(page))
    except json.JSONDecodeError:
        # It was stopped before `fragprof doctor` had finished.
        answers, ended = None, False
    # Not all kernels name it.
    architecture = "arm64" if os.path.basename(path).startswith("arm64") else "x86-64"
    return {"kernel": kernel, "architecture": architecture, "page": answers, "tests": tests, "noise": noise, "ended": ended}


def row(cells):
    return "| " + " | ".join(cells) + " |"


def number(name):
    return [int(part) for part in re.findall(r"\d+", name)[:2]]


def stands(runs):
    """The test results, one sentence per kernel: only of tests that ran."""
    lines = []
    for run in runs:
        results = list(run["tests"].items())
        bad = [f"`{name}`" for name, result in results if result == "FAILED"]
        skipped = [f"`{name}`" for name, result in results if result == "skipped"]
        passed = sum(result == "ok" for _, result in results)
        text = f"- **{run['kernel']}**: {passed} of {len(results)} tests pass"
        if not run["ended"]:
            text += " of those that ran within its time limit"
        if skipped:
            text += f"; not offered there: {', '.join(skipped)}"
        if bad:
            text += f"; **failing**: {', '.join(bad)}"
        lines.append(text + ".")
    return lines


def counts_before(text):
    """The present table: instructions by kernel and program."""
    before, kernels = {}, []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] == "program":
            kernels = cells[1:]
        elif kernels and line.startswith("|"):
            for kernel, cell in zip(kernels, cells[1:]):
                if re.fullmatch(r"[\d,]+", cell):
                    before[kernel, cells[0]] = int(cell.replace(",", ""))
    return before


def refused(features):
    """Why the ordinary programs are not used although the kernel has what they need. The tests would pass with those for older kernels."""
    has_all = all(features[key]["works"] == "yes" for key in ("unwind_tables", "attach_cookie", "task_storage", "bpf_loop"))
    return features["perf_uprobe"].get("reason", "no reason") if has_all and features["perf_uprobe"]["works"] != "yes" else None


def tables(runs, before):
    """The lines on some kernels, and where a program's instruction count has changed by a tenth."""
    unknown = [run["kernel"] for run in runs if run["page"] is None]
    runs = [run for run in runs if run["page"] is not None]
    lines = stands(runs) + [f"- **{kernel}**: did not finish within the guests' time limit." for kernel in unknown] + [""]
    lines += [row(["", *(run["kernel"] for run in runs)]), row(["---"] * (len(runs) + 1))]
    for title, key in FEATURES:
        lines.append(row([title, *("yes" if run["page"]["kernel"][key]["works"] == "yes" else "–" for run in runs)]))
    lines.append(row(["**probes are attached by**", *(str(run["page"]["kernel"]["attach"] or "nothing").replace("_", " ") for run in runs)]))
    lines.append("")
    lines += [row(["test", *(run["kernel"] for run in runs)]), row(["---"] * (len(runs) + 1))]
    names = []
    for run in runs:
        names += [name for name in run["tests"] if name not in names]
    for name in names:
        results = [run["tests"].get(name, "not run") for run in runs]
        lines.append(row([f"`{name}`", *("not offered" if result == "skipped" else result for result in results)]))
    lines.append("")
    lines += [row(["program", *(run["kernel"] for run in runs)]), row(["---"] + ["---:"] * len(runs))]
    programs, changes = [], []
    for run in runs:
        programs += [key for p in run["page"]["programs"] if (key := (p["object"], p["name"])) not in programs]
    for key in programs:
        name, cells = f"{key[0]} `{key[1]}`", []
        for run in runs:
            found = next((p for p in run["page"]["programs"] if (p["object"], p["name"]) == key), None)
            cells.append("" if found is None else "–" if found["refused"] else f"{found['instructions'] or 0:,}")
            was, now = before.get((run["kernel"], name)), (found or {}).get("instructions")
            if was and now and abs(now - was) > was / 10:
                changes.append(f"{name} on {run['kernel']}: {was:,} instructions before, {now:,} now")
        lines.append(row([name, *cells]))
    for run in runs:
        for line in run["noise"]:
            lines.append(f"\n{run['kernel']} logged: `{line}`")
    return lines, changes


def parsed(block):
    """The sentences by kernel; each table's first line, second line, and cells by kernel and row; and the other lines."""
    sentences, parts, others = {}, [], []
    for line in block.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if sentence := re.match(r"- \*\*(\S+)\*\*: ", line):
            sentences[sentence[1]] = line
        elif not line.startswith("|"):
            others += [line] * bool(line)
        elif cells[0] in ("", "test", "program"):
            parts.append({"title": cells[0], "kernels": cells[1:], "rows": {}})
        elif cells[0] == "---":
            parts[-1]["rule"] = cells[-1]
        else:
            parts[-1]["rows"][cells[0]] = dict(zip(parts[-1]["kernels"], cells[1:]))
    return sentences, parts, others


def kind(kernel):
    """Kernels of which the matrix has one: of a version and a flavour."""
    return tuple(number(kernel)), re.sub(r"\d+", "", kernel)


def merged(new, old):
    """The new lines with the columns of kernels that only the old ones have."""
    (sentences, parts, others), (old_sentences, old_parts, _) = parsed(new), parsed(old)
    kinds = {kind(kernel) for kernel in sentences}
    kept = {kernel: line for kernel, line in old_sentences.items() if kind(kernel) not in kinds}
    sentences = sentences | kept
    lines = [sentences[kernel] for kernel in sorted(sentences, key=lambda kernel: (number(kernel), kernel))]
    for part in parts:
        before = next((one for one in old_parts if one["title"] == part["title"]), {"kernels": [], "rows": {}})
        kernels = part["kernels"] + [kernel for kernel in before["kernels"] if kernel in kept]
        kernels.sort(key=lambda kernel: (number(kernel), kernel))
        lines += ["", row([part["title"], *kernels]), row(["---"] + [part["rule"]] * len(kernels))]
        for name in list(part["rows"]) + [name for name in before["rows"] if name not in part["rows"]]:
            cells = before["rows"].get(name, {}) | part["rows"].get(name, {})
            cells = [cells.get(kernel, "not run" if part["title"] == "test" else "") for kernel in kernels]
            lines += [row([name, *cells])] if set(cells) - {"not run", ""} else []
    return "\n".join(lines + others)


def main():
    runs = sorted((read(path) for path in sys.argv[1:]), key=lambda run: number(run["kernel"]))
    text = open(DOCUMENT, encoding="utf-8").read()
    before = counts_before(text)
    for architecture in ("x86-64", "arm64"):
        own = [run for run in runs if run["architecture"] == architecture]
        if not own:
            continue
        lines, changes = tables(own, before)
        begin, end = f"<!-- make kernel-matrix writes {architecture} from here -->\n", "<!-- to here -->\n"
        head, rest = text.split(begin)
        old, tail = rest.split(end, 1)
        text = head + begin + merged("\n".join(lines), old) + "\n" + end + tail
        for change in changes:
            print(change)
    open(DOCUMENT, "w", encoding="utf-8").write(text)
    unfinished = [run["kernel"] for run in runs if not run["ended"]]
    runs = [run for run in runs if run["page"] is not None]
    # The verifier's limit is a million; a program close to it on one kernel may be refused by the next.
    heavy = [p for run in runs for p in run["page"]["programs"] if (p["instructions"] or 0) > 500_000]
    failed = [f"{run['kernel']} has what the ordinary programs need, but: {reason}" for run in runs if (reason := refused(run["page"]["kernel"]))]
    failed += [f"{run['kernel']}: {name}" for run in runs for name, result in run["tests"].items() if result == "FAILED"]
    for line in failed + [f"{p['name']} takes the verifier {p['instructions']} instructions" for p in heavy]:
        print(line, file=sys.stderr)
    sys.exit(1 if failed or heavy or unfinished else 0)


main()
