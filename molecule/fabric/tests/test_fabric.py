"""The record says what the kernel of this node says."""

import ipaddress
import json


def record(host):
    return json.loads(host.file("/var/lib/sparkwright/fabric.json").content_string)


def test_record_names_the_device_that_owns_the_address(host):
    fabric = record(host)
    shown = json.loads(host.check_output("ip -j -4 address show dev %s", fabric["socket_interface"]))
    assert fabric["address"] in [info["local"] for info in shown[0]["addr_info"]]
    assert [rail["netdev"] for rail in fabric["rails"]] == [fabric["socket_interface"]]
    assert fabric["rails"][0]["mtu"] == shown[0]["mtu"] == 9000


def test_gid_is_the_mapped_address_of_this_node(host):
    fabric = record(host)
    assert fabric["hcas"] == "=rocep1s0f0:1"
    index = fabric["rails"][0]["gid_index"]
    gid = host.file(f"/sys/class/infiniband/rocep1s0f0/ports/1/gids/{index}").content_string.strip()
    assert str(ipaddress.IPv6Address(gid).ipv4_mapped) == fabric["address"]


def test_the_path_to_the_other_rank_answers(host):
    for path in record(host)["paths"].values():
        assert host.run("ping -c1 -W2 -Mdo -s8972 -I%s %s", path["local"], path["remote"]).rc == 0


def test_record_is_readable_and_only_root_writes_it(host):
    file = host.file("/var/lib/sparkwright/fabric.json")
    assert (file.user, file.group, file.mode) == ("root", "root", 0o644)
