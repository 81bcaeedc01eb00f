#!/bin/bash
# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
# A root file system becomes what QEMU starts: make.sh ROOTFS OUT AUTHORIZED_KEY MODULES
# writes OUT/{vmlinuz,initrd,disk.img,host_key.pub}; MODULES holds further kernel modules. Nothing is emulated or mounted
# here.
set -euo pipefail
root=$1 out=$2 key=$3 modules=$4
here=$(dirname "$(readlink -f "$0")")
version=$(ls "$root/lib/modules")

# What an installed Spark has been given: keys, names, a network configuration.
cp -r --no-preserve=ownership "$here/files/." "$root/"
chmod 600 "$root"/etc/netplan/*.yaml
install -D -m 600 "$key" "$root/root/.ssh/authorized_keys"
chroot "$root" passwd --quiet --delete root
install -d "$root/var/cache/lab-code"
echo 'tmpfs /tmp tmpfs mode=1777 0 0' > "$root/etc/fstab"
cp "$root/etc/ssh/ssh_host_ed25519_key.pub" "$out/host_key.pub"

# Units: what is needed on, what only costs seconds under emulation off.
chroot "$root" systemctl --quiet enable ssh systemd-networkd systemd-network-generator lab-rdma
chroot "$root" systemctl --quiet disable apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer \
  fstrim.timer
# Installed, not in use: as a node that nobody has given an export or a pool.
chroot "$root" systemctl --quiet disable nfs-blkmap.service nfs-client.target nfs-server.service rpcbind.service \
  rpcbind.socket zfs-import-cache.service zfs-import-scan.service zfs-import.target zfs-load-module.service \
  zfs-mount.service zfs-share.service zfs-volume-wait.service zfs-volumes.target zfs.target
chroot "$root" systemctl --quiet mask dev-hugepages.mount getty.target ldconfig.service modprobe@configfs.service \
  modprobe@drm.service modprobe@efi_pstore.service modprobe@fuse.service rdma-load-modules@rdma.service \
  rdma-ndd.service serial-getty@ttyS0.service \
  sys-fs-fuse-connections.mount sys-kernel-config.mount sys-kernel-debug.mount sys-kernel-tracing.mount \
  systemd-binfmt.service systemd-boot-random-seed.service systemd-firstboot.service systemd-hwdb-update.service \
  systemd-journal-catalog-update.service systemd-journal-flush.service systemd-logind.service \
  systemd-machine-id-commit.service systemd-networkd-persistent-storage.service systemd-networkd-wait-online.service \
  systemd-pstore.service systemd-random-seed.service systemd-tpm2-setup.service systemd-tpm2-setup-early.service \
  systemd-update-done.service systemd-update-utmp.service
mkdir -p "$root/etc/systemd/system-generators"
for name in bless-boot cryptsetup debug getty gpt-auto hibernate-resume integritysetup ssh system-update \
  tpm2 veritysetup; do
  ln -sf /dev/null "$root/etc/systemd/system-generators/systemd-$name-generator"
done
tr -d - < /proc/sys/kernel/random/uuid > "$root/etc/machine-id"
touch "$root/etc/.updated" "$root/var/.updated"

# Unpacking modules and compiling Python would cost seconds under emulation, at every start or use.
install -D -m 644 -t "$root/lib/modules/$version/updates" "$modules"/*.ko
find "$root/lib/modules/$version" -name '*.ko.xz' -print0 | xargs -0 -r -P2 -n64 unxz
chroot "$root" depmod "$version"
chroot "$root" python3 -m compileall -q -j2 /usr/lib/python3 "/usr/lib/python3.$(chroot "$root" \
  python3 -c 'import sys; print(sys.version_info.minor)')" > /dev/null || true

# A first stage that knows one disk.
initrd=$root/tmp/initrd
mkdir -p "$initrd"/{bin,dev,proc,sys,mnt,modules}
cp "$(command -v busybox)" "$initrd/bin/busybox"
for name in sh mount insmod switch_root sleep; do ln -s busybox "$initrd/bin/$name"; done
chroot "$root" modprobe -S "$version" --show-depends -a crc32c_generic virtio_blk ext4 |
  while read -r verb path _; do
    if [ "$verb" = insmod ] && ! [ -e "$initrd/modules/$(basename "$path")" ]; then
      cp "$root$path" "$initrd/modules/"
      basename "$path" >> "$initrd/modules/list"
    fi
  done
install -m 755 "$here/init" "$initrd/init"
(cd "$initrd" && find . | cpio --quiet -o -H newc) > "$out/initrd"
mv "$root/boot/vmlinuz-$version" "$out/vmlinuz"
rm -rf "$initrd" "$root"/boot/* "$root"/var/lib/apt/lists/*

rm -f "$out/disk.img"
truncate -s 4G "$out/disk.img"
mkfs.ext4 -q -F -L root -E lazy_itable_init=0,lazy_journal_init=0 -d "$root" "$out/disk.img"
