#!/usr/bin/env python3
"""Writes the image of an arm64 kernel that can be booted without firmware.

usage: kernel-image.py VMLINUZ IMAGE

Unpacks what drivers/firmware/efi/libstub/zboot-header.S of Linux packs, also inside another EFI program, as Ubuntu's are: "MZ", "zimg",
where the compressed image begins and how long it is, and its compression. Any other file is copied.
"""
import struct
import subprocess
import sys

HEADER = b"MZ\0\0zimg"
PROGRAMS = {b"gzip": "gzip", b"zstd": "zstd", b"xz": "xz"}

vmlinuz, image = sys.argv[1:]
packed = open(vmlinuz, "rb").read()
at = packed.find(HEADER)
if at < 0:
    unpacked = packed
else:
    offset, length = struct.unpack_from("<II", packed, at + len(HEADER))
    name = packed[at + 24:at + 32].rstrip(b"\0")
    if name not in PROGRAMS:
        sys.exit(f"{vmlinuz}: compressed with {name!r}, which is not supported")
    begin = at + offset
    unpacked = subprocess.run([PROGRAMS[name], "-dc"], input=packed[begin:begin + length], stdout=subprocess.PIPE, check=True).stdout
with open(image, "wb") as out:
    out.write(unpacked)
