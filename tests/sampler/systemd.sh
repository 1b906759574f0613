#!/usr/bin/env bash
# Runs systemd as the first process of namespaces of its own, on a copy-on-write view of this machine's files: what it changes is gone with
# it. Called within new mount, pid, ipc, uts and cgroup namespaces.
#   systemd.sh DIRECTORY REPOSITORY
set -euo pipefail
directory=$1 repository=$2
mount --make-rprivate /
# The writable layer must not be on an overlay itself.
mount -t tmpfs tmpfs "$directory"
mkdir "$directory"/{upper,work,root}
mount -t overlay overlay -o "lowerdir=/,upperdir=$directory/upper,workdir=$directory/work" "$directory/root"
cd "$directory/root"
mkdir -p "./$repository"
mount --rbind "$repository" "./$repository"
mount -t proc proc proc
mount -t tmpfs tmpfs run
mount --rbind /dev dev
mount -t sysfs -o ro sysfs sys
if [ "$(stat -f -c %T /sys/fs/cgroup)" = cgroup2fs ]; then
	mount -t cgroup2 cgroup2 sys/fs/cgroup
else
	mount -t tmpfs tmpfs sys/fs/cgroup
	mkdir sys/fs/cgroup/systemd
	mount -t cgroup -o none,name=systemd cgroup sys/fs/cgroup/systemd
fi
# None of this machine's own services.
rm -rf etc/systemd/system
mkdir -p etc/systemd/system
printf '[Unit]\nDescription=nothing\n' >etc/systemd/system/nothing.target
echo 0123456789abcdef0123456789abcdef >etc/machine-id
export container=fragprof-test
exec chroot . /lib/systemd/systemd --system --unit=nothing.target --show-status=0
