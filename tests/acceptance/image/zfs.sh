#!/bin/bash
# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
# Builds /zfs.ko and /spl.ko from the sources of zfs-dkms, in a directory with a compiler: zfs.sh KERNEL JOBS
# Not by dkms: it would configure with debug information and one job. Nothing is mounted here.
set -euo pipefail
kernel=$1
ln -sf mawk /usr/bin/awk  # the package's own link comes with its configuration only
# Nobody debugs these modules: without debug information and with a quick optimizer they take half the time. Type
# information (BTF) is made from debug information, and skipped where the kernel's is not there.
export LC_ALL=C KCFLAGS="-O1 -g0" MAKEFLAGS="-j$2"
rm -f "/usr/src/linux-headers-$kernel/vmlinux"
cd /usr/src/zfs-*
./configure --disable-dependency-tracking --with-config=kernel \
  --with-linux="/usr/lib/modules/$kernel/source" --with-linux-obj="/usr/lib/modules/$kernel/build"
make
strip --strip-debug module/spl.ko module/zfs.ko
exec mv module/spl.ko module/zfs.ko /
