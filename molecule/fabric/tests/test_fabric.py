"""The record says what the kernel of this node says."""

import ipaddress
import json


def test_record_names_the_device_that_owns_the_address(host):
    record = json.loads(host.file("/var/lib/sparkwright/fabric.json").content_string)
    shown = json.loads(host.check_output("ip -j -4 address show dev %s", record["socket_interface"]))
    assert record["address"] in [info["local"] for info in shown[0]["addr_info"]]
    assert record["mtu"] == shown[0]["mtu"] == 9000


def test_gid_is_the_mapped_address_of_this_node(host):
    record = json.loads(host.file("/var/lib/sparkwright/fabric.json").content_string)
    assert record["hcas"] == "=rocep1s0f0:1"
    index = record["gids"]["rocep1s0f0:1"]
    gid = host.file(f"/sys/class/infiniband/rocep1s0f0/ports/1/gids/{index}").content_string.strip()
    assert str(ipaddress.IPv6Address(gid).ipv4_mapped) == record["address"]


def test_record_is_readable_and_only_root_writes_it(host):
    record = host.file("/var/lib/sparkwright/fabric.json")
    assert (record.user, record.group, record.mode) == ("root", "root", 0o644)
