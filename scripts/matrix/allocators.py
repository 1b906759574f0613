#!/usr/bin/env python3
"""Writes a table of docs/allocators.md from the log of allocator-matrix.sh.

usage: allocators.py LOG ARCHITECTURE
"""
import os
import sys

DOCUMENT = "docs/allocators.md"
COLUMNS = ["exact", "threads", "governed", "sampled", "census"]
cells, order = {}, []
for line in open(sys.argv[1], encoding="utf-8", errors="replace"):
    at = line.find("@@cell\t")
    if at < 0:
        continue
    _, place, column, mark, text = line[at:].rstrip("\n").split("\t", 4)
    if place not in order:
        order.append(place)
    cells[place, column] = {"good": text, "none": "– " + text, "wrong": "**wrong**: " + text[:120]}[mark]
if not order:
    sys.exit("the log has no cell")
text = open(DOCUMENT, encoding="utf-8").read()
begin, end = f"<!-- make allocator-matrix writes {sys.argv[2]} from here -->\n", "<!-- to here -->\n"
head, rest = text.split(begin)
before, tail = rest.split(end, 1)
if os.environ.get("PLACES"):
    present = [[cell.strip() for cell in line.strip("|").split("|")] for line in before.splitlines()[2:]]
    order = [row[0] for row in present] + [place for place in order if place not in {row[0] for row in present}]
    cells = {(row[0], column): cell for row in present for column, cell in zip(COLUMNS, row[1:])} | cells
rows = ["| | " + " | ".join(COLUMNS) + " |", "|" + "---|" * (len(COLUMNS) + 1)]
rows += [f"| {place} | " + " | ".join(cells.get((place, column), "") for column in COLUMNS) + " |" for place in order]
open(DOCUMENT, "w", encoding="utf-8").write(head + begin + "\n".join(rows) + "\n" + end + tail)
