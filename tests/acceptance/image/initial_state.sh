#!/bin/sh
# Copyright (c) Sparkwright contributors
# SPDX-License-Identifier: Apache-2.0
# What the tests start from: initial_state.sh N, once on the freshly started machine sparkN. Addresses of the fabric are
# set by hand, as many do: no configuration file holds them, so that netplan can take over.
set -e
echo "spark$1" > /etc/hostname
echo "127.0.1.1 spark$1" >> /etc/hosts
systemctl start lab-rdma
rail=0
for port in enp1s0f0np0 enP2p1s0f0np0; do
  ip link set "$port" up mtu 9000
  ip address add "10.7$((7 + rail)).0.$1/24" dev "$port"
  rail=$((rail + 1))
done
for port in enp1s0f1np1 enP2p1s0f1np1; do ip link set "$port" mtu 1500; done
# Used once, so that it is in memory when the state is saved.
python3 -c 'import json, subprocess, ssl'
ibv_devinfo > /dev/null
ip -j address show > /dev/null
